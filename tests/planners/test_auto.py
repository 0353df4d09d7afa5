"""`auto`: at least as good as every start, repeatable, and open to a trained policy."""

import pytest

from autoshard.core import TableSet
from autoshard.core.errors import InfeasiblePlanError, InvalidOptionError
from autoshard.evaluation import evaluate
from autoshard.planners.auto import AutoPlanner
from autoshard.planners.greedy import (
    CostGreedyPlanner,
    DimGreedyPlanner,
    LookupGreedyPlanner,
    RandomPlanner,
    SizeGreedyPlanner,
)

STEPS = {"steps_per_s": 20}
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
    starts_only_ms = max_ms(AutoPlanner(), task, options={"steps_per_s": 0, "policy": False}, time_limit_s=1e-6)
    assert max_ms(AutoPlanner(), task, options=STEPS, time_limit_s=SECONDS) < starts_only_ms


def test_seeds_decide(draw_task, make_request):
    task, options = draw_task(16, 4, seed=1), {"steps_per_s": 150}
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


def test_refuses_options_it_does_not_have(draw_task, make_request):
    with pytest.raises(InvalidOptionError, match="steps_per_s: must be at least 0"):
        AutoPlanner().plan(make_request(draw_task(4, 2), options={"steps_per_s": -1}))
    with pytest.raises(InvalidOptionError, match=r"options\.beam: unknown option; this planner takes: steps_per_s"):
        AutoPlanner().plan(make_request(draw_task(4, 2), options={"beam": 3}))
