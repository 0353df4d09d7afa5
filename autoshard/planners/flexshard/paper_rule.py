"""The break points as FlexShard's paper chooses them: rows by falling probability, over all tables.

Shape suffixes: I intervals of all tables' access curves, by falling probability of a row, T tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.core import EmbeddingTable, Exchange
from autoshard.core.access import FloatArray, IntArray
from autoshard.planners.flexshard.break_points import neutral_communication
from autoshard.planners.flexshard.equations import Strategy
from autoshard.planners.flexshard.frontier import TierBounds, TierChoice, whole_rows
from autoshard.planners.flexshard.tier_costs import Pricing, TierCost


def paper_choice(
    tables: Sequence[EmbeddingTable],
    tiers: Sequence[Sequence[Strategy]],
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
    if not any(table.pooling_factor for table in tables):
        return row_wise if row_wise.memory_bytes <= memory_bytes else None
    merged = _Merged.of(tables, tiers, pricing, row_wise)
    room = memory_bytes - row_wise.memory_bytes
    has_flex = any(Strategy.FLEX in allowed for allowed in tiers)
    replicated_I: FloatArray | None
    flexed_I: FloatArray | None
    if has_flex:
        saves_I = merged.is_worth(Strategy.DATA_PARALLEL) & (merged.more_bytes(Strategy.DATA_PARALLEL) <= 0)
        replicated_I = merged.rows_I * saves_I
        room -= float(merged.more_bytes(Strategy.DATA_PARALLEL)[saves_I].sum())
        flexed_I = _down_to_budget(merged, merged.is_worth(Strategy.FLEX) & ~saves_I, Strategy.FLEX, room)
    else:
        wanted_I = merged.is_worth(Strategy.DATA_PARALLEL)
        flexed_I = np.zeros(len(merged.rows_I))
        replicated_I = _down_to_budget(merged, wanted_I, Strategy.DATA_PARALLEL, room)
    if replicated_I is None or flexed_I is None:
        return None
    return merged.choice(row_wise, replicated_I, flexed_I)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Merged:
    """All tables' rows as one distribution, in intervals of rows with one probability, the highest first.

    Of rows that are exactly alike, those of the earlier table come first.

    Source:
        FlexShard, Sec. 4.6: the tables' distributions "are simply merged and sorted into one large distribution".
    """

    tables: Sequence[EmbeddingTable]
    table_I: IntArray
    """The table of each interval."""
    rows_I: FloatArray
    """Rows of each interval."""
    probability_I: FloatArray
    """Expected lookups of a row in one sample."""
    neutral: dict[Strategy, FloatArray]
    """By strategy, the probability that rows of each table must exceed; infinite where it is not allowed."""
    costs_T: Sequence[dict[Strategy, TierCost]]

    @classmethod
    def of(
        cls,
        tables: Sequence[EmbeddingTable],
        tiers: Sequence[Sequence[Strategy]],
        pricing: Pricing,
        row_wise: TierChoice,
    ) -> _Merged:
        sends_rows = [bounds.tail_exchange is Exchange.ROWS for bounds in row_wise.bounds]
        neutral: dict[Strategy, FloatArray] = {}
        for strategy in (Strategy.FLEX, Strategy.DATA_PARALLEL):
            neutral[strategy] = np.full(len(tables), np.inf)
            for index, (table, allowed) in enumerate(zip(tables, tiers, strict=True)):
                if sends_rows[index] and strategy in allowed and Strategy.ROW_WISE in allowed:
                    rows = pricing.rows_of(table)
                    neutral[strategy][index] = neutral_communication(strategy, rows, pricing.machine)
        intervals = [np.diff(table.access.ranks_K) for table in tables]
        table_I = np.repeat(np.arange(len(tables)), [len(rows_I) for rows_I in intervals])
        rows_I = np.concatenate(intervals)
        lookups = [np.diff(table.access.cumulative_K) * table.pooling_factor for table in tables]
        probability_I = np.concatenate(lookups) / rows_I
        order_I = np.argsort(-probability_I, kind="stable")
        return cls(
            tables=tables,
            table_I=table_I[order_I],
            rows_I=rows_I[order_I],
            probability_I=probability_I[order_I],
            neutral=neutral,
            costs_T=[
                {strategy: pricing.cost(table, strategy, Exchange.ROWS) for strategy in _TIERS} for table in tables
            ],
        )

    def is_worth(self, strategy: Strategy) -> NDArray[np.bool_]:
        """Whether rows take less time to communicate than row-wise."""
        return self.probability_I > self.neutral[strategy][self.table_I]

    def more_bytes(self, strategy: Strategy) -> FloatArray:
        """Memory over row-wise."""
        return self._more("bytes_per_row", "bytes_per_lookup", strategy)

    def _more(self, per_row: str, per_lookup: str, strategy: Strategy) -> FloatArray:
        def over_row_wise(name: str) -> FloatArray:
            return np.array([getattr(of[strategy], name) - getattr(of[Strategy.ROW_WISE], name) for of in self.costs_T])

        return np.asarray(
            self.rows_I * over_row_wise(per_row)[self.table_I]
            + self.rows_I * self.probability_I * over_row_wise(per_lookup)[self.table_I]
        )

    def choice(self, row_wise: TierChoice, replicated_I: FloatArray, flexed_I: FloatArray) -> TierChoice:
        """What comes out if so many rows of each interval leave the row-wise tier."""
        memory, seconds = row_wise.memory_bytes, row_wise.communication_s
        for strategy, moved_I in ((Strategy.DATA_PARALLEL, replicated_I), (Strategy.FLEX, flexed_I)):
            share_I = moved_I / self.rows_I
            memory += float((share_I * self.more_bytes(strategy)).sum())
            seconds += float((share_I * self._more("seconds_per_row", "seconds_per_lookup", strategy)).sum())
        num_tables = len(self.tables)
        replicated_T = np.bincount(self.table_I, weights=replicated_I, minlength=num_tables)
        held_T = replicated_T + np.bincount(self.table_I, weights=flexed_I, minlength=num_tables)
        bounds = [
            _bounds(before, replicated, held)
            for before, replicated, held in zip(row_wise.bounds, replicated_T.tolist(), held_T.tolist(), strict=True)
        ]
        return TierChoice(bounds=tuple(bounds), memory_bytes=memory, communication_s=seconds)


_TIERS = (Strategy.ROW_WISE, Strategy.FLEX, Strategy.DATA_PARALLEL)


def _bounds(before: TierBounds, replicated: float, held: float) -> TierBounds:
    if not held:
        return before
    return replace(before, replicated=whole_rows(replicated), flexed=whole_rows(held))


def _down_to_budget(merged: _Merged, wanted_I: NDArray[np.bool_], strategy: Strategy, room: float) -> FloatArray | None:
    """Rows of each interval that leave the row-wise tier, by falling probability, until no byte is left.

    Rows that save memory come first, so that the sum of bytes falls before it rises: the last point within the
    budget counts.
    """
    order = np.flatnonzero(wanted_I)
    used = np.cumsum(np.r_[0.0, merged.more_bytes(strategy)[order]])
    within = np.flatnonzero(used <= room)
    if not len(within):
        return None
    last = int(within[-1])
    rows_I = np.zeros(len(merged.rows_I))
    rows_I[order[:last]] = merged.rows_I[order[:last]]
    if last < len(order):
        rows_I[order[last]] = merged.rows_I[order[last]] * (room - used[last]) / (used[last + 1] - used[last])
    return rows_I
