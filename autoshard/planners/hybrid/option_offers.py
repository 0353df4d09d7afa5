"""The options that the search chooses from: few of most tables at first, and all of the costliest.

Shape suffixes: I items.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeAlias

import numpy as np

from autoshard.core import EmbeddingTable, MemoryLevel, Pooling, Tier, Topology
from autoshard.core.costs import MsArray
from autoshard.core.errors import InfeasiblePlanError
from autoshard.core.shard import fused_kernel
from autoshard.evaluation.cached_rows import LRU
from autoshard.planners.hybrid.hot_rows import RowPrices, offer_hot_rows, row_prices
from autoshard.planners.planner import PlanRequest
from autoshard.planners.space.caches import on_level
from autoshard.planners.space.cost_gradient import CostGradient, FlatOptions, shard_cost, shard_costs
from autoshard.planners.space.kinds import FloatArray
from autoshard.planners.space.layout import Layout
from autoshard.planners.space.options import (
    ShardingOption,
    ShardingType,
    enumerate_options,
    hot_rows,
    row_tiers,
    why_none,
    why_not,
)
from autoshard.planners.space.planner_space import PlannerSpace
from autoshard.planners.space.uneven_rows import room_of_ranks, uneven_options
from autoshard.planners.space.ways import TaskFeatures, Way, way_features

#: Rows are offered behind caches where tables take more than this share of the devices' memory.
_SCARCE_SHARE = 0.5
#: Cache sizes that are offered, over the rows that a batch hits; memory that is left makes them larger.
_CACHE_SHARES = (1.0, 0.25)
#: Tables that take more than this share of the memory that devices have in the mean have all options, and where ranks
#: differ in memory, uneven shares of rows: smaller ones fill the ranks whole.
_LARGE_SHARE = 0.25
#: What every table is offered first, and then, where it is not among the costliest.
_FIRST = frozenset({ShardingType.TABLE_WISE})
_NEXT = frozenset({ShardingType.DATA_PARALLEL, ShardingType.ROW_TIERS})
#: How many tables are offered all options at first, the costliest: so many, or this share of them.
_NUM_COSTLIEST, _COSTLIEST_SHARE = 20, 0.05
#: Tables times ranks of tasks in which a burst takes long, and single tables decide the step.
LARGE_TASK = 10_000
#: Steps of the search after which twice as many are.
_WIDENED_AFTER = 24
#: Share of the time that is left which more options may take.
_GROWTH_SHARE = 0.15
#: Share of the time left in which the costliest tables of a large task, or after a policy's options, get all others.
_MORE_SHARE = 0.5
#: Tables of each kind of rows that tell for the others of a large task what their rows cost.
_NUM_SAMPLED = 5
#: Tables that differ and are offered all options, a few by price, and few, between two looks at the clock.
_BATCH, _SMALL_BATCH, _LARGE_BATCH = 20, 50, 100
#: How often numbers of hot rows are read off what costs least before the search begins: two rounds leave a sixth of
#: what thirty numbers could gain.
_NUM_HOT_ROUNDS = 2
#: Share of the lookups whose rows tell how skewed a table's lookups are.
_SKEW_SHARE = 0.6
#: Most sharding types of a table, beside the whole one, that a policy names, and the least probability of one.
_NUM_LIKELY, _LEAST_LIKELY = 3, 0.05

#: What a policy says: features of a task with I items and of W ways to hold a table in, a score for each of both out,
#: shape (I, W); the higher, the likelier is the way among those that a long search takes.
ScoreWays: TypeAlias = Callable[[TaskFeatures, FloatArray], FloatArray]


class OfferedOptions:
    """The options of a task while it is searched.

    Every table may be whole. All sharding types are offered to the costliest tables, which decide the step, and few to
    the others; to more of them the longer the search goes on. All options of a table take 1 to 2 ms (metasyn, 8 to 80
    A100, one core of an EPYC, November 2026).

    Args:
        request: The task.
        names: Ways that tables may be held.
        min_partition: Least columns of a column shard; 0 for 32 bytes of a row.
        by_kernels: Whether a step is the kernels of its slowest rank alone.
        reserved_bytes: Of every device, to stay free of tables.

    Attributes:
        space: What there is to choose from now.

    Raises:
        InfeasiblePlanError: If a table cannot be held as any of the names.
    """

    def __init__(
        self,
        request: PlanRequest,
        names: Collection[ShardingType] = tuple(ShardingType),
        min_partition: int = 0,
        *,
        by_kernels: bool = False,
        reserved_bytes: int = 0,
    ) -> None:
        self._ways = _Ways.of(request, names, min_partition, reserved_bytes)
        self.space = PlannerSpace(
            request.tables,
            request.topology,
            request.costs,
            self._ways.simplest,
            request.payload,
            by_kernels=by_kernels,
        )
        is_large = _is_large(request.topology)
        self._large = [index for index, item in enumerate(self.space.items) if any(map(is_large, item.tables))]
        self._with_all: set[int] = set()
        self._is_timed, self._round_s = False, 0.0

    @property
    def is_large(self) -> bool:
        """Whether the task is so large that there is hardly time for more than starts."""
        return self.space.size > LARGE_TASK

    @property
    def is_complete(self) -> bool:
        """Whether every table has been offered all options."""
        return len(self._with_all) == len(self.space.items)

    def begin(self, until_s: float = math.inf, score: ScoreWays | None = None) -> None:
        """Offers what a policy names, or else all options of the costliest tables and few of others, as time allows.

        Args:
            until_s: When to end, by `time.perf_counter`; if it is infinite, no clock decides what is offered later.
            score: The policy; None for none.
        """
        began_s = time.perf_counter()
        self._is_timed = math.isfinite(until_s)
        rates = CostGradient.of(self.space)
        order = self._costliest_whole(rates)
        num_all = max(_NUM_COSTLIEST, math.ceil(_COSTLIEST_SHARE * len(order)))
        if self.is_large:
            self._begin_by_price(order, rates, until_s)
            self._offer_all(order[:num_all], share_of_time(_MORE_SHARE, until_s))
            return
        if score is None:
            self._offer_all([*self._large, *order[:num_all]], until_s)
            self._offer_few([index for index in order if index not in self._with_all], until_s)
            self._round_s = (time.perf_counter() - began_s) / 2
        else:
            self.offer_likely(score, until_s)
        for _ in range(_NUM_HOT_ROUNDS):
            if time.perf_counter() + self._round_s >= until_s:
                break
            self._offer_hot_rows(CostGradient.of(self.space))
        if score is not None:
            self._offer_all(order[:num_all], share_of_time(_MORE_SHARE, until_s))

    def offer_likely(self, score: ScoreWays, until_s: float = math.inf) -> None:
        """Offers every item the few sharding types that a policy thinks likely, the costliest first, as time allows.

        Args:
            score: The policy.
            until_s: When to end, by `time.perf_counter`. If that is yet to come, the costliest items are offered theirs
                in any case: where a busy processor took all the time for the scores, all tables would be whole.
        """
        is_due = time.perf_counter() < until_s
        features = TaskFeatures.of(self.space, FlatOptions.of(self.space), CostGradient.of(self.space))
        ways = self._ways.every_way(self.space)
        score_IW = score(features, way_features(ways))
        share_IW = np.exp(score_IW - score_IW.max(axis=1, keepdims=True))
        share_IW /= share_IW.sum(axis=1, keepdims=True)
        types = [one for one in dict.fromkeys(way.name for way in ways) if one not in _FIRST]
        if not types:
            return
        share_IT = np.stack([share_IW[:, [way.name is one for way in ways]].sum(axis=1) for one in types], axis=1)
        names_of: dict[str, frozenset[ShardingType]] = {}
        for item, share_T in zip(self.space.items, share_IT, strict=True):
            likeliest = [index for index in np.argsort(-share_T)[:_NUM_LIKELY] if share_T[index] >= _LEAST_LIKELY]
            names_of |= dict.fromkeys((table.name for table in item.like), frozenset(types[one] for one in likeliest))
        order: list[int] = features.order().tolist()
        self._offer_all(self._large, until_s)
        others = [index for index in order if index not in self._with_all]
        first = others[: _BATCH if is_due else 0]
        for batch in chain([first] if first else [], self._batches(others[len(first) :], _LARGE_BATCH, until_s)):
            self.space.offer(batch, lambda table: self._ways.few(table, names_of[table.name]))

    def _begin_by_price(self, order: Sequence[int], rates: CostGradient, until_s: float) -> None:
        """Offers all options to what binds, and to all others copies of the hot rows for which that is cheapest.

        Few options of a few tables tell what rows cost of all tables that are like theirs.
        """
        self._offer_all([*self._large, *self._binding(rates)], until_s)
        others = [index for index in order if index not in self._with_all]
        single = [index for index in others if len(self.space.items[index].like) == 1]
        sampled: dict[Hashable, dict[str, int]] = {}
        for index in single:
            table = self.space.items[index].like[0]
            of_kind = sampled.setdefault(_row_kind(table), {})
            if len(of_kind) < _NUM_SAMPLED:
                of_kind.setdefault(table.name, index)
        few = [index for of_kind in sampled.values() for index in of_kind.values()]
        self._offer_few(few, until_s)
        for _ in range(_NUM_HOT_ROUNDS):
            offer_hot_rows(self.space, CostGradient.of(self.space), [*self._with_all, *few])
        rates = CostGradient.of(self.space)
        prices = {kind: row_prices(self.space, of_kind.values(), rates) for kind, of_kind in sampled.items()}
        for batch in self._batches(single, _SMALL_BATCH, until_s):
            self.space.offer(batch, lambda table: self._ways.by_price(table, prices[_row_kind(table)]))
        self._offer_few([index for index in others if len(self.space.items[index].like) > 1], until_s)

    def complete(self) -> None:
        """Offers all options to all tables."""
        self._offer_all(range(len(self.space.items)), math.inf)

    def offer_caches(self) -> bool:
        """Offers all options to all tables, also with rows in lower memory levels; whether that is anything new.

        Where tables fit the devices' memory together, some of them may fit no rank.
        """
        levels = _lower_levels(self._ways.request.topology)
        if self._ways.levels == levels:
            return False
        self._ways = replace(self._ways, levels=levels)
        self._with_all.clear()
        self.complete()
        return True

    def grow(self, flat: FlatOptions, around: Layout, num_steps: int, deadline_s: float) -> bool:
        """Offers more around a layout of the search; whether there is anything new.

        Args:
            flat: The options so far.
            around: The best layout.
            num_steps: Steps that the search has made.
            deadline_s: When it ends, by `time.perf_counter`.
        """
        now_s = time.perf_counter()
        until_s = now_s + _GROWTH_SHARE * (deadline_s - now_s) if self._is_timed else math.inf
        if now_s + self._round_s >= until_s:
            return False
        rates = CostGradient.of(self.space, around)
        is_new = self._offer_hot_rows(rates)
        if num_steps < _WIDENED_AFTER or self.is_complete:
            return is_new
        order = [index for index in self._costliest(flat, rates, around) if index not in self._with_all]
        self._offer_all(order[: max(_BATCH, len(self._with_all))], until_s)
        return True

    def _offer_hot_rows(self, rates: CostGradient) -> bool:
        """See `offer_hot_rows`; the next time it takes about as long."""
        began_s = time.perf_counter()
        is_new = offer_hot_rows(self.space, rates)
        self._round_s = time.perf_counter() - began_s
        return is_new

    def _costliest_whole(self, rates: CostGradient) -> list[int]:
        """Items by what they cost whole as if all ranks were alike, the costliest first."""
        cost_ms = shard_cost(rates, self.space.topology.world_size)
        costs = [sum(map(cost_ms, item.options[0].shards)) for item in self.space.items]
        order: list[int] = np.argsort(-np.array(costs), kind="stable").tolist()
        return order

    def _costliest(self, flat: FlatOptions, rates: CostGradient, around: Layout) -> list[int]:
        """As `_costliest_whole`, as items are held in a layout."""
        cost_O: MsArray = flat.sums(shard_costs(flat, rates, self.space.topology.world_size))
        order: list[int] = np.argsort(-cost_O[flat.first_I + around.numbers_I], kind="stable").tolist()
        return order

    def _binding(self, rates: CostGradient) -> list[int]:
        """Items that take a rank longer for some part, whole, than what ranks have in the mean; by how much, falling.

        No rank that holds one of them whole is level with the others: with many ranks these decide the step.
        """
        whole_IP = rates.served_VP[[item.options[0].shards[0].kind for item in self.space.items]]
        excess_I = np.maximum(whole_IP - whole_IP.sum(axis=0) / self.space.topology.world_size, 0.0).sum(axis=1)
        return [index for index in np.argsort(-excess_I, kind="stable").tolist() if excess_I[index] > 0]

    def _offer_all(self, items: Iterable[int], until_s: float) -> None:
        """Offers all options to some items that have not been offered them."""
        new = [index for index in dict.fromkeys(items) if index not in self._with_all]
        for batch in self._batches(new, _BATCH, until_s):
            self.space.offer(batch, self._ways.every)
            self._with_all.update(batch)

    def _offer_few(self, items: Sequence[int], until_s: float) -> None:
        """Offers few options to some items."""
        for batch in self._batches(items, _LARGE_BATCH, until_s):
            self.space.offer(batch, self._ways.few)

    def _batches(self, items: Sequence[int], size: int, until_s: float) -> Iterable[Sequence[int]]:
        """So many items at a time until the time is over; those that are alike count once, as they take it."""
        batch: list[int] = []
        alike: set[str] = set()
        for number, index in enumerate(items, 1):
            batch.append(index)
            alike.add(self.space.items[index].like[0].name)
            if len(alike) < size and number < len(items):
                continue
            if time.perf_counter() >= until_s:
                break
            yield batch
            batch, alike = [], set()


def space_of(
    request: PlanRequest,
    names: Collection[ShardingType] = tuple(ShardingType),
    only: Collection[str] | None = None,
    reserved_bytes: int = 0,
) -> PlannerSpace:
    """All sharding options of the tables of a task, with rows behind caches where device memory is scarce.

    Args:
        request: The task.
        names: Ways that tables may be held.
        only: Names of the tables that have all options, where the others may only be whole; None for all tables.
        reserved_bytes: Of every device, to stay free of tables.

    Raises:
        InfeasiblePlanError: If a table cannot be held as any of the names.
    """
    ways = _Ways.of(request, names, 0, reserved_bytes)

    def options_of(table: EmbeddingTable) -> list[ShardingOption]:
        return ways.every(table) if only is None or table.name in only else ways.simplest(table)

    return PlannerSpace(request.tables, request.topology, request.costs, options_of, request.payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ways:
    """Ways to hold a table of a task.

    Attributes:
        request: The task.
        names: Sharding types.
        min_partition: Least columns of a column shard; 0 for 32 bytes of a row.
        levels: Memory levels below the devices', where the devices' memory is scarce.
        room_R: Bytes of each rank that are not reserved.
    """

    request: PlanRequest
    names: frozenset[ShardingType]
    min_partition: int
    levels: Sequence[MemoryLevel]
    room_R: FloatArray

    @classmethod
    def of(
        cls, request: PlanRequest, names: Collection[ShardingType], min_partition: int, reserved_bytes: int
    ) -> _Ways:
        tables, topology = request.tables, request.topology
        there = sum(max(0, hbm_bytes - reserved_bytes) for hbm_bytes in topology.hbm_bytes)
        return cls(
            request=request,
            names=frozenset(names),
            min_partition=min_partition,
            levels=_lower_levels(topology) if tables.storage_bytes > _SCARCE_SHARE * there else (),
            room_R=np.maximum(room_of_ranks(tables, topology) - reserved_bytes, 0.0),
        )

    def every(self, table: EmbeddingTable) -> list[ShardingOption]:
        """All of them."""
        listed = self._listed(table, self.names)
        if not listed:
            raise InfeasiblePlanError(f"{table.name}: {why_none(table, self.request.topology, self.names)}")
        is_uneven = ShardingType.ROW_WISE in self.names and self.room_R.min() < self.room_R.max()
        uneven: Sequence[ShardingOption] = ()
        if is_uneven and _is_large(self.request.topology)(table):
            uneven = uneven_options(table, self.request.topology, self.room_R, self.request.payload)
        return [*listed, *uneven, *self._cached(listed)]

    def simplest(self, table: EmbeddingTable) -> list[ShardingOption]:
        """The whole table on one rank; all of them where that is none, or the table's constraints rule it out."""
        whole = self._listed(table, self.names & _FIRST)
        is_any = any(not why_not(option, self.request.topology) for option in whole)
        return [*whole, *self._cached(whole)] if is_any else self.every(table)

    def few(self, table: EmbeddingTable, types: Collection[ShardingType] = _NEXT) -> list[ShardingOption]:
        """The simpler ways of some sharding types: owners send what is less, rows beside hot ones are on one rank.

        With hot rows there are copies of all rows, too: numbers of hot rows are read off the prices of both.
        """
        names = {*types, ShardingType.DATA_PARALLEL} if ShardingType.ROW_TIERS in types else set(types)
        listed = self._listed(table, self.names & names, is_simple=True)
        return [*listed, *self._cached(listed)]

    def every_way(self, space: PlannerSpace) -> list[Way]:
        """Ways to hold the tables of a task, read off a few tables of each kind that have most of them.

        The widest has the most numbers of column shards, the one with the fewest lookups exchanges by rows, the one
        with the most skewed lookups tiers of rows, and the one with the most even ones groups of rows.
        """
        most: dict[tuple[bool, bool, int], tuple[float, EmbeddingTable]] = {}
        for item in space.items:
            table = item.like[0]
            hot_share = hot_rows(table, _SKEW_SHARE) / table.num_embeddings
            sizes = table.embedding_dim, -table.pooling_factor, -hot_share, hot_share
            for number, size in enumerate(sizes):
                kind = table.pooling is Pooling.SEQUENCE, table.row_order is not None, number
                if kind not in most or size > most[kind][0]:
                    most[kind] = size, table
        chosen = {table.name: table for _, table in most.values()}
        found = dict.fromkeys(Way.of(option) for table in chosen.values() for option in self.every(table))
        # Columns over the ranks of one node are the same shards as columns over any ranks, which an item has once.
        is_twice = ShardingType.COLUMN_WISE in self.names
        return [way for way in found if not (is_twice and way.name is ShardingType.TABLE_COLUMN_WISE)]

    def by_price(self, table: EmbeddingTable, prices: RowPrices | None) -> list[ShardingOption]:
        """Copies on all ranks of all rows, or of those for which that is cheapest; without prices, as `few`."""
        if prices is None:
            return self.few(table)
        copied = self._listed(table, self.names & {ShardingType.DATA_PARALLEL})
        num_hot = prices.num_hot(table, self.request.tables.batch_size)
        tiers: Sequence[ShardingOption] = ()
        if 0 < num_hot < table.num_embeddings and table.row_order and ShardingType.ROW_TIERS in self.names:
            tiers = row_tiers(table, num_hot, Tier.TABLE_WISE, self.request.topology, self.request.payload)
        return [*copied, *tiers, *self._cached(copied)]

    def _listed(
        self, table: EmbeddingTable, names: Collection[ShardingType], *, is_simple: bool = False
    ) -> tuple[ShardingOption, ...]:
        return enumerate_options(
            table,
            self.request.topology,
            names,
            self.request.payload,
            self.min_partition,
            with_exchanges=not is_simple,
            rest_on_one=is_simple,
        )

    def _cached(self, listed: Sequence[ShardingOption]) -> list[ShardingOption]:
        """The same behind caches, in each memory level below the devices'."""
        return [
            on_level(option, level, share, LRU, self.request.topology, self.request.tables.batch_size)
            for level in self.levels
            for share in _CACHE_SHARES
            for option in listed
            if option.name is not ShardingType.ROW_TIERS
        ]


def _row_kind(table: EmbeddingTable) -> Hashable:
    """Rows of tables with the same have about the same prices."""
    return fused_kernel(table), table.embedding_dim, len(table.features)


def _is_large(topology: Topology) -> Callable[[EmbeddingTable], bool]:
    """Whether a table takes much of the memory that devices have in the mean."""
    memory_bytes = float(np.mean(topology.hbm_bytes))
    return lambda table: table.storage_bytes > _LARGE_SHARE * memory_bytes


def share_of_time(share: float, until_s: float) -> float:
    """When a share of the time from now on will be over, by `time.perf_counter`."""
    now_s = time.perf_counter()
    return now_s + share * max(0.0, until_s - now_s)


def looked_up_bytes(table: EmbeddingTable) -> float:
    """Bytes that a sample reads of a table."""
    return table.pooling_factor * table.embedding_dim * table.dtype.num_bytes


def _lower_levels(topology: Topology) -> tuple[MemoryLevel, ...]:
    """Memory levels below the devices' that there are; the fastest first."""
    memories = [topology.memory_of(rank) for rank in range(topology.world_size)]
    return tuple(level for level in (MemoryLevel.DDR, MemoryLevel.SSD) if any(memory[level] for memory in memories))
