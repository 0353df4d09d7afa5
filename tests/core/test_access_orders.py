"""Row orders: the ranks of rows, what an older order has of today's lookups, what two orders share."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core import AccessProfile
from autoshard.core.access.orders import BY_ID, Reordering, frequencies, ranks_in, reordered
from autoshard.runtime.engine.ids.addresses import RowOrderMap

NUM_ROWS = 40
ALL = np.arange(NUM_ROWS)


@st.composite
def orders(draw):
    """Some of the rows, in any order."""
    return np.array(draw(st.permutations(range(NUM_ROWS)))[: draw(st.integers(0, NUM_ROWS))], dtype=np.int64)


@given(orders())
def test_ranks_are_those_of_the_runtime(order):
    of_runtime = RowOrderMap(torch.from_numpy(order), NUM_ROWS, torch.device("cpu"))
    assert ranks_in(order, ALL).tolist() == of_runtime.ranks(torch.from_numpy(ALL)).tolist()


def zipf():
    return AccessProfile.zipf(NUM_ROWS, 1.2)


@given(orders(), orders(), st.integers(1, NUM_ROWS - 1))
def test_slices_of_an_older_order_have_what_their_rows_have_today(today, older, cut):
    access = zipf()
    profile = reordered(access, today, older)
    frequency = frequencies(access, today, ALL)
    ranks = ranks_in(older, ALL)
    for start, stop in ((0, cut), (cut, NUM_ROWS)):
        part, share = profile.slice(start, stop)
        if len(today) in (0, NUM_ROWS):  # else rows that are not listed may lie anywhere
            assert share == pytest.approx(frequency[(ranks >= start) & (ranks < stop)].sum())
        assert part.num_rows == stop - start
    assert sum(profile.slice(*ends)[1] for ends in ((0, cut), (cut, NUM_ROWS))) == pytest.approx(1)
    assert profile.coverage(cut) == access.coverage(cut)


def test_the_rows_of_a_slice_are_as_skewed_as_they_are():
    """The rows that were coldest are hottest now: the older order's cold half has the whole skew."""
    access, today = zipf(), ALL[::-1].copy()
    part, share = reordered(access, today, BY_ID).slice(NUM_ROWS / 2, NUM_ROWS)
    expected, of_hot = access.slice(0, NUM_ROWS / 2)
    assert share == pytest.approx(of_hot)
    assert part.coverage(3) == pytest.approx(expected.coverage(3))


def test_an_order_that_stayed_leaves_the_curve_alone():
    access = zipf()
    assert reordered(access, ALL[:5], ALL[:5].copy()) is access


def test_curves_of_other_orders_are_other_curves():
    access = zipf()
    first, again, other = (reordered(access, ALL[5:9], ALL[[hottest]]) for hottest in (7, 7, 8))
    assert first == again
    assert hash(first) == hash(again)
    assert len({first, access, other}) == 3
    assert access != first
    assert pickle.loads(pickle.dumps(first)) == first


@given(orders())
def test_frequencies_of_rows_sum_to_one(order):
    assert frequencies(zipf(), order, ALL).sum() == pytest.approx(1)


@given(orders(), orders(), st.integers(0, 30), st.integers(1, 10), st.integers(0, 30), st.integers(1, 10))
def test_shared_rows_are_those_of_both_ranges(first, second, start, length, start_after, length_after):
    before, after = (start, start + length), (start_after, start_after + length_after)
    strewn, kept = Reordering.of(first, second, NUM_ROWS).shared_rows(before, after)
    ranks, ranks_after = ranks_in(first, ALL), ranks_in(second, ALL)
    is_shared = (ranks >= before[0]) & (ranks < before[1]) & (ranks_after >= after[0]) & (ranks_after < after[1])
    listed = np.isin(ALL, np.union1d(first, second))
    assert strewn == (is_shared & listed).sum()
    # The others are known but for the few whose rank a listed one has.
    assert abs(kept - (is_shared & ~listed).sum()) <= max(len(first), len(second))
