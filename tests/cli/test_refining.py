"""`--replay-refine` of `plan` and `compare`, on the real benchmark."""

import json
from dataclasses import replace

import pytest

from autoshard.cli import main
from autoshard.evaluation import evaluate
from autoshard.formats import read_plan
from autoshard.planning import plan_costs


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    file = tmp_path_factory.mktemp("tables") / "tables.json"
    assert main(["import", "metasyn", "--num-tables", "8", "--seed", "1", "--scale", "16384", "-o", str(file)]) == 0
    return str(file)


@pytest.mark.slow
def test_plan_says_what_measuring_changed(run, tables, tmp_path):
    file, topology = tmp_path / "plan.json", tmp_path / "topology.json"
    document = json.loads(run("plan", tables, "--topology", "cpu-4", "--planner", "random", "--json")[0])
    topology.write_text(json.dumps({**document["topology"], "device": "a100"}), encoding="utf-8")
    task = ("plan", tables, "--topology", topology, "--planner", "cost-greedy", "-o", file, "--json")
    out, said = run(*task, "--time-limit", 60, "--replay-refine", 2, "--device", "cpu")
    plan = read_plan(file)
    made = plan.provenance
    assert made.planner == "cost-greedy"
    assert made.options["replay_refine"] == 2
    assert made.models["refined"].startswith("measured slowest rank ")
    assert made.models["refined"] in said
    assert "warning: Measured on cpu, but the plan is for a100." in said
    assert json.loads(out)["predicted"]["ranks"]
    evaluated = evaluate(plan, plan_costs(plan))
    # Row orders could cut these tables, so that no bound is proven.
    assert plan.predicted.bounds["step"].estimated_ms <= evaluated.step_ms.value
    assert replace(plan.predicted, bounds=evaluated.bounds) == evaluated


@pytest.mark.slow
def test_compare_has_a_row_of_the_refined_plan(run, tables, tmp_path):
    task = ("compare", tables, "--topology", "cpu-4", "--planners", "auto,random", "--time-limit", 0.2)
    task = (*task, "--set", "auto.sharding_types=table_wise")
    out, said = run(*task, "--replay", "--replay-refine", 1, "--device", "cpu", "--output-dir", tmp_path, "--json")
    rows = {row["planner"]: row for row in json.loads(out)["planners"]}
    assert list(rows) == ["auto", "auto, refined", "random"]
    assert "1 measurement\n" in said
    refined = read_plan(tmp_path / "auto-refined.json")
    assert "refined" in refined.provenance.models
    assert refined.predicted.max_kernel_ms == rows["auto, refined"]["predicted_max_kernel_ms"]
    assert len(rows["auto, refined"]["measured_kernel_ms"]) == 4


def test_a_refinement_that_fails_has_a_row_that_says_why(run, tables):
    task = ("compare", tables, "--topology", "cpu-4", "--planners", "auto", "--time-limit", 0.1, "--json")
    out, _ = run(*task, "--set", "auto.sharding_types=row_wise", "--replay-refine", 1)
    whole, refined = (row["failure"] for row in json.loads(out)["planners"])
    assert whole is None
    assert "takes plans whose shards are on single ranks" in refined
