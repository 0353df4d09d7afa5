"""Finished plans compared by draws of what they take."""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest

from autoshard.core import CostModels, ReplicaGroups, ShardingPlan, Tier
from autoshard.core.costs import KernelErrors, recorded_errors
from autoshard.evaluation import AnalyticCostModel, evaluate, price_step
from autoshard.evaluation.evaluate import price_with_kernels
from autoshard.evaluation.uncertainty.plan_draws import slowest_draws, step_draws
from autoshard.planners.auto import AutoPlanner
from autoshard.planners.comparison import FoundPlan, choose, last_told, num_cuts
from autoshard.planners.space.options import placed_shard
from tests import builders as make

COSTS = make.costs()

NO_ERRORS = KernelErrors(table=0.0, kind=0.0, company=0.0)


@dataclass(frozen=True)
class Recorded(AnalyticCostModel):
    """The analytic model with errors on record."""

    errors: KernelErrors = NO_ERRORS


def recorded(errors):
    return Recorded(device="cpu", memory=AnalyticCostModel.for_device("cpu").memory, errors=errors)


@pytest.fixture
def with_errors():
    return lambda errors: replace(COSTS, kernel=recorded(errors))


def level_and_alone(tables, topology):
    """A plan with a table on every rank, and one with all tables on the first."""
    level = [number % topology.world_size for number in range(len(tables.tables))]
    return [
        make.plan(*make.table_wise(tables.tables, ranks), tables=tables, topology=topology)
        for ranks in (level, [0] * len(level))
    ]


def priced(plans, costs):
    return [price_with_kernels(plan, costs) for plan in plans]


def test_models_say_whether_they_know_their_errors():
    assert recorded_errors(COSTS.kernel) is None
    assert recorded_errors(recorded(NO_ERRORS)) == NO_ERRORS


def test_steps_without_errors_are_those_predicted():
    plans = level_and_alone(*make.draw_task(4, 4))
    drawn_PE = step_draws(priced(plans, COSTS), NO_ERRORS)
    for plan, drawn_E in zip(plans, drawn_PE, strict=True):
        assert drawn_E == pytest.approx(price_step(plan, COSTS).step_ms.value)


def test_the_slowest_of_many_equal_ranks_takes_longer_than_predicted():
    tables = make.tables(8, batch_size=256)
    level, alone = level_and_alone(tables, make.topology(8))
    drawn_PE = step_draws(priced([level, alone], COSTS), KernelErrors(table=0.0, kind=0.0, company=0.1))
    growth_P = [
        drawn_E.mean() / price_step(plan, COSTS).step_ms.value
        for plan, drawn_E in zip((level, alone), drawn_PE, strict=True)
    ]
    assert growth_P[0] > growth_P[1] > 1.0


def test_plans_that_differ_in_nothing_have_the_same_draws():
    level, alone = level_and_alone(*make.draw_task(6, 3))
    first_E, _, third_E = step_draws(
        priced([level, alone, level], COSTS), KernelErrors(table=0.2, kind=0.1, company=0.1)
    )
    assert first_E.tolist() == third_E.tolist()


def test_gains_below_what_the_model_can_tell_are_nothing():
    noise_E = np.tile([-1.0, 1.0], 50)
    certain = np.full(100, 10.0)
    unsure = 9.9 + noise_E
    better = 8.0 + noise_E
    assert last_told(np.stack([certain, unsure]), [0, 3]) == 0
    assert last_told(np.stack([certain, better]), [0, 3]) == 1
    # Plans are compared with the one taken before them, so that many small gains add up to nothing.
    assert last_told(np.stack([certain, unsure, unsure - 0.1, unsure - 0.2]), [0, 3, 3, 3]) == 0
    assert last_told(np.stack([certain, better, better - 0.1 - noise_E]), [0, 3, 3]) == 1
    assert last_told(np.stack([certain, unsure, better, certain]), [0, 3, 3, 0]) == 2


def test_moving_whole_tables_has_to_gain_more_than_cutting_them():
    certain = np.full(100, 10.0)
    better = 9.25 + np.tile([-1.0, 1.0], 50)
    assert last_told(np.stack([certain, better]), [0, 1]) == 1
    assert last_told(np.stack([certain, better]), [1, 0]) == 1
    assert last_told(np.stack([certain, better]), [0, 0]) == 0
    assert last_told(np.stack([certain, better - 0.5]), [0, 0]) == 1


def test_a_longer_search_keeps_to_the_plan_of_a_shorter_one_unless_it_is_told_from_it():
    rng = np.random.default_rng(0)
    drawn_PE = 10.0 - np.arange(12)[:, None] * 0.1 + rng.standard_normal((12, 200))
    taken = [last_told(drawn_PE[:count], [0, *[2] * (count - 1)]) for count in range(1, 13)]
    for shorter, longer in itertools.pairwise(taken):
        gain_E = drawn_PE[shorter] - drawn_PE[longer]
        assert longer == shorter or gain_E.mean() > 0.5 * gain_E.std()
    assert len(set(taken)) > 1


