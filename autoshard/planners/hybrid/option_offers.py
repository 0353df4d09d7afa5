"""The options that the search chooses from: all sharding options of every table, also with rows behind caches."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from autoshard.core import EmbeddingTable, MemoryLevel, TableSet, Topology
from autoshard.core.errors import InfeasiblePlanError
from autoshard.core.machine import device_family
from autoshard.evaluation.cached_rows import behind_cache
from autoshard.planners.planner import PlanRequest
from autoshard.planners.space.kinds import first_alike
from autoshard.planners.space.options import (
    GROUP_COUNTS,
    ShardingOption,
    ShardingType,
    enumerate_options,
    why_none,
    why_not,
)
from autoshard.planners.space.planner_space import PlannerSpace
from autoshard.planners.space.uneven_rows import room_of_ranks, uneven_options

#: Rows are offered behind caches where tables take more than this share of the devices' memory.
_SCARCE_SHARE = 0.5
#: Cache sizes that are offered, over the rows that a batch hits; memory that is left makes them larger.
_CACHE_SHARES = (1.0, 0.25)
#: Sharding types that few tables of good plans have; a third of all options.
_RARE = frozenset({ShardingType.TABLE_COLUMN_WISE, ShardingType.GRID, ShardingType.FLEX})
#: Tables that take more than this share of the memory that devices have in the mean have all options, and where ranks
#: differ in memory, uneven shares of rows: smaller ones fill the ranks whole.
_LARGE_SHARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionOffer:
    """Sharding types that tables are offered: all of them to the costliest, some of them to the others.

    Attributes:
        names: What the others are offered.
        costliest: Share of the tables that are offered all.
        table_s: Seconds that this takes about for each table.
        most_share: Most of the time left that it is worth; the last resort is made whatever the time.
        spare_s: Seconds that it may take beyond that.
        rest_on_one: Whether rows beside hot ones are offered to the others on one rank only.
        group_counts: Numbers of row groups that are offered.
        always: Names of the tables that are offered all, in place of the costliest and the large ones; None for these.
    """

    names: frozenset[ShardingType]
    costliest: float
    table_s: float
    most_share: float
    spare_s: float = 0.0
    rest_on_one: bool = True
    group_counts: tuple[int, ...] = (2, 4)
    always: frozenset[str] | None = None


#: All sharding types for all tables. Seconds are CPU time of metasyn's tables on A100 and CPUs, one core of a virtual
#: Xeon, November 2026; an EPYC's took 60 to 80% of it.
EVERYTHING = OptionOffer(
    names=frozenset(ShardingType),
    costliest=1.0,
    table_s=2.5e-3,
    most_share=0.16,
    rest_on_one=False,
    group_counts=GROUP_COUNTS,
)
_GROUPS = frozenset({ShardingType.ROW_GROUPS})
_WHOLE = frozenset({ShardingType.TABLE_WISE, ShardingType.DATA_PARALLEL})
_HOT = _WHOLE | {ShardingType.ROW_TIERS}
_ON_FAST_LINKS = EVERYTHING.names - _RARE - _GROUPS - {ShardingType.ROW_TIERS}
_LAST = (
    OptionOffer(names=_WHOLE, costliest=0.1, table_s=3.5e-4, most_share=1.3, spare_s=0.15),
    OptionOffer(names=frozenset({ShardingType.TABLE_WISE}), costliest=0.0, table_s=1e-4, most_share=1.0),
)
#: What is offered where time is short and links between nodes are slow, so that hot rows on all ranks save most: plans
#: with them alone are 0.2 to 3% shorter than plans of the same time with all types but the rare ones (metasyn, 800
#: tables on 80 A100 in 1 to 6 s, 200 on 16 in 0.3 and 1 s), and 7% shorter than plans without them. With row groups,
#: they are 5 to 6% shorter again on 80 ranks, and as long on 16.
_LESS = (
    OptionOffer(names=EVERYTHING.names - _RARE, costliest=0.0, table_s=1.3e-3, most_share=0.12),
    OptionOffer(names=_HOT | _GROUPS, costliest=0.0, table_s=8.5e-4, most_share=1.2),
    OptionOffer(names=_HOT, costliest=0.0, table_s=4.8e-4, most_share=1.3, spare_s=0.15),
    *_LAST,
)
#: The same where no links are slow beside the memory, so that hot rows on all ranks save little: plans that are made
#: in the time that they take to be worked out are 0.1 to 4% shorter (metasyn, 80 tables on 8 A100 and on 8 CPU ranks,
#: 800 on 80 CPU ranks). With row groups, predicted steps of 80 tables on 8 A100 are 1 to 3% shorter at 1 to 3 s.
_LESS_ON_FAST_LINKS = (
    OptionOffer(names=_ON_FAST_LINKS | _GROUPS, costliest=0.0, table_s=9.5e-4, most_share=1.2, spare_s=0.05),
    OptionOffer(names=_ON_FAST_LINKS, costliest=0.0, table_s=5e-4, most_share=1.3, spare_s=0.15),
    *_LAST,
)


def offer_within(tables: TableSet, topology: Topology, left_s: float) -> OptionOffer:
    """The largest offer whose options are worked out in time.

    Args:
        tables: Those of the task; of tables that are alike, one is worked out.
        topology: Where they are to be.
        left_s: Seconds for all of the planning.
    """
    num_tables = len(set(first_alike(tables).values()))
    are_links_fast = topology.num_nodes == 1 or device_family(topology.device) == "cpu"
    offers: tuple[OptionOffer, ...] = (EVERYTHING, *(_LESS_ON_FAST_LINKS if are_links_fast else _LESS))
    return next(
        (one for one in offers if one.table_s * num_tables <= one.most_share * left_s + one.spare_s), offers[-1]
    )


def space_of(
    request: PlanRequest,
    names: Collection[ShardingType] = tuple(ShardingType),
    offer: OptionOffer = EVERYTHING,
    min_partition: int = 0,
    *,
    by_kernels: bool = False,
) -> PlannerSpace:
    """The sharding options of the tables of a task, with rows behind caches where device memory is scarce.

    Args:
        request: The task.
        names: Ways that tables may be held.
        offer: Which of them tables are offered.
        min_partition: Least columns of a column shard; 0 for 32 bytes of a row.
        by_kernels: Whether a step is the kernels of its slowest rank alone.

    Raises:
        InfeasiblePlanError: If a table cannot be held as any of the names.
    """
    topology, tables = request.topology, request.tables
    levels = _spare_levels(tables, topology)
    usual = (frozenset(names) & offer.names) or frozenset(names)
    is_large = _is_large(topology)
    with_all = _with_all(tables, offer, is_large)
    room_R = room_of_ranks(tables, topology)
    with_uneven = ShardingType.ROW_WISE in names and room_R.min() < room_R.max()

    def listed(table: EmbeddingTable, is_all: bool) -> tuple[ShardingOption, ...]:
        return enumerate_options(
            table,
            topology,
            names if is_all else usual,
            request.payload,
            min_partition,
            with_exchanges=True,
            rest_on_one=offer.rest_on_one and not is_all,
            group_counts=GROUP_COUNTS if is_all else offer.group_counts,
        )

    def options_of(table: EmbeddingTable) -> list[ShardingOption]:
        is_all = with_all(table)
        offered = listed(table, is_all)
        if not is_all and all(why_not(option, topology) for option in offered):
            offered = listed(table, True)
        if not offered:
            raise InfeasiblePlanError(f"{table.name}: {why_none(table, topology, names)}")
        simple = [option for option in offered if option.name is not ShardingType.ROW_TIERS]
        cached = [
            _behind_cache(option, level, share, topology, tables.batch_size)
            for level in levels
            for share in _CACHE_SHARES
            for option in simple
        ]
        is_uneven = with_uneven and is_all and is_large(table)
        uneven = uneven_options(table, topology, room_R, request.payload) if is_uneven else []
        return [*offered, *uneven, *cached]

    return PlannerSpace(tables, topology, request.costs, options_of, request.payload, by_kernels=by_kernels)


def _is_large(topology: Topology) -> Callable[[EmbeddingTable], bool]:
    """Whether a table takes much of the memory that devices have in the mean."""
    memory_bytes = float(np.mean(topology.hbm_bytes))
    return lambda table: table.storage_bytes > _LARGE_SHARE * memory_bytes


def _with_all(
    tables: TableSet, offer: OptionOffer, is_large: Callable[[EmbeddingTable], bool]
) -> Callable[[EmbeddingTable], bool]:
    """Whether a table is one of the costliest, by the bytes that a sample reads of it, or large."""
    if offer is EVERYTHING:
        return lambda _: True
    if (names := offer.always) is not None:
        return lambda table: table.name in names
    least_bytes = float(np.quantile([looked_up_bytes(table) for table in tables.tables], 1 - offer.costliest))
    return lambda table: looked_up_bytes(table) >= least_bytes or is_large(table)


def looked_up_bytes(table: EmbeddingTable) -> float:
    """Bytes that a sample reads of a table."""
    return table.pooling_factor * table.embedding_dim * table.dtype.num_bytes


def _spare_levels(tables: TableSet, topology: Topology) -> list[MemoryLevel]:
    """Memory levels below the devices' that there are, if the devices' memory is scarce; the fastest first."""
    memories = [topology.memory_of(rank) for rank in range(topology.world_size)]
    held = tables.storage_bytes
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
