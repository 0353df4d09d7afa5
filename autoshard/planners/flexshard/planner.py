"""The planner `flexshard`: tables cut by access rank into data-parallel, Flex and row-wise tiers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from autoshard.core import EmbeddingTable, Exchange, Shard, ShardingPlan, TableSet, Tier
from autoshard.core.accepted import AT_LEAST_0, check_choice
from autoshard.core.errors import InfeasiblePlanError, InvalidOptionError
from autoshard.core.quoting import write_bytes
from autoshard.planners.flexshard.cuts import TierOffers
from autoshard.planners.flexshard.equations import FlexMachine
from autoshard.planners.flexshard.paper_rule import paper_bounds
from autoshard.planners.flexshard.sweep import TierSweep
from autoshard.planners.heuristics.greedy import place_by_cost
from autoshard.planners.hybrid.starts import no_room
from autoshard.planners.planner import PlanRequest, parse_options
from autoshard.planners.space.constraints import check_constraints
from autoshard.planners.space.feasibility import repair
from autoshard.planners.space.layout import Layout, Limits
from autoshard.planners.space.options import ShardingOption, ShardingType, UnplacedShard
from autoshard.planners.space.placement import PlacementProblem
from autoshard.planners.space.planner_space import IndexArray, PlannerSpace

_EXCHANGES = {
    "auto": tuple(Exchange),
    "rows": (Exchange.ROWS,),
    "partial_sums": (Exchange.PARTIAL_SUMS,),
}
_FRONTIER, _PAPER = _RULES = ("frontier", "paper")
#: How often the budget shrinks where memory is short.
_MOST_TRIES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FlexShardOptions:
    """Options of the `flexshard` planner."""

    tiers: int = field(
        default=3,
        metadata={"help": "1: row-wise only; 2: hot rows data-parallel; 3: also a copy per node (flex) in between."},
    )
    rule: str = field(
        default="frontier",
        metadata={
            "help": "Where tiers end: frontier (most of the step saved per byte, over all tables) or paper (by row "
            "probability, with data-parallel rows only where they save memory)."
        },
    )
    memory_multiplier: float = field(
        default=0.0,
        metadata={
            "help": "Bytes held per replicated byte of weights (the paper takes 6); 0 for weights, optimizer state and "
            "gradients of each table."
        },
    )
    memory_budget_bytes: int = field(
        default=0,
        metadata={"help": "Bytes per rank to use more than row-wise sharding does; 0 for as many, below 0 for fewer."},
    )
    exchange: str = field(
        default="auto",
        metadata={"help": "What owners of pooled tables send: rows, partial_sums, or auto for the cheaper one."},
    )
    table_wise_below_rows: int = field(
        default=0, metadata={"help": "Tables with fewer rows are placed whole on one rank; 0 for none."}
    )
    count_activations: bool = field(
        default=True,
        metadata={"help": "Whether what training needs for a batch must fit the memory beside the tables."},
    )

    def __post_init__(self) -> None:
        if not 1 <= self.tiers <= 3:
            raise InvalidOptionError(f"must be 1, 2 or 3, got {self.tiers}", field="options.tiers")
        for name, accepted in (("rule", _RULES), ("exchange", tuple(_EXCHANGES))):
            check_choice(getattr(self, name), accepted, f"options.{name}")
        AT_LEAST_0.check_fields(self, "memory_multiplier", "table_wise_below_rows", within="options.")

    @property
    def cuts_by_access(self) -> bool:
        """Whether rows may be held by how often they are looked up."""
        return self.tiers > 1


class FlexShardPlanner:
    """Shards every table row by row: hot rows replicated, warm rows once per node, cold rows over all ranks.

    - All ranks get the same work, so nothing is left to balance but memory.
    - Where rows are replicated is chosen once for all tables, by what a byte saves of the predicted step; the budget
      is what row-wise sharding takes, and `memory_budget_bytes` more. Where that does not fit the ranks, it shrinks. A
      budget below what replicas can save is refused.
    - Tables that may not be split (pinned, row-wise forbidden, co-located with such) and those below
      `table_wise_below_rows` are placed whole by the cost model, in the memory that is left. If some rank has no room
      for its share of the others, all tables are.
    - Rows count by access rank, so that a plan with more than one tier needs a row order to be executed. Tables
      without one are all `row_wise`; `autoshard plan --assume-row-order` cuts them as if it was known.

    Source:
        FlexShard. Differs: pooled tables are planned too, with rows or partial sums exchanged; `rule=paper` has the
        paper's break points, `memory_multiplier=6` its memory.
    """

    name: ClassVar[str] = "flexshard"
    summary: ClassVar[str] = "Rows in tiers by access frequency: data-parallel, one copy per node, row-wise."
    when: ClassVar[str] = "sequence tables"
    is_compared: ClassVar[bool] = True
    cuts_tables: ClassVar[bool] = True
    options_type: ClassVar[type] = FlexShardOptions

    def plan(self, request: PlanRequest) -> ShardingPlan:
        """Makes a plan, without prediction or provenance.

        Raises:
            InfeasiblePlanError: If no plan within the memory limits was found.
            InvalidOptionError: If an option is unknown or out of range.
            InvalidPlanError: If a constraint names a table or rank that is not there.
        """
        options = parse_options(FlexShardOptions, request.options)
        check_constraints(request.tables, request.topology)
        offers = TierOffers(
            topology=request.topology,
            payload=request.payload,
            num_tiers=options.tiers,
            exchanges=_EXCHANGES[options.exchange],
            below_rows=options.table_wise_below_rows,
        )
        unsplit, everything = offers.unsplit(request.tables), frozenset(table.name for table in request.tables.tables)
        tiers = _Tiers(request, options, offers, unsplit)
        try:
            return tiers.plan()
        except InfeasiblePlanError as failure:
            if unsplit == everything or failure.field:
                raise
            try:
                return _Tiers(request, options, offers, everything).plan()
            except InfeasiblePlanError:
                raise failure from None


class _Tiers:
    """Some tables whole, and all others in tiers.

    Args:
        request: The task.
        options: The planner's.
        offers: Ways to cut tables.
        whole: Names of the tables that are whole.
    """

    def __init__(
        self, request: PlanRequest, options: FlexShardOptions, offers: TierOffers, whole: Collection[str]
    ) -> None:
        self._request, self._options, self._offers = request, options, offers

        def options_of(table: EmbeddingTable) -> list[ShardingOption]:
            if table.name not in whole:
                return offers.in_one_tier(table)
            part = UnplacedShard.of(Shard.whole(table), Tier.TABLE_WISE, request.topology)
            return [ShardingOption(name=ShardingType.TABLE_WISE, parts=(part,))]

        self._space = PlannerSpace(request.tables, request.topology, request.costs, options_of, request.payload)
        self._limits = Limits.of(self._space, with_activations=options.count_activations)
        # Nothing goes behind caches.
        self._limits.capacity_RM[:, 1:] = 0.0
        are_whole = [item.tables[0].name in whole for item in self._space.items]
        self._whole, self._tiered = np.flatnonzero(are_whole).tolist(), np.flatnonzero(~np.array(are_whole)).tolist()
        self._sweep = TierSweep(self._space, offers, self._tiered, options.memory_multiplier)

    def plan(self) -> ShardingPlan:
        """The plan of shortest step within the largest budget that fits.

        Raises:
            InfeasiblePlanError: If there is none.
        """
        sweep, asked_bytes = self._sweep, self._options.memory_budget_bytes
        room_bytes = sweep.row_wise_bytes + asked_bytes
        if room_bytes < sweep.least_bytes:
            sweep.offer_leanest()
        if room_bytes < sweep.least_bytes and asked_bytes < 0:
            raise InfeasiblePlanError(
                f"no cut takes as little: the least is {sweep.least_bytes - sweep.row_wise_bytes:,.0f} bytes over "
                f"row-wise sharding, got {asked_bytes:,}",
                field="options.memory_budget_bytes",
            )
        for _ in range(_MOST_TRIES):
            numbers_I = self._chosen(room_bytes)
            over_bytes = self._held_bytes(numbers_I) - float(self._limits.capacity_RM[:, 0].min())
            if room_bytes <= sweep.least_bytes:
                break
            if over_bytes <= 0:
                try:
                    return self._placed(numbers_I).plan()
                except InfeasiblePlanError:
                    # Whole tables find no room beside the others.
                    over_bytes = (room_bytes - sweep.least_bytes) / 2 + 1
            room_bytes = min(room_bytes, sweep.bytes_of(numbers_I)) - over_bytes
            if room_bytes < sweep.least_bytes:
                sweep.offer_leanest()
            room_bytes = max(room_bytes, sweep.least_bytes)
        return self._placed(numbers_I).plan()

    def _chosen(self, room_bytes: float) -> IndexArray:
        """Options of all items within a budget, by the rule; by the price where the paper's rule cannot save enough."""
        found = self._by_paper(room_bytes - self._sweep.row_wise_bytes) if self._options.rule == _PAPER else None
        return self._sweep.within(max(room_bytes, self._sweep.least_bytes)) if found is None else found

    def _by_paper(self, spare_bytes: float) -> IndexArray | None:
        """Options by the paper's rule; tables whose owners send sums row-wise stay as they are."""
        request, items = self._request, self._space.items
        numbers_I = self._sweep.row_wise_I.copy()
        cut = [
            index
            for index in self._tiered
            if len(items[index].tables) == 1
            for part in items[index].options[numbers_I[index]].of_tables[0].parts
            if part.tier is Tier.ROW_WISE and part.exchange is Exchange.ROWS
        ]
        if not cut:
            return numbers_I if spare_bytes >= 0 else None
        tables = [items[index].tables[0] for index in cut]
        bounds = paper_bounds(
            tables,
            [self._offers.tiers(table) for table in tables],
            FlexMachine.of(request.topology, request.costs.comm, request.tables.batch_size),
            request.payload,
            self._options.memory_multiplier,
            spare_bytes,
        )
        if bounds is None:
            return None
        options_I = [item.options[number].of_tables for item, number in zip(items, numbers_I.tolist(), strict=True)]
        cuts = [self._offers.cuts(table, [ends])[0] for table, ends in zip(tables, bounds, strict=True)]
        for index, option in zip(cut, self._space.synced(cuts), strict=True):
            options_I[index] = (option,)
        return self._sweep.numbers_of(options_I)

    def _held_bytes(self, numbers_I: IndexArray) -> float:
        """What tables in tiers take of every rank."""
        kinds, shards = self._space.kinds, self._space.items
        of_shards = [shard.kind for index in self._tiered for shard in shards[index].options[numbers_I[index]].shards]
        _, moved_C, bytes_M = kinds.split(kinds.rows_VX[of_shards].sum(axis=0))
        training = self._space.prices.training_bytes(moved_C[None, None]) if self._options.count_activations else 0.0
        return float(bytes_M[0] + np.sum(training))

    def _placed(self, numbers_I: IndexArray) -> Layout:
        """Items with their options, whole tables where the cost model has them in the memory that is left."""
        held_bytes = self._held_bytes(numbers_I)
        missing_R = held_bytes - self._limits.capacity_RM[:, 0]
        if missing_R.max() > 0 and self._tiered:
            raise InfeasiblePlanError(
                f"rows split over all {len(missing_R)} ranks take {write_bytes(held_bytes)} of each, "
                f"{write_bytes(missing_R.max())} more than rank {missing_R.argmax()} has"
            )
        ranks = self._whole_ranks(held_bytes) if self._whole else {}
        options = [item.options[number] for item, number in zip(self._space.items, numbers_I.tolist(), strict=True)]
        sites = [(ranks.get(index, 0),) * len(option.shards) for index, option in enumerate(options)]
        layout = Layout(self._space, self._limits, list(zip(numbers_I.tolist(), sites, strict=True)))
        if not layout.fits():
            raise no_room(self._space, self._limits)
        return layout

    def _whole_ranks(self, held_bytes: float) -> dict[int, int]:
        """The rank of each whole item, beside what tables in tiers hold.

        Raises:
            InfeasiblePlanError: If no placement was found.
        """
        request, kinds, prices = self._request, self._space.kinds, self._space.prices
        tables = tuple(table for index in self._whole for table in self._space.items[index].tables)
        problem = PlacementProblem.table_wise(
            TableSet(batch_size=request.tables.batch_size, tables=tables), request.topology, request.costs.kernel
        )
        capacity_R = self._limits.capacity_RM[:, 0] - held_bytes
        bytes_N = problem.bytes_N
        if self._options.count_activations:
            rows_NX = kinds.rows_VX[[self._space.items[index].options[0].shards[0].kind for index in self._whole]]
            _, moved_NC, _ = kinds.split(rows_NX)
            # What a table needs on its rank, and, since all ranks get rows of it, on every other one.
            none_RC = np.zeros((problem.num_ranks, moved_NC.shape[1]))
            own_N, all_N = (moved_NC @ prices.training_rates(held_RC) for held_RC in (none_RC, none_RC[:1]))
            other_N = (all_N - own_N) / max(1, problem.num_ranks - 1)
            capacity_R = capacity_R - other_N.sum()
            bytes_N = bytes_N + np.ceil(own_N - other_N).astype(np.int64)
        if capacity_R.min() < 0:
            raise InfeasiblePlanError(
                f"tables that all ranks share, and what comes back from the others, take "
                f"{write_bytes(-capacity_R.min())} more than rank {capacity_R.argmin()} has"
            )
        problem = replace(problem, bytes_N=bytes_N, capacity_R=np.floor(capacity_R).astype(np.int64))
        ranks_N = place_by_cost(problem, np.argsort(-problem.kernel_ms_N, kind="stable"))
        return dict(zip(self._whole, repair(problem, ranks_N, request.seed).tolist(), strict=True))
