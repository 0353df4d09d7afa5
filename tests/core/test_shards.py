"""Shards: parts of tables, and what one rank holds of them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core import (
    DType,
    Exchange,
    Feature,
    GradSync,
    MemoryLevel,
    MemoryPlacement,
    Optimizer,
    PlacedShard,
    Pooling,
    RowRange,
    RowsBy,
    Shard,
    Tier,
    Update,
    local_shard,
)
from autoshard.core.errors import InvalidPlanError
from autoshard.core.shard import fused_kernel
from tests.builders import each, held, placed, plan, table


def cut(start, stop, by=RowsBy.INDEX, columns=(0, 16), of=None):
    return Shard(table=of or table(), rows=RowRange(start=start, stop=stop, by=by), columns=columns)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: cut(5, 5), "rows"),
        (lambda: cut(-1, 5), "rows"),
        (lambda: cut(0, 1001), "rows"),
        (lambda: cut(0, 1000, columns=(0, 17)), "columns"),
        (lambda: cut(0, 1000, columns=(8, 8)), "columns"),
    ],
)
def test_parts_outside_of_the_table_are_refused(make, field):
    with pytest.raises(InvalidPlanError) as caught:
        make()
    assert caught.value.field == field


@given(at=st.integers(1, 999), by=st.sampled_from(RowsBy))
def test_parts_get_all_lookups_of_the_table(at, by):
    shares = [cut(start, stop, by).access()[1] for start, stop in ((0, at), (at, 1000))]
    assert sum(shares) == pytest.approx(1)
    if by is RowsBy.ACCESS_RANK:
        assert shares[0] == pytest.approx(float(table().access.coverage(at)))
    else:
        assert shares[0] == pytest.approx(at / 1000)


def test_the_whole_table_keeps_its_profile():
    assert Shard.whole(table()).access() == (table().access, 1.0)


def test_a_column_shard_keeps_a_moment_of_its_own():
    # Neo Sec. 4: column shards of a row-wise AdaGrad table keep one moment each.
    halves = [cut(0, 1000, columns=(0, 8)), cut(0, 1000, columns=(8, 16))]
    assert sum(half.storage_bytes for half in halves) == Shard.whole(table()).storage_bytes + 1000 * 4


@pytest.mark.parametrize(
    ("pooling", "exchange"), [(Pooling.SUM, Exchange.PARTIAL_SUMS), (Pooling.SEQUENCE, Exchange.ROWS)]
)
def test_a_table_wise_shard_answers_as_its_pooling_needs(pooling, exchange):
    whole = PlacedShard.table_wise(Shard.whole(table(pooling=pooling)), 3)
    assert (whole.tier, whole.replicas, whole.exchange) == (Tier.TABLE_WISE, ((3,),), exchange)


def test_a_rank_sees_the_groups_batch_of_all_features():
    features = (Feature(name="a", pooling_factor=3.0), Feature(name="b", pooling_factor=1.0))
    local = local_shard(placed(table(features=features)), group_batch_size=64)
    assert local.num_bags == 128
    assert local.num_lookups == pytest.approx(64 * 4.0)
    assert local.memory_bytes == Shard.whole(table()).storage_bytes
    assert local.update is Update.FUSED


def test_rows_split_over_ranks_share_lookups_and_bytes():
    split = placed(tier=Tier.ROW_WISE, replicas=(tuple(range(8)),))
    local = local_shard(split, group_batch_size=64)
    assert local.num_embeddings == 125
    assert local.num_bags == 64
    assert local.num_lookups == pytest.approx(64 * 2.0 / 8)


def test_a_replicated_shard_sees_its_share_of_the_batch_and_is_all_reduced():
    hot = placed(cut(0, 100, RowsBy.ACCESS_RANK), Tier.DATA_PARALLEL, each(4))
    rest = PlacedShard.table_wise(cut(100, 1000, RowsBy.ACCESS_RANK), 1)
    shards_R = plan(hot, rest).local_shards()
    assert [len(shards) for shards in shards_R] == [1, 2, 1, 1]
    assert {shards[0].update for shards in shards_R} == {Update.ALL_REDUCED}
    assert {shards[0].num_bags for shards in shards_R} == {16}
    assert sum(local.num_lookups for shards in shards_R for local in shards) == pytest.approx(64 * 2.0)


def test_the_kind_of_kernel_says_what_runs_together():
    assert held().kernel_kind == "fused/hbm/fp32/rowwise_adagrad/sum"
    assert held(pooling=Pooling.SEQUENCE).kernel_kind == "fused/hbm/fp32/rowwise_adagrad/rows"
    assert held(output=Exchange.ROWS).kernel_kind == held(pooling=Pooling.SEQUENCE).kernel_kind
    assert held(update=Update.ALL_REDUCED).kernel_kind == "all_reduced/hbm/fp32/none/sum"
    assert held(update=Update.ALL_REDUCED).is_pooled
    assert not held(output=Exchange.ROWS).is_pooled


def held_in_host(cache_bytes, policy="lru", **fields):
    """Bytes of host and device memory of a thousand rows of 16 numbers in host memory."""
    memory = MemoryPlacement(level=MemoryLevel.DDR, cache_bytes=cache_bytes, policy=policy)
    held = local_shard(placed(table(**fields), memory=memory), group_batch_size=64).held_bytes
    assert held[MemoryLevel.SSD] == 0
    return held[MemoryLevel.DDR], held[MemoryLevel.HBM]


def test_rows_in_device_memory_have_their_state_there():
    near = local_shard(placed(), group_batch_size=64)
    assert near.held_bytes == {MemoryLevel.HBM: near.memory_bytes, MemoryLevel.DDR: 0, MemoryLevel.SSD: 0}


@pytest.mark.parametrize(("policy", "index_bytes", "slot_bytes"), [("lru", 4, 20), ("lfu", 12, 8)])
def test_caches_know_of_rows_and_of_their_slots(policy, index_bytes, slot_bytes):
    # Ten rows of 64 bytes fit the cache; 50 bytes of it hold none.
    for cache_bytes in (640, 690):
        in_host, in_device = held_in_host(cache_bytes, policy, optimizer=Optimizer.SGD)
        assert in_host == 1000 * 64
        assert in_device == cache_bytes + 10 * slot_bytes + 1000 * index_bytes
    half = held_in_host(640, policy, optimizer=Optimizer.SGD, dtype=DType.FP16)
    assert half == (1000 * 32, 640 + 20 * slot_bytes + 1000 * index_bytes)


@pytest.mark.parametrize(
    ("optimizer", "of_weights", "of_rows"),
    [
        (Optimizer.SGD, 0, 0),
        (Optimizer.ROWWISE_ADAGRAD, 0, 4),
        (Optimizer.ADAGRAD, 64, 0),
        (Optimizer.ADAM, 128, 0),
        (Optimizer.PARTIAL_ROWWISE_ADAM, 64, 4),
    ],
)
def test_moments_of_rows_in_host_memory_are_in_the_device_s_where_a_row_has_one_number(optimizer, of_weights, of_rows):
    assert held_in_host(0, optimizer=optimizer) == (1000 * (64 + of_weights), 1000 * of_rows)
    cache_bytes = 640 + 10 * 20 + 1000 * 4
    assert held_in_host(640, optimizer=optimizer) == (1000 * (64 + of_weights), 1000 * of_rows + cache_bytes)


def test_shards_are_fused_by_what_their_tables_are_and_where_the_optimizer_runs():
    one, alone = table(), placed()
    copies = replace(alone, replicas=((0,), (1,)))
    assert fused_kernel(one, alone.update) == fused_kernel(table(num_embeddings=2000, embedding_dim=32))
    assert fused_kernel(one, copies.update) == fused_kernel(one, Update.ALL_REDUCED) != fused_kernel(one)
    assert fused_kernel(table(dtype=DType.FP16)) != fused_kernel(one)


@pytest.mark.parametrize("sync", [sync for sync in GradSync if sync is not GradSync.NONE])
def test_only_a_dense_sum_writes_gradients_of_rows_that_were_not_hit(sync):
    copies = placed(tier=Tier.DATA_PARALLEL, replicas=each(2), grad_sync=sync)
    local = local_shard(copies, group_batch_size=64, bags_share=0.5)
    # Of the rank's own batch, and of both ranks', whose rows the update writes six times.
    own, hit = map(table().access.expected_distinct, (32 * 2.0, 64 * 2.0))
    gradients = 1000 if sync is GradSync.DENSE else own + hit
    assert local.num_gradient_rows == pytest.approx(gradients + 6 * hit)


def test_a_fused_update_leaves_no_gradient():
    local = local_shard(placed(), group_batch_size=64)
    assert local.num_gradient_rows == 0
