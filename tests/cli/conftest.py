"""How a line is run as users type it, and the files that such lines name."""

import contextlib
import io
import json
from pathlib import Path

import pytest

from autoshard import cli
from studies import __main__ as studies


def tables_document(**fields):
    """Two tables; further fields are those of the second one."""
    tables = [
        {
            "name": name,
            "num_embeddings": 1000,
            "embedding_dim": 8,
            "dtype": "fp32",
            "pooling": "sum",
            "features": [{"name": f"f_{name}", "pooling_factor": 2.0}],
            "access": {"kind": "zipf", "alpha": 1.0},
        }
        for name in ("a", "b")
    ]
    tables[1].update(fields)
    return {"schema": "autoshard.tables/1", "batch_size": 64, "tables": tables}


def topology_document(**fields):
    """Two nodes of two ranks."""
    link = {"bytes_per_s": 1e9, "latency_s": 1e-6}
    levels = [
        {"name": name, "size": size, "all_to_all": {**link}, "all_reduce": {**link}}
        for name, size in (("node", 2), ("cluster", 4))
    ]
    return {
        "schema": "autoshard.topology/1",
        "world_size": 4,
        "device": "cpu",
        "memory_bytes": {"hbm": 10**9},
        "levels": levels,
        **fields,
    }


@pytest.fixture(scope="session")
def documents(tmp_path_factory):
    """A folder with `tables.json`, `topology.json`, a plan of them, and an empty file; nothing writes there."""
    folder = tmp_path_factory.mktemp("documents")
    for name, document in {"tables": tables_document(), "topology": topology_document()}.items():
        (folder / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
    (folder / "empty").touch()
    files = (str(folder / "tables.json"), "--topology", str(folder / "topology.json"), "-o", str(folder / "plan.json"))
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert cli.main(["plan", *files, "--planner", "random"]) == 0
    return folder


@pytest.fixture
def says(run, documents, tmp_path, monkeypatch):
    """Runs a line in an empty folder and checks its exit code; returns what it said: its output, or its one error.

    `DOCUMENTS` within a word is the folder of these, `SAMPLES` the store of the tests. A line that begins with
    `studies` is one of `python -m studies`. What fails prints nothing else than its error and warnings, and writes no
    file.
    """
    places = {"DOCUMENTS": documents, "SAMPLES": Path(__file__).parents[1] / "data" / "samples"}
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def says(line, code, **others):
        words = line.split()
        for name, value in {**places, **others}.items():
            words = [word.replace(name, str(value)) for word in words]
        if words[0] == "studies":
            out, err = run(*words[1:], code=code, program=studies.main)
        else:
            out, err = run(*words, code=code)
        if code == 0:
            return out
        assert out == ""
        (error,) = (told for told in err.splitlines(keepends=True) if not told.startswith("warning: "))
        assert error.startswith("error: ")
        assert error.endswith("\n")
        assert len(error) < 1000
        assert list(folder.iterdir()) == []
        return error

    return says
