"""Which scheme each table gets, by Neo's cost function."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from autoshard.core import EmbeddingTable, MemoryLevel, MemoryPlacement, TableSet, Topology
from autoshard.core.errors import InfeasiblePlanError
from autoshard.evaluation.cached_rows import LRU, cached_row_bytes
from autoshard.planners.neo.cost import CostFunction, PartCost
from autoshard.planners.schemes import Hold, Part, Scheme, SchemeName, allowed_sites, schemes_of, why_not

#: Schemes that Neo has (Sec. 4).
NEO_SCHEMES = (
    SchemeName.TABLE_WISE,
    SchemeName.ROW_WISE,
    SchemeName.COLUMN_WISE,
    SchemeName.DATA_PARALLEL,
    SchemeName.TABLE_ROW_WISE,
    SchemeName.TABLE_COLUMN_WISE,
    SchemeName.GRID,
)
#: Share of the memory that the cheapest schemes leave free which replicated tables may take: the rest is room to move.
_REPLICAS_SHARE = 0.9


@dataclass(frozen=True)
class Choice:
    """One way to hold the tables of a unit: those that must share their ranks, or a single table.

    Attributes:
        schemes: A scheme for each table. Several tables have one part each, all held alike.
        costs: For each scheme, the costs of its parts.
        sites: For each part of the first scheme, the sites that all tables' pins and memory allow.
    """

    schemes: tuple[Scheme, ...]
    costs: tuple[tuple[PartCost, ...], ...]
    sites: tuple[tuple[int, ...], ...]

    @property
    def hold(self) -> Hold:
        """How all parts are held."""
        return self.schemes[0].parts[0].hold

    @cached_property
    def part_s(self) -> tuple[float, ...]:
        """Weighted cost of each part on each of its ranks, all tables of the unit together."""
        return tuple(sum(cost.weighted_s for cost in parts) for parts in zip(*self.costs, strict=True))

    @cached_property
    def part_bytes(self) -> tuple[dict[MemoryLevel, int], ...]:
        """Bytes of each part on each of its ranks, by memory level."""
        return tuple(
            {level: sum(cost.held_bytes.get(level, 0) for cost in parts) for level in MemoryLevel}
            for parts in zip(*self.costs, strict=True)
        )

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Chooser:
    """Lists and prices the ways to hold tables, and picks among them.

    Attributes:
        tables: All tables.
        topology: The machine.
        cost: Prices parts.
        names: Schemes that are allowed.
        capacity: For each memory level, bytes of every rank that may be used.
        cache_policy: Of caches.
        least_cache: Smallest cache of a part, as a share of the rows that a batch hits.
    """

    tables: TableSet
    topology: Topology
    cost: CostFunction
    names: Collection[SchemeName]
    capacity: Mapping[MemoryLevel, Sequence[int]]
    cache_policy: str = LRU
    least_cache: float = 1.0

    def choices(self, unit: Sequence[EmbeddingTable], levels: Sequence[MemoryLevel]) -> tuple[Choice, ...]:
        """All ways to hold the tables of a unit with their rows on a memory level each, the simplest first.

        Raises:
            InfeasiblePlanError: If there is none.
        """
        listed = [
            [
                self._on(level, scheme)
                for scheme in schemes_of(table, self.topology, self.names)
                if level is MemoryLevel.HBM or scheme.name is not SchemeName.DATA_PARALLEL
            ]
            for table, level in zip(unit, levels, strict=True)
        ]
        if len(unit) > 1:
            listed = [[scheme for scheme in schemes if len(scheme.parts) == 1] for schemes in listed]
        found, least = [], None
        for first in listed[0]:
            others = [next((one for one in schemes if one.name is first.name), None) for schemes in listed[1:]]
            schemes = [first, *(one for one in others if one is not None)]
            if len(schemes) < len(unit) or any(why_not(scheme, self.topology) for scheme in schemes):
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
        world = self.topology.world_size

        def best(choices: Sequence[Choice]) -> Choice:
            return min(choices, key=lambda choice: choice.score_s(limit_s, world))

        split = [[one for one in choices if one.hold is not Hold.EACH] for choices in listed]
        picked = [best(own or choices) for own, choices in zip(split, listed, strict=True)]
        if not replicate:
            return picked
        gains: list[tuple[float, int, Choice]] = []
        for index, (choices, now) in enumerate(zip(listed, picked, strict=True)):
            replicas = [one for one in choices if one.hold is Hold.EACH]
            saved = now.score_s(limit_s, world) - best(replicas).score_s(limit_s, world) if replicas else 0.0
            if saved > 0:
                more = best(replicas).total_bytes - now.total_bytes
                gains.append((-saved / max(more, 1), index, best(replicas)))
        per_rank = [int(size) for size in self.capacity[MemoryLevel.HBM]]
        spare = _REPLICAS_SHARE * (sum(per_rank) - sum(choice.total_bytes for choice in picked))
        room = _REPLICAS_SHARE * min(per_rank)
        for _, index, choice in sorted(gains, key=lambda gain: gain[:2]):
            more, own = choice.total_bytes - picked[index].total_bytes, choice.part_bytes[0][MemoryLevel.HBM]
            if more <= spare and own <= room:
                picked[index], spare, room = choice, spare - more, room - own
        return picked

    def _on(self, level: MemoryLevel, scheme: Scheme) -> Scheme:
        """The scheme with its rows on a level, behind the smallest caches."""
        if level is MemoryLevel.HBM:
            return scheme
        parts = []
        for part in scheme.parts:
            local = part.local(self.topology, self.tables.batch_size)
            rows = ceil(self.least_cache * local.access.expected_distinct(local.num_lookups))
            memory = MemoryPlacement(
                level=level,
                cache_bytes=min(rows, local.num_embeddings) * cached_row_bytes(local),
                policy=self.cache_policy,
            )
            parts.append(replace(part, memory=memory))
        return replace(scheme, parts=tuple(parts))

    def _choice(self, schemes: Sequence[Scheme]) -> Choice:
        costs = tuple(self._costs(scheme) for scheme in schemes)
        whole = Choice(schemes=tuple(schemes), costs=costs, sites=())
        sites = tuple(
            tuple(site for site in self._allowed(parts) if self._has_room(parts[0].hold, site, held))
            for parts, held in zip(zip(*(one.parts for one in schemes), strict=True), whole.part_bytes, strict=True)
        )
        return Choice(schemes=whole.schemes, costs=costs, sites=sites)

    def _costs(self, scheme: Scheme) -> tuple[PartCost, ...]:
        """Costs of the parts; column shards of one width cost the same."""
        known: dict[tuple[object, ...], PartCost] = {}
        costs = []
        for part in scheme.parts:
            key = (part.shard.rows, part.shard.embedding_dim)
            if key not in known:
                known[key] = self.cost.of(part)
            costs.append(known[key])
        return tuple(costs)

    def _allowed(self, parts: Sequence[Part]) -> list[int]:
        allowed = [set(allowed_sites(part, self.topology)) for part in parts]
        return sorted(set.intersection(*allowed))

    def _has_room(self, hold: Hold, site: int, held: Mapping[MemoryLevel, int]) -> bool:
        ranks = [rank for replica in hold.replicas(site, self.topology) for rank in replica]
        return all(
            num_bytes <= self.capacity[level][rank] for level, num_bytes in held.items() if num_bytes for rank in ranks
        )

    def _nowhere(self, unit: Sequence[EmbeddingTable], least: Mapping[MemoryLevel, int] | None) -> InfeasiblePlanError:
        label = "+".join(table.name for table in unit)
        if least is None:
            return InfeasiblePlanError(f"{label}: its constraints leave no scheme of {', '.join(self.names)}")
        level = max(least, key=lambda level: least[level] - max(self.capacity[level]))
        return InfeasiblePlanError(
            f"{label} needs {least[level]:,} bytes of {level} on one rank in the scheme that needs least, and no rank "
            f"that may hold it has more than {max(self.capacity[level]):,} bytes"
        )


def units_of(tables: TableSet) -> tuple[tuple[EmbeddingTable, ...], ...]:
    """Tables that must share their ranks together, all others one by one, in the order of the tables."""
    by_name = {table.name: table for table in tables.tables}
    group_of = {name: {name} for name in by_name}
    for table in tables.tables:
        for other in table.constraints.colocate_with:
            merged = group_of[table.name] | group_of[other]
            for name in merged:
                group_of[name] = merged
    units: dict[int, tuple[EmbeddingTable, ...]] = {}
    for table in tables.tables:
        group = group_of[table.name]
        units.setdefault(id(group), tuple(one for one in tables.tables if one.name in group))
    return tuple(units.values())
