"""What commands print as JSON is what its published schema says; results that are read again are read as they were."""

import json

import pytest
from jsonschema import Draft202012Validator

from autoshard.cli import main
from autoshard.core.errors import InfeasiblePlanError
from autoshard.formats import read_json
from autoshard.report.comparison_json import COMPARISON
from autoshard.report.replay_json import REPLAY
from autoshard.results.comparison import ComparedPlan
from autoshard.results.sweep_record import SIMULATION
from autoshard.runtime.result_json import RUN

RESULTS = ("run", "replay", "comparison", "diff", "explanation", "simulation")


@pytest.fixture
def printed(run, published):
    """Runs a command with `--json`, and checks what it prints against a schema."""
    return lambda name, *words: published(name, run(*words, "--json")[0])


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """A few small tables, as a file."""
    file = tmp_path_factory.mktemp("task") / "tables.json"
    assert main(["import", "metasyn", "--num-tables", "4", "--scale", "2048", "-o", str(file)]) == 0
    return file


@pytest.fixture(scope="module")
def plan(task):
    """A priced plan of them, as a file."""
    file = task.with_name("plan.json")
    assert main(["plan", str(task), "--topology", "cpu-4", "--planner", "random", "-o", str(file)]) == 0
    return file


@pytest.mark.parametrize("name", RESULTS)
def test_every_field_of_a_result_is_described(name, schemas):
    def fields(part):
        for key, field in part.get("properties", {}).items():
            yield key, field
            yield from fields(field)
        for inner in filter(None, (part.get("items"), *part.get("oneOf", ()))):
            yield from fields(inner)

    schema = schemas[f"autoshard.{name}/1"]
    Draft202012Validator.check_schema(schema)
    assert [key for key, field in fields(schema) if not field.get("description")] == []


@pytest.mark.slow
def test_a_run(printed, plan, faults):
    document = printed("run", "run", plan, "--nproc", 2, "--steps", 2, "--verify-steps", 1)
    assert RUN.to_json(RUN.from_json(document)) == document
    assert document["verification"]["max_error"] < 1e-4
    assert faults("autoshard.run/1", {**document, "verification": None}) == []
    assert faults("autoshard.run/1", {**document, "step_ms": None}) != []


@pytest.mark.slow
def test_a_replay(printed, plan):
    document = printed("replay", "replay", plan, "--device", "cpu")
    assert document["max_error"] == document["predicted_max_kernel_ms"] / document["max_kernel_ms"] - 1
    assert REPLAY.to_json(REPLAY.from_json(document)) == document


@pytest.mark.parametrize("options", [(), ("--replay", "--device", "cpu")], ids=["predicted", "replayed"])
def test_a_comparison(printed, task, options):
    planners = ("--topology", "cpu-4", "--planners", "random,cost-greedy")
    document = printed("comparison", "compare", task, *planners, *options)
    first, _ = document["planners"]
    assert (first["measured_balance"] is None) == (options == ())


def test_a_comparison_with_a_planner_that_has_no_plan(faults):
    row = ComparedPlan(planner="random", planning_s=0.1, failure=InfeasiblePlanError("too large"))
    document = json.loads(json.dumps(COMPARISON.to_json(([row], None))))
    assert faults("autoshard.comparison/1", document) == []
    assert document["planners"][0]["failure"] == "too large"


def test_a_diff_of_plans(run, printed, plan, task):
    other = plan.with_name("other.json")
    run("plan", task, "--topology", "cpu-8", "--planner", "size-greedy", "-o", other)
    document = printed("diff", "diff", plan, other)
    assert document["tables"]
    assert {change["name"] for change in document["task"]} >= {"num_ranks", "planner"}


def test_a_simulation_with_points_that_have_no_plan(printed, task, tmp_path):
    sizes = ("--ranks", "8", "--groups", "1,3", "--batches", 3, "--planner", "cost-greedy", "-o", tmp_path / "x.json")
    document = printed("simulation", "simulate", task, *sizes)
    assert [point["status"] for point in document["points"]] == ["priced", "impossible"]
    assert SIMULATION.to_json(SIMULATION.from_json(document)) == document == read_json(tmp_path / "x.json")


@pytest.mark.parametrize("what", ["tables", "topologies", "planners"])
def test_lists(printed, what):
    document = printed("catalogue", "list", what)
    assert set(document) == {"schema", what}
    assert all(one["name"] and one.get("description", one.get("summary")) for one in document[what])


def test_what_is_installed(printed):
    document = printed("doctor", "doctor")
    assert set(document) == {"schema", "autoshard", "python", "platform", "packages", "devices", "models", "missing"}
    assert all(set(one) == {"name", "version", "needed_by", "install"} for one in document["packages"])
    assert document["devices"][0]["cores"] > 0


def test_imports_and_exports(run, printed, tmp_path):
    tables, plan, output = tmp_path / "tables.json", tmp_path / "plan.json", tmp_path / "constraints.json"
    document = printed("imported", "import", "metasyn", "--num-tables", 8, "--scale", 64, "-o", tables)
    assert (document["num_tables"], document["num_tables_in_source"], document["output"]) == (8, 856, str(tables))
    run("plan", tables, "--topology", "cpu-4", "--planner", "size-greedy", "-o", plan)
    document = printed("exported", "export", plan, "--format", "torchrec-constraints", "-o", output)
    assert (document["output"], document["format"], document["num_tables"]) == (str(output), "torchrec-constraints", 8)
    assert all(set(one) == {"field", "table", "planned", "executed"} for one in document["changes"])
