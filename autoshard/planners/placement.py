"""Table-wise placement as arrays: items with additive codes and bytes, ranks with capacities.

Shape suffixes: N items, R ranks, H width of a code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.core import (
    CostModel,
    LocalShard,
    PlacedShard,
    Shard,
    ShardingPlan,
    TableSet,
    Tier,
    Topology,
    local_shard,
)
from autoshard.core.costs import CodeArray, MsArray
from autoshard.core.errors import InfeasiblePlanError, InvalidPlanError

RankArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PlacementProblem:
    """Items to be placed on one rank each.

    An item is a whole table, or several that must share a rank: codes and bytes add up, so nobody needs to know.

    Attributes:
        tables: The task's tables.
        topology: The task's topology.
        members: For each item, the indices of its tables.
        locals: For each table, what a rank that holds it runs.
        codes_NH: The cost model's codes of the items.
        kernel_ms_N: Price of each item alone.
        bytes_N: Weights and optimizer state of the items.
        capacity_R: Bytes that each rank can hold.
        allowed_NR: Whether an item may go to a rank.
        model: The cost model that the codes are of.
    """

    tables: TableSet
    topology: Topology
    members: tuple[tuple[int, ...], ...]
    locals: tuple[LocalShard, ...]
    codes_NH: CodeArray
    kernel_ms_N: MsArray
    bytes_N: NDArray[np.int64]
    capacity_R: NDArray[np.int64]
    allowed_NR: NDArray[np.bool_]
    model: CostModel

    @classmethod
    def table_wise(cls, tables: TableSet, topology: Topology, model: CostModel) -> PlacementProblem:
        """Every table whole, on one rank.

        Raises:
            InvalidPlanError: If a constraint names a table or rank that is not there.
            InfeasiblePlanError: If an item fits no rank that it may go to, or all together exceed the memory.
        """
        placed = [PlacedShard.table_wise(Shard.whole(table), 0) for table in tables.tables]
        locals_ = tuple(local_shard(item, group_batch_size=tables.batch_size) for item in placed)
        members = _colocated(tables)
        codes_TH = model.encode(locals_)
        codes_NH = np.stack([codes_TH[list(group)].sum(axis=0) for group in members]).astype(np.float32)
        bytes_T = np.array([item.shard.hbm_bytes for item in placed], dtype=np.int64)
        problem = cls(
            tables=tables,
            topology=topology,
            members=members,
            locals=locals_,
            codes_NH=codes_NH,
            kernel_ms_N=model.price(codes_NH),
            bytes_N=np.array([bytes_T[list(group)].sum() for group in members], dtype=np.int64),
            capacity_R=np.array([topology.memory_of(rank).hbm for rank in range(topology.world_size)], dtype=np.int64),
            allowed_NR=_allowed(tables, topology, members),
            model=model,
        )
        problem._check_feasible()
        return problem

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
        return "+".join(self.tables.tables[index].name for index in self.members[item])

    def rank_codes(self, ranks_N: RankArray) -> CodeArray:
        """Sums of codes per rank, shape (R, H)."""
        codes = np.zeros((self.num_ranks, self.codes_NH.shape[1]), dtype=np.float32)
        np.add.at(codes, ranks_N, self.codes_NH)
        return codes

    def rank_bytes(self, ranks_N: RankArray) -> NDArray[np.int64]:
        """Bytes per rank, shape (R,)."""
        held = np.zeros(self.num_ranks, dtype=np.int64)
        np.add.at(held, ranks_N, self.bytes_N)
        return held

    def rank_ms(self, ranks_N: RankArray) -> MsArray:
        """Predicted kernel time per rank, shape (R,); a rank without items costs 0."""
        cost_ms = self.model.price(self.rank_codes(ranks_N))
        return np.where(np.bincount(ranks_N, minlength=self.num_ranks) > 0, cost_ms, 0.0)

    def is_feasible(self, ranks_N: RankArray) -> bool:
        """Whether memory limits and constraints hold."""
        allowed = bool(self.allowed_NR[np.arange(self.num_items), ranks_N].all())
        return allowed and bool((self.rank_bytes(ranks_N) <= self.capacity_R).all())

    def to_plan(self, ranks_N: RankArray) -> ShardingPlan:
        """The plan that places item n on rank `ranks_N[n]`."""
        rank_of = {index: int(rank) for group, rank in zip(self.members, ranks_N, strict=True) for index in group}
        shards = tuple(
            PlacedShard.table_wise(Shard.whole(table), rank_of[index]) for index, table in enumerate(self.tables.tables)
        )
        return ShardingPlan(tables=self.tables, topology=self.topology, shards=shards)

    def ranks_of(self, plan: ShardingPlan) -> RankArray:
        """Ranks of the items in a plan of whole tables for the same task, shape (N,)."""
        rank_of = {placed.shard.table.name: placed.replicas[0][0] for placed in plan.shards}
        return np.array([rank_of[self.tables.tables[group[0]].name] for group in self.members], dtype=np.int64)

    def _check_feasible(self) -> None:
        for item in range(self.num_items):
            room = int(np.where(self.allowed_NR[item], self.capacity_R, -1).max())
            if room < 0:
                raise InfeasiblePlanError(f"{self.label(item)}: its constraints leave no rank that may hold it whole")
            if self.bytes_N[item] > room:
                missing = int(self.bytes_N[item]) - room
                raise InfeasiblePlanError(
                    f"{self.label(item)} needs {int(self.bytes_N[item]):,} bytes on one rank, {missing:,} bytes more "
                    f"than the largest rank that may hold it has ({room:,})"
                )
        missing = int(self.bytes_N.sum() - self.capacity_R.sum())
        if missing > 0:
            raise InfeasiblePlanError(
                f"all tables need {int(self.bytes_N.sum()):,} bytes, {missing:,} bytes more than the "
                f"{self.num_ranks} ranks have together"
            )


def does_not_fit(
    problem: PlacementProblem, item: int, held_R: Sequence[int] | NDArray[np.int64]
) -> InfeasiblePlanError:
    """The error for an item that no rank has room for, given the bytes that ranks hold already."""
    free_R = np.where(problem.allowed_NR[item], problem.capacity_R - np.asarray(held_R), -1)
    missing = int(problem.bytes_N[item] - free_R.max())
    return InfeasiblePlanError(
        f"{problem.label(item)} needs {int(problem.bytes_N[item]):,} bytes, {missing:,} bytes more than are free on "
        f"rank {int(free_R.argmax())}, the one with most room left"
    )


def _colocated(tables: TableSet) -> tuple[tuple[int, ...], ...]:
    index_of = {table.name: index for index, table in enumerate(tables.tables)}
    root = list(range(len(index_of)))

    def find(index: int) -> int:
        while root[index] != index:
            index = root[index]
        return index

    for index, table in enumerate(tables.tables):
        for name in table.constraints.colocate_with:
            if name not in index_of:
                raise InvalidPlanError(
                    f"names {name!r}, which is no table", field=f"tables[{index}].constraints.colocate_with"
                )
            low, high = sorted((find(index), find(index_of[name])))
            root[high] = low
    groups: dict[int, list[int]] = {}
    for index in range(len(root)):
        groups.setdefault(find(index), []).append(index)
    return tuple(tuple(group) for group in groups.values())


def _allowed(tables: TableSet, topology: Topology, members: tuple[tuple[int, ...], ...]) -> NDArray[np.bool_]:
    allowed = np.ones((len(members), topology.world_size), dtype=np.bool_)
    for item, group in enumerate(members):
        for index in group:
            constraints = tables.tables[index].constraints
            if Tier.TABLE_WISE in constraints.forbidden_tiers:
                allowed[item] = False
            if constraints.pinned_ranks:
                bad = [rank for rank in constraints.pinned_ranks if not 0 <= rank < topology.world_size]
                if bad:
                    raise InvalidPlanError(
                        f"must be in [0, {topology.world_size}), got {bad[0]}",
                        field=f"tables[{index}].constraints.pinned_ranks",
                    )
                pinned = np.zeros(topology.world_size, dtype=np.bool_)
                pinned[list(constraints.pinned_ranks)] = True
                allowed[item] &= pinned
    return allowed
