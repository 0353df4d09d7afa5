"""Placement as arrays: items with additive codes and bytes, ranks with capacities, tiers that all ranks share.

Shape suffixes: U shards, N items, R ranks, K tiers, H width of a code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autoshard.core import (
    CostModel,
    GradSync,
    LocalShard,
    PlacedShard,
    Shard,
    ShardingPlan,
    Split,
    TableSet,
    Tier,
    Topology,
    local_shard,
)
from autoshard.core.costs import CodeArray, MsArray
from autoshard.core.errors import InfeasiblePlanError, InvalidOptionError
from autoshard.evaluation.traffic import cheaper_exchange
from autoshard.planners.space.constraints import allowed_ranks, check_constraints, colocated

RankArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class SharedTier:
    """A way to hold items that puts the same on every rank: replicated, or with rows split over ranks.

    Attributes:
        tier: Which.
        placed: For each shard, how it is held.
        locals: For each shard, what every rank runs of it.
        codes_NH: What an item adds to the code of every rank.
        bytes_N: Bytes that an item takes of every rank.
        allowed_N: Whether an item may be held so.
    """

    tier: Tier
    placed: tuple[PlacedShard, ...]
    locals: tuple[LocalShard, ...]
    codes_NH: CodeArray
    bytes_N: NDArray[np.int64]
    allowed_N: NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class PlacementProblem:
    """Items to be placed, each on one rank or, where the problem offers it, on all ranks by one of K tiers.

    An item is a shard (a whole table, a row group, some columns), or several that must share a rank: codes and bytes
    add up, so nobody needs to know. A placement names for each item its rank, or R + k for the k-th shared tier.

    Attributes:
        tables: The task's tables.
        topology: The task's topology.
        shards: What the tables are cut into; they tile the tables.
        members: For each item, the indices of its shards.
        locals: For each shard, what a rank that holds it alone runs.
        codes_NH: The cost model's codes of the items on a rank of their own.
        kernel_ms_N: Price of each item alone.
        bytes_N: Weights and optimizer state of the items.
        capacity_R: Bytes that each rank can hold.
        allowed_NR: Whether an item may go to a rank.
        model: The cost model that the codes are of.
        tiers: The shared tiers; none unless asked for.
    """

    tables: TableSet
    topology: Topology
    shards: tuple[Shard, ...]
    members: tuple[tuple[int, ...], ...]
    locals: tuple[LocalShard, ...]
    codes_NH: CodeArray
    kernel_ms_N: MsArray
    bytes_N: NDArray[np.int64]
    capacity_R: NDArray[np.int64]
    allowed_NR: NDArray[np.bool_]
    model: CostModel
    tiers: tuple[SharedTier, ...] = ()

    @classmethod
    def table_wise(cls, tables: TableSet, topology: Topology, model: CostModel) -> PlacementProblem:
        """Every table whole, on one rank; see `of`."""
        return cls.of(tables, topology, model, [Shard.whole(table) for table in tables.tables])

    @classmethod
    def of(
        cls,
        tables: TableSet,
        topology: Topology,
        model: CostModel,
        shards: Sequence[Shard],
        tiers: Sequence[Tier] = (),
    ) -> PlacementProblem:
        """Every shard on one rank, or held by one of the tiers.

        Shards of tables that must share a rank make one item.

        Args:
            tables: The task's tables.
            topology: The task's topology.
            model: Prices shards.
            shards: Parts that tile the tables.
            tiers: Any of `data_parallel`, `flex` and `row_wise`.

        Raises:
            InvalidPlanError: If a constraint names a table or rank that is not there.
            InfeasiblePlanError: If an item fits nowhere, or all together exceed the memory.
            ModelError: If the model cannot price a shard as it would be held.
        """
        check_constraints(tables, topology)
        shards = tuple(shards)
        locals_ = tuple(local_shard(on_rank(shard), group_batch_size=tables.batch_size) for shard in shards)
        members = _items(tables, shards)
        codes_NH = _added(model.encode(locals_), members)
        problem = cls(
            tables=tables,
            topology=topology,
            shards=shards,
            members=members,
            locals=locals_,
            codes_NH=codes_NH,
            kernel_ms_N=model.predict_ms(codes_NH),
            bytes_N=_added(np.array([shard.storage_bytes for shard in shards], dtype=np.int64), members),
            capacity_R=np.array([topology.memory_of(rank).hbm for rank in range(topology.world_size)], dtype=np.int64),
            allowed_NR=_allowed(tables, topology, shards, members),
            model=model,
            tiers=tuple(_shared(tier, tables, topology, model, shards, members) for tier in tiers),
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

    @property
    def num_choices(self) -> int:
        """R + K: what a placement may name for an item."""
        return self.num_ranks + len(self.tiers)

    def label(self, item: int) -> str:
        """Names of an item's tables."""
        return "+".join(dict.fromkeys(self.shards[index].table.name for index in self.members[item]))

    def rank_codes(self, ranks_N: RankArray) -> CodeArray:
        """Sums of codes per rank, shape (R, H)."""
        codes_RH = np.zeros((self.num_ranks, self.codes_NH.shape[1]), dtype=np.float32)
        alone_N = ranks_N < self.num_ranks
        np.add.at(codes_RH, ranks_N[alone_N], self.codes_NH[alone_N])
        for index, tier in enumerate(self.tiers):
            codes_RH += tier.codes_NH[ranks_N == self.num_ranks + index].sum(axis=0)
        return codes_RH

    def rank_bytes(self, ranks_N: RankArray) -> NDArray[np.int64]:
        """Bytes per rank, shape (R,)."""
        held_R = np.zeros(self.num_ranks, dtype=np.int64)
        alone_N = ranks_N < self.num_ranks
        np.add.at(held_R, ranks_N[alone_N], self.bytes_N[alone_N])
        for index, tier in enumerate(self.tiers):
            held_R += tier.bytes_N[ranks_N == self.num_ranks + index].sum()
        return held_R

    def rank_ms(self, ranks_N: RankArray) -> MsArray:
        """Predicted kernel time per rank, shape (R,); a rank without items costs 0."""
        cost_ms = self.model.predict_ms(self.rank_codes(ranks_N))
        if (ranks_N >= self.num_ranks).any():
            return cost_ms
        return np.where(np.bincount(ranks_N, minlength=self.num_ranks) > 0, cost_ms, 0.0)

    @property
    def may_choose(self) -> NDArray[np.bool_]:
        """Whether each item may take each choice, memory aside; shape (N, R + K)."""
        return np.concatenate([self.allowed_NR, *(tier.allowed_N[:, None] for tier in self.tiers)], axis=1)

    def is_feasible(self, ranks_N: RankArray) -> bool:
        """Whether memory limits and constraints hold."""
        allowed = bool(self.may_choose[np.arange(self.num_items), ranks_N].all())
        return allowed and bool((self.rank_bytes(ranks_N) <= self.capacity_R).all())

    def to_plan(self, ranks_N: RankArray) -> ShardingPlan:
        """The plan that places item n as `ranks_N[n]` says."""
        choice_of = {index: int(rank) for group, rank in zip(self.members, ranks_N, strict=True) for index in group}
        shards = tuple(
            on_rank(shard, choice_of[index])
            if choice_of[index] < self.num_ranks
            else self.tiers[choice_of[index] - self.num_ranks].placed[index]
            for index, shard in enumerate(self.shards)
        )
        return ShardingPlan(tables=self.tables, topology=self.topology, shards=shards)

    def ranks_of(self, plan: ShardingPlan) -> RankArray:
        """Ranks of the items in a plan of whole tables for the same task, shape (N,)."""
        rank_of = {placed.shard.table.name: placed.replicas[0][0] for placed in plan.shards}
        return np.array([rank_of[self.shards[group[0]].table.name] for group in self.members], dtype=np.int64)

    def _check_feasible(self) -> None:
        nowhere = np.iinfo(np.int64).max
        fits_N = (self.allowed_NR & (self.bytes_N[:, None] <= self.capacity_R)).any(axis=1)
        least_N = np.where(fits_N, self.bytes_N, nowhere)
        for tier in self.tiers:
            fits_N = tier.allowed_N & (tier.bytes_N <= self.capacity_R.min())
            least_N = np.where(fits_N, np.minimum(least_N, tier.bytes_N * self.num_ranks), least_N)
        for item in np.flatnonzero(least_N == nowhere).tolist():
            room = int(np.where(self.allowed_NR[item], self.capacity_R, -1).max())
            if room < 0:
                raise InfeasiblePlanError(f"{self.label(item)}: its constraints leave no rank that may hold it whole")
            missing = int(self.bytes_N[item]) - room
            raise InfeasiblePlanError(
                f"{self.label(item)} needs {int(self.bytes_N[item]):,} bytes on one rank, {missing:,} bytes more "
                f"than the largest rank that may hold it has ({room:,})"
            )
        needed = sum(least_N.tolist())  # of any size, as arrays cannot
        missing = needed - sum(self.capacity_R.tolist())
        if missing > 0:
            raise InfeasiblePlanError(
                f"all tables need {needed:,} bytes, {missing:,} bytes more than the "
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


def on_rank(shard: Shard, rank: int = 0) -> PlacedShard:
    """The shard on a single rank, with the exchange that moves fewer bytes."""
    return replace(PlacedShard.table_wise(shard, rank), exchange=cheaper_exchange(shard, 1))


def on_all_ranks(shard: Shard, tier: Tier, topology: Topology) -> PlacedShard:
    """The shard held by all ranks: a copy each, a copy per node with rows split within, or rows split over all."""
    ranks, node = range(topology.world_size), topology.local_world_size
    groups = {Tier.DATA_PARALLEL: 1, Tier.FLEX: node, Tier.ROW_WISE: topology.world_size}
    if tier not in groups:
        raise InvalidOptionError(f"must be one of {', '.join(groups)}, got {tier}", field="tiers")
    replicas = tuple(tuple(ranks[start : start + groups[tier]]) for start in range(0, len(ranks), groups[tier]))
    return PlacedShard(
        shard=shard,
        tier=tier,
        replicas=replicas,
        split=Split.CYCLIC if len(replicas[0]) > 1 else Split.BLOCK,
        exchange=cheaper_exchange(shard, len(replicas[0])),
        grad_sync=GradSync.SPARSE if len(replicas) > 1 else GradSync.NONE,
    )


def _shared(
    tier: Tier,
    tables: TableSet,
    topology: Topology,
    model: CostModel,
    shards: Sequence[Shard],
    members: Sequence[Sequence[int]],
) -> SharedTier:
    placed = tuple(on_all_ranks(shard, tier, topology) for shard in shards)
    share = 1 / len(placed[0].replicas)
    locals_ = tuple(local_shard(one, group_batch_size=tables.batch_size, bags_share=share) for one in placed)
    is_free_U = np.array(
        [
            not (shard.table.constraints.pinned_ranks or tier in shard.table.constraints.forbidden_tiers)
            for shard in shards
        ]
    )
    return SharedTier(
        tier=tier,
        placed=placed,
        locals=locals_,
        codes_NH=_added(model.encode(locals_), members),
        bytes_N=_added(np.array([local.memory_bytes for local in locals_], dtype=np.int64), members),
        allowed_N=np.array([bool(is_free_U[list(group)].all()) for group in members]),
    )


_Number = TypeVar("_Number", bound=np.generic)


def _added(of_shards: NDArray[_Number], members: Sequence[Sequence[int]]) -> NDArray[_Number]:
    """Sums over the shards of each item."""
    added = np.stack([of_shards[list(group)].sum(axis=0) for group in members])
    return added.astype(of_shards.dtype)


def _items(tables: TableSet, shards: Sequence[Shard]) -> tuple[tuple[int, ...], ...]:
    """Indices of the shards of each item: one by one, but together for tables that must share a rank."""
    of_table: dict[str, list[int]] = {}
    for index, shard in enumerate(shards):
        of_table.setdefault(shard.table.name, []).append(index)
    items: list[tuple[int, ...]] = []
    for group in colocated(tables):
        indices = [index for table in group for index in of_table[table.name]]
        items += [tuple(indices)] if len(group) > 1 else [(index,) for index in indices]
    return tuple(items)


def _allowed(
    tables: TableSet, topology: Topology, shards: Sequence[Shard], members: Sequence[Sequence[int]]
) -> NDArray[np.bool_]:
    by_table = {
        table.name: allowed_ranks(table, topology.world_size)
        & (Tier.TABLE_WISE not in table.constraints.forbidden_tiers)
        for table in tables.tables
    }
    allowed = [np.logical_and.reduce([by_table[shards[index].table.name] for index in group]) for group in members]
    return np.stack(allowed)
