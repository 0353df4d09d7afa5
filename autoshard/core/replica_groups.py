"""Two-dimensional sparse parallelism: which ranks make up a replica group, and what links they see.

A world of T ranks in M groups has two views that are topologies of their own: the N = T / M ranks of one group, over
which the tables are sharded, and the M ranks that hold copies of the same rows, one in each group. One of them is a
run of consecutive ranks, the other takes every so-manieth rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Final, cast

from autoshard.core.accepted import FINITE, MAX_WORLD_SIZE, WHOLE, WHOLE_AT_LEAST_1, Range
from autoshard.core.choices import GroupLayout as GroupLayout
from autoshard.core.declared import Meaning, Written, check_ranges
from autoshard.core.errors import InvalidPlanError
from autoshard.core.topology import Level, MemoryBytes, MemoryLevel, Topology

#: Of `moment_scale`: the number of groups.
_NUM_GROUPS: Final = cast("float", None)


class SyncRows(StrEnum):
    """Which rows replica groups average when they synchronise.

    `all`: every row (2D Eq. 1); `touched`: those that any group updated since the last synchronisation. All others are
    equal in all groups, so that both give the same weights and moments.
    """

    ALL = "all"
    TOUCHED = "touched"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaGroups:
    """Two-dimensional sparse parallelism: the plan is held once per group of ranks (2D Sec. 3).

    Raises:
        InvalidPlanError: If a number is out of range.
    """

    num_groups: Annotated[
        int,
        Range(at_least=1, at_most=MAX_WORLD_SIZE, kind=WHOLE),
        Meaning("Groups M; 1: every table is held once.", written=Written.REQUIRED),
    ] = 1
    layout: Annotated[GroupLayout, Meaning("Which ranks form a group.", written=Written.REQUIRED)] = (
        GroupLayout.ACROSS_NODES
    )
    sync_every: Annotated[
        int,
        WHOLE_AT_LEAST_1,
        Meaning(
            "Steps from one synchronisation of the groups' weights and optimizer states to the next.",
            written=Written.REQUIRED,
        ),
    ] = 1
    moment_scale: Annotated[
        float,
        Range(at_least=1e-6, at_most=1e6, kind=FINITE),
        Meaning(
            "c of 2D's moment-scaled row-wise AdaGrad (Algorithm 1), by which the second moment is divided, at most "
            "num_groups (Scaling rule 1); if left out: num_groups.",
            written=Written.ALWAYS,
        ),
    ] = _NUM_GROUPS
    sync_rows: Annotated[
        SyncRows,
        Meaning(
            "Rows that are averaged at a synchronisation: all, or those that any group updated since the last one; if "
            "left out: all."
        ),
    ] = SyncRows.ALL

    def __post_init__(self) -> None:
        if self.moment_scale is _NUM_GROUPS:
            object.__setattr__(self, "moment_scale", float(self.num_groups))
        check_ranges(self, InvalidPlanError)
        if self.moment_scale > self.num_groups:
            raise InvalidPlanError(
                f"must be at most the number of groups, {self.num_groups}, got {self.moment_scale:g}",
                field="moment_scale",
            )

    def group_size(self, topology: Topology) -> int:
        """Ranks of one group.

        Raises:
            InvalidPlanError: If the groups do not divide the world.
        """
        if topology.world_size % self.num_groups:
            raise InvalidPlanError(
                f"must divide the {topology.world_size} ranks, got {self.num_groups}",
                field="replica_groups.num_groups",
            )
        return topology.world_size // self.num_groups

    def ranks_per_node(self, topology: Topology) -> int:
        """Ranks that a group has on each node that it reaches.

        Raises:
            InvalidPlanError: If that is not the same number everywhere.
        """
        return self._share(topology, topology.levels[0])

    def world_ranks(self, rank: int, topology: Topology) -> range:
        """Ranks of the world that are number `rank` of their group, group by group."""
        if self.layout is GroupLayout.ACROSS_NODES:
            return range(rank * self.num_groups, (rank + 1) * self.num_groups)
        return range(rank, topology.world_size, self.group_size(topology))

    def group_rank(self, world_rank: int, topology: Topology) -> int:
        """Number in its group of a rank of the world: the inverse of `world_ranks`."""
        if self.layout is GroupLayout.ACROSS_NODES:
            return world_rank // self.num_groups
        return world_rank % self.group_size(topology)

    def group_topology(self, topology: Topology) -> Topology:
        """The ranks of one group, as a cluster of their own: what the group's exchanges travel over.

        A level has as many ranks as the group has in one of its units, so a group with a rank on each node has nodes
        of one rank. Links are those of the world: the groups exchange at the same time, each over its ranks' own ports.
        Memory is that of the smallest rank that stands there in any group, `fetch_ms` that of the slowest.

        Raises:
            InvalidPlanError: If the groups do not divide the world, or have no equal share of a level's units.
        """
        if self.num_groups == 1:
            return topology
        ranks = range(self.group_size(topology))
        levels = levels_of_part(topology, lambda level: self._share(topology, level))
        worlds = [self.world_ranks(rank, topology) for rank in ranks] if _is_uneven(topology) else []
        return replace(
            topology,
            world_size=len(ranks),
            levels=levels,
            overrides=tuple((rank, _smallest(topology, world)) for rank, world in enumerate(worlds))
            if topology.overrides
            else (),
            fetch_ms=_slowest_fetch(topology.fetch_ms, worlds) if topology.fetch_ms is not None else None,
        )

    def replica_topology(self, topology: Topology) -> Topology:
        """The ranks that hold copies of the same rows, one of each group: what synchronisation travels over.

        Copies of one node meet there first, and what is left to do between nodes is a part of it.

        Raises:
            InvalidPlanError: As `group_topology`.
        """
        num_replicas = self.num_groups
        self.group_topology(topology)  # the shares of copies are equal where those of groups are
        mirrored = GroupLayout.ACROSS_NODES
        if self.layout is GroupLayout.ACROSS_NODES:
            mirrored = GroupLayout.WITHIN_NODES
        copies = ReplicaGroups(num_groups=topology.world_size // num_replicas, layout=mirrored)
        return copies.group_topology(replace(topology, overrides=(), fetch_ms=None))

    def _share(self, topology: Topology, level: Level) -> int:
        """Ranks that a group has in each unit of a level that it reaches."""
        num_ranks, num_groups = self.group_size(topology), self.num_groups
        if self.layout is GroupLayout.ACROSS_NODES:
            if level.size % num_groups == 0 or num_groups % level.size == 0:
                return max(1, level.size // num_groups)
        elif num_ranks % level.size == 0 or level.size % num_ranks == 0:
            return min(level.size, num_ranks)
        raise InvalidPlanError(
            f"{num_groups} groups of {num_ranks} ranks laid {self.layout} have no equal share of each {level.name}'s "
            f"{level.size} ranks",
            field="replica_groups.num_groups",
        )


def levels_of_part(topology: Topology, share: Callable[[Level], int]) -> tuple[Level, ...]:
    """Levels of a part of the ranks, up to the first that holds them all.

    Args:
        topology: All ranks.
        share: Ranks of the part in each unit of a level that it reaches.

    The bandwidth of an all-reduce is that of its buffer, inner levels included, so it changes with the part. Over n
    units, of s ranks each that first add up among themselves, 2 (n - 1) / (n s) of the buffer passes each rank's port
    (a ring within, a ring between). Where the level's published figure leaves more to the ports than that of its
    all-to-all, they have it here too; an inner level is no slower than the collective that it is part of.
    """
    levels: list[Level] = []
    inner, inner_part, part_ranks = 1, 1, share(topology.levels[-1])
    slowest = math.inf
    for level in topology.levels:
        part = share(level)
        port = max(level.all_to_all.bytes_per_s, level.all_reduce.bytes_per_s * _passing(level.size // inner) / inner)
        if part > inner_part:
            slowest = min(slowest, port * inner_part / _passing(part // inner_part))
        link = replace(level.all_reduce, bytes_per_s=slowest) if math.isfinite(slowest) else level.all_reduce
        levels.append(replace(level, size=part, all_reduce=link))
        inner, inner_part = level.size, part
        if part == part_ranks:
            break
    return tuple(levels)


def part_of(topology: Topology, ranks: Sequence[int]) -> Topology:
    """Some of the ranks as a cluster of their own, over the links that they have.

    Args:
        topology: All ranks.
        ranks: Those of the part, each once.
    """
    if len(ranks) == topology.world_size:
        return topology
    in_units = {level.size: Counter(rank // level.size for rank in ranks).values() for level in topology.levels}
    shares = {size: max(counts) for size, counts in in_units.items()}
    if any(len(set(counts)) > 1 for counts in in_units.values()):
        # Not as many in each unit: the links of the first level that holds them all.
        within = next(level for level in topology.levels if shares[level.size] == len(ranks))
        parts: tuple[Level, ...] = (replace(within, size=len(ranks), shared_links=False),)
    else:
        parts = levels_of_part(topology, lambda level: shares[level.size])
    return replace(topology, world_size=len(ranks), levels=parts, overrides=(), fetch_ms=None)


def _passing(num_units: int) -> float:
    """Share of a buffer that passes a unit's port in a ring all-reduce over some units; that of one is never used."""
    return 2 * (num_units - 1) / num_units if num_units > 1 else 1.0


def _is_uneven(topology: Topology) -> bool:
    return bool(topology.overrides) or topology.fetch_ms is not None


def _smallest(topology: Topology, world_ranks: range) -> MemoryBytes:
    return MemoryBytes(
        **{level.value: min(topology.memory_of(rank)[level] for rank in world_ranks) for level in MemoryLevel}
    )


def _slowest_fetch(fetch_ms: tuple[tuple[float, ...], ...], worlds: list[range]) -> tuple[tuple[float, ...], ...]:
    return tuple(
        tuple(max(fetch_ms[i][j] for i, j in zip(readers, owners, strict=True)) for owners in worlds)
        for readers in worlds
    )
