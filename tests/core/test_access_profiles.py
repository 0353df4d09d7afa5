"""Access profiles: curves that are exact at their knots, and what is read from them."""

import itertools
import math
import pickle

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autoshard.core import NUM_REUSE_BINS, REUSE_BIN_EDGES, REUSE_BIN_MIDDLES, AccessProfile
from autoshard.core.access import ProfileBatch, log_spaced_ranks, mixture
from autoshard.core.access.knots import power_sums
from autoshard.core.access.reuse import poisson_cdf
from autoshard.core.errors import InvalidTableError
from tests.builders import profile_of

row_numbers = st.one_of(
    st.integers(1, 300), st.builds(lambda power, by: max(1, 2**power + by), st.integers(0, 40), st.integers(-1, 1))
)
alphas = st.sampled_from([0.0, 0.4, 0.99, 1.0, 1.05, 1.5, 3.0, 30.0])
counts = st.lists(st.integers(0, 10_000), min_size=1, max_size=300).filter(any)


@st.composite
def profiles(draw):
    num_rows = draw(row_numbers)
    kind = draw(st.sampled_from(["zipf", "uniform", "bins"]))
    if kind == "zipf":
        return AccessProfile.zipf(num_rows, draw(alphas), draw(st.sampled_from([0.0, 1.0, 1000.0])))
    if kind == "uniform":
        return AccessProfile.uniform(num_rows, draw(st.sampled_from([1.0, 0.5, 1e-6])))
    bins = draw(st.lists(st.floats(0, 1), min_size=NUM_REUSE_BINS, max_size=NUM_REUSE_BINS).filter(any))
    lookups = draw(st.floats(1, 1e9))
    return AccessProfile.from_reuse_bins(
        num_rows, bins, of=draw(st.sampled_from(["rows", "lookups"])), num_lookups=lookups
    )


