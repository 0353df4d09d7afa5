"""Rows of several tables in one order of falling access frequency.

Shape suffixes: T tables, I intervals of all their curves, in falling order of lookups per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.core.access import AccessProfile, FloatArray, IntArray
from autoshard.core.errors import InvalidTableError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MergedAccess:
    """Access curves of several tables as one, which knows whose rows are where.

    Cutting it at a rank cuts every table at one number of lookups per row. Rows of one table between two of its knots
    count as alike; of rows of several tables that are exactly alike, those of the earlier table come first.

    Source:
        FlexShard, Sec. 4.6: the tables' distributions "are simply merged and sorted into one large distribution".
    """

    num_tables: int
    table_I: IntArray
    rows_I: FloatArray
    lookups_per_row_I: FloatArray

    @classmethod
    def of(cls, tables: Sequence[tuple[AccessProfile, float]]) -> MergedAccess:
        """Merges tables.

        Args:
            tables: Of each its profile and its lookups, per sample or in any other unit that all share.

        Raises:
            InvalidTableError: If there is no table, or lookups are negative, not finite, or 0 in all tables.
        """
        lookups_T = np.array([lookups for _, lookups in tables], dtype=np.float64)
        if not (len(tables) and np.isfinite(lookups_T).all() and lookups_T.min() >= 0 and lookups_T.max() > 0):
            raise InvalidTableError(
                f"must be finite, at least 0 and not all 0, got {lookups_T.tolist()[:8]}", field="lookups"
            )
        rows = [np.diff(profile.ranks_K) for profile, _ in tables]
        masses = [np.diff(profile.cumulative_K) * lookups for profile, lookups in tables]
        table_I = np.repeat(np.arange(len(tables)), [len(rows_I) for rows_I in rows])
        rows_I, lookups_I = np.concatenate(rows), np.concatenate(masses)
        order_I = np.argsort(-(lookups_I / rows_I), kind="stable")
        table_I, rows_I, lookups_I = table_I[order_I], rows_I[order_I], lookups_I[order_I]
        return cls(num_tables=len(tables), table_I=table_I, rows_I=rows_I, lookups_per_row_I=lookups_I / rows_I)

    def profile(self) -> AccessProfile:
        """Cumulative share of all tables' lookups by access rank over all tables' rows."""
        knots = np.concatenate([[0.0], np.cumsum(self.rows_I)])
        # Ends are sums of whole numbers and of shares of rows: what rounding leaves of them must not split a row.
        knots[-1] = np.rint(knots[-1])
        return AccessProfile.from_masses(knots, self.rows_I * self.lookups_per_row_I)

    def rows_within(self, num_hot_rows: float) -> FloatArray:
        """How many rows of each table are among the `num_hot_rows` most accessed rows of all; shape (T,)."""
        before_I = np.concatenate([[0.0], np.cumsum(self.rows_I)[:-1]])
        taken_I = np.clip(num_hot_rows - before_I, 0.0, self.rows_I)
        rows_T = np.bincount(self.table_I, weights=taken_I, minlength=self.num_tables)
        return np.asarray(rows_T, dtype=np.float64)

    def rows_above(self, lookups_per_row: float) -> FloatArray:
        """How many rows of each table are looked up more often than that; shape (T,)."""
        above_I = self.lookups_per_row_I > lookups_per_row
        rows_T = np.bincount(self.table_I[above_I], weights=self.rows_I[above_I], minlength=self.num_tables)
        return np.asarray(rows_T, dtype=np.float64)

    def lookups_of_row(self, rank: float) -> float:
        """Lookups of the row at an access rank over all tables, from 0."""
        interval = int(np.searchsorted(np.cumsum(self.rows_I), rank, side="right"))
        return float(self.lookups_per_row_I[min(interval, len(self.rows_I) - 1)])
