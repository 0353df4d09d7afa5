"""Placements as arrays: items with additive codes and bytes, each on one rank or shared by all ranks.

Shape suffixes: U shards, N items, R ranks, K shared tiers, W = 1 + K ways to hold an item, A = R + K choices, H width
of a code, X of any row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from autoshard.core import (
    CostModel,
    LocalShard,
    Payload,
    PlacedShard,
    RowRange,
    Shard,
    ShardingPlan,
    TableSet,
    Tier,
    Topology,
)
from autoshard.core.costs import CodeArray, MsArray
from autoshard.core.errors import InfeasiblePlanError, InvalidOptionError
from autoshard.core.quoting import write_bytes
from autoshard.planners.space.constraints import allowed_sites, check_constraints, colocated
from autoshard.planners.space.options import locals_of, placed_shard

RankArray = NDArray[np.int64]
_Number = TypeVar("_Number", bound=np.generic)


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Items and what ranks have room for, whatever they cost.

    An item is a shard (a whole table, a row group, some columns), or several that must share a rank. A placement names
    for each item its rank, or R + k for the k-th shared tier. Way 0 to hold an item is on one rank, way 1 + k is by
    tier k.

    Attributes:
        shards: What is placed.
        members: For each item, the indices of its shards.
        bytes_WN: Weights and optimizer state that an item takes of every rank that holds it.
        capacity_R: Bytes that each rank can hold.
        allowed_NA: Whether the constraints allow an item each choice.
    """

    shards: tuple[Shard, ...]
    members: tuple[tuple[int, ...], ...]
    bytes_WN: NDArray[np.int64]
    capacity_R: NDArray[np.int64]
    allowed_NA: NDArray[np.bool_]

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
            bytes_WN=summed_members(bytes_U, members)[None],
            capacity_R=capacity_R,
            allowed_NA=_allowed(tables, topology, shards, members, ()),
        )

    @property
    def num_items(self) -> int:
        """N."""
        return len(self.members)

    @property
    def num_ranks(self) -> int:
        """R."""
        return len(self.capacity_R)

    @property
    def bytes_N(self) -> NDArray[np.int64]:  # noqa: N802 - a shape suffix
        """Bytes of the items on a rank of their own, shape (N,)."""
        return np.asarray(self.bytes_WN[0])

    @property
    def allowed_NR(self) -> NDArray[np.bool_]:  # noqa: N802 - a shape suffix
        """Whether an item may go to a rank, shape (N, R)."""
        return self.allowed_NA[:, : self.num_ranks]

    def label(self, item: int) -> str:
        """Names of an item's tables."""
        return "+".join(dict.fromkeys(self.shards[index].table.name for index in self.members[item]))

    def rank_bytes(self, ranks_N: RankArray) -> NDArray[np.int64]:
        """Bytes per rank, shape (R,)."""
        return rank_sums(self.bytes_WN, ranks_N, self.num_ranks)

    def is_feasible(self, ranks_N: RankArray) -> bool:
        """Whether memory limits and constraints hold."""
        allowed = bool(self.allowed_NA[np.arange(self.num_items), ranks_N].all())
        return allowed and bool((self.rank_bytes(ranks_N) <= self.capacity_R).all())


