"""Row groups: tables cut by rows so that no group holds many bytes or many lookups, or into equal ranges.

Pure functions of the tables, for planners and environments alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from autoshard.core import AccessProfile, EmbeddingTable, RowRange, RowsBy, Shard, TableSet
from autoshard.core.accepted import AT_LEAST_1, SHARE
from autoshard.planners.space.constraints import colocated


def row_groups(tables: TableSet, threshold: float) -> tuple[Shard, ...]:
    """Cuts every table, in falling access frequency, where a group reaches a share of all lookups or of all bytes.

    Tables whose row order is unknown are cut into equal ranges of ids, which get equal shares of the lookups.

    Args:
        tables: What to cut.
        threshold: Largest share of one group, of the bytes that all tables' lookups read and of the bytes that all
            tables hold, in (0, 1]. Single rows may exceed it.

    Returns:
        Shards that tile every table, by access rank, table by table and hottest first: about `3 / threshold` at most
        and one more for each table. A table that is not cut is whole, so that it needs no row order; those that
        must share a rank with another stay whole.

    Raises:
        InvalidOptionError: If the threshold is out of range.

    Source:
        OPER Sec. 4.1. Differs: lookups count by the bytes that they read (Eq. 2 has S_k A_k, too), since tables need
        not be of one width.
    """
    SHARE.check(threshold, "threshold")
    max_lookup_bytes = threshold * sum(lookup_bytes(Shard.whole(table)) for table in tables.tables)
    max_bytes = threshold * tables.storage_bytes

    def bounds(table: EmbeddingTable) -> list[int]:
        read_bytes = lookup_bytes(Shard.whole(table))
        max_share = max_lookup_bytes / read_bytes if read_bytes > 0 else math.inf
        max_rows = max(1, int(max_bytes / table.storage_bytes * table.num_embeddings))
        if table.row_order is None:
            count = max(math.ceil(1 / max_share), -(-table.num_embeddings // max_rows))
            return _equal_bounds(table.num_embeddings, count)
        return _bounds(table.access, max_share, max_rows)

    return _cut(tables, bounds, cut_by)


def cut_by(table: EmbeddingTable) -> RowsBy:
    """What row groups of a table are ranges of: access ranks where its row order is known, else ids."""
    return RowsBy.INDEX if table.row_order is None else RowsBy.ACCESS_RANK


def equal_row_ranges(tables: TableSet, num_parts: int, *, by: RowsBy = RowsBy.INDEX) -> tuple[Shard, ...]:
    """Cuts every table into ranges of as many rows, which differ by one row at most.

    Args:
        tables: What to cut.
        num_parts: Ranges per table, at least 1; a table with fewer rows has one range per row.
        by: What the ranges count. Ranges of row ids get equal shares of the lookups, ranges of access ranks do not.

    Returns:
        Shards that tile every table, table by table. Tables that must share a rank with another stay whole.

    Raises:
        InvalidOptionError: If the number of ranges is out of range.
    """
    AT_LEAST_1.check(num_parts, "num_parts")

    def bounds(table: EmbeddingTable) -> list[int]:
        return _equal_bounds(table.num_embeddings, num_parts)

    return _cut(tables, bounds, lambda _: by)


def lookup_bytes(shard: Shard) -> float:
    """Bytes of weights that the lookups of one sample read from a shard, on average: S A of OPER's Eq. 2."""
    table = shard.table
    share = shard.num_embeddings / table.num_embeddings
    if shard.rows.by is RowsBy.ACCESS_RANK:
        low, high = table.access.coverage(np.array([shard.rows.start, shard.rows.stop], dtype=np.float64))
        share = float(high - low)
    return table.pooling_factor * share * shard.embedding_dim * table.dtype.num_bytes


def _bounds(access: AccessProfile, max_share: float, max_rows: int) -> list[int]:
    """Access ranks at which groups start and end."""
    num_rows = access.num_rows
    bounds = [0]
    while bounds[-1] < num_rows:
        start = bounds[-1]
        reached = float(access.coverage(start)) + max_share
        stop = num_rows if reached >= 1 else int(np.interp(reached, access.cumulative_K, access.ranks_K))
        bounds.append(min(max(stop, start + 1), start + max_rows, num_rows))
    return bounds


def _equal_bounds(num_rows: int, num_parts: int) -> list[int]:
    """Where ranges of as many rows start and end, of one row at least."""
    count = min(num_parts, num_rows)
    return [index * num_rows // count for index in range(count + 1)]


def _cut(
    tables: TableSet,
    bounds_of: Callable[[EmbeddingTable], list[int]],
    by_of: Callable[[EmbeddingTable], RowsBy],
) -> tuple[Shard, ...]:
    kept_whole = {table.name for unit in colocated(tables) if len(unit) > 1 for table in unit}
    shards: list[Shard] = []
    for table in tables.tables:
        bounds = [] if table.name in kept_whole else bounds_of(table)
        if len(bounds) <= 2:
            shards.append(Shard.whole(table))
            continue
        ranges = [RowRange(start=start, stop=stop, by=by_of(table)) for start, stop in pairwise(bounds)]
        shards += [Shard(table=table, rows=rows, columns=(0, table.embedding_dim)) for rows in ranges]
    return tuple(shards)
