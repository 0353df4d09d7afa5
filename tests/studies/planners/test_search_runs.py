"""The benchmark of searches: its tasks, and a short run of the real thing."""

import json
import os
import subprocess
import sys

import pytest

from autoshard.formats import load_topology
from studies.frame.parts import SCHEMA
from studies.planners.search_runs import widened


def test_topologies_of_any_size():
    wide = widened(load_topology("cpu-8"), 1024)
    assert (wide.world_size, wide.levels[-1].size) == (1024, 1024)


def run(folder, *arguments):
    command = [sys.executable, "-m", "studies", "search", *map(str, arguments)]
    environment = {**os.environ, "AUTOSHARD_REGISTRY": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.slow
def test_program_reports_gaps_and_goes_on_where_it_was(tmp_path):
    task = ("--sizes", "80", "--best-s", 2, "--parts", tmp_path / "parts", "-o", tmp_path, "--json")
    done = run(tmp_path, *task, "--tasks", 1)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("80 tables on 8 ranks") == 2
    runs = json.loads(done.stdout)["runs"]
    assert [run["level"] for run in runs] == [False, True]
    assert all(run["auto_ms"] >= run["best_ms"] > 0 for run in runs)
    assert all(run["greedy_ms"] >= run["best_ms"] for run in runs)
    assert json.loads((tmp_path / "search-80.json").read_text(encoding="utf-8")) == json.loads(done.stdout)
    more = run(tmp_path, *task, "--tasks", 2)
    assert more.stderr.count("80 tables on 8 ranks") == 4
    kept = [run for run in json.loads(more.stdout)["runs"] if run["seed"] == 0]
    assert kept == runs


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sizes", "81"), "--sizes"),
        (("--tasks", 0), "--tasks"),
        (("--best-s", 0), "--best-s"),
        (("--parts", "other"), "parts whose best_s is 1, not 60"),
        (("--parts", "nothing"), "study.json: must be an object"),
    ],
)
def test_bad_input_exits_with_2(capsys, monkeypatch, tmp_path, arguments, message, run_study):
    identity = {"schema": SCHEMA, "model": "analytic:cpu", "best_s": 1}
    for folder, document in (("other", identity), ("nothing", [])):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "study.json").write_text(json.dumps(document), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert run_study("search", *arguments) == 2
    assert message in capsys.readouterr().err
