"""The options that the search chooses from: all sharding options of every table, also with rows behind caches."""

from __future__ import annotations

from collections.abc import Collection

from autoshard.core import EmbeddingTable, MemoryLevel, TableSet, Topology
from autoshard.evaluation.cached_rows import behind_cache
from autoshard.planners.planner import PlanRequest
from autoshard.planners.space.options import ShardingOption, ShardingType, enumerate_options
from autoshard.planners.space.planner_space import PlannerSpace

#: Rows are offered behind caches where tables take more than this share of the devices' memory.
_SCARCE_SHARE = 0.5
#: Cache sizes that are offered, over the rows that a batch hits; memory that is left makes them larger.
_CACHE_SHARES = (1.0, 0.25)


def space_of(request: PlanRequest, names: Collection[ShardingType] = tuple(ShardingType)) -> PlannerSpace:
    """All sharding options of the tables of a task, with rows behind caches where device memory is scarce."""
    topology, tables = request.topology, request.tables
    levels = _spare_levels(tables, topology)

    def options_of(table: EmbeddingTable) -> list[ShardingOption]:
        offered = enumerate_options(table, topology, names, request.payload)
        simple = [option for option in offered if option.name is not ShardingType.ROW_TIERS]
        cached = [
            _behind_cache(option, level, share, topology, tables.batch_size)
            for level in levels
            for share in _CACHE_SHARES
            for option in simple
        ]
        return [*offered, *cached]

    return PlannerSpace(tables, topology, request.costs, options_of, request.payload)


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
