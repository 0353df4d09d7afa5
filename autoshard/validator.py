"""Checks a plan against its tables and topology, whoever made it.

Shares no code with the planners, so that one mistake cannot hide another: bytes, tiles and tiers are worked out here
anew from the plan's data.

Shape suffixes: R ranks of a replica group, W ranks of the world.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn, TypeAlias

import numpy as np

from autoshard.core import (
    Collective,
    EmbeddingTable,
    Exchange,
    GradSync,
    ImpliedOrder,
    MemoryLevel,
    PlacedShard,
    Pooling,
    RowsBy,
    ShardingPlan,
    Split,
    Tier,
)
from autoshard.core.access import IntArray
from autoshard.core.errors import InvalidPlanError
from autoshard.core.quoting import write_bytes
from autoshard.core.shard import Replicas

#: A shard with its place in the plan.
_Numbered: TypeAlias = tuple[int, PlacedShard]


def validate_plan(plan: ShardingPlan, *, to_execute: bool = False) -> None:
    """Checks that a plan places its tables exactly, within its topology and its tables' constraints.

    Args:
        plan: Any plan.
        to_execute: Whether tables that are cut by access rank need the row order that says which rows these are;
            pricing does without.

    Raises:
        InvalidPlanError: At the first fault; the field names the shard, the text what would be accepted.
    """
    group = _Group(plan)
    shards_of: dict[str, list[_Numbered]] = {table.name: [] for table in plan.tables.tables}
    tables = {table.name: table for table in plan.tables.tables}
    # Thousands of shards are held as others are, and tables cut as others: what was right of one is right of all.
    right: set[object] = set()
    for index, placed in enumerate(plan.shards):
        table = placed.shard.table
        known = tables.get(table.name)
        if known is not table and known != table:
            _fail(index, "table", f"{table.name!r} is not one of the plan's tables, or another one by that name")
        shards_of[table.name].append((index, placed))
        if (held := _held_as(placed)) not in right:
            group.check_tier(index, placed)
            group.check_fetch(index, placed)
            _check_travel(index, placed)
            group.check_collective(index, placed)
            right.add(held)
    for table in plan.tables.tables:
        if (cut := _cut_as(table, shards_of[table.name])) not in right:
            _check_tiles(table, shards_of[table.name])
            right.add(cut)
    _check_constraints(plan, shards_of)
    _check_row_orders(plan, shards_of, to_execute=to_execute)
    _check_memory(plan, group)


def is_valid(plan: ShardingPlan) -> bool:
    """Whether `validate_plan` finds nothing."""
    try:
        validate_plan(plan)
    except InvalidPlanError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Holders:
    """Replicas, looked at once for all shards that have the same."""

    fault: str
    """What is wrong with them whatever the tier, or nothing."""
    sets: frozenset[frozenset[int]]
    ranks: IntArray


class _Group:
    """The ranks of one replica group, and how they lie on nodes."""

    def __init__(self, plan: ShardingPlan) -> None:
        topology, groups = plan.topology, plan.replica_groups
        self.size = groups.group_topology(topology).world_size
        self.payload = plan.payload
        self.ranks = frozenset(range(self.size))
        #: For each rank of the group, the ranks of the world that stand there in one group or another.
        self.world_ranks = [groups.world_ranks(rank, topology) for rank in range(self.size)]
        nodes: dict[tuple[int, ...], set[int]] = defaultdict(set)
        for rank, world_ranks in enumerate(self.world_ranks):
            nodes[tuple(map(topology.node_of, world_ranks))].add(rank)
        self.nodes = frozenset(frozenset(ranks) for ranks in nodes.values())
        # By object besides: replicas of thousands of ranks take as long to compare as to look at.
        self._by_object: dict[int, _Holders] = {}
        self._known: dict[Replicas, _Holders] = {}

    def holders(self, replicas: Replicas) -> _Holders:
        """The ranks of some replicas."""
        if id(replicas) not in self._by_object:
            if replicas not in self._known:
                self._known[replicas] = _Holders(
                    fault=self._fault(replicas),
                    sets=frozenset(frozenset(replica) for replica in replicas),
                    ranks=np.array([rank for replica in replicas for rank in replica], dtype=np.int64),
                )
            self._by_object[id(replicas)] = self._known[replicas]
        return self._by_object[id(replicas)]

    def _fault(self, replicas: Replicas) -> str:
        if not replicas or not all(replicas):
            return "needs one or more replicas of one or more ranks"
        sizes = {len(replica) for replica in replicas}
        if len(sizes) > 1:
            return f"must be replicas of one size, got {min(sizes)} and {max(sizes)} ranks"
        seen: set[int] = set()
        for rank in (rank for replica in replicas for rank in replica):
            if rank not in self.ranks:
                return f"must be ranks in [0, {self.size}), got {rank}"
            if rank in seen:
                return f"must be different ranks, got {rank} twice"
            seen.add(rank)
        return ""

    def check_tier(self, index: int, placed: PlacedShard) -> None:
        """Replicas are of one size, each rank is in one of them, and the tier's label says what they are."""
        holders = self.holders(placed.replicas)
        if holders.fault:
            _fail(index, "replicas", holders.fault)
        sets = holders.sets
        single = len(placed.replicas[0]) == 1
        fits, meaning = {
            Tier.TABLE_WISE: (len(sets) == 1 and single, "one replica on one rank"),
            Tier.ROW_WISE: (sets == {self.ranks}, f"one replica over all {self.size} ranks"),
            Tier.TABLE_ROW_WISE: (len(sets) == 1 and sets <= self.nodes, "one replica over the ranks of one node"),
            Tier.DATA_PARALLEL: (single and len(sets) == self.size, f"one replica on each of {self.size} ranks"),
            Tier.FLEX: (sets == self.nodes, f"one replica over each of {len(self.nodes)} nodes"),
            Tier.REPLICATED: (single and len(sets) > 1, "two or more replicas of one rank each"),
        }[placed.tier]
        if not fits:
            _fail(index, "replicas", f"tier {placed.tier} means {meaning}, got {_shown(placed.replicas)}")

    def check_fetch(self, index: int, placed: PlacedShard) -> None:
        """Each rank reads a replica that is there; in a data-parallel tier, its own."""
        if placed.fetch is None:
            return
        if len(placed.fetch) != self.size:
            _fail(index, "fetch", f"must name a replica for each of {self.size} ranks, got {len(placed.fetch)}")
        for rank, replica in enumerate(placed.fetch):
            if not 0 <= replica < len(placed.replicas):
                _fail(index, "fetch", f"must be replicas in [0, {len(placed.replicas)}), got {replica}")
            if placed.tier is Tier.DATA_PARALLEL and rank not in placed.replicas[replica]:
                _fail(index, "fetch", f"rank {rank} must read its own replica in tier {placed.tier}, got {replica}")

    def check_collective(self, index: int, placed: PlacedShard) -> None:
        """A reduce-scatter adds up the sums of all ranks, in a number format that can be added."""
        if placed.collective is Collective.ALL_TO_ALL:
            return
        if placed.exchange is not Exchange.PARTIAL_SUMS:
            fault = f"exchange {placed.exchange}; only partial_sums can be added up on the way"
        elif self.holders(placed.replicas).sets != {self.ranks}:
            fault = f"replicas {_shown(placed.replicas)}; sums must come from one replica over all {self.size} ranks"
        elif not self.payload.can_be_summed:
            fault = "an int8 payload; sums are added up in the payload's format, so fp32, fp16 or bf16 is accepted"
        else:
            return
        _fail(index, "collective", f"must be all_to_all, got {placed.collective} with {fault}")


