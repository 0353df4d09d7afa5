"""Several tables in one order of rows, against sorting every single row."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.core import AccessProfile
from autoshard.core.errors import InvalidTableError
from autoshard.core.merged_access import MergedAccess

#: Up to four rows: all ranks are knots, so that the profile knows every row.
few_counts = st.lists(st.integers(0, 20), min_size=1, max_size=4).filter(any)
lookups = st.floats(0.125, 100)
tables_of_few = st.lists(st.tuples(few_counts, lookups), min_size=1, max_size=5)
profiles = st.builds(
    AccessProfile.zipf, st.integers(1, 10**9), st.sampled_from([0.0, 0.5, 1.05, 2.0]), st.sampled_from([0.0, 100.0])
) | st.builds(AccessProfile.uniform, st.integers(1, 10**9), st.sampled_from([1.0, 0.1]))
tables_of_many = st.lists(st.tuples(profiles, st.just(0.0) | lookups), min_size=1, max_size=5).filter(
    lambda tables: any(weight for _, weight in tables)
)


def every_row(tables):
    """(lookups per sample, table) of each row, hottest first; rows that are alike in the order of tables."""
    rows = [
        (count / sum(counts) * weight, number)
        for number, (counts, weight) in enumerate(tables)
        for count in sorted(counts, reverse=True)
    ]
    return sorted(rows, key=lambda row: -row[0])


@given(tables=tables_of_few)
def test_it_is_all_rows_sorted(tables):
    merged = MergedAccess.of([(AccessProfile.from_counts(counts), weight) for counts, weight in tables])
    rows = every_row(tables)
    total = sum(weight for _, weight in tables)
    assert merged.profile().num_rows == len(rows)
    cumulative = np.cumsum([0.0] + [rate for rate, _ in rows]) / total
    np.testing.assert_allclose(merged.profile().coverage(np.arange(len(rows) + 1.0)), cumulative, atol=1e-9)
    for rank, (rate, _) in enumerate(rows):
        assert merged.lookups_of_row(rank) == pytest.approx(rate, rel=1e-9, abs=1e-12)


@given(tables=tables_of_few, at=st.integers(0, 20))
def test_a_cut_takes_the_hottest_rows_of_every_table(tables, at):
    merged = MergedAccess.of([(AccessProfile.from_counts(counts), weight) for counts, weight in tables])
    rows = every_row(tables)
    at = min(at, len(rows))
    within_T = merged.rows_within(at)
    assert within_T.sum() == pytest.approx(at)
    # Rows that are alike may come from one table or another: what counts is that their lookups are the same.
    taken = sum(
        weight * float(AccessProfile.from_counts(counts).coverage(num_rows))
        for (counts, weight), num_rows in zip(tables, within_T.tolist(), strict=True)
    )
    assert taken == pytest.approx(sum(rate for rate, _ in rows[:at]), rel=1e-9, abs=1e-9)


@given(tables=tables_of_few, threshold=st.floats(0, 20))
def test_a_threshold_counts_rows_above_it(tables, threshold):
    merged = MergedAccess.of([(AccessProfile.from_counts(counts), weight) for counts, weight in tables])
    rows = every_row(tables)
    if any(math.isclose(rate, threshold, rel_tol=1e-9, abs_tol=1e-9) for rate, _ in rows):
        return  # rounding decides
    expected_T = [sum(rate > threshold and table == number for rate, table in rows) for number in range(len(tables))]
    np.testing.assert_allclose(merged.rows_above(threshold), expected_T, atol=1e-9)


@given(tables=tables_of_many, share=st.floats(0, 1))
def test_a_cut_of_large_tables_is_at_one_rate(tables, share):
    merged = MergedAccess.of(tables)
    total_rows = sum(profile.num_rows for profile, _ in tables)
    assert merged.profile().num_rows == total_rows
    at = share * total_rows
    within_T = merged.rows_within(at)
    assert within_T.sum() == pytest.approx(at, rel=1e-9, abs=1e-6)
    weight = sum(lookups for _, lookups in tables)
    covered = sum(
        lookups * float(profile.coverage(rows)) for (profile, lookups), rows in zip(tables, within_T, strict=True)
    )
    assert float(merged.profile().coverage(at)) == pytest.approx(covered / weight, rel=1e-6, abs=1e-9)
    # No table has a hotter row outside of the cut than another has inside.
    rate = merged.lookups_of_row(at)
    above_T = merged.rows_above(rate * (1 + 1e-6))
    assert (above_T <= within_T + 1e-6 * np.maximum(within_T, 1)).all()


def test_one_table_is_itself():
    profile = AccessProfile.zipf(10**6, 1.05)
    merged = MergedAccess.of([(profile, 3.0)])
    np.testing.assert_allclose(merged.profile().coverage(profile.ranks_K), profile.cumulative_K, atol=1e-9)
    assert merged.rows_within(1000.0).tolist() == [1000.0]


@pytest.mark.parametrize("lookups", [[], [-1.0], [math.nan], [0.0, 0.0], [math.inf, 1.0]])
def test_lookups_that_make_no_sense_are_refused(lookups):
    with pytest.raises(InvalidTableError, match="finite, at least 0 and not all 0") as caught:
        MergedAccess.of([(AccessProfile.uniform(10), weight) for weight in lookups])
    assert caught.value.field == "lookups"
