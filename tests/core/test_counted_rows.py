"""Rows whose lookups were counted: their shares, the curve of all rows, what an older order has of them."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core import AccessProfile
from autoshard.core.access.counted import CountedRows, profile_of_known
from autoshard.core.access.orders import BY_ID, ranks_in
from tests.builders import profile_of

NUM_ROWS = 40
ALL = np.arange(NUM_ROWS)


@st.composite
def orders(draw, least=0):
    """Some of the rows, in any order."""
    return np.array(draw(st.permutations(range(NUM_ROWS)))[: draw(st.integers(least, NUM_ROWS))], dtype=np.int64)


def zipf():
    return AccessProfile.zipf(NUM_ROWS, 1.2)


@given(orders())
def test_shares_of_rows_sum_to_one(order):
    rows = CountedRows.of_order(zipf(), order)
    assert rows.shares_of(ALL).sum() == pytest.approx(1)
    assert rows.shares_of(rows.ids_N).tolist() == rows.shares_N.tolist()


@given(orders(), orders(), st.integers(1, NUM_ROWS - 1))
def test_slices_of_an_older_order_have_what_their_rows_have_today(today, older, cut):
    access = zipf()
    rows = CountedRows.of_order(access, today)
    profile, ranks = rows.in_order(access, older), ranks_in(older, ALL)
    for start, stop in ((0, cut), (cut, NUM_ROWS)):
        part, share = profile.slice(start, stop)
        if len(today) in (0, NUM_ROWS):  # else rows that are not listed may lie anywhere
            assert share == pytest.approx(rows.shares_of(ALL)[(ranks >= start) & (ranks < stop)].sum())
        assert part.num_rows == stop - start
    assert sum(profile.slice(*ends)[1] for ends in ((0, cut), (cut, NUM_ROWS))) == pytest.approx(1)
    assert profile.coverage(cut) == access.coverage(cut)


def test_the_rows_of_a_slice_are_as_skewed_as_they_are():
    """The rows that were coldest are hottest now: the older order's cold half has the whole skew."""
    access, today = zipf(), ALL[::-1].copy()
    part, share = CountedRows.of_order(access, today).in_order(access, BY_ID).slice(NUM_ROWS / 2, NUM_ROWS)
    expected, of_hot = access.slice(0, NUM_ROWS / 2)
    assert share == pytest.approx(of_hot)
    assert part.coverage(3) == pytest.approx(expected.coverage(3))


def test_an_order_that_stayed_leaves_the_curve_alone():
    access = zipf()
    assert CountedRows.of_order(access, ALL[:5]).in_order(access, ALL[:5].copy()) is access


def test_curves_of_other_orders_are_other_curves():
    access = zipf()
    rows = CountedRows.of_order(access, ALL[5:9])
    first, again, other = (rows.in_order(access, ALL[[hottest]]) for hottest in (7, 7, 8))
    assert first == again
    assert hash(first) == hash(again)
    assert len({first, access, other}) == 3
    assert access != first
    assert pickle.loads(pickle.dumps(first)) == first


def test_rows_that_are_not_known_count_in_sum():
    """Of 100 rows two are known; ten others were seen, of which one lies among the hottest of the older order."""
    shares = np.array([0.4, 0.2, *[0.04] * 10])
    rows = CountedRows(order_N=ALL[:12], ids_N=ALL[:12], shares_N=shares, num_known=2, num_rows=100)
    profile = rows.in_order(AccessProfile.zipf(100, 1.0), np.array([1, 5, 99]))
    hot, share = profile.slice(0, 3)
    assert share == pytest.approx(0.2 + 0.04)
    assert hot.coverage(1) == pytest.approx(0.2 / 0.24)
    assert profile.slice(3, 100)[1] == pytest.approx(0.76)
    # Where none is known, rows are as skewed as those that are not known.
    assert profile.slice(6, 12)[0].probability_at(0.0) > 1.2 * profile.slice(6, 12)[0].probability_at(5.0)


class TestProfileOfKnown:
    def test_the_others_go_on_as_a_power_law(self):
        access = AccessProfile.zipf(1_000_000, 1.1)
        known = access.probability_at(np.arange(1_000.0))
        found = profile_of_known(known, 1.0, 1_000_000)
        ranks = 10.0 ** np.arange(7)
        assert found.coverage(ranks) == pytest.approx(access.coverage(ranks), abs=0.01)

    def test_others_that_are_looked_up_as_much_are_alike(self):
        found = profile_of_known(np.array([2.0, 1.0]), 12.0, 10)
        assert found.coverage(2) == pytest.approx(2 * 1.2 / 12 + 0.0, abs=0.15)
        assert found.coverage(10) == 1

    def test_rows_of_which_none_is_known_are_alike(self):
        assert profile_of_known(np.zeros(0), 5.0, 10) == AccessProfile.uniform(10)

    def test_known_rows_can_be_all(self):
        assert profile_of_known(np.array([3.0, 1.0]), 4.0, 2) == profile_of([1, 3])

    def test_others_without_lookups_have_none(self):
        found = profile_of_known(np.array([3.0, 1.0]), 4.0, 10)
        assert found.coverage(np.array([1.0, 2.0])).tolist() == [0.75, 1]
