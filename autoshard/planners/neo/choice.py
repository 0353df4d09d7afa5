"""Which scheme each table gets, by Neo's cost function.

Shape suffixes: S sites of a part, L memory levels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import ceil

import numpy as np
from numpy.typing import NDArray

from autoshard.core import EmbeddingTable, MemoryLevel, TableSet, Tier, Topology
from autoshard.core.errors import InfeasiblePlanError
from autoshard.evaluation.cached_rows import behind_cache
from autoshard.planners.neo.cost import CostFunction, PartCost
from autoshard.planners.space.constraints import allowed_sites
from autoshard.planners.space.options import (
    ShardingOption,
    ShardingType,
    UnplacedShard,
    enumerate_options,
    why_not,
)
from autoshard.planners.space.tiers import SITED_TIERS, num_sites, ranks_at

#: Schemes that Neo has (Sec. 4).
NEO_TYPES = (
    ShardingType.TABLE_WISE,
    ShardingType.ROW_WISE,
    ShardingType.COLUMN_WISE,
    ShardingType.DATA_PARALLEL,
    ShardingType.TABLE_ROW_WISE,
    ShardingType.TABLE_COLUMN_WISE,
    ShardingType.GRID,
)
#: Share of the memory that the cheapest schemes leave free which replicated tables may take: the rest is room to move.
_REPLICAS_SHARE = 0.9
#: Most tables of a unit for which mixtures of replicated and row-wise ones are listed.
_MAX_MIXED = 6


@dataclass(frozen=True)
class Choice:
    """One way to hold the tables of a unit: those that must share their ranks, or a single table.

    Attributes:
        schemes: A scheme for each table. Several tables have one part each, all on the same ranks.
        costs: For each scheme, the costs of its parts.
        part_bytes: Bytes of each part on each of its ranks by memory level, all tables of the unit together.
        sites: For each part of the first scheme, the sites that all tables' pins and memory allow.
    """

    schemes: tuple[ShardingOption, ...]
    costs: tuple[tuple[PartCost, ...], ...]
    part_bytes: tuple[Mapping[MemoryLevel, int], ...]
    sites: tuple[tuple[int, ...], ...]

    @property
    def tier(self) -> Tier:
        """How all parts are held; rows over all ranks if only some tables are replicated."""
        tiers = {scheme.parts[0].tier for scheme in self.schemes}
        return tiers.pop() if len(tiers) == 1 else Tier.ROW_WISE

    @cached_property
    def part_s(self) -> tuple[float, ...]:
        """Weighted cost of each part on each of its ranks, all tables of the unit together."""
        return tuple(sum(cost.weighted_s for cost in parts) for parts in zip(*self.costs, strict=True))

    @cached_property
    def total_s(self) -> float:
        """Weighted cost on all ranks together."""
        return sum(cost.weighted_s * cost.num_holders for costs in self.costs for cost in costs)

    @cached_property
    def total_bytes(self) -> int:
        """Device memory on all ranks together."""
        return sum(cost.held_bytes[MemoryLevel.HBM] * cost.num_holders for costs in self.costs for cost in costs)

    def score_s(self, limit_s: float, world_size: int) -> float:
        """Cost on all ranks, and the imbalance that its costliest part forces on them.

        A rank with a part above the limit makes all others wait for what is above it.
        """
        return self.total_s + world_size * max(0.0, max(self.part_s) - limit_s)


class Chooser:
    """Lists and prices the ways to hold tables, and picks among them.

    Args:
        tables: All tables.
        topology: The machine.
        cost: Prices parts.
        names: Schemes that are allowed.
        capacity: For each memory level, bytes of every rank that may be used.
        cache_policy: Of caches.
    """

    def __init__(
        self,
        tables: TableSet,
        topology: Topology,
        cost: CostFunction,
        names: Collection[ShardingType],
        capacity: Mapping[MemoryLevel, Sequence[int]],
        cache_policy: str,
    ) -> None:
        self._batch_size, self._topology, self._cost, self._names = tables.batch_size, topology, cost, names
        self._capacity, self._cache_policy = capacity, cache_policy
        self._room = {tier: _room(tier, topology, capacity) for tier in SITED_TIERS}
        self._sites: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._shared: dict[tuple[int, ...], tuple[int, ...]] = {}

    def choices(
        self, unit: Sequence[EmbeddingTable], level: MemoryLevel, least_cache: float = 1.0
    ) -> tuple[Choice, ...]:
        """All ways to hold the tables of a unit with their rows on a memory level, the simplest first.

        Args:
            unit: Tables that share their ranks.
            level: Of their rows.
            least_cache: Smallest cache of a part on a lower level, as a share of the rows that a batch hits.

        Raises:
            InfeasiblePlanError: If there is none.
        """
        listed = [
            [
                self._on(level, scheme, least_cache)
                for scheme in enumerate_options(table, self._topology, self._names)
                if level is MemoryLevel.HBM or scheme.name is not ShardingType.DATA_PARALLEL
            ]
            for table in unit
        ]
        found: list[Choice] = []
        least: Mapping[MemoryLevel, int] | None = None
        for schemes in _together(listed):
            if any(why_not(scheme, self._topology) for scheme in schemes):
                continue
            choice = self._choice(schemes)
            largest = max(choice.part_bytes, key=lambda held: held[MemoryLevel.HBM])
            if all(choice.sites):
                found.append(choice)
            elif least is None or largest[MemoryLevel.HBM] < least[MemoryLevel.HBM]:
                least = largest
        if not found:
            raise self._nowhere(unit, least)
        return tuple(found)

    def pick(self, listed: Sequence[Sequence[Choice]], limit_s: float, *, replicate: bool) -> list[Choice]:
        """The way of lowest score for every unit; replicas where they gain most per byte, as far as memory goes.

        Args:
            listed: For each unit, the ways to hold it.
            limit_s: What a part may cost before it makes others wait.
            replicate: Whether tables may be replicated that need not be.
        """
        world = self._topology.world_size

        def best(choices: Sequence[Choice]) -> Choice:
            return min(choices, key=lambda choice: choice.score_s(limit_s, world))

        split = [[one for one in choices if one.tier is not Tier.DATA_PARALLEL] for choices in listed]
        picked = [best(own or choices) for own, choices in zip(split, listed, strict=True)]
        if not replicate:
            return picked
        gains: list[tuple[float, int, Choice]] = []
        for index, (choices, now) in enumerate(zip(listed, picked, strict=True)):
            replicas = [one for one in choices if one.tier is Tier.DATA_PARALLEL]
            saved = now.score_s(limit_s, world) - best(replicas).score_s(limit_s, world) if replicas else 0.0
            if saved > 0:
                more = best(replicas).total_bytes - now.total_bytes
                gains.append((-saved / max(more, 1), index, best(replicas)))
        per_rank = [int(size) for size in self._capacity[MemoryLevel.HBM]]
        spare = _REPLICAS_SHARE * (sum(per_rank) - sum(choice.total_bytes for choice in picked))
        room = _REPLICAS_SHARE * min(per_rank)
        for _, index, choice in sorted(gains, key=lambda gain: gain[:2]):
            more, own = choice.total_bytes - picked[index].total_bytes, choice.part_bytes[0][MemoryLevel.HBM]
            if more <= spare and own <= room:
                picked[index], spare, room = choice, spare - more, room - own
        return picked

    def _on(self, level: MemoryLevel, scheme: ShardingOption, least_cache: float) -> ShardingOption:
        """The scheme with its rows on a level, behind the smallest caches."""
        if level is MemoryLevel.HBM:
            return scheme
        parts = []
        for part in scheme.parts:
            local = part.local(self._topology, self._batch_size)
            rows = ceil(least_cache * local.access.expected_distinct(local.num_lookups))
            parts.append(replace(part, memory=behind_cache(local, level, rows, self._cache_policy)))
        return replace(scheme, parts=tuple(parts))

    def _choice(self, schemes: Sequence[ShardingOption]) -> Choice:
        costs = tuple(self._costs(scheme) for scheme in schemes)
        held = tuple(_added(of_part) for of_part in zip(*costs, strict=True))
        parts = zip(*(scheme.parts for scheme in schemes), strict=True)
        sites = tuple(self._sites_of(same, part_held) for same, part_held in zip(parts, held, strict=True))
        return Choice(schemes=tuple(schemes), costs=costs, part_bytes=held, sites=sites)

    def _costs(self, scheme: ShardingOption) -> tuple[PartCost, ...]:
        """Costs of the parts; column shards of one width cost the same."""
        known: dict[tuple[object, ...], PartCost] = {}
        costs = []
        for part in scheme.parts:
            key = (part.shard.rows, part.shard.embedding_dim)
            if key not in known:
                known[key] = self._cost.of(part)
            costs.append(known[key])
        return tuple(costs)

    def _sites_of(self, parts: Sequence[UnplacedShard], held: Mapping[MemoryLevel, int]) -> tuple[int, ...]:
        """Where the parts of a unit's tables may go together, and fit."""
        tier, pins = parts[0].tier, tuple(part.shard.table.constraints.pinned_ranks for part in parts)
        key = (tier, pins, *held.values())
        if key not in self._sites:
            room_LS = self._room[tier]
            fits_S = np.logical_and.reduce([room_LS[level] >= num_bytes for level, num_bytes in held.items()])
            sites = tuple(np.flatnonzero(fits_S).tolist())
            if any(pins):
                allowed = [allowed_sites(part.shard.table, tier, self._topology) for part in parts]
                sites = tuple(site for site in sites if all(may_S[site] for may_S in allowed))
            self._sites[key] = self._shared.setdefault(sites, sites)
        return self._sites[key]

    def _nowhere(self, unit: Sequence[EmbeddingTable], least: Mapping[MemoryLevel, int] | None) -> InfeasiblePlanError:
        label = "+".join(table.name for table in unit)
        if least is None:
            return InfeasiblePlanError(f"{label}: its constraints leave no scheme of {', '.join(self._names)}")
        level = max(least, key=lambda level: least[level] - max(self._capacity[level]))
        return InfeasiblePlanError(
            f"{label} needs {least[level]:,} bytes of {level} on one rank in the scheme that needs least, and no rank "
            f"that may hold it has more than {max(self._capacity[level]):,} bytes"
        )


