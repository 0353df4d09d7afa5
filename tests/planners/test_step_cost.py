"""Steps priced from sums are those that `evaluate` makes of the plans."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from autoshard.core import DenseLayers, DType, Payload, RowRange, RowsBy, Shard, ShardingPlan, Tier
from autoshard.core.shard import fused_kernel
from autoshard.core.step import EMBEDDING_PARTS, PART_FEATURES, Overlap
from autoshard.evaluation import price_step, training_bytes
from autoshard.planners.space.options import locals_of, placed_shard
from autoshard.planners.space.step_cost import StepPrices, StepSums
from autoshard.validator import validate_plan
from tests import builders as make

COSTS = make.costs()

TIERS = (Tier.DATA_PARALLEL, Tier.FLEX, Tier.ROW_WISE)


class Calibrated:
    """Every feature of every part counts."""

    name = "calibrated:test"

    def __init__(self, overlap):
        self.overlap = overlap

    def coefficients(self, part, _basis, _topology):
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
def step_task(request):
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
    return tables, topology, costs


def drawn_plan(tables, topology, seed, payload=None):
    """Row groups, each on a rank or held by one of the shared tiers."""
    places = [*((Tier.TABLE_WISE, rank) for rank in range(topology.world_size)), *((tier, 0) for tier in TIERS)]
    groups = row_groups(tables)
    drawn = np.random.default_rng(seed).integers(0, len(places), len(groups)).tolist()
    shards = [
        placed_shard(shard, places[choice][0], topology, places[choice][1])
        for shard, choice in zip(groups, drawn, strict=True)
    ]
    return ShardingPlan(tables=tables, topology=topology, shards=tuple(shards), payload=payload or Payload())


def priced(plan, costs):
    """The prices of a plan's task, and what its ranks hold."""
    kernels = {fused_kernel(one.shard.table, one.update) for one in plan.shards}
    prices = StepPrices(plan.tables, plan.topology, costs, kernels, plan.payload)
    codes_UH = costs.kernel.encode(locals_of(plan.shards, plan.tables.batch_size))
    moved_UC = prices.moved(plan.shards)
    num_ranks = plan.topology.world_size
    codes_RH = np.zeros((num_ranks, codes_UH.shape[1]), dtype=np.float32)
    moved_RC = np.zeros((num_ranks, moved_UC.shape[1]))
    for placed, codes_H, moved_C in zip(plan.shards, codes_UH, moved_UC, strict=True):
        for rank in {rank for replica in placed.replicas for rank in replica}:
            codes_RH[rank] += codes_H
            moved_RC[rank] += moved_C
    return prices, StepSums(codes_BRH=codes_RH[None], moved_BRC=moved_RC[None])


@pytest.mark.parametrize("seed", range(4))
def test_steps_are_those_of_the_plans(step_task, seed):
    tables, topology, costs = step_task
    plan = drawn_plan(tables, topology, seed)
    validate_plan(plan)
    price = price_step(plan, costs)
    prices, sums = priced(plan, costs)
    np.testing.assert_allclose(prices.step_ms(sums), price.step_ms.value, rtol=1e-5)
    parts_PR = prices.parts_ms(sums)[:, 0]
    for part, ms_R in zip(EMBEDDING_PARTS, parts_PR, strict=True):
        assert ms_R.max() == pytest.approx(getattr(price.times, part.value), rel=1e-5)


@pytest.mark.parametrize("backward", [DType.BF16, DType.INT8])
@pytest.mark.parametrize("forward", [DType.FP16, DType.INT8])
def test_narrow_payloads_are_priced_as_in_plans(step_task, forward, backward):
    tables, topology, costs = step_task
    plan = drawn_plan(tables, topology, 9, Payload(forward=forward, backward=backward))
    prices, sums = priced(plan, costs)
    np.testing.assert_allclose(prices.step_ms(sums), price_step(plan, costs).step_ms.value, rtol=1e-5)
    np.testing.assert_allclose(prices.training_bytes(sums.moved_BRC)[0], training_bytes(plan), rtol=1e-9)
    wide, wide_sums = priced(drawn_plan(tables, topology, 9), costs)
    assert prices.step_ms(sums)[0] < wide.step_ms(wide_sums)[0]


def test_one_rank_stands_for_ranks_that_are_alike(step_task):
    tables, topology, costs = step_task
    shards = [
        placed_shard(shard, TIERS[index % len(TIERS)], topology) for index, shard in enumerate(row_groups(tables))
    ]
    prices, sums = priced(ShardingPlan(tables=tables, topology=topology, shards=tuple(shards)), costs)
    one = StepSums(codes_BRH=sums.codes_BRH[:, :1], moved_BRC=np.ascontiguousarray(sums.moved_BRC[:, :1]))
    np.testing.assert_allclose(prices.step_ms(one), prices.step_ms(sums), rtol=1e-12)
