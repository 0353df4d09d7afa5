"""Rows over all ranks in uneven shares, where ranks differ in memory.

As many rows on every rank as the rank with least room may take are dealt in turn; the other ranks take ranges of the
rest, the least accessed rows, so that lookups stay nearly even.

Shape suffix: R ranks.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autoshard.core import EmbeddingTable, Payload, RowRange, RowsBy, Shard, TableSet, Tier, Topology
from autoshard.planners.space.constraints import allowed_ranks
from autoshard.planners.space.options import ShardingOption, ShardingType, UnplacedShard

FloatArray = NDArray[np.float64]


def room_of_ranks(tables: TableSet, topology: Topology) -> FloatArray:
    """Bytes of device memory of each rank, less those of tables that may be on that rank alone, shape (R,)."""
    room_R = np.array(topology.hbm_bytes, dtype=np.float64)
    for table in tables.tables:
        if not table.constraints.pinned_ranks and topology.world_size > 1:
            continue
        allowed_R = allowed_ranks(table, topology.world_size)
        if allowed_R.sum() == 1:
            room_R[allowed_R] -= table.storage_bytes
    return np.maximum(room_R, 0.0)


def uneven_options(
    table: EmbeddingTable, topology: Topology, room_R: FloatArray, payload: Payload | None = None
) -> list[ShardingOption]:
    """Ways to hold a table by rows with more of them on ranks of more room, whatever its constraints.

    There are two: shares in proportion to the room, and shares that leave every rank as much free, on ranks that have
    that much. The first has room for other tables held alike, the second for what takes as much of every rank. Either
    is listed twice, with sums of the even part by reduce-scatter where that is possible.

    Args:
        table: The table.
        topology: The machine.
        room_R: Bytes of each rank that the tables of the task may take.
        payload: Number formats of vectors and gradients on the wire; fp32 if left out.

    Returns:
        None where all ranks have as much room, or all of them together less than the table takes.
    """
    if room_R.min() == room_R.max() or table.storage_bytes > room_R.sum():
        return []
    shares = (room_R, np.maximum(room_R - _level(room_R, table.storage_bytes), 0.0))
    # Of rooms beyond what floats can tell apart, shares may be alike.
    uneven = [share_R for share_R in shares if share_R.min() < share_R.max()]
    cuts = dict.fromkeys(_rows(table.num_embeddings, share_R) for share_R in uneven)
    return [option for even, more in cuts for option in _held(table, topology, even, more, payload or Payload())]


def _level(room_R: FloatArray, num_bytes: int) -> float:
    """Bytes left of every rank that takes some of a table, where no rank that takes some has less left than another."""
    falling_R = np.sort(room_R)[::-1]
    level_R = (falling_R.cumsum() - num_bytes) / np.arange(1, len(falling_R) + 1)
    # With the n ranks of most room, the level is to be below their room, and not below that of the others.
    return float(level_R.max())


def _rows(num_rows: int, share_R: FloatArray) -> tuple[int, tuple[int, ...]]:
    """Rows that every rank has, and how many more each has."""
    even = int(num_rows * share_R.min() / share_R.sum())
    more_R = share_R - share_R.min()
    ends_R = np.rint((num_rows - even * len(share_R)) * (more_R.cumsum() / more_R.sum())).astype(np.int64)
    return even, tuple(np.diff(ends_R, prepend=0).tolist())


def _held(
    table: EmbeddingTable, topology: Topology, even: int, more: tuple[int, ...], payload: Payload
) -> list[ShardingOption]:
    """The options with so many rows on every rank, and so many more on each."""
    whole = Shard.whole(table)
    by = RowsBy.INDEX if table.row_order is None else RowsBy.ACCESS_RANK

    def cut(start: int, stop: int) -> Shard:
        return replace(whole, rows=RowRange(start=start, stop=stop, by=by))

    first = even * topology.world_size
    bounds = (first + np.append(0, np.cumsum(more))).tolist()
    ranges = [
        replace(UnplacedShard.of(cut(start, stop), Tier.TABLE_WISE, topology), rank=rank)
        for rank, (start, stop) in enumerate(pairwise(bounds))
        if start < stop
    ]
    if len(ranges) + bool(even) < 2:
        return []
    if even:
        ways = UnplacedShard.ways(cut(0, first), Tier.ROW_WISE, topology, payload)
        return [ShardingOption(name=ShardingType.ROW_WISE, parts=(way, *ranges)) for way in ways]
    return [ShardingOption(name=ShardingType.ROW_WISE, parts=tuple(ranges))]
