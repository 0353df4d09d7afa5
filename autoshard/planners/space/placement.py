"""Placements as arrays: items with additive codes and bytes, each on one rank.

Shape suffixes: U shards, N items, R ranks, H width of a code, X of any row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from autoshard.core import (
    CostModel,
    LocalShard,
    MemoryLevel,
    Payload,
    RowRange,
    Shard,
    ShardingPlan,
    TableSet,
    Tier,
    Topology,
)
from autoshard.core.costs import CodeArray, MsArray
from autoshard.core.errors import InfeasiblePlanError
from autoshard.core.quoting import write_bytes
from autoshard.planners.space.constraints import allowed_sites, check_constraints, colocated
from autoshard.planners.space.options import locals_of, placed_shard

RankArray = NDArray[np.int64]
_Number = TypeVar("_Number", bound=np.generic)
_MEMORY = {MemoryLevel.HBM: "device memory", MemoryLevel.DDR: "host memory", MemoryLevel.SSD: "disks"}


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Items and what ranks have room for, whatever they cost.

    An item is a shard (a whole table, a row group, some columns), or several that must share a rank. A placement names
    for each item its rank.

    Attributes:
        shards: What is placed.
        members: For each item, the indices of its shards.
        bytes_N: Weights and optimizer state of each item.
        capacity_R: Bytes that each rank can hold.
        allowed_NR: Whether the constraints allow an item each rank.
    """

    shards: tuple[Shard, ...]
    members: tuple[tuple[int, ...], ...]
    bytes_N: NDArray[np.int64]
    capacity_R: NDArray[np.int64]
    allowed_NR: NDArray[np.bool_]

    @classmethod
    def on_single_ranks(
        cls, tables: TableSet, topology: Topology, shards: Sequence[Shard], capacity_R: NDArray[np.int64]
    ) -> Packing:
        """Every shard on one rank; those of tables that must share a rank make one item.

        Args:
            tables: The task's tables.
            topology: The task's topology.
            shards: Parts of some of the tables.
            capacity_R: Bytes that they may take of each rank.
        """
        members = _items(tables, shards)
        bytes_U = np.array([shard.storage_bytes for shard in shards], dtype=np.int64)
        return Packing(
            shards=tuple(shards),
            members=members,
            bytes_N=summed_members(bytes_U, members),
            capacity_R=capacity_R,
            allowed_NR=_allowed(tables, topology, shards, members),
        )

    @property
    def num_items(self) -> int:
        """N."""
        return len(self.members)

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self.capacity_R)

    def label(self, item: int) -> str:
        """Names of an item's tables."""
        return "+".join(dict.fromkeys(self.shards[index].table.name for index in self.members[item]))

    def rank_bytes(self, ranks_N: RankArray) -> NDArray[np.int64]:
        """Bytes per rank, shape (R,)."""
        return _rank_sums(self.bytes_N, ranks_N, self.num_ranks)

    def is_feasible(self, ranks_N: RankArray) -> bool:
        """Whether memory limits and constraints hold."""
        allowed = bool(self.allowed_NR[np.arange(self.num_items), ranks_N].all())
        return allowed and bool((self.rank_bytes(ranks_N) <= self.capacity_R).all())


