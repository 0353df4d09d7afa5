"""Names from anybody's files: what a terminal obeys is printed as escapes, markup as it is."""

import json
import re

import pytest

from autoshard import console
from autoshard.cli import main
from autoshard.core.quoting import printable, shortened, shown
from autoshard.formats import read_plan
from costmodel.registry.versions import REGISTRY_VARIABLE, Registry

#: Clears the screen, sets the window's title, rings, goes back, turns the line around, hides; and rich's markup.
HOSTILE = "\x1b[2J\x1b]0;x\x07\x08\r\x7f\x9b31m\u202e\u2066\u200b\ufeff\u2028[red]:smile:"
ESCAPED = printable(HOSTILE)
PLAN = ("plan", "criteo-kaggle", "--topology", "cpu-4", "--time-limit", "0.2")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Tables and a topology whose every name is hostile, in files whose names are."""
    folder = tmp_path_factory.mktemp("hostile")
    features = [{"name": f"f{HOSTILE}", "pooling_factor": 2.0}]
    table = {"num_embeddings": 1000, "embedding_dim": 8, "dtype": "fp32", "pooling": "sum", "features": features}
    tables = [
        table | {"name": f"{name}{HOSTILE}", "features": [{"name": name + HOSTILE, "pooling_factor": 2.0}]}
        for name in ("a", "b", "c")
    ]
    tables = [one | {"access": {"kind": "zipf", "alpha": 1.0}} for one in tables]
    link = {"bytes_per_s": 1e9, "latency_s": 1e-6}
    topology = {
        "schema": "autoshard.topology/1",
        "world_size": 2,
        "device": "cpu",
        "memory_bytes": {"hbm": 10**9},
        "levels": [{"name": f"node{HOSTILE}", "size": 2, "all_to_all": link, "all_reduce": link}],
    }
    files = folder / f"tables{HOSTILE}.json", folder / f"topology{HOSTILE}.json"
    documents = {"schema": "autoshard.tables/1", "batch_size": 64, "tables": tables}, topology
    for file, document in zip(files, documents, strict=True):
        file.write_text(json.dumps(document), encoding="utf-8")
    return files


@pytest.fixture(scope="module")
def plan_file(task):
    file = task[0].parent / f"plan{HOSTILE}.json"
    assert main(["plan", str(task[0]), "--topology", str(task[1]), "--planner", "cost-greedy", "-o", str(file)]) == 0
    return file


def test_plan_and_compare(run, task, tmp_path):
    tables, topology = task
    output = tmp_path / f"{HOSTILE}.json"
    for as_json in ([], ["--json"]):
        command = ("plan", tables, "--topology", topology, "--planner", "random", "-o", output)
        out, err = run(*command, *as_json)
        assert ESCAPED in err
        assert as_json or ESCAPED in out
        run("compare", tables, "--topology", topology, "--planners", "random,oper", *as_json)
    assert json.loads(out)["tables"]["tables"][0]["name"] == "a" + HOSTILE


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize("command", ["show", "evaluate", "explain"])
def test_a_plan_that_is_looked_at(run, plan_file, command, as_json):
    out, _ = run(command, plan_file, *as_json)
    if not as_json:
        assert ESCAPED in "".join(out.split()) or command == "explain"  # its columns fold names over lines


def test_one_table_that_is_explained(run, plan_file):
    out, _ = run("explain", plan_file, "--table", read_plan(plan_file).tables.tables[0].name)
    assert "[red]:smile:" in "".join(out.split())


def test_models(run, tmp_path, monkeypatch):
    monkeypatch.setenv(REGISTRY_VARIABLE, str(tmp_path / HOSTILE))
    Registry(None).publish("cost", "cpu", {}, {"device": "cpu", "training": {HOSTILE: HOSTILE, "note": HOSTILE}})
    listed, _ = run("models")
    assert "cost" in listed
    shown_model, _ = run("models", "show", "production")
    assert "[red]:smile:" in re.sub(r"\s", "", shown_model)
    as_json, _ = run("models", "show", "production", "--json")
    training = {HOSTILE: HOSTILE, "note": HOSTILE}
    assert json.loads(as_json)["card"]["training"] == training


@pytest.mark.parametrize("name", [HOSTILE, "n" * 5000], ids=["hostile", "long"])
@pytest.mark.parametrize(
    "line",
    [
        "NAME",
        "plan --NAME",
        "plan NAME --topology cpu-4",
        "plan criteo-kaggle --topology NAME",
        *(
            f"plan criteo-kaggle --topology cpu-4 {options}"
            for options in (
                "--planner NAME",
                "--planner random --set NAME=1",
                "--planner auto --set NAME=1",
                "--planner auto --set sharding_types=NAME",
                "--planner flexshard --set rule=NAME",
                "--set NAME",
                "--risk NAME",
                "--seed NAME",
                "--registry NAME",
            )
        ),
        "compare criteo-kaggle --topology cpu-4 --planners NAME",
        "compare criteo-kaggle --topology cpu-4 --planners auto --set NAME=1",
        "simulate criteo-kaggle --topology NAME",
        "simulate criteo-kaggle --ranks NAME",
        "import NAME -o never.json",
        "import metasyn --part NAME -o never.json",
        "show NAME",
        "explain NAME",
        "run NAME",
        "models show NAME",
        "models NAME",
    ],
)
def test_errors_repeat_what_was_typed_shortened(says, line, name):
    assert "n" * 256 not in says(line, 2, NAME=name)


def test_values_in_messages():
    assert shown("x" * 100) == '"' + "x" * 58 + "…"
    assert shown([]) == "an empty list"
    assert shown([1]) == "a list of 1"
    assert shown("\x1b\u202e\x9b") == '"\\u001b\\u202e\\x9b"'
    assert shortened("a\nb\t\x07") == "a\\nb\\t\\x07"
    assert printable("na\u00efve ☃\n\t") == "na\u00efve ☃\n\t"


def test_a_task_of_a_progress_bar_is_harmless_on_a_terminal(monkeypatch, capfd):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    for shown_while in (console.working(HOSTILE), console.progress(HOSTILE, 1.0), console.until(HOSTILE, 1.0)):
        with shown_while:
            pass
    shown_ = capfd.readouterr().err
    assert "\x1b[2J" not in shown_
    assert not set(HOSTILE) & set(shown_) & set("\x07\x08\x7f\x9b\u202e\u2066\u200b\ufeff\u2028")


class TestBarsTowardsATimeLimit:
    """Of planning, which does not know how far it is."""

    @pytest.mark.parametrize(
        ("now_s", "cells", "said"), [(0.0, 0, "0 of 6 s"), (4.5, 30, "4 of 6 s"), (9.0, 40, "9 of 6 s")]
    )
    def test_they_are_as_far_as_the_time(self, now_s, cells, said, monkeypatch, capfd):
        times = [100.0]
        for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("NO_COLOR", "1")):
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("rich.console.monotonic", lambda: times[0])
        with console.until("Planning", 6.0):
            times[0] += now_s
        *_, last = re.findall("Planning .*?[0-9]+ of 6 s", capfd.readouterr().err)
        assert last.endswith(said)
        assert last.count("━") == cells

    @pytest.mark.parametrize("is_coloured", [True, False])
    def test_planning_shows_one_on_a_terminal(self, is_coloured, monkeypatch, capfd):
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.delenv("NO_COLOR", raising=False)
        if not is_coloured:
            monkeypatch.setenv("NO_COLOR", "1")
        assert main([*PLAN]) == 0
        said = capfd.readouterr().err
        assert "Planning with auto" in said
        assert "of 0.2 s" in said
        assert ("\x1b[38;5;" in said) is is_coloured

    def test_planning_is_quiet_in_pipes(self, run):
        assert "Planning with" not in run(*PLAN, "--no-bound")[1]
