"""The planner `flexshard`: tables cut by access rank into data-parallel, Flex and row-wise tiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from autoshard.core import (
    EmbeddingTable,
    Exchange,
    PlacedShard,
    RowRange,
    RowsBy,
    Shard,
    ShardingPlan,
    Tier,
)
from autoshard.core.accepted import AT_LEAST_0, check_choice
from autoshard.core.errors import InfeasiblePlanError, InvalidOptionError
from autoshard.evaluation.batch_memory import dense_bytes
from autoshard.evaluation.stages import cheapest_sync
from autoshard.evaluation.traffic import SyncBytes
from autoshard.planners.flexshard.equations import FlexMachine
from autoshard.planners.flexshard.frontier import Frontier, TierBounds, TierChoice
from autoshard.planners.flexshard.memory import held_bytes
from autoshard.planners.flexshard.paper_rule import paper_choice
from autoshard.planners.flexshard.tier_costs import Pricing, tiers_of
from autoshard.planners.flexshard.whole_tables import WholeTables, unsplit
from autoshard.planners.planner import PlanRequest, parse_options
from autoshard.planners.space.constraints import check_constraints
from autoshard.planners.space.options import placed_shard

_EXCHANGES = {
    "auto": tuple(Exchange),
    "rows": (Exchange.ROWS,),
    "partial_sums": (Exchange.PARTIAL_SUMS,),
}
_RULES = ("frontier", "paper")
#: Halvings of the budget where memory is short: to a millionth of the span.
_NUM_HALVINGS = 20


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
            "help": "Where tiers end: frontier (most communication saved per byte, over all tables) or paper (by row "
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
    - Where rows are replicated is chosen once for all tables, by what communication a byte saves; the budget is what
      row-wise sharding takes, and `memory_budget_bytes` more. Where that does not fit the ranks, it shrinks. A budget
      below what replicas can save is refused.
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
        pricing = Pricing(
            machine=FlexMachine.of(request.topology, request.costs.comm, request.tables.batch_size, request.payload),
            memory_multiplier=options.memory_multiplier,
            payload=request.payload,
        )
        whole = WholeTables(request=request, machine=pricing.machine, count_activations=options.count_activations)
        tables = request.tables.tables
        names = unsplit(request.tables, pricing.machine, options.tiers, options.table_wise_below_rows)
        split = [table for table in tables if table.name not in names]
        if not split:
            return _plan(request, whole.place(tables))
        tiered = _TieredTables(split, whole, pricing, options)
        try:
            return _plan(request, tiered.place())
        except InfeasiblePlanError as failure:
            try:
                return _plan(request, whole.place(tables))
            except InfeasiblePlanError:
                raise failure from None


def _plan(request: PlanRequest, placed: Sequence[PlacedShard]) -> ShardingPlan:
    order = {table.name: index for index, table in enumerate(request.tables.tables)}
    in_order = sorted(placed, key=lambda one: order[one.shard.table.name])
    return ShardingPlan(
        tables=request.tables, topology=request.topology, shards=tuple(in_order), payload=request.payload
    )


class _TieredTables:
    """Cuts tables into tiers, and places the others whole, by the memory that the tiers may take.

    Raises:
        InfeasiblePlanError: If no cut takes as little memory as the budget.
    """

    def __init__(
        self, tables: Sequence[EmbeddingTable], whole: WholeTables, pricing: Pricing, options: FlexShardOptions
    ) -> None:
        self._tables, self._whole, self._pricing, self._options = tables, whole, pricing, options
        names = {table.name for table in tables}
        self._others = [table for table in whole.request.tables.tables if table.name not in names]
        self._tiers = [tiers_of(table, self._pricing.machine, options.tiers) for table in tables]
        self._frontier = Frontier(tables, self._tiers, self._pricing, _EXCHANGES[options.exchange])
        row_wise, least = self._frontier.row_wise.memory_bytes, self._frontier.least_memory_bytes
        self._budget_bytes = row_wise + options.memory_budget_bytes
        if options.memory_budget_bytes >= 0:
            self._budget_bytes = max(least, self._budget_bytes)
        elif self._frontier.at(self._budget_bytes) is None:
            raise InfeasiblePlanError(
                f"no cut takes as little: the least is {least - row_wise:,.0f} bytes over row-wise sharding, got "
                f"{options.memory_budget_bytes:,}",
                field="options.memory_budget_bytes",
            )

    def place(self) -> list[PlacedShard]:
        """Split tables in tiers and the others whole, with the largest budget that fits.

        Raises:
            InfeasiblePlanError: If even the cuts of least memory do not fit.
        """
        least, most = self._frontier.least_memory_bytes, self._budget_bytes
        try:
            return self._attempt(most)
        except InfeasiblePlanError:
            placed = self._attempt(least)
            for _ in range(_NUM_HALVINGS):
                middle = (least + most) / 2
                try:
                    placed, least = self._attempt(middle), middle
                except InfeasiblePlanError:
                    most = middle
        return placed

    def _attempt(self, memory_bytes: float) -> list[PlacedShard]:
        """Cuts within a budget, after the tables that are placed whole beside them."""
        request, choice = self._whole.request, self._choose(memory_bytes)
        pairs = zip(self._tables, choice.bounds, strict=True)
        tiered = [one for table, bounds in pairs for one in _cut(request, self._pricing.machine, table, bounds)]
        active = self._options.count_activations
        machine, payload = self._pricing.machine, self._pricing.payload
        held = held_bytes(self._tables, choice.bounds, machine, payload, with_activations=active)
        held += dense_bytes(request.tables, machine.local_batch_size) if active else 0.0
        held += sum(SyncBytes.of(one, request.tables.batch_size).held_bytes(one.replicas) for one in tiered)
        missing_R = held - self._whole.capacity_R
        if missing_R.max() > 0:
            raise InfeasiblePlanError(
                f"rows split over all {len(missing_R)} ranks take {held:,.0f} bytes of each, {missing_R.max():,.0f} "
                f"bytes more than rank {missing_R.argmax()} has"
            )
        return [*(self._whole.place(self._others, held) if self._others else ()), *tiered]

    def _choose(self, memory_bytes: float) -> TierChoice:
        """The cuts within a budget that no cut is above."""
        choice = None
        if self._options.rule == "paper":
            choice = paper_choice(self._tables, self._tiers, self._pricing, self._frontier.row_wise, memory_bytes)
        choice = choice or self._frontier.at(memory_bytes)
        assert choice is not None, "no budget is below the least memory"
        return choice


def _cut(request: PlanRequest, machine: FlexMachine, table: EmbeddingTable, bounds: TierBounds) -> list[PlacedShard]:
    """The table's shards, one per tier that has rows."""
    tiers = bounds.tiers(table)
    by = RowsBy.INDEX if len(tiers) == 1 else RowsBy.ACCESS_RANK
    shards = []
    for strategy, start, stop, exchange in tiers:
        shard = Shard(table=table, rows=RowRange(start=start, stop=stop, by=by), columns=(0, table.embedding_dim))
        collective = machine.collective_of(strategy, exchange)
        placed = placed_shard(shard, Tier(strategy), request.topology)
        placed = replace(placed, exchange=exchange, collective=collective)
        sync = cheapest_sync(placed, request.tables.batch_size, request.costs.comm, request.topology)
        shards.append(replace(placed, grad_sync=sync))
    return shards
