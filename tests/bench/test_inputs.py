from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core import AccessProfile, GradSync, PlacedShard, Shard, Tier, Update, local_shard
from autoshard.core.batches import scatter_ranks
from bench.kernels.inputs import BatchCache, draw_batch, draw_ids, reuse_bins_of
from tests import builders as make


def test_a_batch_depends_on_the_shard_and_not_on_its_name():
    shard = make.held(num_embeddings=1000)
    batch, again = draw_batch(shard), draw_batch(replace(shard, table="other"))
    assert torch.equal(batch.ids_L, again.ids_L)
    other = draw_batch(replace(shard, pooling_factor=2.6))
    assert not torch.equal(batch.ids_L[:30], other.ids_L[:30])


def test_a_batch_counts_what_it_holds():
    batch = draw_batch(make.held(num_embeddings=40, num_bags=100, pooling_factor=1.5))
    assert batch.measured.num_lookups == len(batch.ids_L) == 150
    assert batch.measured.num_distinct == len(set(batch.ids_L.tolist()))
    assert sum(batch.measured.reuse_bins) == pytest.approx(1.0)


@pytest.mark.parametrize("num_ranks", [1, 2, 16])
def test_replicas_update_the_rows_that_all_ranks_hit(num_ranks):
    """As a plan has them: each of its ranks reads a part of 2,048 samples, all hit some 7,000 of 20,000 rows."""
    table = make.table("t", num_embeddings=20_000, pooling_factor=10.0, access=AccessProfile.zipf(20_000, 1.05))
    placed = replace(
        PlacedShard.table_wise(Shard.whole(table), 0),
        tier=Tier.DATA_PARALLEL,
        replicas=tuple((rank,) for rank in range(num_ranks)),
        grad_sync=GradSync.SPARSE,
    )
    shard = local_shard(placed, group_batch_size=2048, bags_share=1 / num_ranks)
    shard = replace(shard, update=Update.ALL_REDUCED)
    batch, alone = draw_batch(shard), draw_batch(replace(shard, written_rows=None))
    assert torch.equal(batch.ids_L, alone.ids_L)
    own = set(alone.ids_L.tolist())
    assert set(alone.updated_U.tolist()) == own < {*range(20_000)}
    assert own <= set(batch.updated_U.tolist())
    assert torch.equal(batch.updated_U, batch.updated_U.unique())
    assert len(batch.updated_U) == pytest.approx(shard.access.expected_distinct(2048 * 10), rel=0.03)
    assert not len(draw_batch(replace(shard, update=Update.FUSED)).updated_U)


def test_rows_that_are_all_hit_take_few_draws():
    shard = make.held(num_embeddings=50, update=Update.ALL_REDUCED, written_rows=10_000.0)
    assert len(draw_batch(shard).updated_U) >= 48


@given(st.lists(st.integers(1, 2**20), min_size=1, max_size=50))
def test_reuse_bins_are_powers_of_two(counts):
    expected = [0] * 17
    for count in counts:
        edge, index = 1, 0
        while count > edge and index < 16:
            edge, index = 2 * edge, index + 1
        expected[index] += 1
    assert reuse_bins_of(torch.tensor(counts)) == pytest.approx([number / len(counts) for number in expected])


def test_no_row_has_no_bin():
    assert reuse_bins_of(torch.tensor([], dtype=torch.int64)) == (0.0,) * 17


def test_the_cache_keeps_batches_until_they_fill_it():
    shards = [make.held(num_embeddings=50 + index) for index in range(6)]
    one = draw_batch(shards[0])
    cache = BatchCache(max_bytes=3 * (one.ids_L.nbytes + one.lengths_B.nbytes))
    (first,) = cache(shards[0])
    assert cache(shards[0])[0] is first
    for shard in shards[1:]:
        cache(shard)
    assert len(cache.batches) == 3
    assert cache(shards[0])[0] is not first


def test_batches_are_drawn_ahead_as_one_by_one():
    shards = [make.held(num_embeddings=50 + index) for index in range(4)]
    cache = BatchCache()
    cache.prepare([(shards[0], 2), *((shard, 1) for shard in shards)])
    assert len(cache.batches) == 5
    held = dict(cache.batches)
    for shard in shards:
        (batch,) = cache(shard)
        assert batch is held[shard, 0]
        assert torch.equal(batch.ids_L, draw_batch(shard).ids_L)


def test_further_draws_of_a_shard_differ():
    first, second, third = BatchCache()(make.held(), 3)
    assert first.measured.num_lookups == second.measured.num_lookups
    assert len({tuple(batch.ids_L.tolist()) for batch in (first, second, third)}) == 3


@pytest.mark.parametrize("alpha", [0.0, 0.9])
def test_a_device_draws_as_often_as_the_profile_says(alpha, any_device):
    access, number = AccessProfile.zipf(5000, alpha), 200_000
    generator = torch.Generator(torch.device(any_device)).manual_seed(1)
    ids_L = draw_ids(access, number, generator)
    assert ids_L.dtype == torch.int64
    counts_N = torch.bincount(ids_L.cpu(), minlength=access.num_rows).numpy()
    of_rank_N = counts_N[scatter_ranks(np.arange(access.num_rows), access.num_rows)]
    for first in (50, 500, 2500, 5000):
        assert of_rank_N[:first].sum() / number == pytest.approx(access.coverage(np.array(first)), abs=0.005)
