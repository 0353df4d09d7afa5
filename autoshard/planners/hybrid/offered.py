"""The options that the search chooses from: all sharding options of every table, also with rows behind caches."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from autoshard.core import EmbeddingTable, MemoryLevel, TableSet, Topology
from autoshard.evaluation.cached_rows import behind_cache
from autoshard.planners.planner import PlanRequest
from autoshard.planners.space.options import ShardingOption, ShardingType, enumerate_options
from autoshard.planners.space.planner_space import PlannerSpace

#: Rows are offered behind caches where tables take more than this share of the devices' memory.
_SCARCE_SHARE = 0.5
#: Cache sizes that are offered, over the rows that a batch hits; memory that is left makes them larger.
_CACHE_SHARES = (1.0, 0.25)
#: Sharding types that few tables of good plans have, a third of all options: where time is short, only the costliest
#: tables may have them.
_RARE = frozenset({ShardingType.TABLE_COLUMN_WISE, ShardingType.GRID, ShardingType.FLEX})
#: Share of the tables that are the costliest; seconds that the options of a table take (800 of metasyn's on 80 A100:
#: 0.7 s, CPU time of one core of an EPYC, November 2026); and the share of the time above which it is short.
_COSTLIEST, _TABLE_S, _SHORT = 0.25, 9e-4, 0.3


def space_of(
    request: PlanRequest, names: Collection[ShardingType] = tuple(ShardingType), left_s: float = math.inf
) -> PlannerSpace:
    """All sharding options of the tables of a task, with rows behind caches where device memory is scarce.

    Args:
        request: The task.
        names: Ways that tables may be held.
        left_s: Seconds for all of the planning; where they are few, cheap tables get no rare options.
    """
    topology, tables = request.topology, request.tables
    levels = _spare_levels(tables, topology)
    usual = frozenset(names) - _RARE
    least_bytes = _costliest(tables) if usual and _TABLE_S * len(tables.tables) > _SHORT * left_s else 0.0

    def options_of(table: EmbeddingTable) -> list[ShardingOption]:
        offered_names = names if _looked_up(table) >= least_bytes else usual
        offered = enumerate_options(table, topology, offered_names, request.payload)
        simple = [option for option in offered if option.name is not ShardingType.ROW_TIERS]
        cached = [
            _behind_cache(option, level, share, topology, tables.batch_size)
            for level in levels
            for share in _CACHE_SHARES
            for option in simple
        ]
        return [*offered, *cached]

    return PlannerSpace(tables, topology, request.costs, options_of, request.payload)


def _looked_up(table: EmbeddingTable) -> float:
    """Bytes that a sample reads of a table, about what tables cost by."""
    return table.pooling_factor * table.embedding_dim * table.dtype.num_bytes


def _costliest(tables: TableSet) -> float:
    """Least bytes that a sample reads of one of the costliest tables."""
    return float(np.quantile([_looked_up(table) for table in tables.tables], 1 - _COSTLIEST))


def _spare_levels(tables: TableSet, topology: Topology) -> list[MemoryLevel]:
    """Memory levels below the devices' that there are, if the devices' memory is scarce; the fastest first."""
    memories = [topology.memory_of(rank) for rank in range(topology.world_size)]
    held = sum(table.storage_bytes for table in tables.tables)
    if held <= _SCARCE_SHARE * sum(memory.hbm for memory in memories):
        return []
    return [level for level in (MemoryLevel.DDR, MemoryLevel.SSD) if any(memory[level] for memory in memories)]


def _behind_cache(
    option: ShardingOption, level: MemoryLevel, share: float, topology: Topology, batch_size: int
) -> ShardingOption:
    """The option with rows in another memory, behind caches for a share of the rows that a batch hits."""
    local = option.parts[0].local(topology, batch_size)
    num_rows = max(1, round(share * local.access.expected_distinct(local.num_lookups)))
    return option.in_memory(behind_cache(local, level, num_rows))
