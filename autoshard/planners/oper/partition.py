"""Row groups: tables cut by rows so that no group holds many bytes or many lookups."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise

import numpy as np

from autoshard.core import AccessProfile, EmbeddingTable, RowRange, RowsBy, Shard, TableSet
from autoshard.core.accepted import SHARE
from autoshard.core.access import FloatArray
from autoshard.planners.space.constraints import colocated


def row_groups(tables: TableSet, threshold: float, hot: Mapping[str, int] | None = None) -> tuple[Shard, ...]:
    """Cuts every table, in falling access frequency, where a group reaches a share of all lookups or of all bytes.

    Tables whose row order is unknown are cut into equal ranges of ids, which get equal shares of the lookups.

    Args:
        tables: What to cut.
        threshold: Largest share of one group, of the bytes that all tables' lookups read and of the bytes that all
            tables hold, in (0, 1]. Single rows may exceed it.
        hot: How many rows of some tables are hot: groups have either hot rows or others.

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
    max_lookup_bytes = threshold * float(lookup_bytes([Shard.whole(table) for table in tables.tables]).sum())
    max_bytes = threshold * tables.storage_bytes

    def bounds(table: EmbeddingTable) -> list[int]:
        read_bytes = lookup_bytes([Shard.whole(table)])[0]
        max_share = max_lookup_bytes / read_bytes if read_bytes > 0 else math.inf
        max_rows = max(1, int(max_bytes / table.storage_bytes * table.num_embeddings))
        middle = (hot or {}).get(table.name, 0)
        if table.row_order is None:
            num_rows = table.num_embeddings
            count = min(num_rows, max(math.ceil(1 / max_share), -(-num_rows // max_rows)))
            return sorted({middle, *(index * num_rows // count for index in range(count + 1))})
        return _bounds(table.access, max_share, max_rows, middle)

    kept_whole = {table.name for unit in colocated(tables) if len(unit) > 1 for table in unit}
    shards: list[Shard] = []
    for table in tables.tables:
        ends = [0, table.num_embeddings] if table.name in kept_whole else bounds(table)
        shards += [row_range(table, start, stop) for start, stop in pairwise(ends)]
    return tuple(shards)


def row_range(table: EmbeddingTable, start: int, stop: int) -> Shard:
    """Rows of a table by access rank, or by id where its row order is unknown; all of them are the whole table."""
    if stop - start == table.num_embeddings:
        return Shard.whole(table)
    by = RowsBy.INDEX if table.row_order is None else RowsBy.ACCESS_RANK
    return replace(Shard.whole(table), rows=RowRange(start=start, stop=stop, by=by))


def lookup_bytes(shards: Sequence[Shard]) -> FloatArray:
    """Bytes of weights that the lookups of one sample read from shards, on average: S A of OPER's Eq. 2; shape (N,)."""
    found = []
    for (_, by), alike in groupby(shards, key=lambda shard: (shard.table.name, shard.rows.by)):
        of_table = list(alike)
        table = of_table[0].table
        rows_2N = np.array([(shard.rows.start, shard.rows.stop) for shard in of_table], dtype=np.float64).T
        covered_2N = table.access.coverage(rows_2N) if by is RowsBy.ACCESS_RANK else rows_2N / table.num_embeddings
        widths_N = np.array([shard.embedding_dim for shard in of_table])
        found.append(table.pooling_factor * (covered_2N[1] - covered_2N[0]) * widths_N * table.dtype.num_bytes)
    return np.concatenate([np.zeros(0), *found])


def _bounds(access: AccessProfile, max_share: float, max_rows: int, middle: int) -> list[int]:
    """Access ranks at which groups start and end, the middle among them."""
    num_rows = access.num_rows
    bounds = [0]
    while bounds[-1] < num_rows:
        start = bounds[-1]
        reached = float(access.coverage(start)) + max_share
        stop = num_rows if reached >= 1 else int(np.interp(reached, access.cumulative_K, access.ranks_K))
        end = middle if start < middle else num_rows
        bounds.append(min(max(stop, start + 1), start + max_rows, end))
    return bounds
