"""Batches that are drawn from access profiles."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core import AccessProfile
from autoshard.core.batches import draw_bags, draw_lengths, scatter_ranks


@given(num_rows=st.integers(1, 5000))
def test_strewing_ranks_gives_every_row_once(num_rows):
    ids = scatter_ranks(np.arange(num_rows), num_rows)
    assert np.array_equal(np.sort(ids), np.arange(num_rows))


@pytest.mark.parametrize("num_rows", [2**31 - 1, 2**32, 2**40])
def test_strewing_ranks_of_huge_tables_does_not_overflow(num_rows):
    ranks = np.concatenate([np.arange(1000), num_rows - 1 - np.arange(1000)])
    ids = scatter_ranks(ranks, num_rows)
    step = int(ids[1])  # the row of rank 1, as rank 0 is row 0
    assert ids.tolist() == [int(rank) * step % num_rows for rank in ranks]
    assert len(set(ids.tolist())) == 2000


def test_hot_ranks_do_not_sit_side_by_side():
    ids = np.sort(scatter_ranks(np.arange(100), 10_000))
    assert np.diff(ids).min() > 10


@given(pooling_factor=st.floats(0, 300), num_bags=st.integers(1, 300), seed=st.integers(0, 9))
def test_lengths_have_the_mean_to_one_id(pooling_factor, num_bags, seed):
    lengths = draw_lengths(pooling_factor, num_bags, np.random.default_rng(seed))
    assert lengths.shape == (num_bags,)
    assert lengths.max() - lengths.min() <= 1
    assert abs(lengths.sum() - pooling_factor * num_bags) <= 0.5 + 1e-6


def test_a_thin_shard_is_looked_up_far_less_than_once_a_bag():
    lengths = draw_lengths(0.001, 100_000, np.random.default_rng(0))
    assert lengths.sum() == 100


@given(num_rows=st.integers(1, 10_000), pooling_factor=st.floats(0, 5), seed=st.integers(0, 9))
def test_a_batch_is_in_range_and_its_seed_decides_it(num_rows, pooling_factor, seed):
    access = AccessProfile.zipf(num_rows, 1.05)
    bags, again = (draw_bags(access, pooling_factor, 50, np.random.default_rng(seed)) for _ in range(2))
    assert len(bags.ids_L) == bags.lengths_B.sum()
    assert ((bags.ids_L >= 0) & (bags.ids_L < num_rows)).all()
    assert np.array_equal(bags.ids_L, again.ids_L)
    assert np.array_equal(bags.lengths_B, again.lengths_B)
