"""The break points as FlexShard's paper chooses them: rows by falling probability, over all tables.

Shape suffixes: I intervals of all tables' access curves, by falling probability of a row, T tables.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.core import EmbeddingTable, Payload, Pooling, Tier
from autoshard.core.access import FloatArray
from autoshard.planners.flexshard.equations import (
    FlexMachine,
    RowSet,
    TierStrategy,
    dynamic_memory_bytes,
    neutral_communication,
    static_memory_bytes,
)

#: Of a row: knots are doubles, so that the bound of all rows may end up just below a whole number.
_ROUNDING = 1e-6


def paper_bounds(
    tables: Sequence[EmbeddingTable],
    tiers: Sequence[Collection[Tier]],
    machine: FlexMachine,
    payload: Payload,
    memory_multiplier: float,
    spare_bytes: float,
) -> list[tuple[int, int]] | None:
    """Rows of each table that are replicated, and rows that are replicated or Flex, by the paper's rule.

    With two tiers the hottest rows are data-parallel, down to the budget (point B of Fig. 5) or to the row that is
    neutral in communication. With three, data-parallel rows end where they no longer save memory (point A), and
    Flex takes on down to the budget or to the row for which it is neutral in communication against row-wise.

    Args:
        tables: The tables, whose owners send rows.
        tiers: Tiers that each may use.
        machine: The machine.
        payload: Number formats of what is sent.
        memory_multiplier: As `RowSet.of` has it.
        spare_bytes: Memory of a rank, static and dynamic, over what row-wise tables take.

    Returns:
        The bounds, or None if the budget is below what the rule can save.

    Source:
        FlexShard, Sec. 4.3, 4.5 and 4.6.
    """
    merged = _Merged(tables, tiers, machine, [RowSet.of(table, payload, memory_multiplier) for table in tables])
    worth_I, more_I = merged.is_worth(Tier.DATA_PARALLEL), merged.more_bytes(Tier.DATA_PARALLEL)
    if not any(Tier.FLEX in allowed for allowed in tiers):
        replicated_I = merged.down_to_budget(worth_I, more_I, spare_bytes)
        return None if replicated_I is None else merged.bounds(replicated_I, 0.0 * replicated_I)
    saves_I = worth_I & (more_I <= 0)
    worth_I = merged.is_worth(Tier.FLEX) & ~saves_I
    left_bytes = spare_bytes - float(more_I[saves_I].sum())
    flexed_I = merged.down_to_budget(worth_I, merged.more_bytes(Tier.FLEX), left_bytes)
    return None if flexed_I is None else merged.bounds(merged.rows_I * saves_I, flexed_I)


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
        tiers: Sequence[Collection[Tier]],
        machine: FlexMachine,
        row_sets: Sequence[RowSet],
    ) -> None:
        self._tables, self._tiers, self._machine, self._row_sets = tables, tiers, machine, row_sets
        rows = [np.diff(table.access.ranks_K) for table in tables]
        lookups = [np.diff(table.access.cumulative_K) * table.pooling_factor for table in tables]
        rows_I = np.concatenate(rows)
        probability_I = np.concatenate(lookups) / rows_I
        order_I = np.argsort(-probability_I, kind="stable")
        self.rows_I, self._probability_I = rows_I[order_I], probability_I[order_I]
        self._table_I = np.repeat(np.arange(len(tables)), list(map(len, rows)))[order_I]

    def is_worth(self, tier: Tier) -> NDArray[np.bool_]:
        """Whether rows may leave the row-wise tier, and take less time to communicate then."""
        neutral_T = [
            neutral_communication(TierStrategy(tier), rows, self._machine) if tier in allowed else np.inf
            for rows, allowed in zip(self._row_sets, self._tiers, strict=True)
        ]
        return np.asarray(self._probability_I > np.array(neutral_T)[self._table_I])

    def more_bytes(self, tier: Tier) -> FloatArray:
        """Bytes over row-wise, shape (I,); replicas of pooled tables are pooled where they are."""
        per_row_T, per_lookup_T = [], []
        for table, rows in zip(self._tables, self._row_sets, strict=True):
            strategies = TierStrategy(tier), TierStrategy.ROW_WISE
            row, row_wise = (static_memory_bytes(one, rows.one_row, self._machine) for one in strategies)
            looked_up, from_owners = (dynamic_memory_bytes(one, rows.one_lookup, self._machine) for one in strategies)
            stays = tier is Tier.DATA_PARALLEL and table.pooling is not Pooling.SEQUENCE
            per_row_T.append(row - row_wise)
            per_lookup_T.append((0.0 if stays else looked_up) - from_owners)
        more_I = np.array(per_row_T)[self._table_I] + self._probability_I * np.array(per_lookup_T)[self._table_I]
        return np.asarray(self.rows_I * more_I)

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

    def bounds(self, replicated_I: FloatArray, flexed_I: FloatArray) -> list[tuple[int, int]]:
        """Bounds of each table if so many rows of each interval leave the row-wise tier, in whole rows."""
        num_tables = len(self._tables)
        replicated_T = np.bincount(self._table_I, weights=replicated_I, minlength=num_tables)
        held_T = replicated_T + np.bincount(self._table_I, weights=flexed_I, minlength=num_tables)
        return [
            (int(replicated), int(held))
            for replicated, held in zip((replicated_T + _ROUNDING).tolist(), (held_T + _ROUNDING).tolist(), strict=True)
        ]
