"""`autoshard explain`: why tables are held as they are, for people and as JSON."""

import json

import pytest

from autoshard.cli import main
from autoshard.formats import read_plan, write_tables


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("plans") / "plan.json"
    assert main(["plan", "param-a", "--topology", "a100-32", "--planner", "neo", "-o", str(file)]) == 0
    return file


def test_every_table_has_its_reason(run, plan_file):
    document = json.loads(run("explain", plan_file, "--json")[0])
    plan = read_plan(plan_file)
    assert document["step_ms"] == plan.predicted.step_ms.value
    assert [one["table"] for one in document["tables"]] == [table.name for table in plan.tables.tables]
    for one in document["tables"]:
        assert one["reason"]
        assert {"table_wise", "row_wise", "grid x2"} <= {other["option"] for other in one["alternatives"]} | {
            one["option"]
        }
    assert {"field", "text", "step_ms", "samples_per_s", "gain"} == set(document["improvements"][0])
    shown, _ = run("explain", plan_file)
    assert "Single changes, each planned" in shown
    assert "next best" in shown
    assert "t1" in shown


@pytest.mark.slow
def test_a_plan_is_priced_for_what_it_was_made_for_unless_told_otherwise(run, tmp_path):
    file, planned = tmp_path / "plan.json", ("param-a", "--topology", "a100-32", "--planner", "neo")
    run("plan", *planned, "--risk", "high", "-o", file)
    high_ms = read_plan(file).predicted.step_ms.value
    write_tables(read_plan(file).tables, tmp_path / "same.json")
    steps_ms = {}
    for risk in ((), ("--risk", "mean")):
        found = [json.loads(run(*words, *risk, "--json")[0]) for words in of_plans(file, tmp_path)]
        steps_ms[risk] = {
            found[0]["step_ms"],
            found[1]["step_ms_planned"]["value"],
            found[2]["step_ms_before"]["value"],
            found[3]["predicted"]["step_ms"]["value"],
        }
    assert steps_ms[()] == {high_ms}
    assert len(steps_ms[("--risk", "mean")]) == 1
    assert max(steps_ms[("--risk", "mean")]) < 0.9 * high_ms


def of_plans(file, folder):
    yield "explain", file
    yield "drift", file, "--access", folder / "same.json"
    yield "replan", file, "--time-limit", "0.5"
    yield "evaluate", file


def test_a_plan_that_is_evaluated_says_what_its_prices_are_of(run, plan_file, tmp_path):
    high, mean = tmp_path / "high.json", tmp_path / "mean.json"
    run("evaluate", plan_file, "--risk", "high", "-o", high)
    assert read_plan(high).risk == "high"
    assert run("evaluate", high, "--json") == run("evaluate", plan_file, "--risk", "high", "--json")
    run("evaluate", high, "--risk", "mean", "-o", mean)
    assert read_plan(mean).provenance == read_plan(plan_file).provenance
    assert read_plan(mean).predicted.step_ms == read_plan(plan_file).predicted.step_ms


def test_one_table_has_all_its_alternatives(run, plan_file):
    shown = " ".join(run("explain", plan_file, "--table", "t0")[0].split())
    assert "alternative" in shown
    assert "column_wise x8" in shown
    assert "At the slowest rank of" in shown


def test_a_table_that_is_left_out_is_counted(run, plan_file):
    num_tables = len(read_plan(plan_file).tables.tables)
    shown = run("explain", plan_file, "--most", num_tables - 1)[0]
    assert "1 more table: --most 0" in " ".join(shown.split())
