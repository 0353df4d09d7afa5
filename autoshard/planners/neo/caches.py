"""How large caches are, and which tables lie behind one.

Shape suffixes: R ranks, I intervals of access curves with rows of one probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import chain

import numpy as np

from autoshard.core import EmbeddingTable, LocalShard, MemoryLevel, PlacedShard, Topology, local_shard, weight_row_bytes
from autoshard.evaluation.cached_rows import TransferSpeeds, cached_row_bytes

#: Shares of a lower level that tables are laid out for, in the order in which they are tried: ranks cannot be filled to
#: the brim by whole tables.
FILLS = (1.0, 0.9, 0.7, 0.5)


def levels_of(
    units: Sequence[Sequence[EmbeddingTable]], num_cached: int, ddr_bytes: float, *, has_disks: bool
) -> list[MemoryLevel]:
    """The memory level of each unit, when the `num_cached` units with the fewest lookups per byte lie behind caches.

    The hottest of them fill `ddr_bytes` of host memory, the others the disks if there are any.
    """
    levels = [MemoryLevel.HBM] * len(units)
    for index in reversed(coldest_first(units)[:num_cached]):
        held = sum(table.storage_bytes for table in units[index])
        levels[index] = MemoryLevel.DDR if held <= ddr_bytes or not has_disks else MemoryLevel.SSD
        ddr_bytes -= held if levels[index] is MemoryLevel.DDR else 0
    return levels


def fewest_cached(units: Sequence[Sequence[EmbeddingTable]], hbm_bytes: int) -> int:
    """How many of the coldest units have to leave, at least, for the others to fit that many bytes."""
    held = sum(table.storage_bytes for unit in units for table in unit)
    for count, index in enumerate(coldest_first(units)):
        if held <= hbm_bytes:
            return count
        held -= sum(table.storage_bytes for table in units[index])
    return len(units)


def coldest_first(units: Sequence[Sequence[EmbeddingTable]]) -> list[int]:
    """Indices of units by rising lookups per byte; of those alike, the larger first."""

    def heat(index: int) -> tuple[float, int]:
        held = sum(table.storage_bytes for table in units[index])
        moved = sum(table.pooling_factor * table.embedding_dim * table.dtype.num_bytes for table in units[index])
        return moved / held, -held

    return sorted(range(len(units)), key=heat)


def with_grown_caches(
    shards: Sequence[PlacedShard], topology: Topology, batch_size: int, hbm_bytes: Sequence[int]
) -> tuple[PlacedShard, ...]:
    """The same shards, with caches that share the device memory that is left on their ranks.

    Every rank gives its free bytes to the rows that save most transfer time per byte if they are cached: rows by
    falling chance to be hit by a batch, times the time to fetch them and write them back, over their bytes. A shard
    on several ranks gets what the tightest of them gives it.

    Args:
        shards: Placed shards; caches that they have are kept or grow.
        topology: The machine.
        batch_size: Global batch.
        hbm_bytes: Of every rank, what may be used.
    """
    locals_ = [local_shard(one, group_batch_size=batch_size, bags_share=1 / len(one.replicas)) for one in shards]
    cached_R: list[list[int]] = [[] for _ in range(topology.world_size)]
    free_R = list(hbm_bytes)
    for index, (placed, local) in enumerate(zip(shards, locals_, strict=True)):
        is_cached = local.level is not MemoryLevel.HBM
        # The index of a cache takes its room before the cache has any.
        with_index = replace(local, cache_bytes=max(1, local.cache_bytes)) if is_cached else local
        for rank in chain.from_iterable(placed.replicas):
            free_R[rank] -= with_index.held_bytes[MemoryLevel.HBM]
            if is_cached:
                cached_R[rank].append(index)

    # Ranks are often alike.
    @cache
    def grants(free: int, indices: tuple[int, ...]) -> list[int]:
        return _grants([locals_[index] for index in indices], free, TransferSpeeds.of(topology))

    granted: dict[int, int] = {}
    for free, indices in zip(free_R, cached_R, strict=True):
        for index, more in zip(indices, grants(free, tuple(indices)), strict=True):
            granted[index] = min(granted.get(index, more), more)
    return tuple(
        replace(one, memory=replace(one.memory, cache_bytes=one.memory.cache_bytes + granted[index]))
        if granted.get(index)
        else one
        for index, one in enumerate(shards)
    )


def _grants(locals_: Sequence[LocalShard], free_bytes: int, speeds: TransferSpeeds) -> list[int]:
    """Bytes by which each of a rank's caches grows; they add up to at most what is free."""
    if not locals_ or free_bytes <= 0:
        return [0] * len(locals_)
    rows, worth = zip(*(_rows_by_worth(local, speeds) for local in locals_), strict=True)
    sizes = [cached_row_bytes(local) for local in locals_]
    owner_I = np.repeat(np.arange(len(locals_)), [len(rows_I) for rows_I in rows])
    order_I = np.argsort(-np.concatenate(worth), kind="stable")
    bytes_I = (np.concatenate(rows) * np.array(sizes)[owner_I])[order_I]
    taken_I = np.clip(free_bytes - (np.cumsum(bytes_I) - bytes_I), 0.0, bytes_I)
    taken = np.bincount(owner_I[order_I], weights=taken_I, minlength=len(locals_))
    return [int(share // size) * size for share, size in zip(taken.tolist(), sizes, strict=True)]


def _rows_by_worth(local: LocalShard, speeds: TransferSpeeds) -> tuple[np.ndarray, np.ndarray]:
    """Rows that are not cached yet, by falling probability, and the seconds per byte that caching one saves."""
    access, row_bytes = local.access, cached_row_bytes(local)
    ends_I = np.clip(access.ranks_K - local.cache_bytes // row_bytes, 0.0, None)
    chance_I = np.diff(access.cumulative_K) / np.diff(access.ranks_K)
    stored = weight_row_bytes(local.dtype, local.optimizer, local.embedding_dim)
    both_ways_s = speeds.fetch_s(local.level, stored) + speeds.store_s(local.level, stored)
    return np.diff(ends_I), -np.expm1(-chance_I * local.num_lookups) * both_ways_s / row_bytes