@dataclass(frozen=True, slots=True, eq=False)
class PlacementProblem(Packing):
    """Items to be placed, each on one rank.

    Codes and bytes of an item add up over its shards, which tile the tables.

    Attributes:
        tables: The task's tables.
        topology: The task's topology.
        model: The cost model that the codes are of.
        codes_NH: What each item adds to the codes of its rank.
        kernel_ms_N: Price of each item alone on a rank.
        payload: Number formats of what is sent.
    """

    tables: TableSet
    topology: Topology
    model: CostModel
    codes_NH: CodeArray
    kernel_ms_N: MsArray
    payload: Payload = field(default_factory=Payload)

    @classmethod
    def table_wise(
        cls, tables: TableSet, topology: Topology, model: CostModel, payload: Payload | None = None
    ) -> PlacementProblem:
        """Every table whole, on one rank; see `of`."""
        return cls.of(tables, topology, model, [Shard.whole(table) for table in tables.tables], payload=payload)

    @classmethod
    def of(
        cls,
        tables: TableSet,
        topology: Topology,
        model: CostModel,
        shards: Sequence[Shard],
        payload: Payload | None = None,
    ) -> PlacementProblem:
        """Every shard on one rank; shards of tables that must share a rank make one item.

        Args:
            tables: The task's tables.
            topology: The task's topology.
            model: Prices shards.
            shards: Parts that tile the tables.
            payload: Number formats of what is sent; fp32 if left out.

        Raises:
            InvalidPlanError: If a constraint names a table or rank that is not there.
            InfeasiblePlanError: If an item fits nowhere, or all together exceed the memory.
            ModelError: If the model cannot price a shard as it would be held.
        """
        check_constraints(tables, topology)
        members = _items(tables, shards)
        locals_ = _locals(shards, topology, tables.batch_size)
        codes_NH = summed_members(model.encode(locals_), members)
        bytes_U = np.array([local.memory_bytes for local in locals_], dtype=np.int64)
        problem = cls(
            tables=tables,
            topology=topology,
            shards=tuple(shards),
            members=members,
            model=model,
            codes_NH=codes_NH,
            bytes_N=summed_members(bytes_U, members),
            kernel_ms_N=model.predict_ms(codes_NH),
            capacity_R=np.array(topology.hbm_bytes, dtype=np.int64),
            allowed_NR=_allowed(tables, topology, shards, members),
            payload=payload or Payload(),
        )
        problem._check_feasible()
        return problem

    def locals_(self) -> tuple[LocalShard, ...]:
        """What the rank that holds it runs of each shard, shape (U,)."""
        return _locals(self.shards, self.topology, self.tables.batch_size)

    def rank_codes(self, ranks_N: RankArray) -> CodeArray:
        """Sums of codes per rank, shape (R, H)."""
        return _rank_sums(self.codes_NH, ranks_N, self.num_ranks)

    def rank_ms(self, ranks_N: RankArray) -> MsArray:
        """Predicted kernel time per rank, shape (R,); a rank without items costs 0."""
        cost_ms = self.model.predict_ms(self.rank_codes(ranks_N))
        return np.where(np.bincount(ranks_N, minlength=self.num_ranks) > 0, cost_ms, 0.0)

    def to_plan(self, ranks_N: RankArray) -> ShardingPlan:
        """The plan that places item n as `ranks_N[n]` says."""
        rank_of = {index: int(rank) for group, rank in zip(self.members, ranks_N, strict=True) for index in group}
        shards = tuple(
            placed_shard(shard, Tier.TABLE_WISE, self.topology, rank_of[index])
            for index, shard in enumerate(self.shards)
        )
        return ShardingPlan(tables=self.tables, topology=self.topology, shards=shards, payload=self.payload)

    def ranks_of(self, plan: ShardingPlan) -> RankArray:
        """Ranks of the items in a plan of the same shards on single ranks, shape (N,)."""
        rank_of = {_key(placed.shard): placed.replicas[0][0] for placed in plan.shards}
        return np.array([rank_of[_key(self.shards[group[0]])] for group in self.members], dtype=np.int64)

    def _check_feasible(self) -> None:
        fits_N = (self.allowed_NR & (self.bytes_N[:, None] <= self.capacity_R)).any(axis=1)
        for item in np.flatnonzero(~fits_N).tolist():
            room = int(np.where(self.allowed_NR[item], self.capacity_R, -1).max())
            if room < 0:
                raise InfeasiblePlanError(f"{self.label(item)}: its constraints leave no rank that may hold it whole")
            missing = int(self.bytes_N[item]) - room
            raise InfeasiblePlanError(
                f"{self.label(item)} needs {write_bytes(self.bytes_N[item])} on one rank, {write_bytes(missing)} more "
                f"than the device memory of the largest rank that may hold it ({write_bytes(room)})"
            )
        # Sums of any size, as arrays cannot have them.
        needed, there = sum(self.bytes_N.tolist()), sum(self.capacity_R.tolist())
        if needed > there:
            raise exceeds_total(needed, {MemoryLevel.HBM: there}, self.num_ranks)


