"""Which sharding type each table gets, by what it adds to the step.

Shape suffixes: S sites of an item, R ranks, L memory levels (`LEVELS`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import ceil

import numpy as np
from numpy.typing import NDArray

from autoshard.core import Collective, EmbeddingTable, MemoryLevel, Tier
from autoshard.core.access import IntArray
from autoshard.core.errors import InfeasiblePlanError
from autoshard.evaluation.cached_rows import behind_cache
from autoshard.planners.neo.cost import CostFunction, PartCost
from autoshard.planners.space.constraints import allowed_sites
from autoshard.planners.space.options import (
    ShardingOption,
    ShardingType,
    UnplacedShard,
    enumerate_options,
    why_none,
    why_not,
)
from autoshard.planners.space.planner_space import synced_options
from autoshard.planners.space.tiers import SITED_TIERS, num_sites

#: Sharding types that Neo has (Sec. 4).
NEO_TYPES = (
    ShardingType.TABLE_WISE,
    ShardingType.ROW_WISE,
    ShardingType.COLUMN_WISE,
    ShardingType.DATA_PARALLEL,
    ShardingType.TABLE_ROW_WISE,
    ShardingType.TABLE_COLUMN_WISE,
    ShardingType.GRID,
)
LEVELS = tuple(MemoryLevel)
HBM = LEVELS.index(MemoryLevel.HBM)
#: Share of the memory that the cheapest sharding types leave free which replicated tables may take: the rest is room
#: to move.
_REPLICAS_SHARE = 0.9
#: Most tables of a unit for which mixtures of replicated and row-wise ones are listed.
_MAX_MIXED = 6


@dataclass(frozen=True, kw_only=True, eq=False)
class NeoItem:
    """What is placed as one: a part of a table, or one part of each table of a unit.

    Attributes:
        parts: One for each table.
        costs: Of each part.
        held_L: Bytes of all of them on each of their ranks, shape (L,).
        allowed_S: Whether all tables' pins and the memory allow a site, shape (S,).
    """

    parts: tuple[UnplacedShard, ...]
    costs: tuple[PartCost, ...]
    held_L: IntArray
    allowed_S: NDArray[np.bool_]

    @cached_property
    def tier(self) -> Tier:
        """How the parts are held; rows over all ranks if only some tables are replicated."""
        tiers = {part.tier for part in self.parts}
        return tiers.pop() if len(tiers) == 1 else Tier.ROW_WISE

    @cached_property
    def cost_s(self) -> float:
        """Weighted cost on each of its ranks."""
        return sum(cost.weighted_s for cost in self.costs)

    @property
    def label(self) -> str:
        """Names of its tables."""
        return "+".join(part.shard.table.name for part in self.parts)


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """One way to hold the tables of a unit: those that must share their ranks, or a single table.

    Attributes:
        items: One for each part of a table; a single one for several tables.
        in_one_node: Whether the items must be on ranks of one node.
    """

    items: tuple[NeoItem, ...]
    in_one_node: bool

    @property
    def tier(self) -> Tier:
        """How all items are held."""
        return self.items[0].tier

    @cached_property
    def is_scattered(self) -> bool:
        """Whether sums of any part travel by reduce-scatter."""
        return any(part.collective is Collective.REDUCE_SCATTER for item in self.items for part in item.parts)

    @cached_property
    def step_ms(self) -> float:
        """What the items add to the step, if all ranks share it evenly."""
        return sum(cost.step_ms for item in self.items for cost in item.costs)

    @cached_property
    def lump_ms(self) -> float:
        """What the costliest item adds to its ranks."""
        return max(sum(cost.lump_ms for cost in item.costs) for item in self.items)

    @cached_property
    def total_bytes(self) -> int:
        """Device memory on all ranks together."""
        return sum(int(item.held_L[HBM]) * item.costs[0].num_holders for item in self.items)

    def score_ms(self, limit_ms: float) -> float:
        """What it adds to the step, with what its costliest item makes others wait for: all that is above the limit."""
        return self.step_ms + max(0.0, self.lump_ms - limit_ms)


class Chooser:
    """Lists the choices of units of tables, and picks among them.

    Args:
        units: Tables that share their ranks.
        cost: Prices parts.
        names: Sharding types that are allowed.
        capacity_LR: Bytes that may be used.
        cache_policy: Of caches.
        min_partition: Least columns of a column shard; 0 for 32 bytes of a row.
    """

    def __init__(
        self,
        units: Sequence[Sequence[EmbeddingTable]],
        cost: CostFunction,
        names: Collection[ShardingType],
        capacity_LR: IntArray,
        cache_policy: str,
        min_partition: int = 0,
    ) -> None:
        self._units, self._cost, self._names, self._cache_policy = units, cost, names, cache_policy
        self._min_partition = min_partition
        self._topology, self._capacity_LR = cost.topology, capacity_LR
        self._ways: dict[tuple[str, MemoryLevel, float], list[ShardingOption]] = {}
        self._room = {tier: self._room_of_sites(tier) for tier in SITED_TIERS}
        self._known: dict[tuple[int, MemoryLevel, float], tuple[Choice, ...]] = {}

    def choices(self, levels: Sequence[MemoryLevel], least_cache: float = 1.0) -> list[tuple[Choice, ...]]:
        """For each unit all ways to hold its tables with their rows on a memory level, the simplest first.

        Args:
            levels: Of each unit's rows.
            least_cache: Smallest cache of a part on a lower level, as a share of the rows that a batch hits.

        Raises:
            InfeasiblePlanError: If a unit has none.
        """
        keys = [(unit, level, least_cache) for unit, level in enumerate(levels)]
        if new := [key for key in keys if key not in self._known]:
            tables = [(table, level) for unit, level, _ in new for table in self._units[unit]]
            self._offer(tables, least_cache)
            self._known |= {key: self._list(self._units[key[0]], *key[1:]) for key in new}
        return [self._known[key] for key in keys]

    def pick(self, listed: Sequence[Sequence[Choice]], limit_ms: float, *, replicate: bool) -> list[Choice]:
        """The choice of lowest score for every unit; replicas where they gain most per byte, as far as memory goes.

        Args:
            listed: For each unit, its choices.
            limit_ms: What an item may add to its ranks before it makes others wait.
            replicate: Whether tables may be replicated that need not be.
        """

        def score_ms(choice: Choice) -> float:
            return choice.score_ms(limit_ms)

        sharded = [[one for one in choices if one.tier is not Tier.DATA_PARALLEL] or choices for choices in listed]
        picked = [min(choices, key=score_ms) for choices in sharded]
        gains: list[tuple[float, int, Choice]] = []
        for index, (choices, now) in enumerate(zip(listed, picked, strict=True)):
            replicas = [one for one in choices if one.tier is Tier.DATA_PARALLEL] if replicate else []
            copied = min(replicas, key=score_ms, default=now)
            if (saved_ms := score_ms(now) - score_ms(copied)) > 0:
                gains.append((-saved_ms / max(copied.total_bytes - now.total_bytes, 1), index, copied))
        per_rank = self._capacity_LR[HBM].tolist()
        spare = _REPLICAS_SHARE * (sum(per_rank) - sum(choice.total_bytes for choice in picked))
        room = _REPLICAS_SHARE * min(per_rank)
        for _, index, copied in sorted(gains, key=lambda gain: gain[:2]):
            more, own = copied.total_bytes - picked[index].total_bytes, int(copied.items[0].held_L[HBM])
            if more <= spare and own <= room:
                picked[index], spare, room = copied, spare - more, room - own
        return picked

    def _list(self, unit: Sequence[EmbeddingTable], level: MemoryLevel, least_cache: float) -> tuple[Choice, ...]:
        listed = [self._ways[table.name, level, least_cache] for table in unit]
        for table, offered in zip(unit, listed, strict=True):
            if not offered:
                stay = f"{', '.join(self._names)} keeps rows in {MemoryLevel.HBM}, not in {level}"
                why = stay if self._offered(table) else why_none(table, self._topology, self._names)
                raise InfeasiblePlanError(f"{table.name}: {why}")
        found: list[Choice] = []
        too_large: list[IntArray] = []
        ruled_out: dict[str, None] = {}
        for options in _together(listed):
            if reasons := [why for option in options if (why := why_not(option, self._topology))]:
                ruled_out[f"{reasons[0]} ({options[0].name})"] = None
                continue
            items = self._items(options)
            if all(item.allowed_S.any() for item in items):
                found.append(Choice(items=items, in_one_node=options[0].in_one_node))
            else:
                too_large.append(max((item.held_L for item in items), key=lambda held_L: held_L[HBM]))
        if not found:
            raise self._nowhere("+".join(table.name for table in unit), too_large, list(ruled_out))
        return tuple(found)

    def _offered(self, table: EmbeddingTable) -> tuple[ShardingOption, ...]:
        payload = self._cost.prices.payload
        return enumerate_options(table, self._topology, self._names, payload, self._min_partition)

    def _offer(self, tables: Sequence[tuple[EmbeddingTable, MemoryLevel]], least_cache: float) -> None:
        """Lists ways to hold tables with their rows on a level, and works out what they cost, all at once."""
        offered = [
            self._on(level, option, least_cache)
            for table, level in tables
            for option in self._offered(table)
            if level is MemoryLevel.HBM or option.name is not ShardingType.DATA_PARALLEL
        ]
        synced = synced_options(offered, self._cost.prices)
        self._cost.learn(part for option in synced for part in option.parts)
        for table, level in tables:
            self._ways[table.name, level, least_cache] = []
        level_of = {table.name: level for table, level in tables}
        for option in synced:
            if all(map(self._cost.can_price, option.parts)):
                self._ways[option.table.name, level_of[option.table.name], least_cache].append(option)

    def _on(self, level: MemoryLevel, option: ShardingOption, least_cache: float) -> ShardingOption:
        """The option with its rows on a level, behind the smallest caches."""
        if level is MemoryLevel.HBM:
            return option
        parts = []
        for part in option.parts:
            local = part.local(self._topology, self._cost.prices.tables.batch_size)
            rows = ceil(least_cache * local.access.expected_distinct(local.num_lookups))
            parts.append(replace(part, memory=behind_cache(local, level, rows, self._cache_policy)))
        return replace(option, parts=tuple(parts))

    def _items(self, options: Sequence[ShardingOption]) -> tuple[NeoItem, ...]:
        """The items of a unit; column shards of one width are alike but for their columns."""
        known: dict[tuple[object, ...], NeoItem] = {}
        items = []
        for parts in zip(*(option.parts for option in options), strict=True):
            key = tuple((part.shard.rows, part.shard.embedding_dim) for part in parts)
            if key not in known:
                costs = tuple(map(self._cost.of, parts))
                held_L = np.array([sum(cost.held_bytes[level] for cost in costs) for level in LEVELS], dtype=np.int64)
                known[key] = NeoItem(
                    parts=parts, costs=costs, held_L=held_L, allowed_S=self._allowed_sites(parts, held_L)
                )
            items.append(replace(known[key], parts=parts))
        return tuple(items)

    def _allowed_sites(self, parts: Sequence[UnplacedShard], held_L: IntArray) -> NDArray[np.bool_]:
        """Whether the parts of a unit's tables may go to a site together, and fit."""
        allowed_S = np.all(self._room[parts[0].tier] >= held_L[:, None], axis=0)
        for part in parts:
            allowed_S &= allowed_sites(part.shard.table, part.tier, self._topology)
        return np.asarray(allowed_S)

    def _room_of_sites(self, tier: Tier) -> IntArray:
        """Bytes that the tightest rank of each site has, shape (L, S)."""
        sites = num_sites(tier, self._topology)
        room_LS: IntArray = self._capacity_LR.reshape(len(LEVELS), sites, -1).min(axis=2)
        return room_LS

    def _nowhere(self, label: str, too_large: Sequence[IntArray], ruled_out: Sequence[str]) -> InfeasiblePlanError:
        if not too_large:
            why = "; ".join(ruled_out) or f"none of {', '.join(self._names)} keeps its tables on the same ranks"
            return InfeasiblePlanError(f"{label}: no sharding type is left: {why}")
        least_L = min(too_large, key=lambda held_L: held_L[HBM])
        most_L = self._capacity_LR.max(axis=1)
        level = int((least_L - most_L).argmax())
        return InfeasiblePlanError(
            f"{label} needs {least_L[level]:,} bytes of {LEVELS[level]} on one rank in the sharding type of "
            f"{', '.join(self._names)} that needs least, and no rank that may hold it has more than {most_L[level]:,} "
            "bytes"
        )


def _together(listed: Sequence[Sequence[ShardingOption]]) -> Iterator[tuple[ShardingOption, ...]]:
    """Options, one for each table of a unit, that can be on the same ranks.

    Several tables are in one part each, all held alike; on all ranks, some may be replicated and others split by rows.
    """
    if len(listed) == 1:
        yield from zip(*listed, strict=True)
        return
    # Of those that differ in how sums travel, the first.
    whole = [{option.name: option for option in reversed(options) if len(option.parts) == 1} for options in listed]
    for name in whole[0]:
        if all(name in of_table for of_table in whole):
            yield tuple(of_table[name] for of_table in whole)
    everywhere = [
        [option for name, option in of_table.items() if name in (ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL)]
        for of_table in whole
    ]
    if len(listed) <= _MAX_MIXED:
        yield from (options for options in product(*everywhere) if len({option.name for option in options}) > 1)
