"""Plans that are executed in virtual time, of which the best is kept."""

import json
from types import SimpleNamespace

import pytest

from autoshard.core.errors import InvalidOptionError
from autoshard.formats import read_plan
from autoshard.planning import make_plan
from autoshard.whatif.run_off import Contender, contenders, run_off, with_outcome
from tests import builders as make


@pytest.fixture(scope="module")
def task():
    of = [make.table(f"t{index}", 2000 * (1 + index), 16, pooling_factor=1.0 + index) for index in range(6)]
    return make.request(make.tables(*of, batch_size=64), make.topology(2), time_limit_s=0.4)


def test_contenders_are_different_plans_of_one_task_and_the_planners_own_is_first(task):
    found = contenders("auto", task, 3)
    assert 2 <= len(found) <= 3
    assert found[0][0] == "auto"
    predicted = [plan.predicted.step_ms.value for _, plan in found]
    assert predicted[1:] == sorted(predicted[1:])
    assert len({round(one, 9) for one in predicted}) == len(found)
    assert len(contenders("auto", task, 1)) == 1


def test_options_of_a_planner_hold_for_all_of_its_plans(task):
    asked = make.request(task.tables, task.topology, time_limit_s=0.2, options={"sharding_types": "table_wise"})
    for name, plan in contenders("auto", asked, 8):
        assert name.startswith("auto")
        assert all(one.tier == "table_wise" for one in plan.shards)


def test_the_best_plan_says_what_all_of_them_took(task):
    plan = make_plan("cost-greedy", task)
    found = [
        Contender(name="neo", plan=plan, executed=SimpleNamespace(step_ms=20.0)),
        Contender(name="auto", plan=plan, executed=SimpleNamespace(step_ms=21.5)),
    ]
    told = with_outcome(found).provenance.models["run_off"]
    assert told.startswith("executed in virtual time: neo 20 ms (")
    assert "auto 21.5 ms" in told


@pytest.mark.slow
def test_a_run_off_ends_with_the_shortest_step(task):
    found = run_off(contenders("auto", task, 2))
    steps = [one.executed.step_ms for one in found]
    assert steps == sorted(steps)
    assert all(one.executed.steps == 24 for one in found)


@pytest.mark.slow
def test_plan_keeps_what_is_best_when_it_is_executed(run, tmp_path):
    tables, file = tmp_path / "tables.json", tmp_path / "plan.json"
    run("import", "metasyn", "--num-tables", 6, "--seed", 1, "--scale", 16384, "-o", tables)
    out, said = run("plan", tables, "--topology", "cpu-4", "--run-off", 2, "-o", file, "--json")
    assert "ms in virtual time" in said
    assert json.loads(out)["provenance"]["models"]["run_off"] == read_plan(file).provenance.models["run_off"]


@pytest.mark.parametrize("more", [{"start": "old.json"}, {"replay_refine": 1}])
def test_what_does_not_go_with_a_run_off_is_refused(more):
    from autoshard.commands.arguments import PricingOptions, SearchOptions
    from autoshard.commands.plan import PlanOptions

    with pytest.raises(InvalidOptionError, match="with --run-off"):
        PlanOptions(tables="t", topology="cpu-2", search=SearchOptions(pricing=PricingOptions()), run_off=2, **more)
