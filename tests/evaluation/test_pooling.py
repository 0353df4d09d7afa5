"""What readers take to pool rows: priced by `evaluate` and by the planners' sums alike."""

from dataclasses import replace

import numpy as np
import pytest

from autoshard.core import (
    DenseLayers,
    Exchange,
    GradSync,
    Pooling,
    Tier,
)
from autoshard.core.step import PART_FEATURES, Overlap, StepPart, plain_coefficients
from autoshard.evaluation import evaluate, price_step
from autoshard.evaluation.device_memory import DEVICE_MEMORY
from autoshard.evaluation.reader_work import READER_SPEED, SUM_SPEED, reader_ms, sequence_sums_ms
from autoshard.evaluation.step_price import DenseWork
from autoshard.planners.space.options import ShardingType, enumerate_options
from autoshard.planners.space.planner_space import PlannerSpace
from tests.builders import costs, each, placed, plan, table, tables, topology

TIERS = {
    Tier.TABLE_WISE: ((1,),),
    Tier.ROW_WISE: ((0, 1, 2, 3),),
    Tier.TABLE_ROW_WISE: ((2, 3),),
    Tier.FLEX: ((0, 1), (2, 3)),
}
BATCH, DIM = 512, 16
#: Seconds of each amount, forward and backward.
SPEED = {name: seconds[1:] for name, seconds in READER_SPEED["cpu"].items()}
TOPOLOGY, COSTS = topology(bytes_per_s=1e10, latency_s=1e-5), costs()


def held(tier, exchange=Exchange.ROWS, *, pooling=Pooling.SUM, pooling_factor=0.5):
    sync = GradSync.SPARSE if len(TIERS[tier]) > 1 else GradSync.NONE
    of = table(pooling=pooling, pooling_factor=pooling_factor)
    return placed(of, tier, TIERS[tier], exchange=exchange, grad_sync=sync)


def plan_of(shard):
    return plan(shard, batch_size=BATCH, topology=TOPOLOGY)


def pooled(shard, topology=TOPOLOGY):
    return reader_ms([shard], BATCH / 4, topology)[0, 1:]


@pytest.mark.parametrize("tier", TIERS)
def test_readers_pool_the_rows_of_their_own_samples_whoever_holds_them(tier):
    lookups, bag_bytes = 0.5 * BATCH / 4, BATCH / 4 * DIM * 4
    expected_ms = [
        1e3 * (of_lookup * lookups + of_byte * bag_bytes)
        for of_lookup, of_byte in zip(SPEED["pooled_lookups"], SPEED["pooled_bytes"], strict=True)
    ]
    np.testing.assert_allclose(pooled(held(tier)), expected_ms)


@pytest.mark.parametrize("tier", TIERS)
def test_without_a_measurement_it_is_that_of_fused_kernels(tier):
    memory = DEVICE_MEMORY["a100"]
    bags, rows, vector_bytes = BATCH / 4, 0.5 * BATCH / 4, DIM * 4
    written_s = vector_bytes / (memory.output_bytes_per_s or memory.gather_bytes_per_s)
    forward_s = rows * (memory.lookup_s + vector_bytes / memory.gather_bytes_per_s) + bags * written_s
    expected_ms = [1e3 * forward_s, 1e3 * (bags + rows) * written_s]
    on_gpus = replace(TOPOLOGY, device="a100")
    np.testing.assert_allclose(pooled(held(tier), on_gpus), expected_ms)
    sequence = held(tier, pooling=Pooling.SEQUENCE)
    assert pooled(sequence, on_gpus).tolist() == [0.0, 0.0]


def test_sums_and_own_copies_take_nothing():
    copies = replace(held(Tier.FLEX), tier=Tier.DATA_PARALLEL, replicas=each(4))
    for shard in (held(Tier.ROW_WISE, Exchange.PARTIAL_SUMS), copies):
        assert pooled(shard).tolist() == [0.0, 0.0]


def test_sequences_are_put_in_order_and_means_are_scaled():
    row_bytes, bag_bytes = 0.5 * BATCH / 4 * DIM * 4, BATCH / 4 * DIM * 4
    whole_s = np.array(SPEED["sequences"]) + np.array(SPEED["sequence_bytes"]) * row_bytes
    for tier, seconds in ((Tier.TABLE_WISE, whole_s), (Tier.ROW_WISE, whole_s + SPEED["split_sequences"])):
        np.testing.assert_allclose(pooled(held(tier, pooling=Pooling.SEQUENCE)), 1e3 * seconds)
    mean = held(Tier.TABLE_WISE, Exchange.PARTIAL_SUMS, pooling=Pooling.MEAN)
    np.testing.assert_allclose(pooled(mean), [1e3 * second * bag_bytes for second in SPEED["mean_bytes"]])


def test_rows_that_several_lookups_share_come_once():
    busy = held(Tier.ROW_WISE, pooling_factor=64.0)
    on_gpus = replace(TOPOLOGY, device="a100")
    once, each_time = (pooled(one, on_gpus) for one in (replace(busy, deduplicate=True), busy))
    assert once[0] < each_time[0]


