import json
import sqlite3
from pathlib import Path

import pytest

from server.storage.sqlite_file import SAFE_VERSION
from studies.__main__ import main


@pytest.mark.slow
@pytest.mark.parametrize(("database", "processes"), [("sqlite", 1), ("postgresql", 2)])
def test_killed_services_lose_nothing_and_their_jobs_are_begun_again(tmp_path, database, processes):
    if database == "postgresql" and not any(Path("/usr/lib/postgresql").glob("*/bin")):
        pytest.skip("this machine has no PostgreSQL server (Debian: postgresql-15)")
    words = ["--database", database, "--processes", str(processes), "--kills", "4", "--per-part", "2"]
    parts = ["--parts", str(tmp_path / "parts"), "-o", str(tmp_path)]
    assert main(["service-kills", *words, *parts]) == 0
    name = f"service-kills-{database}" + ("-2" if processes == 2 else "")
    document = json.loads((tmp_path / f"{name}.json").read_bytes())
    assert [part["num_writing"] + part["num_starting"] for part in document["parts"]] == [2, 2]
    assert all(part["faults"] == [] and part["acknowledged"]["jobs"] > 0 for part in document["parts"])


@pytest.mark.slow
@pytest.mark.skipif(sqlite3.sqlite_version_info >= SAFE_VERSION, reason="this SQLite takes several processes")
def test_several_processes_of_an_old_sqlite_are_refused_in_one_line(capsys):
    assert main(["service-kills", "--processes", "2", "--kills", "1"]) == 1
    assert "is in use by another process" in capsys.readouterr().err.strip().splitlines()[-1]
