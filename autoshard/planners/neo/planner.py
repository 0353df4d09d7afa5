"""The planner `neo`: sharding types of tables, then greedy or largest-differencing placement, with caches if needed."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import ClassVar

import numpy as np

from autoshard.core import MemoryLevel, PlacedShard, ShardingPlan, Tier, Topology
from autoshard.core.accepted import AT_LEAST_0, SHARE, check_choice, listed
from autoshard.core.access import IntArray
from autoshard.core.errors import InfeasiblePlanError
from autoshard.evaluation.cached_rows import LFU, LRU
from autoshard.evaluation.evaluate import PricedPlan, breakdown_of, price_with_kernels
from autoshard.planners.neo.caches import FILLS, fewest_cached, levels_of, with_grown_caches
from autoshard.planners.neo.choice import HBM, LEVELS, NEO_TYPES, Choice, Chooser
from autoshard.planners.neo.cost import CostFunction
from autoshard.planners.neo.placement import GREEDY, KARMARKAR_KARP, Arrangement, Arranger
from autoshard.planners.planner import PlanRequest, parse_options
from autoshard.planners.space.constraints import check_constraints, colocated
from autoshard.planners.space.options import ShardingType
from autoshard.planners.space.planner_space import task_prices

_PLACEMENTS = (GREEDY, KARMARKAR_KARP)
_STEP, _COST = "step", "cost"
_Families = Sequence[tuple[Callable[[Choice], bool], Sequence[float]]]
#: Choices among which sharding types are picked, and what a part may add to its ranks before others wait for it, over
#: the even share of all tables: of all choices; without those of nodes; without reduce-scatters, which take something
#: however little is in them; and on single ranks alone.
_FAMILIES: _Families = (
    (lambda _: True, (2.0, 1.0, 0.25)),
    (lambda choice: choice.tier is not Tier.TABLE_ROW_WISE and not choice.in_one_node, (0.35,)),
    (lambda choice: not choice.is_scattered, (0.35,)),
    (lambda choice: choice.tier in (Tier.TABLE_WISE, Tier.DATA_PARALLEL), (math.inf, 0.35)),
)
#: Where arrangements only have to be found.
_ANY: _Families = ((lambda _: True, (1.0,)),)
#: Smallest caches that are tried, as shares of the rows that a batch hits.
_LEAST_CACHES = (1.0, 0.0)
#: Up to so many units, cuts are refined in small steps, and all limits are tried with each number of cached units.
_FEW_UNITS = 128
#: How many more units than must are put behind caches, to see whether that is faster; and all.
_MORE_CACHED = (0, 1, 2, 4, 8, 16, 64, 256)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class NeoOptions:
    """Options of the `neo` planner."""

    sharding_types: str = field(
        default=",".join(NEO_TYPES),
        metadata={"help": "Sharding types that tables may have, a comma between them."},
    )
    placement: str = field(default=KARMARKAR_KARP, metadata={"help": "How parts are placed: greedy or karmarkar_karp."})
    communication_weight: float = field(default=1.0, metadata={"help": "Weight of message volumes in the cost."})
    access_weight: float = field(default=1.0, metadata={"help": "Weight of access sizes in the cost."})
    memory: str = field(
        default=MemoryLevel.SSD.value,
        metadata={
            "help": "Lowest level that rows may live on: hbm, ddr or ssd. Lower levels are used, behind caches, only "
            "where the device memory is too small."
        },
    )
    memory_share: float = field(
        default=1.0, metadata={"help": "Share of every rank's device memory that tables and caches may take."}
    )
    compare: str = field(
        default=_STEP,
        metadata={
            "help": "What arrangements are compared by: step (its prediction by the cost models) or cost (the cost "
            "function alone, by which the paper's heuristics place)."
        },
    )
    cache_policy: str = field(default=LRU, metadata={"help": "What caches evict by: lru (age) or lfu (frequency)."})
    min_partition: int = field(
        default=0,
        metadata={"help": "Least columns of a column shard, at least 4; 0 for 32 bytes of a row."},
    )

    def __post_init__(self) -> None:
        for name, accepted in (
            ("placement", _PLACEMENTS),
            ("memory", tuple(map(str, MemoryLevel))),
            ("compare", (_STEP, _COST)),
            ("cache_policy", (LRU, LFU)),
        ):
            check_choice(getattr(self, name), accepted, f"options.{name}")
        AT_LEAST_0.check_fields(self, "communication_weight", "access_weight", "min_partition", within="options.")
        SHARE.check_fields(self, "memory_share", within="options.")
        for name in self.names:
            check_choice(name, NEO_TYPES, "options.sharding_types")

    @property
    def names(self) -> tuple[str, ...]:
        """The sharding types, each once."""
        return tuple(dict.fromkeys(listed(self.sharding_types)))


class NeoPlanner:
    """Gives each table one of seven sharding types, and places their parts.

    - A table gets the sharding type whose parts add least to the predicted step, where a part above the even share of a
      rank counts as much as it keeps the others waiting. Several limits for what counts are tried among several kinds
      of choices, with and without replicas. Parts are placed by `CostFunction`, and the arrangement with the shortest
      predicted step is taken, or with `compare=cost` the one whose costliest rank is cheapest.
    - Replication is for the tables that gain most per byte by it, as far as the memory goes.
    - Where memory is short, replicas are given up first; then the largest tables are cut as finely as they may be.
    - Where tables do not fit the device memory, some go behind caches: those with the fewest lookups per byte, in host
      memory and then on disks; as few as it takes, or more if the larger caches pay. What device memory is left, caches
      share (`with_grown_caches`).

    Source:
        Neo Sec. 4 and 5.2. Differs: the paper leaves open how sharding types are chosen, and how large caches are;
        predicted steps, which it has for analysis only, decide; memory limits and constraints hold. Its hybrid of
        tables to nodes, then columns to ranks (`table_column_wise`) moves the same bytes as column-wise does.
    """

    name: ClassVar[str] = "neo"
    summary: ClassVar[str] = (
        "4D parallelism: per table the cheapest of seven sharding types, placed by bytes sent and read."
    )
    when: ClassVar[str] = "large tables, plans without a search"
    is_compared: ClassVar[bool] = True
    cuts_tables: ClassVar[bool] = True
    options_type: ClassVar[type] = NeoOptions

    def plan(self, request: PlanRequest) -> ShardingPlan:
        """Makes a plan, without prediction or provenance.

        Raises:
            InfeasiblePlanError: If no plan within the memory limits was found.
            InvalidOptionError: If an option is unknown or out of range.
            InvalidPlanError: If a constraint names a table or rank that is not there.
        """
        options = parse_options(NeoOptions, request.options)
        check_constraints(request.tables, request.topology)
        return _Search(request, options).plan()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    """A plan, what it is compared by, and its price where that is the predicted step."""

    plan: ShardingPlan
    cost: float
    priced: PricedPlan | None = None

    def predicted(self) -> ShardingPlan:
        """The plan with its prediction, where it was priced."""
        return self.plan if self.priced is None else replace(self.plan, predicted=breakdown_of(self.plan, self.priced))


class _Search:
    """The search for one request."""

    def __init__(self, request: PlanRequest, options: NeoOptions) -> None:
        self.request, self.options = request, options
        topology = request.topology
        self.cost = CostFunction(
            task_prices(request.tables, topology, request.costs, request.payload),
            communication_weight=options.communication_weight,
            access_weight=options.access_weight,
        )
        self.capacity_LR = _capacity(topology, options)
        self.units = colocated(request.tables)
        names = tuple(ShardingType(name) for name in options.names)
        self.chooser = Chooser(
            self.units, self.cost, names, self.capacity_LR, options.cache_policy, options.min_partition
        )
        self.arranger = Arranger(
            tables=request.tables,
            topology=topology,
            capacity_LR=self.capacity_LR,
            method=options.placement,
            model=request.costs.kernel,
        )
        self.hbm_bytes, *self.lower_bytes = (sum(of_level) for of_level in self.capacity_LR.tolist())

    def plan(self) -> ShardingPlan:
        """The plan in device memory, or else with as few units behind caches as pays.

        Raises:
            InfeasiblePlanError: If there is none.
        """
        self._check_total()
        failure: InfeasiblePlanError | None = None
        if not fewest_cached(self.units, self.hbm_bytes):
            try:
                return self._best([MemoryLevel.HBM] * len(self.units), 1.0, _FAMILIES).predicted()
            except InfeasiblePlanError as error:
                failure = error
        if any(self.lower_bytes):
            for least_cache, fill in product(_LEAST_CACHES, FILLS):
                fewest = self._fewest_cached(least_cache, fill)
                if fewest is not None:
                    return self._best_cached(fewest, least_cache, fill).predicted()
        raise failure or InfeasiblePlanError(
            f"whichever tables lie behind caches, the others find no room in the {self.hbm_bytes:,} bytes of device "
            "memory that all ranks have together"
        )

    def _fewest_cached(self, least_cache: float, fill: float) -> int | None:
        """The fewest units behind caches that fit; None if no number of them was found to.

        From the fewest that leave no more bytes than the device memory has: one more, two, four ..., and then back.
        """

        def fits(num_cached: int) -> bool:
            return self._cached(num_cached, least_cache, fill) is not None

        # No plan without caches was found before.
        low, more = max(1, fewest_cached(self.units, self.hbm_bytes)), 0
        while not fits(high := min(len(self.units), low + more)):
            if high == len(self.units):
                return None
            low, more = high + 1, max(1, 2 * more)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle + 1, high)
        return high

    def _best_cached(self, fewest: int, least_cache: float, fill: float) -> _Judged:
        """With the fewest units behind caches, or with 1, 2, 4 ... more, which leaves more room for caches."""
        counts = [count for count in (fewest + more for more in _MORE_CACHED) if count < len(self.units)]
        counts.append(len(self.units))
        families = _FAMILIES if len(self.units) <= _FEW_UNITS else _ANY
        tried = {count: self._cached(count, least_cache, fill, families) for count in counts}
        found = {count: one for count, one in tried.items() if one is not None}
        count = min(found, key=lambda count: found[count].cost, default=fewest)
        _log.info("neo: %d of %d tables, or groups of them, are behind caches", count, len(self.units))
        best = found.get(count)
        if best is None or families is not _FAMILIES:
            best = self._cached(count, least_cache, fill, _FAMILIES) or best
        assert best is not None, "it was found before"
        return best

    def _cached(self, num_cached: int, least_cache: float, fill: float, families: _Families = _ANY) -> _Judged | None:
        """The best arrangement with that many units behind caches, if one was found."""
        levels = levels_of(self.units, num_cached, fill * self.lower_bytes[0], has_disks=bool(self.lower_bytes[1]))
        try:
            return self._best(levels, least_cache, families)
        except InfeasiblePlanError:
            return None

    def _best(self, levels: Sequence[MemoryLevel], least_cache: float, families: _Families) -> _Judged:
        """The best arrangement, or the first of ever finer ones that fits.

        Raises:
            InfeasiblePlanError: If there is none.
        """
        listed = self.chooser.choices(levels, least_cache)
        failures: list[InfeasiblePlanError] = []
        found = list(self._arranged(self._picks(listed, levels, families), failures))
        if found:
            return min(map(self._judged, found), key=lambda one: one.cost)
        for one in self._arranged(_ever_finer(listed), failures):
            return self._judged(one)
        raise failures[0]

    def _arranged(self, picks: Iterable[list[Choice]], failures: list[InfeasiblePlanError]) -> Iterator[Arrangement]:
        """Arrangements of choices; for others, why there is none goes to the failures."""
        for picked in picks:
            try:
                yield self.arranger.arrange(picked, self.request.seed)
            except InfeasiblePlanError as error:
                failures.append(error)

    def _picks(
        self, listed: Sequence[Sequence[Choice]], levels: Sequence[MemoryLevel], families: _Families
    ) -> list[list[Choice]]:
        """Choices worth arranging, each once."""
        even_ms = sum(min(choice.step_ms for choice in choices) for choices in listed)
        # Where device memory is short of tables, there is none for replicas.
        is_short = any(level is not MemoryLevel.HBM for level in levels)
        picks = [
            self.chooser.pick(offered, limit * even_ms, replicate=replicate)
            for may, limits in families
            for offered in [[list(filter(may, choices)) or choices for choices in listed]]
            for limit in limits
            for replicate in ((False,) if is_short else (True, False))
        ]
        # Without any all-to-all, whatever that takes.
        copied = [[one for one in choices if one.tier is Tier.DATA_PARALLEL] for choices in listed]
        if all(copied):
            picks.append([choices[0] for choices in copied])
        return list({tuple(map(id, picked)): picked for picked in picks}.values())

    def _judged(self, found: Arrangement) -> _Judged:
        """The plan of an arrangement, with what it is compared by."""
        plan = self._to_plan(found)
        if self.options.compare == _STEP:
            priced = price_with_kernels(plan, self.request.costs)
            return _Judged(plan=plan, cost=priced.step.step_ms.value, priced=priced)
        cost_s_R = found.cost_s_R.copy()
        held = [(part, placed) for (part, _), placed in zip(found.parts, self._placed(found), strict=True)]
        grown = [(part, placed) for part, placed in held if placed.memory != part.memory]
        self.cost.learn(replace(part, memory=placed.memory) for part, placed in grown)
        for part, placed in grown:
            more_s = self.cost.of(replace(part, memory=placed.memory)).weighted_s - self.cost.of(part).weighted_s
            cost_s_R[[rank for replica in placed.replicas for rank in replica]] += more_s
        return _Judged(plan=plan, cost=float(cost_s_R.max()))

    def _placed(self, found: Arrangement) -> tuple[PlacedShard, ...]:
        """All parts at their sites, with caches that fill the device memory."""
        topology, batch_size = self.request.topology, self.request.tables.batch_size
        shards = tuple(part.placed(site, topology) for part, site in found.parts)
        if all(placed.memory.level is MemoryLevel.HBM for placed in shards):
            return shards
        return with_grown_caches(shards, topology, batch_size, self.capacity_LR[HBM].tolist())

    def _check_total(self) -> None:
        """Refuses what no plan can hold: every row is on some rank, on some level."""
        needed = self.request.tables.storage_bytes
        bytes_L = self.hbm_bytes, *self.lower_bytes
        if needed > sum(bytes_L):
            levels = ", ".join(level for level, there in zip(LEVELS, bytes_L, strict=True) if there) or "any level"
            raise InfeasiblePlanError(
                f"all tables need {needed:,} bytes, {needed - sum(bytes_L):,} bytes more than the "
                f"{self.request.topology.world_size} ranks have together on {levels}"
            )

    def _to_plan(self, found: Arrangement) -> ShardingPlan:
        request = self.request
        order = {table.name: index for index, table in enumerate(request.tables.tables)}
        shards = sorted(self._placed(found), key=lambda placed: order[placed.shard.table.name])
        return ShardingPlan(
            tables=request.tables, topology=request.topology, shards=tuple(shards), payload=request.payload
        )


def _ever_finer(listed: Sequence[Sequence[Choice]]) -> Iterator[list[Choice]]:
    """Units as they take least memory in all; then more and more of them, the largest first, in the smallest items."""

    def largest_item(choice: Choice) -> int:
        return max(int(item.held_L.sum()) for item in choice.items)

    # Of those that take as much, the simplest.
    smallest = [min(choices, key=lambda choice: choice.total_bytes) for choices in listed]
    finest = [min(choices, key=lambda choice: (largest_item(choice), choice.step_ms)) for choices in listed]
    by_size = sorted(range(len(listed)), key=lambda index: -smallest[index].total_bytes)
    num_cut, growth = 0, 2 if len(listed) <= _FEW_UNITS else 4
    while True:
        cut = set(by_size[:num_cut])
        yield [finest[index] if index in cut else smallest[index] for index in range(len(listed))]
        if num_cut >= len(listed):
            return
        num_cut = min(len(listed), max(1, growth * num_cut))


def _capacity(topology: Topology, options: NeoOptions) -> IntArray:
    """Bytes of every rank that may be used, shape (L, R); none below the lowest level allowed."""
    memory_R = [topology.memory_of(rank) for rank in range(topology.world_size)]
    capacity_LR = np.array([[memory[level] for memory in memory_R] for level in LEVELS], dtype=np.int64)
    capacity_LR[LEVELS.index(MemoryLevel(options.memory)) + 1 :] = 0
    if options.memory_share < 1:
        capacity_LR[HBM] = [int(options.memory_share * memory.hbm) for memory in memory_R]
    return capacity_LR
