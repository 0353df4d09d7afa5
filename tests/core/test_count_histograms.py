"""Histograms of counts: exact whatever the parts they arrive in, bounded where numbers are too many."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core import AccessProfile
from autoshard.core.access import log_spaced_ranks
from autoshard.core.count_histogram import CountHistogram
from autoshard.core.errors import InvalidTableError
from tests.builders import profile_of

whole = st.lists(st.integers(0, 10) | st.integers(0, 2**40), min_size=1, max_size=200).filter(any)
broken = st.lists(st.floats(0, 1e12, allow_subnormal=False), min_size=1, max_size=200).filter(any)
dtypes = st.sampled_from([np.int64, np.uint64, np.float64])


def in_parts(values, cuts, **limits):
    histogram = CountHistogram(**limits)
    for part in np.split(values, sorted(cuts)):
        histogram.add(part)
    return histogram


def exact_coverage(values, ranks):
    """By adding up the sorted counts, row by row."""
    cumulative = np.concatenate([[0.0], np.cumsum(np.sort(np.asarray(values, dtype=np.float64))[::-1])])
    return cumulative[ranks] / cumulative[-1]


@given(values=whole, dtype=dtypes, cuts=st.lists(st.integers(0, 200), max_size=4))
def test_whole_counts_are_exact_at_every_knot_and_in_any_parts(values, dtype, cuts):
    histogram = in_parts(np.array(values, dtype=dtype), cuts)
    profile = histogram.profile()
    knots = profile.ranks_K.astype(int)
    np.testing.assert_allclose(profile.cumulative_K, exact_coverage(values, knots), rtol=1e-14, atol=1e-14)
    assert profile == profile_of(values)
    assert (histogram.num_rows, histogram.num_lookups) == (len(values), sum(values))
    assert histogram.max_error == 0.0


@given(values=broken, cuts=st.lists(st.integers(0, 200), max_size=4))
def test_broken_counts_are_exact_at_every_knot(values, cuts):
    profile = in_parts(np.array(values), cuts).profile()
    knots = profile.ranks_K.astype(int)
    np.testing.assert_allclose(profile.cumulative_K, exact_coverage(values, knots), rtol=1e-12, atol=1e-14)


@given(values=whole)
def test_the_last_row_that_is_looked_up_has_a_knot(values):
    profile = in_parts(np.array(values), []).profile()
    hit = sum(value > 0 for value in values)
    assert float(profile.coverage(float(hit))) == 1
    assert hit in profile.ranks_K


@pytest.fixture(scope="module")
def many_numbers():
    """More different numbers than buckets: a few rows with huge counts, many that differ a little."""
    rng = np.random.default_rng(5)
    return np.concatenate([rng.pareto(0.7, 30_000) * 100, 1 + rng.random(30_000), np.zeros(1000)])


def test_too_many_numbers_stay_within_the_bound(many_numbers):
    histogram = in_parts(many_numbers, [20_000], max_buckets=1 << 13)
    assert 0 < histogram.max_error < 1e-3
    ranks = np.arange(len(many_numbers) + 1)
    # All ranks where the buckets' curve has knots: in between, log-spaced knots are no better for single rows.
    knots = log_spaced_ranks(np.count_nonzero(many_numbers))
    error = exact_coverage(many_numbers, ranks)[knots] - histogram.profile().coverage(knots.astype(float))
    assert error.min() >= -1e-12
    assert error.max() <= histogram.max_error
    assert error.max() > 0.0


def test_the_order_of_parts_does_not_matter(many_numbers):
    one = in_parts(many_numbers, [100, 40_000], max_buckets=1 << 13)
    other = in_parts(many_numbers[::-1].copy(), [], max_buckets=1 << 13)
    assert one.max_error == pytest.approx(other.max_error)
    np.testing.assert_allclose(one.profile().ranks_K, other.profile().ranks_K)
    np.testing.assert_allclose(one.profile().cumulative_K, other.profile().cumulative_K, rtol=1e-12)


def test_whole_numbers_keep_the_bits_that_are_promised():
    # Every number of 13 leading bits and up to 63 in all: more than buckets, in every power of two.
    leading = np.arange(1 << 12, 1 << 13, dtype=np.int64)
    values = np.concatenate([leading << shift for shift in range(50)])
    histogram = in_parts(values, [], max_buckets=1 << 16)
    # 50 powers of two in 2**16 buckets: 2**10 for each.
    assert histogram.max_error <= 2.0**-10 / 4


@pytest.mark.parametrize(
    ("values", "dtype", "message"),
    [
        ([1, 2, -3, 4], np.int64, "got -3 in row 7"),
        ([1, 2, 3, np.nan], np.float64, "got nan in row 8"),
        ([1, np.inf, 3], np.float64, "got inf in row 6"),
        ([-0.5], np.float32, "got -0.5 in row 5"),
        (["a"], str, "one number per row"),
        ([[1, 2]], np.int64, "one number per row"),
        ([True], bool, "one number per row"),
    ],
)
def test_a_count_that_makes_no_sense_is_named_with_its_row(values, dtype, message):
    histogram = CountHistogram()
    histogram.add(np.arange(5))
    with pytest.raises(InvalidTableError, match=message) as caught:
        histogram.add(np.array(values, dtype=dtype))
    assert caught.value.field == "counts"
    assert histogram.num_rows == 5


@pytest.mark.parametrize("values", [[], [0, 0, 0]])
def test_rows_that_nothing_looked_up_make_no_profile(values):
    with pytest.raises(InvalidTableError, match="must have a positive sum, got 0"):
        in_parts(np.array(values, dtype=np.int64), []).profile()


def test_too_few_buckets_are_refused():
    with pytest.raises(InvalidTableError, match="at least 4096, got 10"):
        CountHistogram(max_buckets=10)


@given(values=st.lists(st.integers(0, 50), min_size=2, max_size=120).filter(any), data=st.data())
def test_a_slice_by_access_rank_is_the_profile_of_its_rows(values, data):
    falling = np.sort(values)[::-1]
    profile = profile_of(values)
    knots = profile.ranks_K.astype(int).tolist()
    start = data.draw(st.sampled_from(knots[:-1]))
    stop = data.draw(st.sampled_from([knot for knot in knots if knot > start]))
    part, mass = profile.slice(start, stop)
    inside = falling[start:stop]
    assert mass == pytest.approx(inside.sum() / falling.sum(), abs=1e-12)
    if not inside.any():
        assert part == AccessProfile.uniform(stop - start)
        return
    at = part.ranks_K.astype(int)
    np.testing.assert_allclose(part.cumulative_K, exact_coverage(inside, at), atol=1e-9)
