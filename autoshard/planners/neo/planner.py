"""The planner `neo`: sharding types of tables, then greedy or largest-differencing placement, with caches if needed.

Shape suffixes: I items, O options, R ranks, M memory levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from autoshard.core import EmbeddingTable, MemoryLevel, ShardingPlan
from autoshard.core.accepted import AT_LEAST_0, SHARE, check_choice, listed
from autoshard.core.errors import InfeasiblePlanError
from autoshard.evaluation.cached_rows import LFU, LRU
from autoshard.evaluation.evaluate import breakdown_of, price_with_kernels
from autoshard.planners.comparison import FoundPlan, choose, num_cuts
from autoshard.planners.hybrid.starts import no_room
from autoshard.planners.neo.choice import Picks
from autoshard.planners.neo.cost import CostFunction
from autoshard.planners.neo.placement import GREEDY, KARMARKAR_KARP, Arranger
from autoshard.planners.planner import PlanRequest, parse_options
from autoshard.planners.space.caches import on_level, with_grown_caches
from autoshard.planners.space.kinds import LEVELS
from autoshard.planners.space.layout import Layout, Limits
from autoshard.planners.space.options import ShardingOption, ShardingType, enumerate_options, why_none
from autoshard.planners.space.planner_space import IndexArray, PlannerSpace

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
_PLACEMENTS = (GREEDY, KARMARKAR_KARP)
_STEP, _COST = "step", "cost"
#: Smallest caches that are offered, over the rows that a batch hits.
_LEAST_CACHES = (1.0, 0.0)
#: Shares of the device memory that tables may take by estimate: shards do not pack without gaps.
_FILLS = (1.0, 0.95, 0.85)
#: The same where rows are behind caches, which grow into the rest.
_CACHED_FILLS = (1.0, 0.8, 0.5, 0.2, 0.0)
#: Shares of a rank's memory that a shard may take, each tried where no arrangement of larger ones fits.
_LARGEST = (1.0, 0.5, 0.25, 0.125, 0.06, 0.03, 0.0)


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
      rank counts as much as it keeps the others waiting, and bytes have a price where memory is short. Several limits
      for what counts are tried among several kinds of choices, with and without replicas. Parts are placed by
      `CostFunction`; of these arrangements one is taken by its predicted step (see `choose`), or with `compare=cost`
      the one whose costliest rank is cheapest.
    - Where none of them fits, shards have to be smaller and smaller shares of a rank's memory.
    - Where tables do not fit the device memory, some go behind caches, in host memory or on disks: those that lose
      least per byte; as few as it takes, or more if the larger caches pay. What device memory is left, caches share
      (`with_grown_caches`).

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
        """Makes a plan with its prediction, without provenance.

        Raises:
            InfeasiblePlanError: If no plan within the memory limits was found.
            InvalidOptionError: If an option is unknown or out of range.
            InvalidPlanError: If a constraint names a table or rank that is not there.
        """
        return _Search(request, parse_options(NeoOptions, request.options)).plan()


class _Search:
    """The search for one request."""

    def __init__(self, request: PlanRequest, options: NeoOptions) -> None:
        self.request, self.options = request, options
        self.space = PlannerSpace(
            request.tables, request.topology, request.costs, self._in_device_memory, request.payload
        )
        self.limits = _limits(self.space, options)
        self.cost = CostFunction(
            self.space.prices,
            communication_weight=options.communication_weight,
            access_weight=options.access_weight,
        )
        self.arranger = Arranger(self.space, self.limits, self.cost, options.placement)

    def plan(self) -> ShardingPlan:
        """The plan in device memory, or else with tables behind caches.

        Raises:
            InfeasiblePlanError: If there is none.
        """
        layouts = self._layouts(_FILLS)
        if not layouts and self.limits.capacity_RM[:, 1:].any():
            self.space.offer(range(len(self.space.items)), self._behind_caches)
            layouts = self._layouts(_CACHED_FILLS)
        if not layouts:
            raise no_room(self.space, self.limits)
        found = [self._found(layout) for layout in layouts]
        if self.options.compare == _COST:
            taken = min(found, key=lambda one: one.cost_ms)
        else:
            taken = choose(sorted(found, key=lambda one: num_cuts(one.plan)), self.request.costs)
        return replace(taken.plan, predicted=breakdown_of(taken.plan, taken.priced))

    def _in_device_memory(self, table: EmbeddingTable) -> Sequence[ShardingOption]:
        topology, names = self.request.topology, [ShardingType(name) for name in self.options.names]
        offered = enumerate_options(table, topology, names, self.request.payload, self.options.min_partition)
        if not offered:
            raise InfeasiblePlanError(f"{table.name}: {why_none(table, topology, names)}")
        return offered

    def _behind_caches(self, table: EmbeddingTable) -> list[ShardingOption]:
        topology, batch_size = self.request.topology, self.request.tables.batch_size
        capacity_M = self.limits.capacity_RM.sum(axis=0)
        return [
            on_level(option, level, hit_share, self.options.cache_policy, topology, batch_size)
            for level, capacity_bytes in zip(LEVELS[1:], capacity_M[1:].tolist(), strict=True)
            if capacity_bytes
            for hit_share in _LEAST_CACHES
            for option in self._in_device_memory(table)
            if option.name is not ShardingType.DATA_PARALLEL
        ]

    def _layouts(self, fills: Sequence[float]) -> list[Layout]:
        """Arrangements of picks, of the largest shards with which any of them fits."""
        picks, tried = Picks(self.space, self.limits), set[bytes]()

        def arranged(numbers_I: IndexArray) -> Layout | None:
            is_new = numbers_I.tobytes() not in tried
            tried.add(numbers_I.tobytes())
            return self.arranger.arrange(numbers_I, self.request.seed) if is_new else None

        for largest in _LARGEST:
            if found := list(filter(None, map(arranged, picks.within(fills, largest)))):
                return found
        return []

    def _found(self, layout: Layout) -> FoundPlan:
        """The plan of a layout, with what it is compared by."""
        plan = with_grown_caches(layout)
        priced = price_with_kernels(plan, self.request.costs)
        cost_ms = priced.step.step_ms.value
        if self.options.compare == _COST:
            cost_s_R = np.zeros(self.request.topology.world_size)
            for placed, cost_s in zip(plan.shards, self.cost.of(plan.shards), strict=True):
                cost_s_R[[rank for replica in placed.replicas for rank in replica]] += cost_s
            cost_ms = 1e3 * float(cost_s_R.max())
        return FoundPlan(plan=plan, priced=priced, cost_ms=cost_ms, status="")


def _limits(space: PlannerSpace, options: NeoOptions) -> Limits:
    """All memory that may be used: none below the lowest level allowed."""
    capacity_RM = Limits.of(space).capacity_RM
    capacity_RM[:, LEVELS.index(MemoryLevel(options.memory)) + 1 :] = 0
    if options.memory_share < 1:
        capacity_RM[:, 0] = np.floor(options.memory_share * capacity_RM[:, 0])
    return Limits(capacity_RM=capacity_RM, less=("memory_share",) if options.memory_share < 1 else ())
