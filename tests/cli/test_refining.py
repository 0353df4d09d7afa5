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


def run(capfd, *arguments):
    """Exit code, standard output, standard error."""
    capfd.readouterr()
    code = main([str(argument) for argument in arguments])
    return code, *capfd.readouterr()


@pytest.mark.slow
def test_plan_says_what_measuring_changed(capfd, tables, tmp_path):
    file, topology = tmp_path / "plan.json", tmp_path / "topology.json"
    document = json.loads(run(capfd, "plan", tables, "--topology", "cpu-4", "--planner", "random", "--json")[1])
    topology.write_text(json.dumps({**document["topology"], "device": "a100"}), encoding="utf-8")
    task = ("plan", tables, "--topology", topology, "--planner", "cost-greedy", "-o", file, "--json")
    code, out, said = run(capfd, *task, "--time-limit", 60, "--replay-refine", 2, "--device", "cpu")
    assert code == 0
    plan = read_plan(file)
    made = plan.provenance
    assert made.planner == "cost-greedy"
    assert made.options["replay_refine"] == 2
    assert made.models["refined"].startswith("measured slowest rank ")
    assert made.models["refined"] in said
    assert "warning: measured on cpu, but the plan is for a100" in said
    assert json.loads(out)["predicted"]["ranks"]
    evaluated = evaluate(plan, plan_costs(plan))
    assert plan.predicted.bounds["step"].proven_ms <= evaluated.step_ms.value
    assert replace(plan.predicted, bounds=evaluated.bounds) == evaluated


@pytest.mark.slow
def test_compare_has_a_row_of_the_refined_plan(capfd, tables, tmp_path):
    task = ("compare", tables, "--topology", "cpu-4", "--planners", "auto,random", "--time-limit", 0.2)
    task = (*task, "--set", "auto.sharding_types=table_wise")
    code, out, said = run(
        capfd, *task, "--replay", "--replay-refine", 1, "--device", "cpu", "--output-dir", tmp_path, "--json"
    )
    assert code == 0
    rows = {row["planner"]: row for row in json.loads(out)["planners"]}
    assert list(rows) == ["auto", "auto, refined", "random"]
    assert "1 measurement\n" in said
    refined = read_plan(tmp_path / "auto-refined.json")
    assert "refined" in refined.provenance.models
    assert refined.predicted.max_kernel_ms == rows["auto, refined"]["predicted_max_kernel_ms"]
    assert len(rows["auto, refined"]["measured_kernel_ms"]) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "TABLES", "--replay-refine", "0"), "--replay-refine"),
        (("plan", "TABLES", "--replay-refine", "two"), "--replay-refine"),
        (("compare", "TABLES", "--planners", "auto", "--replay-refine", "-1"), "--replay-refine"),
        (("compare", "TABLES", "--planners", "random", "--replay-refine", "2"), "--replay-refine: refines the plan of"),
        (("compare", "TABLES", "--planners", "auto", "--set", "tiers=all"), "--set: must be PLANNER.KEY=VALUE"),
        (("compare", "TABLES", "--planners", "auto", "--set", "random.tiers=all"), "--set: must be PLANNER.KEY=VALUE"),
        (("plan", "TABLES", "--planner", "random", "--replay-refine", "1", "--device", "tpu"), "tpu"),
    ],
)
def test_bad_input_exits_with_2(capfd, tables, arguments, message):
    arguments = [{"TABLES": tables}.get(part, part) for part in arguments]
    code, _, said = run(capfd, *arguments, "--topology", "cpu-4")
    assert code == 2
    assert message in said
    assert "Traceback" not in said


def test_plans_over_several_ranks_are_refused(capfd, tmp_path):
    file = tmp_path / "plan.json"
    task = ("plan", "criteo-kaggle", "--topology", "cpu-4", "--planner", "flexshard", "-o", file)
    code, _, said = run(capfd, *task, "--replay-refine", 2)
    assert code == 2
    assert "replay_refine: takes plans whose shards are on single ranks" in said
    assert not file.exists()


def test_a_refinement_that_fails_has_a_row_that_says_why(capfd, tables):
    task = ("compare", tables, "--topology", "cpu-4", "--planners", "auto", "--time-limit", 0.1, "--json")
    task = (*task, "--set", "auto.objective=kernel")
    code, out, _ = run(capfd, *task, "--replay-refine", 1, "--device", "tpu")
    assert code == 0
    assert [row["failure"] is None for row in json.loads(out)["planners"]] == [True, False]
