"""What plans are made of: items with their sharding options.

Shape suffixes: R ranks, S sites, M memory levels, E shards of an option.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.core import (
    Collective,
    CostModels,
    EmbeddingTable,
    MemoryLevel,
    Payload,
    PlacedShard,
    ShardingPlan,
    TableSet,
    Tier,
    Topology,
    Update,
)
from autoshard.core.collector import collector_paused
from autoshard.core.errors import InfeasiblePlanError
from autoshard.core.quoting import write_bytes
from autoshard.core.shard import fused_kernel
from autoshard.evaluation.cached_rows import behind_caches
from autoshard.evaluation.stages import cheapest_syncs
from autoshard.planners.space.constraints import allowed_sites, check_constraints, colocated
from autoshard.planners.space.kinds import LEVELS, FloatArray, ShardKinds
from autoshard.planners.space.options import ShardingOption, UnplacedShard, why_not
from autoshard.planners.space.step_cost import StepPrices
from autoshard.planners.space.tiers import is_everywhere, num_holders, num_replicas, site_of

IndexArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ItemShard:
    """Shards of the tables of one item that have one site.

    Attributes:
        parts: One for each table that has to be on the same ranks.
        tier: How they are held.
        kind: Index of what they add to the sums of every rank that holds them.
        num_holders: How many ranks that is.
        allowed_S: Sites that the constraints allow.
        is_everywhere: Whether all ranks hold some of it.
        in_one_node: Whether it must be in the node of the other shards of its option.
        is_free: Whether it may be on any rank by itself.
    """

    parts: tuple[UnplacedShard, ...]
    tier: Tier
    kind: int
    num_holders: int
    allowed_S: BoolArray
    is_everywhere: bool
    in_one_node: bool
    is_free: bool

    def ranks(self, site: int) -> slice:
        """Ranks that hold it at a site."""
        return slice(site * self.num_holders, (site + 1) * self.num_holders)

    def by_site(self, values_R: NDArray[Any]) -> NDArray[Any]:
        """Values of the ranks of each site, shape (S, R / S)."""
        return values_R.reshape(-1, self.num_holders)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ItemOption:
    """One way to hold an item.

    Attributes:
        of_tables: The sharding option of each of its tables.
        shards: What is to be placed.
    """

    of_tables: tuple[ShardingOption, ...]
    shards: tuple[ItemShard, ...]

    @property
    def label(self) -> str:
        """How the first table is held, and behind which cache."""
        memory = self.shards[0].parts[0].memory
        behind = (
            "" if memory.cache_bytes == 0 else f", {memory.level} behind a cache of {write_bytes(memory.cache_bytes)}"
        )
        return self.of_tables[0].label + behind

    @property
    def is_uneven(self) -> bool:
        """Whether rows are in uneven shares."""
        return self.of_tables[0].is_uneven


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Found:
    """An option, None if constraints or the model rule it out, with what it is known by."""

    of_tables: Sequence[ShardingOption]
    key: Hashable
    option: ItemOption | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Item:
    """Tables that have to be on the same ranks, mostly a single one.

    Items that are alike but for names share their options, which are of the tables of the first of them.

    Attributes:
        tables: The tables.
        options: Ways to hold them, by number.
        numbers: Their numbers, by kinds and columns of their shards.
        refused: Ways that were offered, and that constraints or the model rule out.
        like: The tables that the options are of.
    """

    tables: tuple[EmbeddingTable, ...]
    like: tuple[EmbeddingTable, ...]
    options: list[ItemOption] = field(default_factory=list)
    numbers: dict[Hashable, int] = field(default_factory=dict)
    refused: list[Sequence[ShardingOption]] = field(default_factory=list)

    @property
    def label(self) -> str:
        """Names of its tables."""
        return "+".join(table.name for table in self.tables)

    def parts(self, shard: ItemShard) -> tuple[UnplacedShard, ...]:
        """The parts of one of its options' shards, of its own tables."""
        if self.like is self.tables:
            return shard.parts
        return tuple(part.of_table(self.tables[0]) for part in shard.parts)

    def placed(self, shard: ItemShard, site: int, topology: Topology) -> list[PlacedShard]:
        """One of its options' shards at a site, of its own tables."""
        table = None if self.like is self.tables else self.tables[0]
        return [part.placed(site, topology, table) for part in shard.parts]

    def taken(self, found: _Found) -> int | None:
        """The number of an option, which it has from now on; None if something rules it out."""
        if found.option is None:
            return None
        number = self.numbers.setdefault(found.key, len(self.options))
        if number == len(self.options):
            self.options.append(found.option)
        return number

    def shared(self, of_tables: Sequence[ShardingOption]) -> Sequence[ShardingOption]:
        """Ways to hold its own tables, as ways to hold those that its options are of."""
        if self.like is self.tables:
            return of_tables
        return [option.of_table(self.like[0]) for option in of_tables]


