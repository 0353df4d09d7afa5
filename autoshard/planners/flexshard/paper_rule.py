"""The break points as FlexShard's paper chooses them: rows by falling probability, over all tables.

Shape suffixes: I intervals of all tables' access curves, by falling probability of a row, T tables, Q bytes and
seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autoshard.core import EmbeddingTable, Exchange
from autoshard.core.access import FloatArray
from autoshard.planners.flexshard.break_points import neutral_communication
from autoshard.planners.flexshard.equations import TierStrategy
from autoshard.planners.flexshard.frontier import TierBounds, TierChoice, whole_rows
from autoshard.planners.flexshard.tier_costs import Pricing, intervals


def paper_choice(
    tables: Sequence[EmbeddingTable],
    tiers: Sequence[Sequence[TierStrategy]],
    pricing: Pricing,
    row_wise: TierChoice,
    memory_bytes: float,
) -> TierChoice | None:
    """Bounds by the paper's rule.

    With two tiers the hottest rows are data-parallel, down to the budget (point B of Fig. 5) or to the row that is
    neutral in communication. With three, data-parallel rows end where they no longer save memory (point A), and
    Flex takes on down to the budget or to the row for which it is neutral in communication against row-wise.

    Args:
        tables: The tables.
        tiers: Strategies that each may use.
        pricing: How they are priced.
        row_wise: The tables without replicas. Those whose owners send partial sums there stay as they are.
        memory_bytes: Budget for all memory of a rank, static and dynamic.

    Returns:
        The bounds, or None if the budget is below what the rule can save.

    Source:
        FlexShard, Sec. 4.3, 4.5 and 4.6.
    """
    merged = _Merged(tables, tiers, pricing, row_wise)
    worth_I, more_I = merged.is_worth(TierStrategy.DATA_PARALLEL), merged.more(TierStrategy.DATA_PARALLEL)[0]
    room = memory_bytes - row_wise.memory_bytes
    if not any(TierStrategy.FLEX in allowed for allowed in tiers):
        replicated_I = merged.down_to_budget(worth_I, more_I, room)
        return None if replicated_I is None else merged.choice(replicated_I, 0.0 * replicated_I)
    saves_I = worth_I & (more_I <= 0)
    room -= float(more_I[saves_I].sum())
    worth_I = merged.is_worth(TierStrategy.FLEX) & ~saves_I
    flexed_I = merged.down_to_budget(worth_I, merged.more(TierStrategy.FLEX)[0], room)
    return None if flexed_I is None else merged.choice(merged.rows_I * saves_I, flexed_I)


class _Merged:
    """All tables' rows as one distribution, in intervals of rows with one probability, the highest first.

    Of rows that are exactly alike, those of the earlier table come first.

    Attributes:
        rows_I: Rows of each interval.

    Source:
        FlexShard, Sec. 4.6: the tables' distributions "are simply merged and sorted into one large distribution".
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingTable],
        tiers: Sequence[Sequence[TierStrategy]],
        pricing: Pricing,
        row_wise: TierChoice,
    ) -> None:
        self._tables, self._tiers, self._pricing, self._row_wise = tables, tiers, pricing, row_wise
        rows, lookups = zip(*map(intervals, tables), strict=True)
        rows_I = np.concatenate(rows)
        probability_I = np.concatenate(lookups) / rows_I
        order_I = np.argsort(-probability_I, kind="stable")
        self.rows_I, self._probability_I = rows_I[order_I], probability_I[order_I]
        self._table_I = np.repeat(np.arange(len(tables)), list(map(len, rows)))[order_I]

    def is_worth(self, strategy: TierStrategy) -> NDArray[np.bool_]:
        """Whether rows may leave the row-wise tier, and take less time to communicate then."""
        neutral_T = np.full(len(self._tables), np.inf)
        for index, (table, allowed) in enumerate(zip(self._tables, self._tiers, strict=True)):
            sends_rows = self._row_wise.bounds[index].tail_exchange is Exchange.ROWS
            if sends_rows and strategy in allowed and TierStrategy.ROW_WISE in allowed:
                neutral_T[index] = neutral_communication(strategy, self._pricing.rows_of(table), self._pricing.machine)
        return np.asarray(self._probability_I > neutral_T[self._table_I])

    def more(self, strategy: TierStrategy) -> FloatArray:
        """Bytes and seconds over row-wise, shape (2, I)."""
        ours, row_wise = (
            [self._pricing.cost(table, one, Exchange.ROWS) for table in self._tables]
            for one in (strategy, TierStrategy.ROW_WISE)
        )
        pairs = list(zip(ours, row_wise, strict=True))
        per_row_QT = np.array([one.per_row - other.per_row for one, other in pairs]).T
        per_lookup_QT = np.array([one.per_lookup - other.per_lookup for one, other in pairs]).T
        lookups_I = self.rows_I * self._probability_I
        return np.asarray(self.rows_I * per_row_QT[:, self._table_I] + lookups_I * per_lookup_QT[:, self._table_I])

    def down_to_budget(self, wanted_I: NDArray[np.bool_], more_I: FloatArray, room: float) -> FloatArray | None:
        """Rows of each interval that leave the row-wise tier, by falling probability, until no byte is left.

        Rows that save memory come first, so that the sum of bytes falls before it rises: the last point within the
        budget counts.
        """
        order = np.flatnonzero(wanted_I)
        used = np.cumsum(np.r_[0.0, more_I[order]])
        within = np.flatnonzero(used <= room)
        if not len(within):
            return None
        last = int(within[-1])
        rows_I = np.zeros(len(self.rows_I))
        rows_I[order[:last]] = self.rows_I[order[:last]]
        if last < len(order):
            rows_I[order[last]] = self.rows_I[order[last]] * (room - used[last]) / (used[last + 1] - used[last])
        return rows_I

    def choice(self, replicated_I: FloatArray, flexed_I: FloatArray) -> TierChoice:
        """What comes out if so many rows of each interval leave the row-wise tier."""
        memory, seconds = self._row_wise.memory_bytes, self._row_wise.communication_s
        for strategy, moved_I in ((TierStrategy.DATA_PARALLEL, replicated_I), (TierStrategy.FLEX, flexed_I)):
            more_bytes, more_s = (moved_I / self.rows_I * self.more(strategy)).sum(axis=1).tolist()
            memory, seconds = memory + more_bytes, seconds + more_s
        num_tables = len(self._tables)
        replicated_T = np.bincount(self._table_I, weights=replicated_I, minlength=num_tables)
        held_T = replicated_T + np.bincount(self._table_I, weights=flexed_I, minlength=num_tables)
        rows = zip(self._row_wise.bounds, replicated_T.tolist(), held_T.tolist(), strict=True)
        bounds = tuple(_bounds(before, replicated, held) for before, replicated, held in rows)
        return TierChoice(bounds=bounds, memory_bytes=memory, communication_s=seconds)


def _bounds(before: TierBounds, replicated: float, held: float) -> TierBounds:
    if not held:
        return before
    return replace(before, replicated=whole_rows(replicated), flexed=whole_rows(held))