@dataclass(frozen=True, slots=True, eq=False)
class PlacementProblem(Packing):
    """Items to be placed, each on one rank or, where the problem offers it, on all ranks by one of K shared tiers.

    Codes and bytes of an item add up over its shards, which tile the tables.

    Attributes:
        tables: The task's tables.
        topology: The task's topology.
        model: The cost model that the codes are of.
        tiers: The shared tiers; none unless asked for.
        codes_WNH: What each item adds to the codes of every rank that holds it.
        kernel_ms_N: Price of each item alone on a rank.
        payload: Number formats of what is sent.
    """

    tables: TableSet
    topology: Topology
    model: CostModel
    codes_WNH: CodeArray
    kernel_ms_N: MsArray
    tiers: tuple[Tier, ...] = ()
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
        tiers: Sequence[Tier] = (),
        payload: Payload | None = None,
    ) -> PlacementProblem:
        """Every shard on one rank, or held by one of the tiers.

        Shards of tables that must share a rank make one item.

        Args:
            tables: The task's tables.
            topology: The task's topology.
            model: Prices shards.
            shards: Parts that tile the tables.
            tiers: Any of `data_parallel`, `flex` and `row_wise`.
            payload: Number formats of what is sent; fp32 if left out.

        Raises:
            InvalidPlanError: If a constraint names a table or rank that is not there.
            InfeasiblePlanError: If an item fits nowhere, or all together exceed the memory.
            ModelError: If the model cannot price a shard as it would be held.
        """
        check_constraints(tables, topology)
        _check_shared(tiers)
        members = _items(tables, shards)
        locals_ = [_locals(shards, tier, topology, tables.batch_size) for tier in (Tier.TABLE_WISE, *tiers)]
        codes_WNH = np.stack([summed_members(model.encode(of_way), members) for of_way in locals_])
        bytes_WU = np.array([[local.memory_bytes for local in of_way] for of_way in locals_], dtype=np.int64)
        problem = cls(
            tables=tables,
            topology=topology,
            shards=tuple(shards),
            members=members,
            model=model,
            codes_WNH=codes_WNH,
            bytes_WN=np.stack([summed_members(bytes_U, members) for bytes_U in bytes_WU]),
            kernel_ms_N=model.predict_ms(codes_WNH[0]),
            capacity_R=np.array(topology.hbm_bytes, dtype=np.int64),
            allowed_NA=_allowed(tables, topology, shards, members, tiers),
            tiers=tuple(tiers),
            payload=payload or Payload(),
        )
        problem._check_feasible()
        return problem

    @property
    def num_choices(self) -> int:
        """A = R + K: what a placement may name for an item."""
        return self.num_ranks + len(self.tiers)

    @property
    def ways(self) -> tuple[Tier, ...]:
        """The tier of each way to hold an item."""
        return (Tier.TABLE_WISE, *self.tiers)

    @property
    def codes_NH(self) -> CodeArray:  # noqa: N802 - a shape suffix
        """Codes of the items on a rank of their own, shape (N, H)."""
        return np.asarray(self.codes_WNH[0])

    def locals_by(self, tier: Tier) -> tuple[LocalShard, ...]:
        """For each shard, what every rank runs that holds it by a tier, shape (U,)."""
        return _locals(self.shards, tier, self.topology, self.tables.batch_size)

    def rank_codes(self, ranks_N: RankArray) -> CodeArray:
        """Sums of codes per rank, shape (R, H)."""
        return rank_sums(self.codes_WNH, ranks_N, self.num_ranks)

    def rank_ms(self, ranks_N: RankArray) -> MsArray:
        """Predicted kernel time per rank, shape (R,); a rank without items costs 0."""
        cost_ms = self.model.predict_ms(self.rank_codes(ranks_N))
        if (ranks_N >= self.num_ranks).any():
            return cost_ms
        return np.where(np.bincount(ranks_N, minlength=self.num_ranks) > 0, cost_ms, 0.0)

    def subset(self, items: NDArray[np.int64], *, with_tiers: bool = True) -> PlacementProblem:
        """The problem of some of the items, which need not tile the tables."""
        chosen = [self.members[item] for item in items]
        shards = [shard for group in chosen for shard in group]
        place = {shard: index for index, shard in enumerate(shards)}
        tiers = self.tiers if with_tiers else ()
        return replace(
            self,
            shards=tuple(self.shards[shard] for shard in shards),
            members=tuple(tuple(place[shard] for shard in group) for group in chosen),
            codes_WNH=self.codes_WNH[: 1 + len(tiers), items],
            bytes_WN=self.bytes_WN[: 1 + len(tiers), items],
            kernel_ms_N=self.kernel_ms_N[items],
            allowed_NA=self.allowed_NA[items, : self.num_ranks + len(tiers)],
            tiers=tiers,
        )

    def to_plan(self, ranks_N: RankArray) -> ShardingPlan:
        """The plan that places item n as `ranks_N[n]` says."""
        choice_of = {index: int(rank) for group, rank in zip(self.members, ranks_N, strict=True) for index in group}
        shards = tuple(self._placed(shard, choice_of[index]) for index, shard in enumerate(self.shards))
        return ShardingPlan(tables=self.tables, topology=self.topology, shards=shards, payload=self.payload)

    def ranks_of(self, plan: ShardingPlan) -> RankArray:
        """Ranks of the items in a plan of the same shards on single ranks, shape (N,)."""
        rank_of = {_key(placed.shard): placed.replicas[0][0] for placed in plan.shards}
        return np.array([rank_of[_key(self.shards[group[0]])] for group in self.members], dtype=np.int64)

    def _placed(self, shard: Shard, choice: int) -> PlacedShard:
        if choice < self.num_ranks:
            return placed_shard(shard, Tier.TABLE_WISE, self.topology, choice)
        return placed_shard(shard, self.tiers[choice - self.num_ranks], self.topology)

    def _check_feasible(self) -> None:
        nowhere = np.iinfo(np.int64).max
        fits_N = (self.allowed_NR & (self.bytes_N[:, None] <= self.capacity_R)).any(axis=1)
        least_N = np.where(fits_N, self.bytes_N, nowhere)
        for bytes_N, allowed_N in zip(self.bytes_WN[1:], self.allowed_NA.T[self.num_ranks :], strict=True):
            fits_N = allowed_N & (bytes_N <= self.capacity_R.min())
            least_N = np.where(fits_N, np.minimum(least_N, bytes_N * self.num_ranks), least_N)
        for item in np.flatnonzero(least_N == nowhere).tolist():
            room = int(np.where(self.allowed_NR[item], self.capacity_R, -1).max())
            if room < 0:
                raise InfeasiblePlanError(f"{self.label(item)}: its constraints leave no rank that may hold it whole")
            missing = int(self.bytes_N[item]) - room
            raise InfeasiblePlanError(
                f"{self.label(item)} needs {write_bytes(self.bytes_N[item])} on one rank, {write_bytes(missing)} more "
                f"than the largest rank that may hold it has ({write_bytes(room)})"
            )
        # Sums of any size, as arrays cannot have them.
        needed, there = sum(least_N.tolist()), sum(self.capacity_R.tolist())
        if needed > there:
            raise exceeds_total(needed, there, self.num_ranks)