def _together(listed: Sequence[Sequence[ShardingOption]]) -> Iterator[tuple[ShardingOption, ...]]:
    """Schemes, one for each table of a unit, that can be on the same ranks.

    Several tables are in one part each, all held alike; on all ranks, some may be replicated and others split by rows.
    """
    if len(listed) == 1:
        yield from zip(*listed, strict=True)
        return
    whole = [{scheme.name: scheme for scheme in schemes if len(scheme.parts) == 1} for schemes in listed]
    for name in whole[0]:
        if all(name in of_table for of_table in whole):
            yield tuple(of_table[name] for of_table in whole)
    everywhere = [
        [scheme for name, scheme in of_table.items() if name in (ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL)]
        for of_table in whole
    ]
    if len(listed) <= _MAX_MIXED:
        yield from (schemes for schemes in product(*everywhere) if len({scheme.name for scheme in schemes}) > 1)


def _added(costs: Sequence[PartCost]) -> Mapping[MemoryLevel, int]:
    """Bytes of several parts on the same ranks."""
    if len(costs) == 1:
        return costs[0].held_bytes
    return {level: sum(cost.held_bytes[level] for cost in costs) for level in MemoryLevel}


def _room(
    tier: Tier, topology: Topology, capacity: Mapping[MemoryLevel, Sequence[int]]
) -> dict[MemoryLevel, NDArray[np.int64]]:
    """For each memory level, bytes that the tightest rank of each site has, shape (S,)."""
    sites = [ranks_at(tier, site, topology) for site in range(num_sites(tier, topology))]
    return {
        level: np.array([min(of_level[rank] for rank in ranks) for ranks in sites], dtype=np.int64)
        for level, of_level in capacity.items()
    }