class TestMaking:
    @given(start=st.integers(300, 10**6), spans=st.lists(st.integers(1, 5000), min_size=1, max_size=9), alpha=alphas)
    @example(start=300, spans=[64, 65, 1], alpha=1.0)
    def test_sums_of_powers_are_right_where_spans_are_long(self, start, spans, alpha):
        bounds = start - 1 + np.cumsum([0, *spans])
        exact = [
            math.fsum(float(r) ** -alpha for r in range(low + 1, high + 1))
            for low, high in itertools.pairwise(bounds.tolist())
        ]
        np.testing.assert_allclose(power_sums(bounds.astype(float), alpha), exact, rtol=1e-5, atol=1e-300)

    @pytest.mark.parametrize(
        ("ranks", "cumulative", "message"),
        [
            ([0], [0], "two or more"),
            ([0, 4], [0, 0.9], "must end at cumulative probability 1"),
            ([0, 4], [0.1, 1], "must start at"),
            ([0, 2, 2, 4], [0, 0.5, 0.6, 1], "must rise"),
            ([0, 5e-324, 4], [0, 0.5, 1], "must rise"),
            ([0, 1, 2, 4], [0, 0.9, 0.8, 1], "must not fall"),
            ([0, 2, 4], [0, 0.4, 1], "concave"),
            ([0, math.nan, 4], [0, 0.4, 1], "finite"),
        ],
    )
    def test_impossible_knots_are_refused(self, ranks, cumulative, message):
        with pytest.raises(InvalidTableError, match=message) as caught:
            AccessProfile(np.array(ranks, dtype=float), np.array(cumulative, dtype=float))
        assert caught.value.field == "knots"

    @pytest.mark.parametrize(
        ("make", "field"),
        [
            (lambda: AccessProfile.uniform(0), "num_rows"),
            (lambda: AccessProfile.uniform(5, 0.0), "accessed_fraction"),
            (lambda: AccessProfile.zipf(5, -1.0), "alpha"),
            (lambda: AccessProfile.zipf(5, 1.0, math.inf), "shift"),
            (lambda: profile_of([0, 0]), "counts"),
            (lambda: AccessProfile.from_reuse_bins(5, [1.0] * 16, of="rows", num_lookups=1), "bins"),
            (lambda: AccessProfile.from_reuse_bins(5, [0.0] * 17, of="rows", num_lookups=1), "bins"),
            (lambda: AccessProfile.from_reuse_bins(5, [1.0] * 17, of="rows", num_lookups=0), "num_lookups"),
        ],
    )
    def test_impossible_descriptions_are_refused_by_field(self, make, field):
        with pytest.raises(InvalidTableError) as caught:
            make()
        assert caught.value.field == field

    def test_arrays_cannot_be_changed_afterwards(self):
        profile = AccessProfile.zipf(100, 1.0)
        with pytest.raises(ValueError, match="read-only"):
            profile.cumulative_K[1] = 0.0

    @given(num_rows=st.integers(1, 400), alpha=alphas, shift=st.sampled_from([0.0, 2.5]))
    def test_zipf_is_exact_at_every_knot(self, num_rows, alpha, shift):
        weights = (np.arange(1, num_rows + 1) + shift) ** -alpha
        exact = np.concatenate([[0.0], np.cumsum(weights) / weights.sum()])
        profile = AccessProfile.zipf(num_rows, alpha, shift)
        knots = profile.ranks_K.astype(int)
        np.testing.assert_allclose(profile.cumulative_K, exact[knots], rtol=1e-9, atol=1e-12)

    def test_zipf_of_many_rows_is_exact_where_sums_become_integrals(self):
        num_rows, alpha = 200_000, 1.05
        exact = np.concatenate([[0.0], np.cumsum(np.arange(1, num_rows + 1) ** -alpha)])
        ranks = log_spaced_ranks(num_rows)
        profile = AccessProfile.zipf(num_rows, alpha)
        np.testing.assert_allclose(profile.coverage(ranks.astype(float)), exact[ranks] / exact[-1], rtol=1e-7)

    @given(values=counts)
    def test_counts_are_exact_where_knots_are(self, values):
        falling = np.sort(values)[::-1].astype(float)
        exact = np.concatenate([[0.0], np.cumsum(falling) / falling.sum()])
        profile = profile_of(values)
        knots = log_spaced_ranks(len(values))
        np.testing.assert_allclose(profile.coverage(knots.astype(float)), exact[knots], atol=1e-12)

    @given(profile=profiles())
    @example(profile=AccessProfile.zipf(2**29 + 1, 0.0))  # the last interval holds one row of half a billion
    def test_a_profile_is_made_of_its_own_knots(self, profile):
        assert AccessProfile(profile.ranks_K.copy(), profile.cumulative_K.copy()) == profile
        assert hash(AccessProfile(profile.ranks_K, profile.cumulative_K)) == hash(profile)

    @given(profile=profiles())
    def test_a_profile_travels_between_processes(self, profile):
        restored = pickle.loads(pickle.dumps(profile))
        assert restored == profile
        assert hash(restored) == hash(profile)
        assert not restored.ranks_K.flags.writeable