def _key(shard: Shard) -> tuple[str, RowRange, tuple[int, int]]:
    """What tells the shards of a task apart."""
    return shard.table.name, shard.rows, shard.columns


def is_table_wise(plan: ShardingPlan) -> bool:
    """Whether a plan holds every table whole on one rank, over one replica group."""
    is_whole = len(plan.shards) == len(plan.tables.tables) and plan.replica_groups.num_groups == 1
    return is_whole and all(placed.tier is Tier.TABLE_WISE for placed in plan.shards)


def exceeds_total(needed: int, room: int, num_ranks: int) -> InfeasiblePlanError:
    """The error for tables that need more bytes than all ranks have."""
    return InfeasiblePlanError(
        f"all tables need {write_bytes(needed)}, {write_bytes(needed - room)} more than the {num_ranks} ranks have "
        "together"
    )


def rank_sums(rows_WNX: NDArray[_Number], choice_N: RankArray, num_ranks: int) -> NDArray[_Number]:
    """Sums over what each rank holds, shape (R, X).

    Args:
        rows_WNX: What each item adds to every rank that holds it, for each way; X may be no axis at all.
        choice_N: Choices of the items; -1 for those that nobody holds.
        num_ranks: R.
    """
    sums_RX: NDArray[Any] = np.zeros((num_ranks, *rows_WNX.shape[2:]), dtype=rows_WNX.dtype)
    alone = np.flatnonzero((choice_N >= 0) & (choice_N < num_ranks))
    np.add.at(sums_RX, choice_N[alone], rows_WNX[0, alone])
    for index, rows_NX in enumerate(rows_WNX[1:], num_ranks):
        sums_RX += rows_NX[choice_N == index].sum(axis=0)
    return sums_RX


def summed_members(rows_UX: NDArray[_Number], members: Sequence[Sequence[int]]) -> NDArray[_Number]:
    """Sums over the shards of each item, shape (N, X)."""
    if len(members) == len(rows_UX):
        return rows_UX[[index for (index,) in members]]
    added = np.stack([rows_UX[list(group)].sum(axis=0) for group in members])
    return added.astype(rows_UX.dtype)


def _locals(shards: Sequence[Shard], tier: Tier, topology: Topology, batch_size: int) -> tuple[LocalShard, ...]:
    return tuple(locals_of([placed_shard(shard, tier, topology) for shard in shards], batch_size))


def _check_shared(tiers: Sequence[Tier]) -> None:
    shared = (Tier.DATA_PARALLEL, Tier.FLEX, Tier.ROW_WISE)
    for tier in tiers:
        if tier not in shared:
            raise InvalidOptionError(f"must be one of {', '.join(shared)}, got {tier}", field="tiers")


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
    tables: TableSet,
    topology: Topology,
    shards: Sequence[Shard],
    members: Sequence[Sequence[int]],
    tiers: Sequence[Tier],
) -> NDArray[np.bool_]:
    """Whether the constraints of all its tables allow an item each choice, shape (N, A)."""
    by_table = {
        table.name: np.concatenate([allowed_sites(table, tier, topology) for tier in (Tier.TABLE_WISE, *tiers)])
        for table in tables.tables
    }
    return np.stack(
        [reduce(np.logical_and, [by_table[shards[index].table.name] for index in group]) for group in members]
    )