class PlannerSpace:
    """Items and their options. Options may be added, none is ever removed.

    Args:
        tables: The task's tables.
        topology: The task's topology.
        costs: Models that price steps.
        options_of: Ways to hold a table, whatever its constraints.
        payload: Number formats of what is sent; fp32 if left out.
        by_kernels: Whether a step is the kernels of its slowest rank alone.

    Attributes:
        items: The tables, in items that are placed together.
        item_of: Index of each table's item, by name.
        prices: Prices steps from sums.
        kinds: Kinds of the options' shards.

    Raises:
        InvalidPlanError: If a constraint names a table or rank that is not there.
        InfeasiblePlanError: If the constraints or the model leave an item no option, or none is offered.
    """

    def __init__(
        self,
        tables: TableSet,
        topology: Topology,
        costs: CostModels,
        options_of: Callable[[EmbeddingTable], Sequence[ShardingOption]],
        payload: Payload | None = None,
        *,
        by_kernels: bool = False,
    ) -> None:
        self.prices = task_prices(tables, topology, costs, payload or Payload(), by_kernels=by_kernels)
        self.tables, self.topology, self.costs = tables, topology, self.prices.costs
        self.kinds = ShardKinds(self.prices)
        self._sites: dict[Hashable, _Sites] = {}
        self._made: dict[tuple[str, Hashable], ItemOption | None] = {}
        check_constraints(tables, topology)
        self.items = _items(colocated(tables), self.kinds.twins)
        self.item_of = {table.name: index for index, item in enumerate(self.items) for table in item.tables}
        self.offer(range(len(self.items)), options_of)
        for item in self.items:
            if not item.options:
                raise InfeasiblePlanError(f"{item.label}: {self._why_none(item)}")

    @property
    def size(self) -> int:
        """Tables times ranks, by which a burst of the search takes long; tables that are placed together count once."""
        return len(self.items) * self.topology.world_size

    @property
    def num_options(self) -> int:
        """Options of all items."""
        return sum(len(item.options) for item in self.items)

    def offer(self, items: Iterable[int], options_of: Callable[[EmbeddingTable], Sequence[ShardingOption]]) -> None:
        """Adds ways to hold the tables of some items, without those that their constraints or the model rule out.

        What takes time is done for all of them together. Rare ways may be offered later, to some of the items.

        Args:
            items: Indices of items.
            options_of: Ways to hold a table, whatever its constraints.
        """
        with collector_paused():
            self._offer([self.items[index] for index in items], options_of)

    def _offer(
        self, of_items: Sequence[Item], options_of: Callable[[EmbeddingTable], Sequence[ShardingOption]]
    ) -> None:
        offered = {table.name: table for item in of_items for table in item.like}
        options = {name: list(options_of(table)) for name, table in offered.items()}
        synced = iter(self.synced(chain.from_iterable(options.values())))
        by_table = {name: list(islice(synced, len(of_table))) for name, of_table in options.items()}
        self.kinds.learn(chain.from_iterable(by_table.values()))
        found: dict[str, list[_Found]] = {}
        for item in of_items:
            like = [by_table[table.name] for table in item.like]
            if (name := item.like[0].name) not in found:
                found[name] = [self._found(name, of_tables) for of_tables in _alike(like)]
            for one in found[name]:
                if item.taken(one) is None:
                    item.refused.append(one.of_tables)
            if not item.options and (unlike := self._everywhere(like)):
                item.taken(self._found(name, unlike))

    def _everywhere(self, of_tables: Sequence[Sequence[ShardingOption]]) -> tuple[ShardingOption, ...]:
        """For each table the first way on all ranks that its constraints allow; none if one of them has none."""
        held = [
            next((one for one in options if one.is_everywhere and not why_not(one, self.topology)), None)
            for options in of_tables
        ]
        return tuple(one for one in held if one is not None) if None not in held else ()

    def add(self, options_I: Sequence[Sequence[ShardingOption]]) -> list[int | None]:
        """For each item the number of the option that holds its tables so; None if something rules it out.

        Args:
            options_I: For each item the options of its tables.
        """
        self.kinds.learn(option for options in options_I for option in options)
        return [
            item.taken(self._found(item.like[0].name, item.shared(options)))
            for item, options in zip(self.items, options_I, strict=True)
        ]

    def synced(self, options: Iterable[ShardingOption]) -> list[ShardingOption]:
        """See `synced_options`."""
        return synced_options(options, self.prices)

    def open_sites(self, shard: ItemShard, free_RM: FloatArray, node: int | None = None) -> BoolArray:
        """Sites that a shard may take with the memory that is left, shape (S,).

        Args:
            shard: The shard.
            free_RM: Bytes left of each rank by memory level.
            node: The node that a shard on a single rank has to be in; None for any.
        """
        # Level by level: a reduction over the few levels of each rank took a tenth of planning for a thousand ranks.
        fits_R = np.logical_and.reduce(
            [free_R >= held for free_R, held in zip(free_RM.T, self.kinds.bytes_VM[shard.kind], strict=True)]
        )
        open_S = shard.allowed_S & (fits_R if shard.num_holders == 1 else shard.by_site(fits_R).all(axis=1))
        if node is not None:
            open_S &= np.arange(len(open_S)) // self.topology.local_world_size == node
        return open_S

    def take_sites(
        self, option: ItemOption, free_RM: FloatArray, choose: Callable[[ItemShard, BoolArray], int]
    ) -> tuple[int, ...] | None:
        """Sites for the shards of an option, one after the other; None as soon as one has no site left.

        Args:
            option: The option.
            free_RM: Bytes left of each rank by memory level; the shards' bytes are taken from them.
            choose: Picks one of the open sites of a shard.
        """
        sites: list[int] = []
        node: int | None = None
        for shard in option.shards:
            open_S = self.open_sites(shard, free_RM, node)
            if not open_S.any():
                return None
            sites.append(choose(shard, open_S))
            free_RM[shard.ranks(sites[-1])] -= self.kinds.bytes_VM[shard.kind]
            if shard.in_one_node:
                node = sites[-1] // self.topology.local_world_size
        return tuple(sites)

    def largest_bytes(self, option: ItemOption, level: MemoryLevel | None = None) -> int:
        """Bytes that an option takes of some rank at least: of its shards on all ranks, and the largest of the others.

        Args:
            option: The option.
            level: The memory that counts; None for all levels together.
        """
        bytes_EM = self.kinds.bytes_VM[[shard.kind for shard in option.shards]]
        bytes_E = bytes_EM.sum(axis=1) if level is None else bytes_EM[:, LEVELS.index(level)]
        is_shared_E = np.array([shard.is_everywhere for shard in option.shards])
        return round(float(bytes_E[is_shared_E].sum() + bytes_E[~is_shared_E].max(initial=0.0)))

    def plan(self, held: Iterable[PlacedShard]) -> ShardingPlan:
        """The plan of some shards, in the order of the tables."""
        placed: dict[str, list[PlacedShard]] = {table.name: [] for table in self.tables.tables}
        for one in held:
            placed[one.shard.table.name].append(one)
        shards = tuple(chain.from_iterable(placed.values()))
        return ShardingPlan(tables=self.tables, topology=self.topology, shards=shards, payload=self.prices.payload)

    def number(self, item: Item, of_tables: Sequence[ShardingOption]) -> int | None:
        """The number of the option that holds an item's tables so; None if there is none."""
        together = _together(item.shared(of_tables))
        return item.numbers.get(_key(together, [self.kinds.of_parts(parts) for parts in together]))

    def _found(self, name: str, of_tables: Sequence[ShardingOption]) -> _Found:
        """The option that holds some tables so, of which the first has this name; it is made once."""
        together = _together(of_tables)
        kinds = [self.kinds.of_parts(parts) for parts in together]
        key = _key(together, kinds)
        if (name, key) not in self._made:
            self._made[name, key] = self._option(of_tables, together, kinds)
        return _Found(of_tables=of_tables, key=key, option=self._made[name, key])

    def _why_none(self, item: Item) -> str:
        """Why an item has no options: what rules out each way that was offered, with the sharding types."""
        if not item.refused:
            return "no sharding type that is offered keeps tables that must share their ranks on the same ones"
        ruled_out: dict[str, list[str]] = {}
        for of_tables in item.refused:
            reasons = filter(None, (why_not(option, self.topology) for option in of_tables))
            if any(self.kinds.of_parts(parts) is None for parts in _together(of_tables)):
                other = f"{self.costs.kernel.name} cannot price it"
            else:
                other = "its tables are pinned to ranks of which none is allowed to all of them"
            names = ruled_out.setdefault(next(reasons, other), [])
            if (name := str(of_tables[0].name)) not in names:
                names.append(name)
        told = "; ".join(f"{reason} ({', '.join(names)})" for reason, names in ruled_out.items())
        return f"no sharding type is left: {told}"

    def _option(
        self,
        of_tables: Sequence[ShardingOption],
        together: Sequence[tuple[UnplacedShard, ...]],
        kinds: Sequence[int | None],
    ) -> ItemOption | None:
        """The option of some tables; None if something rules it out."""
        if any(why_not(option, self.topology) for option in of_tables):
            return None
        shards = []
        in_one_node = of_tables[0].in_one_node
        for parts, kind in zip(together, kinds, strict=True):
            tier, sites = parts[0].tier, self._sites_of(parts)
            if kind is None or not sites.is_any:
                return None
            shard = ItemShard(
                parts=parts,
                tier=tier,
                kind=kind,
                num_holders=sites.num_holders,
                allowed_S=sites.allowed_S,
                is_everywhere=sites.is_everywhere,
                in_one_node=in_one_node,
                is_free=tier is Tier.TABLE_WISE and not in_one_node and sites.is_all,
            )
            shards.append(shard)
        return ItemOption(of_tables=tuple(of_tables), shards=tuple(shards))

    def _sites_of(self, parts: Sequence[UnplacedShard]) -> _Sites:
        """Sites that parts of several tables may share; most tables have the same constraints: none."""
        key = (parts[0].tier, parts[0].rank, *(part.shard.table.constraints for part in parts))
        if key not in self._sites:
            tables = [part.shard.table for part in parts]
            self._sites[key] = _Sites.of(tables, parts[0].tier, parts[0].rank, self.topology)
        return self._sites[key]


