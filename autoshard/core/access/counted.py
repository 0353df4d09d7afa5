"""Rows of one table whose lookups were counted: their shares, the curve of all rows, and that of an older order.

Shape suffixes: N rows by falling lookups, L rows, S known rows, K knots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from typing_extensions import override

from autoshard.core.access.knots import FloatArray, IntArray, log_spaced_ranks, power_sums
from autoshard.core.access.orders import ranks_in
from autoshard.core.access.profile import AccessProfile

#: Rows that stand for an order by ids where rows are looked at one by one: the hottest.
_NUM_BY_ID = 1 << 20
#: Steepest power law of rows that are not known, and halvings that find the one that has their lookups.
_MAX_ALPHA, _NUM_HALVINGS = 30.0, 60


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CountedRows:
    """Rows of a table by falling lookups.

    Attributes:
        order_N: Their ids: the row order; empty where that is the order of all ids.
        ids_N: The same, and where the order is that of the ids, the lowest of them.
        shares_N: Share of the table's lookups that each gets, falling.
        num_known: How many of the first have shares of their own; others are right in sum alone.
        num_rows: Rows of the table.
        least_share: Share from which on a row is known; None where that of the last known row is all that is known.
    """

    order_N: IntArray
    ids_N: IntArray
    shares_N: FloatArray
    num_known: int
    num_rows: int
    least_share: float | None = None

    @classmethod
    def of_order(cls, access: AccessProfile, order_N: IntArray) -> CountedRows:
        """Rows of an order that have the shares of a curve."""
        ids_N = order_N if len(order_N) else np.arange(min(access.num_rows, _NUM_BY_ID))
        shares_N = access.probability_at(np.arange(len(ids_N), dtype=np.float64))
        return cls(order_N=order_N, ids_N=ids_N, shares_N=shares_N, num_known=len(ids_N), num_rows=access.num_rows)

    @property
    def known_from(self) -> float:
        """Share from which on a row would be known."""
        if self.least_share is not None:
            return self.least_share
        return float(self.shares_N[self.num_known - 1]) if self.num_known else 1.0

    @property
    def other_share(self) -> float:
        """Share of the lookups that each row gets which is not among them."""
        others = self.num_rows - len(self.ids_N)
        return max(0.0, 1.0 - float(self.shares_N.sum())) / others if others else 0.0

    def shares_of(self, ids_L: IntArray) -> FloatArray:
        """Shares of some rows, shape (L,)."""
        by_id_N = np.argsort(self.ids_N)
        place_L = np.searchsorted(self.ids_N, ids_L, sorter=by_id_N)
        place_L = by_id_N[np.minimum(place_L, len(by_id_N) - 1)]
        return np.where(self.ids_N[place_L] == ids_L, self.shares_N[place_L], self.other_share)

    def in_order(self, access: AccessProfile, older_N: IntArray) -> AccessProfile:
        """Their curve, as one whose slices are those of an older order."""
        if np.array_equal(self.order_N, older_N):
            return access
        ranks_N = ranks_in(older_N, self.ids_N)
        return ReorderedProfile(access.ranks_K, access.cumulative_K, ranks_N, self.shares_N, self.num_known)


def profile_of_known(known_S: FloatArray, total: float, num_rows: int) -> AccessProfile:
    """The curve of rows of which some are known: the others go on as a power law that has their lookups.

    Args:
        known_S: Lookups of the known rows, falling, in any unit.
        total: Lookups of all rows.
        num_rows: How many they are.
    """
    S, rest = len(known_S), max(0.0, total - float(known_S.sum()))
    if not S or known_S[-1] <= 0:
        return AccessProfile.uniform(num_rows)
    if num_rows == S:
        return AccessProfile.from_groups(np.ones(S, dtype=np.int64), known_S)
    ranks_K = np.union1d(log_spaced_ranks(num_rows), [S])
    head_K = ranks_K[ranks_K <= S]
    masses = np.diff(np.concatenate([[0.0], np.cumsum(known_S)])[head_K])
    tail_K = ranks_K[ranks_K >= S].astype(np.float64)
    tail = power_sums(tail_K, _tail_alpha(rest / known_S[-1], S, num_rows))
    tail *= rest / tail.sum() if rest else 0.0
    return AccessProfile.from_masses(ranks_K.astype(np.float64), np.concatenate([masses, tail]))


def _tail_alpha(lookups: float, num_known: int, num_rows: int) -> float:
    """Exponent of the power law of the rows that are not known, which goes on from the last one that is.

    Args:
        lookups: Of all of them together, over those of the last known row.
        num_known: Rows that are known, at least 1.
        num_rows: Rows of the table, more than these.
    """
    bounds = np.array([num_known, num_rows], dtype=np.float64)
    low, high = 0.0, _MAX_ALPHA
    for _ in range(_NUM_HALVINGS):
        alpha = (low + high) / 2
        if float(num_known**alpha * power_sums(bounds, alpha)[0]) > lookups:
            low = alpha
        else:
            high = alpha
    return high


@dataclass(frozen=True, slots=True, eq=False)
class ReorderedProfile(AccessProfile):
    """A curve whose slices are not those of falling frequency, but of an older order of the rows.

    Attributes:
        older_N: Ranks in the older order of rows by falling lookups; all others lie anywhere in it.
        shares_N: Their shares of the lookups.
        num_known: As of `CountedRows`.
    """

    older_N: IntArray
    shares_N: FloatArray
    num_known: int
    _rows_hash: int = field(init=False, repr=False)

    @override
    def __post_init__(self) -> None:
        AccessProfile.__post_init__(self)
        object.__setattr__(self, "_rows_hash", hash((self._hash, self.older_N.tobytes(), self.shares_N.tobytes())))

    @override
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ReorderedProfile):
            return False
        pairs = ((self.older_N, other.older_N), (self.shares_N, other.shares_N))
        return AccessProfile.__eq__(self, other) is True and all(np.array_equal(*pair) for pair in pairs)

    @override
    def __hash__(self) -> int:
        return self._rows_hash

    @override
    def __reduce__(self) -> tuple[Callable[..., AccessProfile], tuple[Any, ...]]:
        return ReorderedProfile, (self.ranks_K, self.cumulative_K, self.older_N, self.shares_N, self.num_known)

    @override
    def slice(self, start: float, stop: float) -> tuple[AccessProfile, float]:
        """The rows of ranks [start, stop) of the older order, and the share of lookups that goes to them."""
        num_rows, inside_N = round(stop - start), (self.older_N >= start) & (self.older_N < stop)
        others = self.num_rows - len(self.older_N)
        share = float(self.shares_N[inside_N].sum())
        if others:
            share += max(0.0, 1.0 - float(self.shares_N.sum())) * (num_rows - int(inside_N.sum())) / others
        if share <= 0:
            return AccessProfile.uniform(num_rows), 0.0
        known_S = self.shares_N[: self.num_known][inside_N[: self.num_known]]
        if not len(known_S):
            return self._drawn(share / num_rows).thinned(num_rows), min(share, 1.0)
        return profile_of_known(known_S, share, num_rows), min(share, 1.0)

    def _drawn(self, mean_share: float) -> AccessProfile:
        """The curve of the coldest rows that are looked up as much on average, of those that are not known."""
        ranks_K = self.ranks_K[(self.ranks_K >= self.num_known) & (self.ranks_K < self.num_rows)]
        means_K = (1.0 - self.coverage(ranks_K)) / (self.num_rows - ranks_K)
        first = min(int(np.count_nonzero(means_K > mean_share)), len(ranks_K) - 1)
        return AccessProfile.slice(self, float(ranks_K[first]), self.num_rows)[0]
