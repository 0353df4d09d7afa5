"""Orders of the rows of one table: the ranks that rows have, and which rows two orders share.

A row order lists the ids of some rows; an id that is not listed keeps its number as its rank, unless a listed row has
that rank. An empty order is that of the ids.

Shape suffixes: N listed ids, L ids.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoshard.core.access.knots import IntArray

#: An order of all rows by their ids.
BY_ID: IntArray = np.zeros(0, dtype=np.int64)


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reordering:
    """The rows of a table in two orders.

    Attributes:
        before_N: Ranks in the first order of the rows that either lists, and of those whose number a listed row has as
            its rank.
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
        first_rest = max(len(before_N), len(after_N))
        ids = np.union1d(np.union1d(before_N, after_N), np.arange(first_rest))
        return cls(
            before_N=ranks_in(before_N, ids), after_N=ranks_in(after_N, ids), num_rows=num_rows, first_rest=first_rest
        )

    def shared_rows(self, before: tuple[float, float], after: tuple[float, float]) -> tuple[float, float]:
        """Rows of ranks [start, stop) of the first order that are among those of the second.

        Returns:
            Rows of `before_N`; and other rows, which keep their rank.
        """
        (start, stop), (start_after, stop_after) = before, after
        is_before_N = (self.before_N >= start) & (self.before_N < stop)
        is_after_N = (self.after_N >= start_after) & (self.after_N < stop_after)
        common = min(stop, stop_after) - max(start, start_after, self.first_rest)
        among = self.num_rows - self.first_rest
        share = (self.num_rows - len(self.before_N)) / among if among else 0.0
        return float((is_before_N & is_after_N).sum()), max(0.0, common) * share
