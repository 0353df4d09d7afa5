"""`auto`: at least as good as every start, repeatable, and open to a trained policy."""

from dataclasses import replace

import pytest

from autoshard.core import Shard, TableSet
from autoshard.core.errors import InfeasiblePlanError, InvalidOptionError
from autoshard.evaluation import evaluate
from autoshard.evaluation.validator import validate_plan
from autoshard.planners.auto import AutoPlanner
from autoshard.planners.greedy import (
    CostGreedyPlanner,
    DimGreedyPlanner,
    LookupGreedyPlanner,
    RandomPlanner,
    SizeGreedyPlanner,
)

STEPS = {"steps": 400}
SECONDS = 20.0


@pytest.fixture
def max_ms(make_request, costs):
    def predicted(planner, task, **changes):
        return evaluate(planner.plan(make_request(task, **changes)), costs).max_kernel_ms

    return predicted


@pytest.mark.parametrize("spare", [None, 0.3])
def test_is_at_least_as_fast_as_every_heuristic(draw_task, max_ms, spare):
    task = draw_task(40, 4, seed=8, spare=spare)
    found_ms = max_ms(AutoPlanner(), task, options=STEPS, time_limit_s=SECONDS)
    heuristics = (RandomPlanner, SizeGreedyPlanner, DimGreedyPlanner, LookupGreedyPlanner, CostGreedyPlanner)
    assert all(found_ms <= max_ms(heuristic(), task) * (1 + 1e-6) for heuristic in heuristics)


def test_search_improves_on_its_starts(draw_task, max_ms):
    task = draw_task(60, 8, seed=4)
    starts_only_ms = max_ms(AutoPlanner(), task, options={"policy": False}, time_limit_s=1e-6)
    assert max_ms(AutoPlanner(), task, options=STEPS, time_limit_s=SECONDS) < starts_only_ms


def test_seeds_decide(draw_task, make_request):
    task, options = draw_task(16, 4, seed=1), {"steps": 200}
    first, again, other = (
        AutoPlanner().plan(make_request(task, seed=seed, options=options, time_limit_s=SECONDS)) for seed in (7, 7, 8)
    )
    assert first == again
    assert first != other


def test_does_without_a_policy(draw_task, make_request, tmp_path):
    # The registry is empty, so the policy planner has no model.
    request = make_request(draw_task(10, 2), registry=tmp_path, options=STEPS)
    assert len(AutoPlanner().plan(request).shards) == 10


def test_says_what_does_not_fit(make_table, make_topology, make_request):
    tables = tuple(make_table(f"t{index}") for index in range(3))
    task = (TableSet(batch_size=8, tables=tables), make_topology(2, int(tables[0].hbm_bytes / 0.6)))
    with pytest.raises(InfeasiblePlanError, match="bytes more than are free"):
        AutoPlanner().plan(make_request(task))


def test_says_how_far_from_the_bound_it_ended(draw_task, make_request):
    plan = AutoPlanner().plan(make_request(draw_task(16, 4, seed=1), options=STEPS))
    assert plan.provenance.models["search"].startswith("stopped by ")
    assert "an estimated bound of" in plan.provenance.models["search"]


@pytest.mark.parametrize("split", ["columns", "rows"])
def test_cuts_tables_that_alone_bound_the_slowest_rank(draw_task, make_table, make_request, max_ms, split):
    tables, topology = draw_task(20, 4, seed=5)
    heavy = tuple(make_table(f"heavy{index}", embedding_dim=1024, pooling_factor=1000.0) for index in range(2))
    task = (replace(tables, tables=(*heavy, *tables.tables)), topology)
    whole_ms = max_ms(AutoPlanner(), task, options=STEPS, time_limit_s=SECONDS)
    options = {**STEPS, "split": split}
    assert max_ms(AutoPlanner(), task, options=options, time_limit_s=SECONDS) < 0.9 * whole_ms
    plan = AutoPlanner().plan(make_request(task, options=options, time_limit_s=SECONDS))
    validate_plan(plan)
    cut = [placed.shard for placed in plan.shards if placed.shard != Shard.whole(placed.shard.table)]
    assert {shard.table.name for shard in cut} == {"heavy0", "heavy1"}


def test_cuts_nothing_unless_asked_or_useful(draw_task, make_request):
    task = draw_task(20, 4, seed=5)
    for options in (STEPS, {**STEPS, "split": "columns"}):
        plan = AutoPlanner().plan(make_request(task, options=options, time_limit_s=SECONDS))
        assert all(placed.shard == Shard.whole(placed.shard.table) for placed in plan.shards)


def test_refuses_cuts_that_there_are_not(draw_task, make_request):
    with pytest.raises(InvalidOptionError, match=r"options\.split: must be any of none, columns, rows, got 'diagonal'"):
        AutoPlanner().plan(make_request(draw_task(4, 2), options={"split": "diagonal"}))


def test_refuses_options_it_does_not_have(draw_task, make_request):
    with pytest.raises(InvalidOptionError, match="steps: must be at least 0"):
        AutoPlanner().plan(make_request(draw_task(4, 2), options={"steps": -1}))
    with pytest.raises(
        InvalidOptionError, match=r"options\.beam: unknown option; this planner takes: steps, policy, split"
    ):
        AutoPlanner().plan(make_request(draw_task(4, 2), options={"beam": 3}))