def test_errors_that_plans_have_in_common_hide_no_gain():
    shared_E = np.linspace(-5.0, 5.0, 100)
    assert last_told(np.stack([10.0 + shared_E, 9.9 + shared_E]), [0, 3]) == 1


def test_cuts_are_pieces_beyond_whole_tables():
    tables, topology = make.draw_task(4, 4)
    whole, _ = level_and_alone(tables, topology)
    assert num_cuts(whole) == 0
    everywhere = placed_shard(whole.shards[0].shard, Tier.ROW_WISE, topology)
    assert num_cuts(replace(whole, shards=(everywhere, *whole.shards[1:]))) == 3
    assert num_cuts(replace(whole, replica_groups=ReplicaGroups(num_groups=2))) == 4


def found(plans, placed, *, by_kernels=False):
    costs_ms = [max(one.kernels.costs.kernel_ms_S) if by_kernels else one.step.step_ms.value for one in placed]
    return [
        FoundPlan(plan=plan, priced=one, cost_ms=cost_ms, status=f"plan {index}")
        for index, (plan, one, cost_ms) in enumerate(zip(plans, placed, costs_ms, strict=True))
    ]


def test_without_errors_on_record_the_fastest_is_taken():
    plans = level_and_alone(*make.draw_task(4, 4))
    for order in (plans, plans[::-1]):
        candidates = found(order, priced(order, COSTS))
        assert choose(candidates, COSTS) is min(candidates, key=lambda one: one.cost_ms)


def test_a_margin_keeps_the_plainest_and_says_why():
    plans = level_and_alone(*make.draw_task(4, 4))[::-1]
    plain, faster = candidates = found(plans, priced(plans, COSTS))
    gain = 1 - faster.cost_ms / plain.cost_ms
    assert choose(candidates, COSTS, margin=0.99 * gain) is faster
    kept = choose(candidates, COSTS, margin=1.01 * gain)
    assert kept.plan is plain.plan
    assert kept.status == f"plan 0, since the model cannot tell {faster.cost_ms:.6g} ms from {plain.cost_ms:.6g} ms"
    assert choose([plain], COSTS, margin=0.5) is plain


def test_slowest_ranks_are_drawn_as_steps_are(with_errors):
    costs = with_errors(KernelErrors(table=0.2, kind=0.1, company=0.2))
    plans = level_and_alone(*make.draw_task(12, 3))
    placed = priced(plans, costs)
    slowest_ms = [evaluate(plan, costs).max_kernel_ms for plan in plans]
    assert slowest_draws(placed, NO_ERRORS).mean(axis=1) == pytest.approx(slowest_ms)
    drawn_PE = slowest_draws(placed, costs.kernel.errors)
    candidates = found(plans, placed, by_kernels=True)
    assert choose(candidates, costs, by_kernels=True).plan is plans[last_told(drawn_PE, [0, 0])]
    steps_PE = step_draws(placed, costs.kernel.errors)
    assert steps_PE.std(axis=1) == pytest.approx(drawn_PE.std(axis=1), rel=0.4)


def minimised_ms(plan, costs, objective):
    """What `auto` makes short."""
    return price_step(plan, costs).step_ms.value if objective == "step" else evaluate(plan, costs).max_kernel_ms


@pytest.mark.parametrize("objective", ["step", "kernel"])
def test_the_search_keeps_to_whole_tables_where_the_model_knows_little(with_errors, objective):
    task = make.draw_task(20, 4)
    options = {"steps": 20, "objective": objective, "policy": False}

    def plan(costs: CostModels) -> ShardingPlan:
        return AutoPlanner().plan(replace(make.request(*task, options=options, time_limit_s=60.0), costs=costs))

    unsure = with_errors(KernelErrors(table=3.0, kind=0.0, company=3.0))
    found = plan(unsure)
    assert num_cuts(found) == 0
    assert plan(unsure) == found
    sure = plan(with_errors(NO_ERRORS))
    sure_ms, unsure_ms = (minimised_ms(one, unsure, objective) for one in (sure, found))
    assert sure_ms <= unsure_ms * (1 + 1e-9)


@pytest.mark.parametrize("objective", ["step", "kernel"])
def test_a_plan_that_is_given_stays_where_the_model_knows_little(with_errors, objective):
    tables, topology = task = make.draw_task(20, 4)
    given, _ = level_and_alone(tables, topology)
    options = {"steps": 20, "objective": objective, "policy": False}
    request = replace(
        make.request(*task, options=options, time_limit_s=60.0),
        costs=with_errors(KernelErrors(table=3.0, kind=0.0, company=3.0)),
        start=given,
    )
    plan = AutoPlanner().plan(request)
    assert [placed.replicas for placed in plan.shards] == [placed.replicas for placed in given.shards]