def synced_options(options: Iterable[ShardingOption], prices: StepPrices) -> list[ShardingOption]:
    """The options with the gradient synchronisation of least predicted time for each part of several replicas."""
    known, topology = list(options), prices.topology
    copied = [part for option in known for part in option.parts if num_replicas(part.tier, topology) > 1]
    placed = [part.placed(0, topology) for part in copied]
    syncs = cheapest_syncs(placed, prices.tables.batch_size, prices.costs.comm, topology)
    found = {
        id(part): replace(part, grad_sync=sync)
        for part, sync in zip(copied, syncs, strict=True)
        if part.grad_sync is not sync
    }
    return [
        replace(option, parts=tuple(found.get(id(part), part) for part in option.parts))
        if any(id(part) in found for part in option.parts)
        else option
        for option in known
    ]


def task_prices(
    tables: TableSet, topology: Topology, costs: CostModels, payload: Payload, *, by_kernels: bool = False
) -> StepPrices:
    """Prices of a task, whatever its shards; see `StepPrices`. Rows behind caches are priced as `evaluate` does."""
    memories = [topology.memory_of(rank) for rank in range(topology.world_size)]
    if any(memory.ddr or memory.ssd for memory in memories):
        costs = replace(costs, kernel=behind_caches(costs.kernel, topology))
    distinct = [tables.tables[index] for index in dict.fromkeys(tables.first_alike.values())]
    kernels = {fused_kernel(table, update) for table in distinct for update in Update}
    return StepPrices(tables, topology, costs, kernels, payload, by_kernels=by_kernels)


