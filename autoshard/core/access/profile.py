"""The access profile of one table or shard.

Shape suffixes: K knots, I intervals between knots (K - 1), V groups of rows with one number of lookups, N draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autoshard.core.accepted import AT_LEAST_1, FINITE_AT_LEAST_0, SHARE
from autoshard.core.access.knots import FloatArray, IntArray, concave_hull, log_spaced_ranks, power_sums
from autoshard.core.access.reuse import NUM_REUSE_BINS, REUSE_BIN_MIDDLES, expected_bins, hit_rows
from autoshard.core.errors import InvalidTableError

_CONCAVITY_TOLERANCE = 1e-9
#: Rows between two knots, far below what rounding leaves of one: probabilities per row stay finite.
_LEAST_ROWS = 1e-30


@dataclass(frozen=True, slots=True, eq=False)
class AccessProfile:
    """Cumulative access probability by access rank, linear between knots.

    Rank 0 is the most often accessed row. Memory is O(knots), whatever the number of rows.

    Attributes:
        ranks_K: Access ranks of the knots, rising from 0 to the number of rows.
        cumulative_K: Probability that a lookup hits one of the first `ranks_K[k]` rows, rising from 0 to 1, concave.

    Raises:
        InvalidTableError: If the knots do not start at [0, 0], end at 1, rise, and stay concave.
    """

    ranks_K: FloatArray
    cumulative_K: FloatArray
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        ranks = np.ascontiguousarray(self.ranks_K, dtype=np.float64)
        cumulative = np.ascontiguousarray(self.cumulative_K, dtype=np.float64)
        if ranks.ndim != 1 or ranks.shape != cumulative.shape or len(ranks) < 2:
            raise InvalidTableError("needs two or more [access rank, cumulative probability] pairs", field="knots")
        _check_knots(ranks, cumulative)
        self._set(ranks, cumulative / cumulative[-1])

    def _set(self, ranks_K: FloatArray, cumulative_K: FloatArray) -> None:
        for name, array in (("ranks_K", ranks_K), ("cumulative_K", cumulative_K)):
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        object.__setattr__(self, "_hash", hash((ranks_K.tobytes(), cumulative_K.tobytes())))

    def __reduce__(self) -> tuple[Callable[..., AccessProfile], tuple[Any, ...]]:
        # Hashes of bytes differ between processes, and arrays do not stay read-only on their way.
        return _restored, (self.ranks_K, self.cumulative_K)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AccessProfile):
            return NotImplemented
        return np.array_equal(self.ranks_K, other.ranks_K) and np.array_equal(self.cumulative_K, other.cumulative_K)

    def __hash__(self) -> int:
        return self._hash

    # -- how profiles are made ------------------------------------------------------------------------------------

    @classmethod
    def uniform(cls, num_rows: int, accessed_fraction: float = 1.0) -> AccessProfile:
        """All accessed rows alike; `accessed_fraction` of the rows are accessed at all (AutoShard Sec. 3.1)."""
        AT_LEAST_1.check(num_rows, "num_rows", InvalidTableError)
        SHARE.check(accessed_fraction, "accessed_fraction", InvalidTableError)
        accessed = max(1, round(num_rows * accessed_fraction))
        if accessed == num_rows:
            return cls(np.array([0.0, num_rows]), np.array([0.0, 1.0]))
        return cls(np.array([0.0, accessed, num_rows]), np.array([0.0, 1.0, 1.0]))

    @classmethod
    def zipf(cls, num_rows: int, alpha: float, shift: float = 0.0) -> AccessProfile:
        """Row of access rank r (from 1) has probability proportional to (r + shift) ** -alpha."""
        AT_LEAST_1.check(num_rows, "num_rows", InvalidTableError)
        FINITE_AT_LEAST_0.check(alpha, "alpha", InvalidTableError)
        FINITE_AT_LEAST_0.check(shift, "shift", InvalidTableError)
        ranks_K = log_spaced_ranks(num_rows).astype(np.float64)
        return cls.from_masses(ranks_K, power_sums(ranks_K + shift, alpha))

    @classmethod
    def from_groups(cls, rows_V: IntArray, lookups_V: FloatArray) -> AccessProfile:
        """Profile from groups of rows that are looked up alike, from the most to the least looked up.

        Cumulative sums are exact at every knot. The last row that is looked up has a knot of its own.

        Args:
            rows_V: Rows of each group, at least 1.
            lookups_V: Lookups of all its rows together; those per row never rise from group to group.
        """
        total = float(lookups_V.sum())
        if not 0 < total < math.inf:
            raise InvalidTableError(f"must have a positive sum, got {total:g}", field="counts")
        ends_V = np.concatenate([[0], np.cumsum(rows_V)])
        cumulative_V = np.concatenate([[0.0], np.cumsum(lookups_V)])
        ranks = log_spaced_ranks(int(ends_V[np.flatnonzero(lookups_V)[-1] + 1]))
        if ranks[-1] < ends_V[-1]:
            ranks = np.append(ranks, ends_V[-1])
        masses = np.diff(np.interp(ranks, ends_V, cumulative_V))
        return cls.from_masses(ranks.astype(np.float64), masses)

    @classmethod
    def from_reuse_bins(
        cls, num_rows: int, bins: Sequence[float], *, of: Literal["rows", "lookups"], num_lookups: float
    ) -> AccessProfile:
        """Profile from AutoShard's 17 reuse bins of one batch.

        Args:
            num_rows: Rows of the table.
            bins: Share per bin, of the rows that the batch hit or of its lookups.
            of: What the shares are of.
            num_lookups: Lookups of the batch that the bins were counted on.

        Source:
            Bins as in AutoShard B.2. Within a bin rows are taken alike, at the bin's middle; rows hit
            once are spread over all rows that are left, which expects as many of them in the next batch.
        """
        AT_LEAST_1.check(num_rows, "num_rows", InvalidTableError)
        shares = np.asarray(bins, dtype=np.float64)
        if shares.shape != (NUM_REUSE_BINS,):
            raise InvalidTableError(f"needs {NUM_REUSE_BINS} numbers, got {shares.size}", field="bins")
        if not (shares >= 0).all() or not 0 < shares.max() <= 1e100:  # their sum must not overflow
            raise InvalidTableError("must be finite, at least 0, with a positive sum", field="bins")
        if not (math.isfinite(num_lookups) and num_lookups > 0):
            raise InvalidTableError(f"must be positive, got {num_lookups}", field="num_lookups")
        reuse = np.array(REUSE_BIN_MIDDLES)
        lookups = shares * reuse if of == "rows" else shares
        lookups = lookups / lookups.sum() * num_lookups
        hit_rows = np.minimum(lookups / reuse, num_rows)[::-1]
        ends = np.cumsum(hit_rows)
        # Small tables cannot hold all the rows that the shares imply: the hottest stay, the rest is squeezed in.
        ends = np.minimum(ends, num_rows) if ends[-1] <= num_rows else ends * (num_rows / ends[-1])
        ends[-1] = num_rows
        knots = np.concatenate([[0.0], ends])
        keep = np.diff(knots) > 1e-9 * num_rows
        totals = np.cumsum(lookups[::-1])
        kept_ends, kept_cumulative = ends[keep], totals[keep]
        kept_ends[-1], kept_cumulative[-1] = num_rows, totals[-1]
        return cls.from_masses(np.concatenate([[0.0], kept_ends]), np.diff(kept_cumulative, prepend=0.0))

    @classmethod
    def from_masses(cls, ranks_K: FloatArray, masses_I: FloatArray) -> AccessProfile:
        """Profile from the mass between knots; neighbours that break concavity are pooled.

        Args:
            ranks_K: Access ranks of the knots, rising from 0.
            masses_I: Lookups, in any unit, between each knot and the next.
        """
        return cls(*_curve(ranks_K, masses_I))

    @classmethod
    def _part(cls, ranks_K: FloatArray, masses_I: FloatArray) -> AccessProfile:
        """As `from_masses`, for masses of a profile that has been checked: parts of a sound curve are sound."""
        profile = object.__new__(cls)
        profile._set(*_curve(ranks_K, masses_I))
        return profile

    # -- what is read from them ------------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        """Rows that the profile describes."""
        return round(float(self.ranks_K[-1]))

    def coverage(self, num_hot_rows: float | FloatArray) -> FloatArray:
        """Probability that a lookup hits one of the `num_hot_rows` most accessed rows."""
        return np.asarray(np.interp(num_hot_rows, self.ranks_K, self.cumulative_K))

    def probability_at(self, rank: float | FloatArray) -> FloatArray:
        """Probability of the row at an access rank (from 0)."""
        slopes = np.diff(self.cumulative_K) / np.diff(self.ranks_K)
        interval = np.clip(np.searchsorted(self.ranks_K, rank, side="right") - 1, 0, len(slopes) - 1)
        return np.asarray(slopes[interval])

    def expected_distinct(self, num_lookups: float) -> float:
        """Expected number of distinct rows among `num_lookups` independent lookups."""
        rows_I, rates_I = self._rows_and_rates(num_lookups)
        return float(hit_rows(rows_I, rates_I).sum())

    def reuse_bins(self, num_lookups: float, of: Literal["rows", "lookups"] = "rows") -> FloatArray:
        """Expected shares of AutoShard's 17 reuse bins for a batch.

        Args:
            num_lookups: Lookups in the batch; each row's count is taken as Poisson.
            of: Shares of the distinct rows hit, or of the lookups.

        Returns:
            17 shares that sum to 1 (to 0 when nothing is looked up).

        Source:
            AutoShard B.2; the bins are counted there, expected here.
        """
        rows_I, rates_I = self._rows_and_rates(num_lookups)
        return np.asarray(expected_bins(rows_I, rates_I, np.zeros(1, dtype=np.int64), of)[0])

    def slice(self, start: float, stop: float) -> tuple[AccessProfile, float]:
        """The rows of access ranks [start, stop), and the share of lookups that goes to them."""
        if not 0 <= start < stop <= self.ranks_K[-1]:
            raise InvalidTableError(
                f"must satisfy 0 <= start < stop <= {self.num_rows}, got {start}, {stop}", field="rows"
            )
        inside = (self.ranks_K > start) & (self.ranks_K < stop)
        ranks_K = np.concatenate([[start], self.ranks_K[inside], [stop]])
        cumulative_K = self.coverage(ranks_K)
        mass = float(cumulative_K[-1] - cumulative_K[0])
        if mass <= 0:
            return AccessProfile.uniform(round(stop - start)), 0.0
        return AccessProfile._part(ranks_K - start, np.diff(cumulative_K)), mass

    def thinned(self, num_rows: int) -> AccessProfile:
        """The profile of `num_rows` rows drawn evenly over all access ranks, as hashing or a row range does."""
        AT_LEAST_1.check(num_rows, "num_rows", InvalidTableError)
        if num_rows == self.num_rows:
            return self
        ranks_K = log_spaced_ranks(num_rows).astype(np.float64)
        cumulative_K = self.coverage(ranks_K * (float(self.ranks_K[-1]) / num_rows))
        return AccessProfile._part(ranks_K, np.diff(cumulative_K))

    def sample_ranks(self, num_lookups: int, rng: np.random.Generator) -> IntArray:
        """Draws access ranks of independent lookups; shape (N,), int64 in [0, num_rows)."""
        draws = np.interp(rng.random(num_lookups), self.cumulative_K, self.ranks_K)
        return np.minimum(draws.astype(np.int64), self.num_rows - 1)

    def _rows_and_rates(self, num_lookups: float) -> tuple[FloatArray, FloatArray]:
        rows_I = np.diff(self.ranks_K)
        return rows_I, num_lookups * np.diff(self.cumulative_K) / rows_I


def _curve(ranks_K: FloatArray, masses_I: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Ranks and cumulative probabilities of the concave hull of masses between knots."""
    ends_K, pooled_I = concave_hull(ranks_K, masses_I)
    cumulative_K = np.concatenate([[0.0], np.cumsum(pooled_I)])
    return ends_K, cumulative_K / cumulative_K[-1]