class TestReading:
    @given(profile=profiles(), num_lookups=st.floats(1e-3, 1e9))
    def test_distinct_rows_are_no_more_than_rows_or_lookups(self, profile, num_lookups):
        distinct = profile.expected_distinct(num_lookups)
        assert 0 < distinct <= min(profile.num_rows, num_lookups) * (1 + 1e-9)
        assert profile.expected_distinct(num_lookups * 2) >= distinct

    @given(profile=profiles(), num_lookups=st.floats(1e-3, 1e9), of=st.sampled_from(["rows", "lookups"]))
    def test_reuse_bins_are_shares(self, profile, num_lookups, of):
        bins = profile.reuse_bins(num_lookups, of)
        assert bins.shape == (NUM_REUSE_BINS,)
        assert (bins >= 0).all()
        assert bins.sum() == pytest.approx(1)

    def test_reuse_bins_are_what_a_drawn_batch_has(self):
        profile, num_lookups = AccessProfile.zipf(20_000, 1.05), 200_000
        _, counts_seen = np.unique(profile.sample_ranks(num_lookups, np.random.default_rng(0)), return_counts=True)
        bins = np.searchsorted(REUSE_BIN_EDGES, counts_seen)
        rows = np.bincount(bins, minlength=NUM_REUSE_BINS)
        lookups = np.bincount(bins, weights=counts_seen, minlength=NUM_REUSE_BINS)
        # Seven or more standard deviations of the draw.
        np.testing.assert_allclose(profile.reuse_bins(num_lookups), rows / rows.sum(), atol=0.02)
        np.testing.assert_allclose(profile.reuse_bins(num_lookups, "lookups"), lookups / num_lookups, atol=0.02)
        assert profile.expected_distinct(num_lookups) == pytest.approx(len(counts_seen), rel=0.02)

    @pytest.mark.parametrize("edge", [1, 8, 64, 128, 1024, 32768])
    def test_poisson_sums_are_exact_or_close(self, edge):
        rates = np.array([0.0, 1e-3, 0.5, 3.0, 60.0, 100.0, 0.9 * edge, 1.0 * edge, 1.1 * edge])
        counts_K = np.arange(edge + 1)
        log_factorials = np.cumsum(np.log(np.maximum(counts_K, 1)))
        safe = np.maximum(rates, 1e-300)[:, None]
        exact = np.exp(counts_K * np.log(safe) - safe - log_factorials).sum(axis=1)
        np.testing.assert_allclose(poisson_cdf(rates, np.array([float(edge)]))[0], exact, atol=5e-4)

    def test_reuse_bins_are_found_again(self):
        shares = np.array([0.4, 0.0, 0.0, 0.0, 0.0, 0.0, 0.2, 0.0, 0.0, 0.2, 0.0, 0.0, 0.0, 0.0, 0.2, 0.0, 0.0])
        profile = AccessProfile.from_reuse_bins(10_000_000, shares.tolist(), of="lookups", num_lookups=1_000_000)
        # Rows of one bin are taken to be alike, in its middle, so that little leaks into others: in bin 6, 48 lookups
        # a row with a deviation of 7, 1% of the rows get above 64 and 1% below 33. Single rows are too rare to meet.
        np.testing.assert_allclose(profile.reuse_bins(1_000_000, "lookups"), shares, atol=0.02)

    def test_middles_lie_in_their_bins(self):
        edges = (0.0, *REUSE_BIN_EDGES)
        assert all(low < middle <= high for low, middle, high in zip(edges, REUSE_BIN_MIDDLES, edges[1:], strict=False))

    @given(profile=profiles())
    def test_the_probability_falls_and_the_coverage_rises(self, profile):
        ranks = np.linspace(0, profile.num_rows - 1, 50)
        probabilities = profile.probability_at(ranks)
        assert (np.diff(probabilities) <= 1e-9 * probabilities[0] + 1e-15).all()
        assert (np.diff(profile.coverage(ranks)) >= 0).all()
        assert profile.coverage(float(profile.num_rows)) == pytest.approx(1)

    def test_drawn_ranks_follow_the_curve(self):
        profile = AccessProfile.zipf(1000, 1.0)
        ranks = profile.sample_ranks(100_000, np.random.default_rng(1))
        assert ranks.dtype == np.int64
        assert 0 <= ranks.min() <= ranks.max() < 1000
        for top in (1, 10, 100):
            assert (ranks < top).mean() == pytest.approx(float(profile.coverage(top)), abs=0.006)


