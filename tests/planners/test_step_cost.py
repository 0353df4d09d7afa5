"""Steps priced from sums are those that `evaluate` makes of the plans."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from autoshard.core import DenseLayers, DType, Payload, RowRange, RowsBy, Shard, Tier
from autoshard.core.step import EMBEDDING_PARTS, PART_FEATURES, Overlap
from autoshard.evaluation import activation_bytes, evaluate, price_step, training_bytes
from autoshard.planners.space.placement import PlacementProblem
from autoshard.planners.space.step_cost import StepCost, StepSums
from autoshard.validator import validate_plan
from tests import builders as make

COSTS = make.costs()

TIERS = (Tier.DATA_PARALLEL, Tier.FLEX, Tier.ROW_WISE)


class Calibrated:
    """Every feature of every part counts."""

    name = "calibrated:test"

    def __init__(self, overlap):
        self.overlap = overlap

    def coefficients(self, part, _basis):
        return tuple(0.3 + 0.1 * index for index in range(len(PART_FEATURES[part])))

    def interval_ms(self, value_ms, *_):
        return value_ms, value_ms


def row_groups(tables):
    shards = []
    for table in tables.tables:
        ends = sorted({0, table.num_embeddings // 10, table.num_embeddings // 3, table.num_embeddings})
        for start, stop in pairwise(ends):
            rows = RowRange(start=start, stop=stop, by=RowsBy.ACCESS_RANK)
            shards.append(Shard(table=table, rows=rows, columns=(0, table.embedding_dim)))
    return shards


@pytest.fixture(params=["plain", "calibrated", "neo"])
def step_problem(request):
    tables, topology = make.draw_task(12, 8, seed=3)
    node, *outer = make.levels(2, 4, 8, bytes_per_s=(1e9, 4e8, 3e8), latency_s=1e-5)
    outer = [replace(level, shared_links=request.param == "calibrated") for level in outer]
    topology = replace(topology, levels=(node, *outer))
    tables = replace(
        tables, dense=DenseLayers(num_dense_features=13, bottom_mlp=(64, 16), top_mlp=(64, 1), interaction="dot")
    )
    costs = make.costs()
    if request.param != "plain":
        overlap = Overlap.NEO if request.param == "neo" else Overlap.NONE
        costs = replace(costs, step=Calibrated(overlap))
    if request.param == "neo":
        tables = replace(tables, dense=None)
    problem = PlacementProblem.of(tables, topology, costs.kernel, row_groups(tables), TIERS)
    return problem, costs


@pytest.mark.parametrize("seed", range(4))
def test_steps_are_those_of_the_plans(step_problem, seed):
    problem, costs = step_problem
    step_cost = StepCost(problem, costs)
    rng = np.random.default_rng(seed)
    ranks_N = rng.integers(0, problem.num_choices, problem.num_items)
    plan = problem.to_plan(ranks_N)
    validate_plan(plan)
    price = price_step(plan, costs)
    sums = step_cost.sums(ranks_N)
    np.testing.assert_allclose(step_cost.step_ms(sums), price.step_ms.value, rtol=1e-5)
    parts_PR = step_cost.parts_ms(sums)[:, 0]
    for part, ms_R in zip(EMBEDDING_PARTS, parts_PR, strict=True):
        assert ms_R.max() == pytest.approx(getattr(price.times, part.value), rel=1e-5)
    np.testing.assert_array_equal(problem.rank_bytes(ranks_N), [one.hbm_bytes for one in evaluate(plan, costs).ranks])


@pytest.mark.parametrize("backward", [DType.BF16, DType.INT8])
@pytest.mark.parametrize("forward", [DType.FP16, DType.INT8])
def test_narrow_payloads_are_priced_as_in_plans(step_problem, forward, backward):
    problem, costs = step_problem
    rng = np.random.default_rng(9)
    ranks_N = rng.integers(0, problem.num_choices, problem.num_items)
    narrow = replace(problem, payload=Payload(forward=forward, backward=backward))
    plan, step_cost = narrow.to_plan(ranks_N), StepCost(narrow, costs)
    assert plan.payload == narrow.payload
    sums = step_cost.sums(ranks_N)
    np.testing.assert_allclose(step_cost.step_ms(sums), price_step(plan, costs).step_ms.value, rtol=1e-5)
    np.testing.assert_allclose(step_cost.activation_bytes(sums.moved_BRC)[0], activation_bytes(plan), rtol=1e-9)
    np.testing.assert_allclose(step_cost.training_bytes(sums.moved_BRC)[0], training_bytes(plan), rtol=1e-9)
    wide = StepCost(problem, costs)
    assert step_cost.step_ms(sums)[0] < wide.step_ms(wide.sums(ranks_N))[0]


def test_choices_are_priced_as_what_they_lead_to(step_problem):
    problem, costs = step_problem
    step_cost = StepCost(problem, costs)
    rng = np.random.default_rng(0)
    ranks_N = rng.integers(0, problem.num_choices, problem.num_items)
    item = 5
    others = np.delete(np.arange(problem.num_items), item)
    before = _sums_of(step_cost, ranks_N, others)
    choices_ms = step_cost.choices_ms(
        before,
        problem.codes_WNH[:, [item]],
        step_cost.moved_WNC[:, [item]],
    )
    expected = []
    for choice in range(problem.num_choices):
        ranks_N[item] = choice
        expected.append(step_cost.step_ms(step_cost.sums(ranks_N))[0])
    np.testing.assert_allclose(choices_ms[0], expected, rtol=1e-5)


def _sums_of(step_cost, ranks_N, items):
    """Sums without one item: those with it, less what it added."""
    problem = step_cost.problem
    codes_RH = np.zeros((problem.num_ranks, problem.codes_NH.shape[1]), dtype=np.float32)
    moved_RC = np.zeros((problem.num_ranks, step_cost.moved_WNC.shape[2]))
    for item in items:
        choice = ranks_N[item]
        way = max(0, choice - problem.num_ranks + 1)
        ranks = slice(None) if way else choice
        codes_RH[ranks] += problem.codes_WNH[way, item]
        moved_RC[ranks] += step_cost.moved_WNC[way, item]
    return type(step_cost.sums(ranks_N))(codes_BRH=codes_RH[None], moved_BRC=moved_RC[None])


def test_one_rank_stands_for_ranks_that_are_alike(step_problem):
    problem, costs = step_problem
    cost = StepCost(problem, costs)
    shared_N = np.arange(problem.num_items) % len(TIERS) + problem.num_ranks
    sums = cost.sums(shared_N)
    one = StepSums(codes_BRH=sums.codes_BRH[:, :1], moved_BRC=np.ascontiguousarray(sums.moved_BRC[:, :1]))
    np.testing.assert_allclose(cost.step_ms(one), cost.step_ms(sums), rtol=1e-12)
    every_R = cost.training_bytes(sums.moved_BRC)[0]
    np.testing.assert_allclose(cost.training_bytes(one.moved_BRC)[0], every_R[:1], rtol=1e-12)