def mixture(profiles: Iterable[tuple[AccessProfile, float]]) -> AccessProfile:
    """Profile of lookups that go to equally large row sets with the given weights, hottest ranks aligned."""
    pairs = [(profile, weight) for profile, weight in profiles if weight > 0]
    knots = np.unique(np.concatenate([profile.ranks_K for profile, _ in pairs]))
    total = sum(weight for _, weight in pairs)
    cumulative = sum((profile.coverage(knots) * (weight / total) for profile, weight in pairs), np.zeros(len(knots)))
    return AccessProfile.from_masses(knots, np.diff(cumulative))


def _check_knots(ranks_K: FloatArray, cumulative_K: FloatArray) -> None:
    """Refuses knots that are no concave curve from [0, 0] to probability 1; the text has the first that is wrong."""

    def refuse(wrong: NDArray[np.bool_], what: str, first: int = 0) -> None:
        if wrong.any():
            knot = first + int(wrong.argmax())
            pair = f"[{ranks_K[knot]:.12g}, {cumulative_K[knot]:.12g}]"
            raise InvalidTableError(f"{what}, got {pair} at knot {knot}", field="knots")

    refuse(~(np.isfinite(ranks_K) & np.isfinite(cumulative_K)), "must hold finite numbers only")
    refuse(((ranks_K != 0) | (cumulative_K != 0))[:1], "must start at [0, 0]")
    if abs(cumulative_K[-1] - 1.0) > 1e-6:
        raise InvalidTableError(f"must end at cumulative probability 1, got {cumulative_K[-1]:.12g}", field="knots")
    # Differences of slices: `np.diff` takes ten times as long, and there are thousands of tables.
    rows_I, masses_I = ranks_K[1:] - ranks_K[:-1], cumulative_K[1:] - cumulative_K[:-1]
    refuse(rows_I < _LEAST_ROWS, "access ranks must rise", 1)
    refuse(masses_I < 0, "cumulative probabilities must not fall", 1)
    slopes_I = masses_I / rows_I
    # Sums near 1 are rounded, which shows in the slope of a narrow interval of a table with many rows.
    rounding_I = 4 * np.finfo(np.float64).eps / rows_I
    tolerated = _CONCAVITY_TOLERANCE * slopes_I[0] + rounding_I[1:] + rounding_I[:-1]
    refuse(
        slopes_I[1:] - slopes_I[:-1] > tolerated,
        "must be concave: rows are ordered by falling access frequency, so slopes must not rise",
        2,
    )


def _restored(ranks_K: FloatArray, cumulative_K: FloatArray) -> AccessProfile:
    """A profile of knots that were checked when it was made."""
    profile = object.__new__(AccessProfile)
    profile._set(ranks_K, cumulative_K)
    return profile