def _check_travel(index: int, placed: PlacedShard) -> None:
    """Row split, exchange and gradient synchronisation fit the rows, the pooling and the replicas."""
    table, num_replicas = placed.shard.table, len(placed.replicas)
    if placed.shard.rows.by is RowsBy.ACCESS_RANK and placed.split is Split.BLOCK and len(placed.replicas[0]) > 1:
        _fail(
            index,
            "split",
            "rows in falling access frequency over several ranks must be split cyclic or hash, since blocks "
            "overload the first rank, got block",
        )
    if table.pooling is Pooling.SEQUENCE and placed.exchange is not Exchange.ROWS:
        _fail(index, "exchange", f"must be rows for a sequence table, got {placed.exchange}")
    if placed.deduplicate and placed.exchange is not Exchange.ROWS:
        _fail(index, "deduplicate", f"must be false unless rows are exchanged, got {placed.exchange}")
    if (placed.grad_sync is GradSync.NONE) != (num_replicas == 1):
        accepted = f"dense, sparse or all_gather for {num_replicas} replicas"
        accepted = "none for one replica" if num_replicas == 1 else accepted
        _fail(index, "grad_sync", f"must be {accepted}, got {placed.grad_sync}")


def _held_as(placed: PlacedShard) -> object:
    """All that tells whether ranks can hold a shard so, and rows and gradients travel so; replicas by their object."""
    travel = (placed.exchange, placed.collective, placed.deduplicate, placed.grad_sync, placed.split)
    return placed.tier, id(placed.replicas), placed.fetch, travel, placed.shard.rows.by, placed.shard.table.pooling


