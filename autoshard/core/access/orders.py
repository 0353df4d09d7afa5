"""Rows of one table in two orders: what an older row order has of today's lookups, and which rows two orders share.

A row order lists the ids of some rows; an id that is not listed keeps its number as its rank, unless a listed row has
that rank. An empty order is that of the ids.

Shape suffixes: N listed ids, L ids, S rows of a slice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from typing_extensions import override

from autoshard.core.access.knots import FloatArray, IntArray, log_spaced_ranks
from autoshard.core.access.profile import AccessProfile

#: An order of all rows by their ids.
BY_ID: IntArray = np.zeros(0, dtype=np.int64)
#: Ids that stand for an order by ids where rows are looked at one by one: the hottest of it.
_NUM_BY_ID = 1 << 20


def ranks_in(order_N: IntArray, ids_L: IntArray) -> IntArray:
    """Ranks of rows in an order, shape (L,), as the runtime has them (`RowOrderMap`)."""
    N = len(order_N)
    if not N:
        return ids_L
    by_id_N = np.argsort(order_N)
    sorted_N = order_N[by_id_N]
    place_L = np.minimum(np.searchsorted(sorted_N, ids_L), N - 1)
    is_listed_L = sorted_N[place_L] == ids_L
    # Unlisted rows with ids below N take the ranks that listed ones above it leave.
    given_up = sorted_N[np.searchsorted(sorted_N, N) :]
    is_taken_N = np.zeros(N, dtype=np.bool_)
    is_taken_N[sorted_N[: N - len(given_up)]] = True
    moved = np.flatnonzero(~is_taken_N)
    is_moved_L = ~is_listed_L & (ids_L < N)
    ranks_L = np.where(is_listed_L, by_id_N[place_L], ids_L)
    ranks_L[is_moved_L] = given_up[np.searchsorted(moved, ids_L[is_moved_L])]
    return np.asarray(ranks_L)


def hot_ids(order_N: IntArray, num_rows: int) -> IntArray:
    """Ids of an order's first rows: those that it lists, or the lowest ids."""
    return order_N if len(order_N) else np.arange(min(num_rows, _NUM_BY_ID))


def frequencies(access: AccessProfile, order_N: IntArray, ids_L: IntArray) -> FloatArray:
    """Probability of a lookup to hit each of some rows, shape (L,).

    Rows that the order does not list are taken as alike.

    Args:
        access: The curve of the rows in this order.
        order_N: Ids in falling access frequency; empty where that is the order of the ids.
        ids_L: The rows.
    """
    ranks_L, N = ranks_in(order_N, ids_L), len(order_N)
    found_L = access.probability_at(ranks_L.astype(np.float64))
    if 0 < N < access.num_rows:
        found_L = np.where(ranks_L < N, found_L, float(1.0 - access.coverage(N)) / (access.num_rows - N))
    return np.asarray(found_L)


@dataclass(frozen=True, slots=True, eq=False)
class ReorderedProfile(AccessProfile):
    """A curve whose slices are not those of falling frequency, but of an older order of the rows.

    Attributes:
        ranks_N: Ranks in the older order of the rows that are looked up most, in falling frequency; all other rows lie
            anywhere in it.
    """

    ranks_N: IntArray
    _order_hash: int = field(init=False, repr=False)

    @override
    def __post_init__(self) -> None:
        AccessProfile.__post_init__(self)
        object.__setattr__(self, "_order_hash", hash((self._hash, self.ranks_N.tobytes())))

    @override
    def __eq__(self, other: object) -> bool:
        is_like = isinstance(other, ReorderedProfile) and np.array_equal(self.ranks_N, other.ranks_N)
        return is_like and AccessProfile.__eq__(self, other) is True

    @override
    def __hash__(self) -> int:
        return self._order_hash

    @override
    def __reduce__(self) -> tuple[Callable[..., AccessProfile], tuple[Any, ...]]:
        return ReorderedProfile, (self.ranks_K, self.cumulative_K, self.ranks_N)

    @override
    def slice(self, start: float, stop: float) -> tuple[AccessProfile, float]:
        """The rows of ranks [start, stop) of the older order, and the share of lookups that goes to them."""
        N, num_rows = len(self.ranks_N), self.num_rows
        today_S = np.flatnonzero((self.ranks_N >= start) & (self.ranks_N < stop))
        S, others = len(today_S), round(stop - start) - len(today_S)
        ends_K = log_spaced_ranks(S) if S else np.zeros(1, dtype=np.int64)
        masses = np.diff(np.concatenate([[0.0], np.cumsum(self.probability_at(today_S.astype(np.float64)))])[ends_K])
        ranks_K = ends_K.astype(np.float64)
        if others > 0 and num_rows > N:
            rest, mass = AccessProfile.slice(self, N, num_rows)
            rest = rest.thinned(others)
            share = mass * others / (num_rows - N)
            masses = np.concatenate([masses, np.diff(rest.cumulative_K) * share])
            ranks_K = np.concatenate([ranks_K, rest.ranks_K[1:] + S])
        total = float(masses.sum())
        if total <= 0:
            return AccessProfile.uniform(round(stop - start)), 0.0
        return AccessProfile.from_masses(ranks_K, masses), min(total, 1.0)


def reordered(access: AccessProfile, order_N: IntArray, older_N: IntArray) -> AccessProfile:
    """A curve of today's order, as one whose slices are those of an older order.

    Args:
        access: The curve.
        order_N: Today's order.
        older_N: The older one.
    """
    if np.array_equal(order_N, older_N):
        return access
    ids = hot_ids(order_N, access.num_rows)
    return ReorderedProfile(access.ranks_K, access.cumulative_K, ranks_in(older_N, ids))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reordering:
    """The rows of a table in two orders.

    Attributes:
        before_N: Ranks in the first order of the rows that either lists.
        after_N: Their ranks in the second one.
        num_rows: Rows of the table.
        first_rest: Rank from which on the other rows lie, each at one rank in both.
    """

    before_N: IntArray
    after_N: IntArray
    num_rows: int
    first_rest: int

    @classmethod
    def of(cls, before_N: IntArray, after_N: IntArray, num_rows: int) -> Reordering:
        """From one order to another."""
        ids = np.union1d(before_N, after_N)
        first_rest = max(len(before_N), len(after_N))
        return cls(
            before_N=ranks_in(before_N, ids), after_N=ranks_in(after_N, ids), num_rows=num_rows, first_rest=first_rest
        )

    def shared_rows(self, before: tuple[float, float], after: tuple[float, float]) -> tuple[float, float]:
        """Rows of ranks [start, stop) of the first order that are among those of the second.

        Returns:
            Rows that an order lists; and other rows, which keep their rank.
        """
        (start, stop), (start_after, stop_after) = before, after
        is_before_N = (self.before_N >= start) & (self.before_N < stop)
        is_after_N = (self.after_N >= start_after) & (self.after_N < stop_after)
        common = min(stop, stop_after) - max(start, start_after, self.first_rest)
        among = self.num_rows - self.first_rest
        share = (self.num_rows - len(self.before_N)) / among if among else 0.0
        return float((is_before_N & is_after_N).sum()), max(0.0, common) * share
