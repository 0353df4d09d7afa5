"""One price of a step: plans, sums of a search and the slow way say the same of drawn plans of all layouts."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.core import DType, RowOrder, Topology
from autoshard.core.costs import LinkBytes
from autoshard.core.shard import fused_kernel
from autoshard.core.step import EMBEDDING_PARTS, PART_FEATURES, Overlap
from autoshard.evaluation import evaluate, price_step, stages, training_bytes
from autoshard.evaluation.batch_memory import row_order_bytes
from autoshard.planners.oper import OperPlanner
from autoshard.planners.space.options import locals_of
from autoshard.planners.space.step_cost import StepPrices, StepSums
from tests import builders as make
from tests.contracts.drawn_layouts import drawn_plan
from tests.contracts.price_oracle import slow_parts

SEEDS = range(60)
#: Milliseconds that every peer of an all-to-all takes, as a change of the price would have it.
PEER_MS = 0.05


class Calibrated:
    """Every feature of every part counts."""

    name = "calibrated:test"
    overlap = Overlap.NONE

    def coefficients(self, part, _basis, _topology):
        return tuple(0.3 + 0.1 * index for index in range(len(PART_FEATURES[part])))

    def interval_ms(self, value_ms, *_):
        return value_ms, value_ms


def models(*, calibrated):
    plain = make.costs()
    return replace(plain, step=Calibrated()) if calibrated else plain


def drawn(seed):
    """A plan on levels of different links."""
    world, node = [(1, 1), (2, 2), (4, 4), (4, 2), (6, 3), (8, 2)][seed % 6]
    payload = [DType.FP32, DType.FP16, DType.INT8][seed % 3]
    plan, _ = drawn_plan(seed, world, node, payload)
    topology = make.topology(
        *(level.size for level in plan.topology.levels),
        bytes_per_s=(2e9, 1e9),
        latency_s=(1e-5, 3e-5),
        reduce_bytes_per_s=(3e9, 1.5e9),
        reduce_latency_s=2e-5,
        shared_links=(False, seed % 4 == 3),
    )
    return with_listed_orders(replace(plan, topology=topology))


def with_listed_orders(plan):
    """The plan with a file for the rows of every table, of which ranks keep those of tables cut by access rank."""
    tables = {table.name: replace(table, row_order=listed(table)) for table in plan.tables.tables}
    shards = (
        replace(placed, shard=replace(placed.shard, table=tables[placed.shard.table.name])) for placed in plan.shards
    )
    return replace(plan, tables=replace(plan.tables, tables=tuple(tables.values())), shards=tuple(shards))


def listed(table):
    return RowOrder(file="rows.parquet", digest="0" * 64, num_ordered=-(-table.num_embeddings // 2))


def is_searched(plan):
    """Whether every shard is held by one replica, or by one for each node or rank, as those that a search places."""
    topology = plan.topology
    world, node = topology.world_size, topology.local_world_size
    everywhere = make.each(world)
    nodes = tuple(tuple(range(first, first + node)) for first in range(0, world, node))
    return all(
        (len(one.replicas) == 1 or one.replicas in (everywhere, nodes)) and one.fetch in (None, tuple(range(world)))
        for one in plan.shards
    )


def summed(plan, costs):
    """Prices of the plan's task, and what its ranks hold."""
    world = plan.topology.world_size
    shards = [placed.as_run(world) for placed in plan.shards]
    kernels = {fused_kernel(one.shard.table, one.update) for one in shards}
    prices = StepPrices(plan.tables, plan.topology, costs, kernels, plan.payload)
    codes_UH, moved_UC = costs.kernel.encode(locals_of(shards, plan.tables.batch_size)), prices.moved(shards)
    codes_RH, moved_RC = np.zeros((world, codes_UH.shape[1])), np.zeros((world, moved_UC.shape[1]))
    for placed, code_H, moved_C in zip(shards, codes_UH, moved_UC, strict=True):
        ranks = [rank for replica in placed.replicas for rank in replica]
        codes_RH[ranks] += code_H
        moved_RC[ranks] += moved_C
    return prices, StepSums(codes_BRH=codes_RH[None].astype(np.float32), moved_BRC=moved_RC[None])