def _key(shard: Shard) -> tuple[str, RowRange, tuple[int, int]]:
    """What tells the shards of a task apart."""
    return shard.table.name, shard.rows, shard.columns


def is_table_wise(plan: ShardingPlan) -> bool:
    """Whether a plan holds every table whole on one rank, over one replica group."""
    is_whole = len(plan.shards) == len(plan.tables.tables) and plan.replica_groups.num_groups == 1
    return is_whole and all(placed.tier is Tier.TABLE_WISE for placed in plan.shards)


def write_memory(room_M: Mapping[MemoryLevel, int], num_ranks: int, less: Sequence[str] = ()) -> str:
    """Words for the memory that tables may take.

    Args:
        room_M: Bytes of all ranks by level; other levels than the devices' are left out where there are none.
        num_ranks: All ranks.
        less: Names of options that keep device memory free.
    """
    *others, last = [word for level, word in _MEMORY.items() if level is MemoryLevel.HBM or room_M.get(level)]
    memory = f"{', '.join(others)} and {last}" if others else last
    ranks = "the rank" if num_ranks == 1 else f"the {num_ranks} ranks"
    kept = f" less {' and '.join(less)}" if less else ""
    return f"the {memory} of {ranks}{kept} ({write_bytes(sum(room_M.values()))})"


def exceeds_total(
    needed: int, room_M: Mapping[MemoryLevel, int], num_ranks: int, less: Sequence[str] = ()
) -> InfeasiblePlanError:
    """The error for tables that need more bytes than there are, all of them together; see `write_memory`."""
    over = needed - sum(room_M.values())
    memory = write_memory(room_M, num_ranks, less)
    return InfeasiblePlanError(f"all tables need {write_bytes(needed)}, {write_bytes(over)} more than {memory}")


def _rank_sums(rows_NX: NDArray[_Number], ranks_N: RankArray, num_ranks: int) -> NDArray[_Number]:
    """Sums over the items of each rank, shape (R, X); X may be no axis at all."""
    sums_RX: NDArray[Any] = np.zeros((num_ranks, *rows_NX.shape[1:]), dtype=rows_NX.dtype)
    np.add.at(sums_RX, ranks_N, rows_NX)
    return sums_RX


def summed_members(rows_UX: NDArray[_Number], members: Sequence[Sequence[int]]) -> NDArray[_Number]:
    """Sums over the shards of each item, shape (N, X)."""
    if len(members) == len(rows_UX):
        return rows_UX[[index for (index,) in members]]
    added = np.stack([rows_UX[list(group)].sum(axis=0) for group in members])
    return added.astype(rows_UX.dtype)


def _locals(shards: Sequence[Shard], topology: Topology, batch_size: int) -> tuple[LocalShard, ...]:
    return tuple(locals_of([placed_shard(shard, Tier.TABLE_WISE, topology) for shard in shards], batch_size))


def _items(tables: TableSet, shards: Sequence[Shard]) -> tuple[tuple[int, ...], ...]:
    """Indices of the shards of each item: one by one, but together for tables that must share a rank."""
    of_table: dict[str, list[int]] = {}
    for index, shard in enumerate(shards):
        of_table.setdefault(shard.table.name, []).append(index)
    items: list[tuple[int, ...]] = []
    for group in colocated(tables):
        indices = [index for table in group for index in of_table.get(table.name, ())]
        items += [tuple(indices)] if len(group) > 1 and indices else [(index,) for index in indices]
    return tuple(items)


def _allowed(
    tables: TableSet, topology: Topology, shards: Sequence[Shard], members: Sequence[Sequence[int]]
) -> NDArray[np.bool_]:
    """Whether the constraints of all its tables allow an item each rank, shape (N, R)."""
    by_table = {table.name: allowed_sites(table, Tier.TABLE_WISE, topology) for table in tables.tables}
    return np.stack(
        [reduce(np.logical_and, [by_table[shards[index].table.name] for index in group]) for group in members]
    )
