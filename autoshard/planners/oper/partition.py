"""Row groups: tables cut by rows so that no part holds many bytes or many lookups, or into equal parts.

Pure functions of the tables, for planners and environments alike.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from autoshard.core import AccessProfile, EmbeddingTable, RowRange, RowsBy, Shard, TableSet
from autoshard.core.accepted import AT_LEAST_1, SHARE
from autoshard.planners.space.constraints import colocated


def row_groups(tables: TableSet, threshold: float) -> tuple[Shard, ...]:
    """Cuts every table, in falling access frequency, where a part reaches a share of all lookups or of all bytes.

    Args:
        tables: What to cut.
        threshold: Largest share of one part, of the bytes that all tables' lookups read and of the bytes that all
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
    max_bytes = threshold * sum(table.storage_bytes for table in tables.tables)
    kept = _kept_whole(tables)
    shards: list[Shard] = []
    for table in tables.tables:
        whole = Shard.whole(table)
        read = lookup_bytes(whole)
        max_share = max_lookup_bytes / read if read > 0 else math.inf
        max_rows = max(1, int(max_bytes / table.storage_bytes * table.num_embeddings))
        is_kept = table.name in kept
        bounds = [0, table.num_embeddings] if is_kept else _bounds(table.access, max_share, max_rows)
        shards.extend(_cut(table, bounds, RowsBy.ACCESS_RANK))
    return tuple(shards)


def equal_row_ranges(tables: TableSet, num_parts: int, *, by: RowsBy = RowsBy.INDEX) -> tuple[Shard, ...]:
    """Cuts every table into ranges of as many rows, which differ by one row at most.

    Args:
        tables: What to cut.
        num_parts: Parts per table, at least 1; a table with fewer rows has one part per row.
        by: What the ranges count. Ranges of row ids get equal shares of the lookups, ranges of access ranks do not.

    Returns:
        Shards that tile every table, table by table. Tables that must share a rank with another stay whole.

    Raises:
        InvalidOptionError: If the number of parts is out of range.
    """
    AT_LEAST_1.check(num_parts, "num_parts")
    kept = _kept_whole(tables)
    shards: list[Shard] = []
    for table in tables.tables:
        parts = 1 if table.name in kept else min(num_parts, table.num_embeddings)
        shards.extend(_cut(table, [index * table.num_embeddings // parts for index in range(parts + 1)], by))
    return tuple(shards)


def lookup_bytes(shard: Shard) -> float:
    """Bytes of weights that the lookups of one sample read from a shard, on average: S A of OPER's Eq. 2."""
    table = shard.table
    share = shard.num_embeddings / table.num_embeddings
    if shard.rows.by is RowsBy.ACCESS_RANK:
        low, high = table.access.coverage(np.array([shard.rows.start, shard.rows.stop], dtype=np.float64))
        share = float(high - low)
    return table.pooling_factor * share * shard.embedding_dim * table.dtype.num_bytes


def _kept_whole(tables: TableSet) -> frozenset[str]:
    """Names of tables that must share a rank with another."""
    return frozenset(table.name for group in colocated(tables) if len(group) > 1 for table in group)


def _bounds(access: AccessProfile, max_share: float, max_rows: int) -> list[int]:
    """Access ranks at which parts start and end."""
    num_rows = access.num_rows
    bounds = [0]
    while bounds[-1] < num_rows:
        start = bounds[-1]
        reached = float(access.coverage(start)) + max_share
        stop = num_rows if reached >= 1 else int(np.interp(reached, access.cumulative_K, access.ranks_K))
        bounds.append(min(max(stop, start + 1), start + max_rows, num_rows))
    return bounds


def _cut(table: EmbeddingTable, bounds: list[int], by: RowsBy) -> list[Shard]:
    if len(bounds) == 2:
        return [Shard.whole(table)]
    columns = (0, table.embedding_dim)
    ranges = [RowRange(start=start, stop=stop, by=by) for start, stop in pairwise(bounds)]
    return [Shard(table=table, rows=rows, columns=columns) for rows in ranges]