def _cut_as(table: EmbeddingTable, shards: Sequence[_Numbered]) -> object:
    """All that tells whether the shards cover a table: its size, and their rows and columns."""
    parts = [placed.shard for _, placed in shards]
    cuts = tuple([(part.rows.by, part.rows.start, part.rows.stop, part.columns) for part in parts])
    return table.num_embeddings, table.embedding_dim, cuts


def _check_tiles(table: EmbeddingTable, shards: Sequence[_Numbered]) -> None:
    """The shards cover each row and column of the table once.

    One pass down the rows: between two row bounds the shards that are open there must stand side by side from column
    0 to the last.
    """
    kinds = {placed.shard.rows.by: index for index, placed in shards}
    if len(kinds) > 1:
        _fail(max(kinds.values()), "rows", f"table {table.name!r} is cut by {' and by '.join(sorted(kinds))}; use one")
    starts: dict[int, list[_Numbered]] = defaultdict(list)
    stops: dict[int, list[_Numbered]] = defaultdict(list)
    for index, placed in shards:
        starts[placed.shard.rows.start].append((index, placed))
        stops[placed.shard.rows.stop].append((index, placed))
    bounds = sorted({0, table.num_embeddings, *starts, *stops})
    open_columns: list[tuple[int, int, int]] = []  # first column, end and index of the open shards, in order
    for row, next_row in pairwise(bounds):
        for index, placed in stops[row]:
            open_columns.remove((*placed.shard.columns, index))
        for index, placed in starts[row]:
            insort(open_columns, (*placed.shard.columns, index))
        _check_columns(table, open_columns, f"rows [{row}, {next_row})")


def _check_columns(table: EmbeddingTable, open_columns: Sequence[tuple[int, int, int]], rows: str) -> None:
    reached, last = 0, -1
    for start, stop, index in [*open_columns, (table.embedding_dim, table.embedding_dim, -1)]:
        if start > reached:
            raise InvalidPlanError(
                f"table {table.name!r}: no shard holds columns [{reached}, {start}) of {rows}", field="shards"
            )
        if start < reached and index >= 0:
            _fail(
                index,
                "columns",
                f"table {table.name!r}: columns [{start}, {min(stop, reached)}) of {rows} are in shards[{last}] too",
            )
        reached, last = stop, index


def _check_constraints(plan: ShardingPlan, shards_of: Mapping[str, Sequence[_Numbered]]) -> None:
    """Pinned ranks, forbidden tiers and co-location hold."""
    for number, table in enumerate(plan.tables.tables):
        constraints, shards = table.constraints, shards_of[table.name]
        for index, placed in shards if constraints.forbidden_tiers or constraints.pinned_ranks else ():
            if placed.tier in constraints.forbidden_tiers:
                _fail(index, "tier", f"table {table.name!r} forbids tier {placed.tier}")
            stray = _ranks([(index, placed)]).difference(constraints.pinned_ranks) if constraints.pinned_ranks else ()
            if stray:
                pinned = ", ".join(map(str, constraints.pinned_ranks))
                _fail(index, "replicas", f"table {table.name!r} is pinned to ranks {pinned}, got {min(stray)}")
        for other in constraints.colocate_with:
            if other not in shards_of:
                raise InvalidPlanError(
                    f"names {other!r}, which is no table", field=f"tables.tables[{number}].constraints.colocate_with"
                )
            if _ranks(shards) != _ranks(shards_of[other]):
                _fail(shards[0][0], "replicas", f"table {table.name!r} must be on the ranks of table {other!r}")