def _items(groups: Iterable[tuple[EmbeddingTable, ...]], twins: Mapping[str, int]) -> list[Item]:
    """Items of tables that are placed together; single tables that are alike but for names share their options.

    Args:
        groups: The tables of each item.
        twins: For each table, by name, the first one that is like it in prices and bytes.
    """
    first: dict[Hashable, tuple[EmbeddingTable, ...]] = {}
    items = []
    for tables in groups:
        key: Hashable = tuple(table.name for table in tables)
        if len(tables) == 1:
            key = (twins[tables[0].name], tables[0].constraints, tables[0].row_order)
        items.append(Item(tables=tables, like=first.setdefault(key, tables)))
    return items


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sites:
    """Sites of a tier that tables may share, as `ItemShard` has them."""

    allowed_S: BoolArray
    is_any: bool
    is_all: bool
    num_holders: int
    is_everywhere: bool

    @classmethod
    def of(cls, tables: Sequence[EmbeddingTable], tier: Tier, rank: int | None, topology: Topology) -> _Sites:
        allowed_S = np.logical_and.reduce([allowed_sites(table, tier, topology) for table in tables])
        if rank is not None:
            allowed_S &= np.arange(len(allowed_S)) == site_of(tier, rank, topology)
        return cls(
            allowed_S=allowed_S,
            is_any=bool(allowed_S.any()),
            is_all=bool(allowed_S.all()),
            num_holders=num_holders(tier, topology),
            is_everywhere=is_everywhere(tier),
        )