SEARCHED = [seed for seed in SEEDS if is_searched(drawn(seed))]


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_plans_are_priced_as_the_slow_way_says(seed, calibrated):
    plan, costs = drawn(seed), models(calibrated=calibrated)
    price = price_step(plan, costs)
    parts, synced_ms = slow_parts(plan, costs)
    for part, ms in parts.items():
        assert getattr(price.times, part.value) == pytest.approx(ms, rel=1e-9), part
    assert price.times.all_reduce == pytest.approx(synced_ms, rel=1e-9)
    assert price.step_ms.value == pytest.approx(sum(parts.values()) + synced_ms, rel=1e-9)


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("seed", SEARCHED)
def test_sums_of_a_search_are_priced_as_the_slow_way_says(seed, calibrated):
    plan, costs = drawn(seed), models(calibrated=calibrated)
    prices, sums = summed(plan, costs)
    parts, synced_ms = slow_parts(plan, costs)
    parts_PR = prices.parts_ms(sums)[:, 0]
    # Codes add up in single precision.
    np.testing.assert_allclose(parts_PR.max(axis=1), [parts[part] for part in EMBEDDING_PARTS], rtol=1e-5)
    assert prices.step_ms(sums)[0] == pytest.approx(sum(parts.values()) + synced_ms, rel=1e-5)
    np.testing.assert_allclose(prices.training_bytes(sums.moved_BRC)[0], training_bytes(plan), rtol=1e-9)


def test_row_orders_count_in_the_memory_of_some():
    assert any(row_order_bytes(drawn(seed)) > 0 for seed in SEARCHED)


def test_drawn_plans_are_of_both_kinds():
    assert 0.2 * len(SEEDS) < len(SEARCHED) < 0.8 * len(SEEDS)


def test_a_new_term_of_the_step_is_seen_by_plans_and_searches(monkeypatch):
    plan = next(one for seed in SEARCHED if (one := drawn(seed)).topology.world_size > 2)
    costs = models(calibrated=False)
    prices, sums = summed(plan, costs)
    before_ms = evaluate(plan, costs).step_ms.value, prices.step_ms(sums)[0]
    plain = stages.all_to_alls_ms

    def dearer(links: LinkBytes, comm, topology: Topology):
        return plain(links, comm, topology) + (topology.world_size - 1) * PEER_MS

    monkeypatch.setattr(stages, "all_to_alls_ms", dearer)
    more_ms = 3 * (plan.topology.world_size - 1) * PEER_MS
    assert evaluate(plan, costs).step_ms.value == pytest.approx(before_ms[0] + more_ms)
    assert prices.step_ms(sums)[0] == pytest.approx(before_ms[1] + more_ms)


def test_a_new_term_of_the_step_changes_what_oper_decides(monkeypatch):
    """Where bytes that arrive cost more, rows are held everywhere that were not worth it before."""
    tables = make.tables(*(make.table(f"t{i}", 200_000, alpha=1.2) for i in range(3)), batch_size=65_536)
    request = make.request(
        tables, make.topology(2, 4), costs=models(calibrated=False), options={"extra_memory_ratio": 1.0}
    )

    def num_copied(mode):
        plan = OperPlanner().plan(replace(request, options={**request.options, "mode": mode}))
        assert plan.predicted == evaluate(plan, request.costs)
        return sum(one.shard.num_embeddings * (len(one.replicas) - 1) for one in plan.shards)

    before = num_copied("training")
    plain = stages.all_to_alls_ms

    def dearer(links: LinkBytes, comm, topology: Topology):
        return plain(links, comm, topology) + 1e-5 * links.arriving_LR.sum(axis=0)

    monkeypatch.setattr(stages, "all_to_alls_ms", dearer)
    assert num_copied("training") > 1.5 * before > 0

    def free(links: LinkBytes, *_):
        return 0 * links.arriving_LR.sum(axis=0)

    # Algorithm 1 has nothing to copy where links cost nothing.
    assert num_copied("inference") > 0
    monkeypatch.setattr(stages, "all_to_alls_ms", free)
    assert num_copied("inference") == 0