def _check_row_orders(plan: ShardingPlan, shards_of: Mapping[str, Sequence[_Numbered]], *, to_execute: bool) -> None:
    """Row orders are of tables that are there and no longer than them, and none is missing that execution needs."""
    tables = {table.name: table for table in plan.tables.tables}
    for name, order in plan.row_orders.items():
        num_rows = tables[name].num_embeddings if name in tables else 0
        if not 1 <= order.num_ordered <= num_rows:
            raise InvalidPlanError(
                f"must order 1 to {num_rows} rows of a table, got {order.num_ordered}", field=f"row_orders.{name}"
            )
    for name, shards in shards_of.items() if to_execute else ():
        if name in plan.row_orders or tables[name].row_order is ImpliedOrder.BY_ID:
            continue
        for index, placed in shards:
            rows = placed.shard.rows
            if rows.by is RowsBy.ACCESS_RANK and rows.num_rows < tables[name].num_embeddings:
                _fail(index, "rows", f"is cut by access rank, so execution needs row_orders of table {name!r}")


def _check_memory(plan: ShardingPlan, group: _Group) -> None:
    """Weights, optimizer state and caches of every rank fit its memory, level by level."""
    # Doubles, since sums of absurd sizes would wrap around in 64-bit integers; exact to 9 PB.
    held_R = {level: np.zeros(group.size) for level in MemoryLevel}
    world_ranks = np.array(group.world_ranks)
    held_by: dict[tuple[_Holders, MemoryLevel], int] = defaultdict(int)
    for placed in plan.shards:
        holders = group.holders(placed.replicas)
        for level, num_bytes in _bytes_per_rank(placed).items():
            held_by[holders, level] += num_bytes
    for (holders, level), num_bytes in held_by.items():
        held_R[level][holders.ranks] += float(num_bytes)
    for level, held in held_R.items():
        limit_of_world = np.full(plan.topology.world_size, plan.topology.memory_bytes[level], dtype=np.float64)
        for rank, memory in plan.topology.overrides:
            limit_of_world[rank] = memory[level]
        limits_R = limit_of_world[world_ranks].min(axis=1)
        for rank in np.flatnonzero(held > limits_R).tolist():
            largest = max(
                (index for index, placed in enumerate(plan.shards) if _is_held_by(placed, rank)),
                key=lambda index: _bytes_per_rank(plan.shards[index])[level],
            )
            _fail(
                largest,
                "memory",
                f"rank {rank} would hold {write_bytes(held[rank])} of {level}, "
                f"{write_bytes(held[rank] - limits_R[rank])} more than its {write_bytes(limits_R[rank])}; "
                "this shard is the largest there",
            )


def _bytes_per_rank(placed: PlacedShard) -> dict[MemoryLevel, int]:
    """Bytes by memory level on each rank of a replica; the last rank may hold fewer rows than that."""
    num_rows = -(-placed.shard.rows.num_rows // len(placed.replicas[0]))
    return placed.memory.held_bytes(placed.shard.table, num_rows, placed.shard.embedding_dim)


def _is_held_by(placed: PlacedShard, rank: int) -> bool:
    return any(rank in replica for replica in placed.replicas)


def _ranks(shards: Sequence[_Numbered]) -> set[int]:
    return {rank for _, placed in shards for replica in placed.replicas for rank in replica}


def _shown(replicas: Sequence[Sequence[int]]) -> str:
    text = str([list(replica) for replica in replicas[:8]])
    return text if len(text) <= 60 and len(replicas) <= 8 else f"{len(replicas)} of {len(replicas[0])} ranks"


def _fail(index: int, field: str, message: str) -> NoReturn:
    raise InvalidPlanError(message, field=f"shards[{index}].{field}")
