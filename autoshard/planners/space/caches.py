"""Rows behind caches: options with small ones, which grow into the device memory that plans leave.

Shape suffixes: R ranks, I intervals of access curves with rows of one probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from math import ceil

import numpy as np

from autoshard.core import LocalShard, MemoryLevel, MemoryPlacement, ShardingPlan, Topology, weight_row_bytes
from autoshard.core.shard import IN_DEVICE_MEMORY
from autoshard.evaluation.cached_rows import TransferSpeeds, behind_cache, in_device_memory
from autoshard.planners.space.layout import Layout
from autoshard.planners.space.options import ShardingOption, locals_of


def on_level(
    option: ShardingOption, level: MemoryLevel, hit_share: float, policy: str, topology: Topology, batch_size: int
) -> ShardingOption:
    """The option with its rows on a memory level below the devices', behind caches.

    Args:
        option: With its rows in device memory.
        level: Where they go.
        hit_share: Rows that a cache holds, over those of its shard that a batch is expected to hit.
        policy: By which caches evict.
        topology: The machine.
        batch_size: Global batch.
    """
    parts = []
    for part in option.parts:
        local = part.local(topology, batch_size)
        num_rows = max(1, ceil(hit_share * local.access.expected_distinct(local.num_lookups)))
        parts.append(replace(part, memory=behind_cache(local, level, num_rows, policy)))
    return replace(option, parts=tuple(parts))


def with_grown_caches(layout: Layout) -> ShardingPlan:
    """A layout's plan, with caches that share the device memory that is left on their ranks.

    Every rank gives its free bytes to the rows that save most transfer time per byte if they are cached: rows by
    falling chance to be hit by a batch, times the time to fetch them and write them back, over their bytes. A shard
    on several ranks gets what the tightest of them gives it. Rows that take no more of the device memory without a
    cache are there.
    """
    plan, topology = layout.plan(), layout.space.topology
    if all(placed.memory.level is MemoryLevel.HBM for placed in plan.shards):
        return plan
    locals_ = locals_of(plan.shards, plan.tables.batch_size)
    cached_R: list[list[int]] = [[] for _ in range(topology.world_size)]
    free_R = [int(free) for free in layout.free_bytes()[:, 0].tolist()]
    for index, (placed, local) in enumerate(zip(plan.shards, locals_, strict=True)):
        if local.level is MemoryLevel.HBM:
            continue
        # The index of a cache takes its room before the cache has any.
        with_index = replace(local, cache_bytes=max(1, local.cache_bytes))
        index_bytes = with_index.held_bytes[MemoryLevel.HBM] - local.held_bytes[MemoryLevel.HBM]
        for rank in chain.from_iterable(placed.replicas):
            free_R[rank] -= index_bytes
            cached_R[rank].append(index)

    # Ranks are often alike.
    @cache
    def grants(free: int, indices: tuple[int, ...]) -> list[int]:
        return _grants([locals_[index] for index in indices], free, TransferSpeeds.of(topology))

    granted: dict[int, int] = {}
    for free, indices in zip(free_R, cached_R, strict=True):
        for index, more in zip(indices, grants(free, tuple(indices)), strict=True):
            granted[index] = min(granted.get(index, more), more)
    grown = (replace(local, cache_bytes=local.cache_bytes + granted.get(n, 0)) for n, local in enumerate(locals_))
    shards = tuple(
        one if local.level is MemoryLevel.HBM else replace(one, memory=_in_less_device_memory(local))
        for one, local in zip(plan.shards, grown, strict=True)
    )
    return replace(plan, shards=shards)


def _in_less_device_memory(local: LocalShard) -> MemoryPlacement:
    """Where a shard with a cache is, or without one in the device's memory where that takes no more of it."""
    near = in_device_memory(local).held_bytes[MemoryLevel.HBM]
    return IN_DEVICE_MEMORY if near <= local.held_bytes[MemoryLevel.HBM] else local.memory


def _grants(locals_: Sequence[LocalShard], free_bytes: int, speeds: TransferSpeeds) -> list[int]:
    """Bytes by which each of a rank's caches grows; with those of their slots, they add up to at most what is free."""
    if not locals_ or free_bytes <= 0:
        return [0] * len(locals_)
    rows, worth = zip(*(_rows_by_worth(local, speeds) for local in locals_), strict=True)
    lines, sizes = [local.cached_row_bytes for local in locals_], [_taken_bytes(local) for local in locals_]
    owner_I = np.repeat(np.arange(len(locals_)), [len(rows_I) for rows_I in rows])
    order_I = np.argsort(-np.concatenate(worth), kind="stable")
    bytes_I = (np.concatenate(rows) * np.array(sizes)[owner_I])[order_I]
    taken_I = np.clip(free_bytes - (np.cumsum(bytes_I) - bytes_I), 0.0, bytes_I)
    taken = np.bincount(owner_I[order_I], weights=taken_I, minlength=len(locals_))
    return [int(share // size) * line for share, size, line in zip(taken.tolist(), sizes, lines, strict=True)]


def _rows_by_worth(local: LocalShard, speeds: TransferSpeeds) -> tuple[np.ndarray, np.ndarray]:
    """Rows that are not cached yet, by falling probability, and the seconds per byte that caching one saves."""
    access = local.access
    ends_I = np.clip(access.ranks_K - local.cache_bytes // local.cached_row_bytes, 0.0, None)
    chance_I = np.diff(access.cumulative_K) / np.diff(access.ranks_K)
    stored = weight_row_bytes(local.dtype, local.optimizer, local.embedding_dim)
    both_ways_s = speeds.fetch_s(local.level, stored) + speeds.store_s(local.level, stored)
    return np.diff(ends_I), -np.expm1(-chance_I * local.num_lookups) * both_ways_s / _taken_bytes(local)


def _taken_bytes(local: LocalShard) -> int:
    """Bytes of device memory that a cached row takes."""
    return local.cached_row_bytes + local.memory.slot_bytes