def _together(of_tables: Sequence[ShardingOption]) -> list[tuple[UnplacedShard, ...]]:
    """Parts of several tables that share a site: what all ranks hold needs no company."""
    if all(option.is_everywhere for option in of_tables):
        return [(part,) for option in of_tables for part in option.parts]
    return list(zip(*(option.parts for option in of_tables), strict=True))


def _key(together: Sequence[Sequence[UnplacedShard]], kinds: Sequence[int | None]) -> Hashable:
    """By what options of an item are known: the kinds of their shards, and their columns."""
    return tuple((kind, parts[0].shard.columns) for parts, kind in zip(together, kinds, strict=True))


def _alike(of_tables: Sequence[Sequence[ShardingOption]]) -> list[tuple[ShardingOption, ...]]:
    """Options of an item's tables; of several tables only those that put all of them on the same ranks."""
    if len(of_tables) == 1:
        return [(option,) for option in of_tables[0]]
    known = [_by_tier(options) for options in of_tables]
    # Sums travel by the same collective where they can; sequences have no sums.
    together = []
    for tier, collective in dict.fromkeys(key for of_table in known for key in of_table):
        keys = ((tier, collective), (tier, Collective.ALL_TO_ALL))
        options = [next((of_table[key] for key in keys if key in of_table), None) for of_table in known]
        together.append(tuple(option for option in options if option is not None))
    return [options for options in together if len(options) == len(known)]


def _by_tier(options: Sequence[ShardingOption]) -> dict[tuple[Tier, Collective], ShardingOption]:
    """Options of one part by tier and collective; of those that differ in what owners send, the first."""
    found: dict[tuple[Tier, Collective], ShardingOption] = {}
    for option in options:
        part = option.parts[0]
        known = found.get((part.tier, option.collective))
        if len(option.parts) == 1 and (known is None or known.parts[0].memory != part.memory):
            found[part.tier, option.collective] = option
    return found
