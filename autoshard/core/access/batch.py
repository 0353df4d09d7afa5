"""Many access profiles at once.

Shape suffixes: N profiles, I intervals between knots of all profiles, one profile after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from autoshard.core.access.knots import FloatArray, IntArray
from autoshard.core.access.profile import AccessProfile
from autoshard.core.access.reuse import NUM_REUSE_BINS, expected_bins, hit_rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProfileBatch:
    """N access profiles as arrays: what `AccessProfile` says of one batch, for a batch of lookups each.

    Attributes:
        rows_I: Rows of each interval.
        before_I: Rows of the same profile that are accessed more often.
        shares_I: Probability that a lookup of the interval's profile hits one of them.
        starts_N: First interval of each profile.
    """

    rows_I: FloatArray
    before_I: FloatArray
    shares_I: FloatArray
    starts_N: IntArray

    @classmethod
    def of(cls, profiles: Sequence[AccessProfile]) -> ProfileBatch:
        """The batch of some profiles."""
        if not profiles:
            nothing = np.zeros(0)
            return cls(rows_I=nothing, before_I=nothing, shares_I=nothing, starts_N=np.zeros(0, dtype=np.int64))
        ends_N = np.cumsum([len(profile.ranks_K) for profile in profiles])
        # Between the last knot of a profile and the first of the next there is no interval.
        between = ends_N[:-1] - 1
        ranks_K = np.concatenate([profile.ranks_K for profile in profiles])
        cumulative_K = np.concatenate([profile.cumulative_K for profile in profiles])
        return cls(
            rows_I=np.delete(np.diff(ranks_K), between),
            before_I=np.delete(ranks_K[:-1], between),
            shares_I=np.delete(np.diff(cumulative_K), between),
            starts_N=np.append(0, ends_N[:-1]) - np.arange(len(profiles)),
        )

    def expected_distinct(self, num_lookups_N: FloatArray) -> FloatArray:
        """Expected number of distinct rows among so many independent lookups of each profile, shape (N,)."""
        return self.sums(self.hit_rows(num_lookups_N))

    def hit_rows(self, num_lookups_N: FloatArray) -> FloatArray:
        """As `expected_distinct`, of each interval, shape (I,)."""
        return hit_rows(self.rows_I, self._rates(num_lookups_N))

    def reuse_bins(self, num_lookups_N: FloatArray, of: Literal["rows", "lookups"] = "rows") -> FloatArray:
        """Expected shares of AutoShard's 17 reuse bins for so many lookups of each profile, shape (N, 17)."""
        if not len(self.starts_N):
            return np.zeros((0, NUM_REUSE_BINS))
        return expected_bins(self.rows_I, self._rates(num_lookups_N), self.starts_N, of)

    def sums(self, values_I: FloatArray) -> FloatArray:
        """Sums over the intervals of each profile, shape (N,)."""
        return np.asarray(np.add.reduceat(values_I, self.starts_N)) if len(self.starts_N) else np.zeros(0)

    def repeated(self, values_N: FloatArray) -> FloatArray:
        """For each interval the value of its profile, shape (I,)."""
        return np.repeat(values_N, np.diff(self.starts_N, append=len(self.rows_I)))

    def _rates(self, num_lookups_N: FloatArray) -> FloatArray:
        """Expected lookups of a row of each interval, shape (I,)."""
        return self.repeated(num_lookups_N) * self.shares_I / self.rows_I
