"""`autoshard explain`: why tables are held as they are, for people and as JSON."""

import json

import pytest

from autoshard.cli import main
from autoshard.formats import read_plan


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


def test_one_table_has_all_its_alternatives(run, plan_file):
    shown = " ".join(run("explain", plan_file, "--table", "t0")[0].split())
    assert "alternative" in shown
    assert "column_wise x8" in shown
    assert "At the slowest rank of" in shown
