"""Which of a table's rows are held how, read off prices: the likelier a row is looked up, the more copies it is worth.

Shape suffixes: N numbers of rows, T ways to hold rows, I intervals of an access curve, K its knots.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.core import EmbeddingTable
from autoshard.core.access import FloatArray
from autoshard.core.access.reuse import hit_rows
from autoshard.core.costs import MsArray


def shares_of_first(table: EmbeddingTable, batch_size: int, num_rows_N: Sequence[int]) -> FloatArray:
    """What so many of its most accessed rows have of the rows that a batch hits, and of the lookups; shape (N, 2)."""
    hits_I, _, _ = _shares(table, batch_size)
    hits_K = np.append(0.0, np.cumsum(hits_I))
    ranks_K, cumulative_K = table.access.ranks_K, table.access.cumulative_K
    return np.column_stack([np.interp(num_rows_N, ranks_K, of_K) for of_K in (hits_K, cumulative_K)])


def cheapest_ends(table: EmbeddingTable, batch_size: int, cost_3T: MsArray) -> tuple[list[int], float]:
    """Where ways to hold rows end, if each row is held in the one that is cheapest for it.

    Args:
        table: The table.
        batch_size: Global batch, in samples.
        cost_3T: What all rows of the table cost in each way, from that for the likeliest rows on: as far as it goes by
            the rows that a batch hits, such as the synchronisation of copies; by rows, such as memory; and by lookups.

    Returns:
        The access rank at which each way ends, falling behind none before it; and what the table costs then.

    Source:
        FlexShard, Sec. 4.2 (thresholds of the access probability). Differs: a threshold is where two prices are alike.
    """
    cost_TI = cost_3T.T @ _shares(table, batch_size)
    way_I = cost_TI.argmin(axis=0)
    ends = [int(table.access.ranks_K[np.append(way_I > way, True).argmax()]) for way in range(len(cost_TI))]
    return ends, float(cost_TI.min(axis=0).sum())


def _shares(table: EmbeddingTable, batch_size: int) -> MsArray:
    """What each interval has of the rows that a batch hits, of all rows, and of the lookups."""
    hits_I, rows_I, lookups_I = amounts_by_interval(table, batch_size)
    return np.stack([hits_I / max(hits_I.sum(), 1e-30), rows_I / rows_I.sum(), lookups_I])


def amounts_by_interval(table: EmbeddingTable, batch_size: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Rows of each interval of a table's access curve that a batch hits, its rows, and its share of the lookups."""
    ranks_K, cumulative_K = table.access.ranks_K, table.access.cumulative_K
    rows_I, lookups_I = ranks_K[1:] - ranks_K[:-1], cumulative_K[1:] - cumulative_K[:-1]
    return hit_rows(rows_I, batch_size * table.pooling_factor * lookups_I / rows_I), rows_I, lookups_I