@pytest.mark.parametrize("tier", TIERS)
def test_a_step_has_it_in_its_exchanges(tier):
    shard = held(tier)
    found, ranks = price_step(plan_of(shard), COSTS), evaluate(plan_of(shard), COSTS).ranks
    without = price_step(plan_of(shard), replace(COSTS, step=Calibrated()))
    forward_ms, backward_ms = pooled(shard)
    assert found.times.forward_exchange - without.times.forward_exchange == pytest.approx(forward_ms)
    assert found.times.backward_exchange - without.times.backward_exchange == pytest.approx(backward_ms)
    assert max(rank.forward_exchange_ms for rank in ranks) == pytest.approx(found.times.forward_exchange)
    assert max(rank.backward_exchange_ms for rank in ranks) == pytest.approx(found.times.backward_exchange)


class Calibrated:
    """Steps that runs calibrated: readers' work took nothing in them."""

    name, overlap, relative_error = "calibrated:test", Overlap.NONE, 0.0

    def coefficients(self, part: StepPart, _basis, _topology):
        weights = zip(PART_FEATURES[part], plain_coefficients(part, "cpu"), strict=True)
        return tuple(0.0 if name == "reading_ms" else weight for name, weight in weights)

    def interval_ms(self, value_ms, *_):
        return value_ms, value_ms


@pytest.mark.parametrize("costs", [COSTS, replace(COSTS, step=Calibrated())], ids=["plain", "calibrated"])
def test_planners_price_it_as_evaluate_does(costs):
    one = tables(table(pooling_factor=0.5), batch_size=BATCH)
    space = PlannerSpace(one, TOPOLOGY, costs, lambda one: enumerate_options(one, TOPOLOGY, with_exchanges=True))
    rows = {}
    for option in space.items[0].options:
        sums_RX = np.zeros((4, space.kinds.rows_VX.shape[1]))
        for shard in option.shards:
            sums_RX[shard.ranks(0)] += space.kinds.rows_VX[shard.kind]
        _, moved_RC, _ = space.kinds.split(sums_RX)
        parts_P = space.prices.moving_ms(moved_RC[None])[:, 0].max(axis=1)
        shards = [part.placed(0, TOPOLOGY) for part in option.of_tables[0].parts]
        times = price_step(plan(*shards, batch_size=BATCH, topology=TOPOLOGY), costs).times
        assert parts_P[2] == pytest.approx(times.forward_exchange, rel=1e-6)
        assert parts_P[3] == pytest.approx(times.backward_exchange, rel=1e-6)
        rows.setdefault(option.of_tables[0].name, set()).update(one.exchange for one in shards)
    both = {ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.FLEX, ShardingType.GRID}
    assert all(rows[name] == set(Exchange) for name in both)
    assert rows[ShardingType.DATA_PARALLEL] == {Exchange.PARTIAL_SUMS}


def test_rows_are_offered_only_where_they_are_fewer_than_sums():
    for pooling_factor, tiers in ((0.5, {"table_wise", "row_wise"}), (3.0, {"row_wise"}), (4.0, set())):
        options = enumerate_options(table(pooling_factor=pooling_factor), TOPOLOGY, with_exchanges=True)
        found = {one.name for one in options for part in one.parts if part.exchange is Exchange.ROWS}
        assert found & {"table_wise", "row_wise"} == tiers


def test_sums_over_sequences_are_the_benchmark_models_and_so_the_interactions():
    dense = DenseLayers(num_dense_features=4, bottom_mlp=(8, DIM), top_mlp=(8, 1))
    one, two = (table(name, pooling=Pooling.SEQUENCE, pooling_factor=3.0) for name in ("one", "two"))
    of = tables(one, two, table("pooled"), batch_size=BATCH, dense=dense)
    lookups, speed = 2 * 3.0 * BATCH / 4, SUM_SPEED["cpu"]
    vectors_bytes = 3 * BATCH / 4 * DIM * 4
    speeds = zip(speed.feature_s, speed.lookup_s, speed.byte_s, speed.joined_s, strict=True)
    expected_ms = [1e3 * (2 * a + lookups * b + lookups * DIM * 4 * c + vectors_bytes * d) for a, b, c, d in speeds]
    found_ms = sequence_sums_ms(of, BATCH / 4, "cpu")
    np.testing.assert_allclose(found_ms, expected_ms)
    assert (found_ms > 0).all()
    assert not sequence_sums_ms(of, BATCH / 4, "a100").any()
    sums = replace(of, tables=tuple(replace(table, pooling=Pooling.SUM) for table in of.tables))
    assert not sequence_sums_ms(sums, BATCH / 4, "cpu").any()
    work, without = (DenseWork.of(tables, TOPOLOGY, COSTS).costs for tables in (of, sums))
    np.testing.assert_allclose(work.forward_ms_N - without.forward_ms_N, [0, found_ms[0], 0], atol=1e-12)
    np.testing.assert_allclose(work.backward_ms_N - without.backward_ms_N, [0, found_ms[1], 0], atol=1e-12)
    np.testing.assert_allclose(work.high_ms_N - without.high_ms_N, [0, found_ms.sum(), 0], atol=1e-12)
