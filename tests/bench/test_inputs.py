from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.kernels.inputs import BatchCache, draw_batch, reuse_bins_of
from tests import builders as make


def test_a_batch_depends_on_the_shard_and_not_on_its_name():
    shard = make.held(num_embeddings=1000)
    batch, again = draw_batch(shard), draw_batch(replace(shard, table="other"))
    np.testing.assert_array_equal(batch.bags.ids_L, again.bags.ids_L)
    other = draw_batch(replace(shard, pooling_factor=2.6))
    assert not np.array_equal(batch.bags.ids_L[:30], other.bags.ids_L[:30])


def test_a_batch_counts_what_it_holds():
    batch = draw_batch(make.held(num_embeddings=40, num_bags=100, pooling_factor=1.5))
    assert batch.measured.num_lookups == len(batch.bags.ids_L) == 150
    assert batch.measured.num_distinct == len(set(batch.bags.ids_L.tolist()))
    assert sum(batch.measured.reuse_bins) == pytest.approx(1.0)


@given(st.lists(st.integers(1, 2**20), min_size=1, max_size=50))
def test_reuse_bins_are_powers_of_two(counts):
    expected = [0] * 17
    for count in counts:
        edge, index = 1, 0
        while count > edge and index < 16:
            edge, index = 2 * edge, index + 1
        expected[index] += 1
    assert reuse_bins_of(np.array(counts)) == pytest.approx([number / len(counts) for number in expected])


def test_no_row_has_no_bin():
    assert reuse_bins_of(np.array([], dtype=np.int64)) == (0.0,) * 17


def test_the_cache_keeps_batches_until_they_fill_it():
    shards = [make.held(num_embeddings=50 + index) for index in range(6)]
    one = draw_batch(shards[0])
    cache = BatchCache(max_bytes=3 * (one.bags.ids_L.nbytes + one.bags.lengths_B.nbytes))
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
        np.testing.assert_array_equal(batch.bags.ids_L, draw_batch(shard).bags.ids_L)


def test_further_draws_of_a_shard_differ():
    first, second, third = BatchCache()(make.held(), 3)
    assert first.measured.num_lookups == second.measured.num_lookups
    assert len({batch.bags.ids_L.tobytes() for batch in (first, second, third)}) == 3