class TestManyAtOnce:
    @given(
        profiles_=st.lists(profiles(), max_size=12),
        num_lookups=st.lists(st.floats(0, 1e9), min_size=12, max_size=12),
        of=st.sampled_from(["rows", "lookups"]),
    )
    def test_a_batch_says_what_each_profile_says(self, profiles_, num_lookups, of):
        batch, lookups_N = ProfileBatch.of(profiles_), np.array(num_lookups[: len(profiles_)])
        pairs = list(zip(profiles_, lookups_N.tolist(), strict=True))
        one_by_one = np.array([profile.reuse_bins(lookups, of) for profile, lookups in pairs])
        np.testing.assert_allclose(batch.reuse_bins(lookups_N, of), one_by_one.reshape(-1, NUM_REUSE_BINS), atol=1e-12)
        distinct_N = np.array([profile.expected_distinct(lookups) for profile, lookups in pairs])
        np.testing.assert_allclose(batch.expected_distinct(lookups_N), distinct_N, rtol=1e-12)

    def test_more_profiles_than_are_worked_on_at_once(self):
        many = [AccessProfile.zipf(rows, 1.0) for rows in range(1, 2**17, 500)]
        lookups_N = np.linspace(0, 1e6, len(many))
        one_by_one = [profile.reuse_bins(lookups) for profile, lookups in zip(many, lookups_N.tolist(), strict=True)]
        np.testing.assert_allclose(ProfileBatch.of(many).reuse_bins(lookups_N), one_by_one, atol=1e-12)


class TestSlicing:
    @given(profile=profiles(), at=st.floats(0.01, 0.99))
    def test_slices_sum_to_the_whole(self, profile, at):
        cut = round(profile.num_rows * at)
        if not 0 < cut < profile.num_rows:
            return
        head, head_mass = profile.slice(0, cut)
        tail, tail_mass = profile.slice(cut, profile.num_rows)
        assert head_mass + tail_mass == pytest.approx(1)
        assert head_mass == pytest.approx(float(profile.coverage(cut)))
        assert (head.num_rows, tail.num_rows) == (cut, profile.num_rows - cut)
        for num_lookups in (10.0, 1e6):
            parts = head.expected_distinct(num_lookups * head_mass) + tail.expected_distinct(num_lookups * tail_mass)
            # A cut within an interval leaves both sides at the interval's rate.
            assert parts == pytest.approx(profile.expected_distinct(num_lookups), rel=1e-6)

    def test_a_slice_outside_is_refused(self):
        with pytest.raises(InvalidTableError, match="0 <= start < stop <= 10"):
            AccessProfile.uniform(10).slice(5, 11)

    def test_a_slice_that_nothing_hits_is_uniform(self):
        profile, mass = AccessProfile.uniform(10, 0.5).slice(5, 10)
        assert mass == 0
        assert profile == AccessProfile.uniform(5)

    @given(profile=profiles(), share=st.floats(0.001, 1.0))
    def test_a_thinned_profile_covers_alike(self, profile, share):
        num_rows = max(1, round(profile.num_rows * share))
        thinned = profile.thinned(num_rows)
        assert thinned.num_rows == num_rows
        half = log_spaced_ranks(num_rows)[-2]  # a knot, so that nothing is interpolated
        expected = profile.coverage(float(half) * profile.num_rows / num_rows)
        assert float(thinned.coverage(float(half))) == pytest.approx(float(expected), abs=1e-9)

    @given(profile=profiles())
    def test_thinning_to_all_rows_changes_nothing(self, profile):
        assert profile.thinned(profile.num_rows) == profile

    def test_a_mixture_weighs_its_parts(self):
        skewed, flat = AccessProfile.zipf(100, 2.0), AccessProfile.uniform(100)
        mixed = mixture([(skewed, 3.0), (flat, 1.0), (AccessProfile.zipf(100, 9.0), 0.0)])
        expected = 0.75 * skewed.coverage(10.0) + 0.25 * flat.coverage(10.0)
        assert float(mixed.coverage(10.0)) == pytest.approx(float(expected))
