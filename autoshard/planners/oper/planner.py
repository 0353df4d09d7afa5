"""The planner `oper`.

Shape suffixes: N row groups, R ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from autoshard.core import EmbeddingTable, Exchange, GradSync, PlacedShard, Shard, ShardingPlan, Tier
from autoshard.core.accepted import AT_LEAST_0, Range, check_choice
from autoshard.core.access import FloatArray, IntArray
from autoshard.core.costs import MsArray
from autoshard.core.errors import InfeasiblePlanError, InvalidTopologyError
from autoshard.evaluation.evaluate import evaluate
from autoshard.evaluation.stages import cheapest_sync
from autoshard.planners.heuristics.greedy import SizeGreedyPlanner
from autoshard.planners.oper.balance import MAX_CAPACITY, Method, Placement, pack, place
from autoshard.planners.oper.cost_matrix import fetch_matrix_ms, mean_row_bytes
from autoshard.planners.oper.partition import row_groups
from autoshard.planners.oper.placed import merged_shards, placed_shards, with_exchange
from autoshard.planners.oper.replication import finer, hot_groups, replicate_evenly, topology_frequency
from autoshard.planners.oper.row_group import RowGroup
from autoshard.planners.planner import PlanRequest, parse_options
from autoshard.planners.space.constraints import allowed_ranks, check_constraints, colocated

#: Finer partitions than this are not tried: about 10 s of planning at worst.
_MIN_THRESHOLD = 1e-5
#: The search for balance goes no further once it has this many groups.
_MAX_GROUPS = 20_000
#: A matrix of all pairs of ranks takes 128 MiB then, and a search has a handful.
_MAX_RANKS = 4096
#: Values of options.
_TRAINING, _INFERENCE, _AUTO = "training", "inference", "auto"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperOptions:
    """Options of the `oper` planner."""

    mode: str = field(
        default=_TRAINING,
        metadata={
            "help": "training: every rank holds the rows that are looked up often enough to be worth an all-reduce; "
            "inference: ranks copy what they fetch over their slowest links."
        },
    )
    threshold: float = field(
        default=0.001,
        metadata={"help": "Largest share of all lookups and of all bytes that a row group may have, to begin with."},
    )
    balance: float = field(
        default=0.99,
        metadata={"help": "Least over most loaded rank, by lookups and by bytes, below which groups are made finer."},
    )
    extra_memory_ratio: float = field(
        default=0.05, metadata={"help": "Memory for copies, over the bytes of all tables, spread over the ranks."}
    )
    method: str = field(
        default="oper",
        metadata={"help": "oper; or without copies mg (balances memory only) or ag (balances lookups only)."},
    )
    exchange: str = field(
        default="rows",
        metadata={"help": "What owners send: rows (as OPER does), partial_sums, or auto for the fastest step."},
    )
    grad_sync: str = field(
        default="sparse",
        metadata={
            "help": "How gradients of copies meet: sparse (as OPER does), dense, all_gather, or auto for the least "
            "predicted time."
        },
    )

    def __post_init__(self) -> None:
        for label, accepted in (
            ("mode", (_TRAINING, _INFERENCE)),
            ("method", Method),
            ("exchange", (Exchange.ROWS, Exchange.PARTIAL_SUMS, _AUTO)),
            ("grad_sync", (GradSync.SPARSE, GradSync.DENSE, GradSync.ALL_GATHER, _AUTO)),
        ):
            check_choice(getattr(self, label), accepted, f"options.{label}")
        Range(at_least=_MIN_THRESHOLD, at_most=1).check_fields(self, "threshold", within="options.")
        Range(at_least=0, at_most=1).check_fields(self, "balance", within="options.")
        AT_LEAST_0.check_fields(self, "extra_memory_ratio", within="options.")

    @property
    def cuts_by_access(self) -> bool:
        """Whether rows may be held by how often they are looked up: always."""
        return True


class OperPlanner:
    """Row groups in two phases, with a finer partition until they balance, and copies of the hot ones.

    Source:
        OPER Sec. 4 and 6.4. Differs: when training, rows that every rank will hold are chosen before the others are
        placed, so that what is left to exchange is balanced; where row groups do not fit, whole tables may.
    """

    name: ClassVar[str] = "oper"
    summary: ClassVar[str] = "Row groups by access and memory, balanced, with copies of the hottest (OPER)."
    when: ClassVar[str] = "skewed tables of few bytes per row, uneven links"
    cuts_tables: ClassVar[bool] = True
    options_type: ClassVar[type] = OperOptions

    def plan(self, request: PlanRequest) -> ShardingPlan:
        """Makes a plan, without prediction or provenance."""
        options = parse_options(OperOptions, request.options)
        search = _Search(request, options)
        try:
            shards = merged_shards(search.best(), request.tables)
        except InfeasiblePlanError as error:
            shards = _whole_tables(request, error)
        shards = tuple(_synced(one, request, options.grad_sync) for one in shards)
        plan = ShardingPlan(tables=request.tables, topology=request.topology, shards=shards, payload=request.payload)
        if options.exchange != _AUTO:
            return with_exchange(plan, Exchange(options.exchange))
        candidates = [with_exchange(plan, exchange) for exchange in (Exchange.ROWS, Exchange.PARTIAL_SUMS, None)]
        return min(candidates, key=lambda candidate: evaluate(candidate, request.costs).step_ms.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """What one threshold gave.

    Attributes:
        everywhere: Groups that every rank holds.
        placement: The others.
        num_groups: Number of groups before any of them was cut further.
        balance: Of lookups and bytes, whichever is worse.
    """

    everywhere: tuple[RowGroup, ...]
    placement: Placement
    num_groups: int
    balance: float


class _Search:
    """The search over thresholds for one request."""

    def __init__(self, request: PlanRequest, options: OperOptions) -> None:
        self.request, self.options, self.method = request, options, Method(options.method)
        tables, topology = request.tables, request.topology
        self.num_ranks = topology.world_size
        if self.num_ranks > _MAX_RANKS:
            raise InvalidTopologyError(
                f"must be at most {_MAX_RANKS:,} for the planner oper, which has a number for each pair of ranks; "
                f"got {self.num_ranks:,}",
                field="world_size",
            )
        # Copies cost an all-reduce of their gradients when training.
        self.copies_in = options.mode if self.method is Method.OPER and self.num_ranks > 1 else ""
        capacities = [min(topology.memory_of(rank).hbm, MAX_CAPACITY) for rank in range(self.num_ranks)]
        self.capacity_R = np.array(capacities, dtype=np.int64)
        self.total_bytes = tables.storage_bytes
        self.free_bytes = sum(capacities) - self.total_bytes
        if self.free_bytes < 0:
            raise InfeasiblePlanError(
                f"all tables need {self.total_bytes:,} bytes, {-self.free_bytes:,} bytes more than the "
                f"{self.num_ranks} ranks have together"
            )
        self.row_bytes = mean_row_bytes(tables)
        self.fetch_ms_RR: MsArray = fetch_matrix_ms(topology, self.row_bytes)
        self.own_ms_R: FloatArray = self.fetch_ms_RR.diagonal()
        check_constraints(tables, topology)
        self.units = [(unit, _allowed_ranks(unit, self.num_ranks)) for unit in colocated(tables)]

    def best(self) -> list[PlacedShard]:
        """The most balanced groups, with their copies: the threshold is halved until they balance or get no better.

        Raises:
            InfeasiblePlanError: If nothing fits.
        """
        threshold = self.options.threshold
        best = self._attempt(threshold)
        while best.balance < self.options.balance and best.num_groups < _MAX_GROUPS and self.method is Method.OPER:
            threshold /= 2
            candidate = self._attempt(threshold)
            _log.info("threshold %.3g: balance %.4f, before %.4f", threshold, candidate.balance, best.balance)
            if candidate.balance <= best.balance:
                break
            best = candidate
        own_R = range(self.num_ranks)
        everywhere = [one for group in best.everywhere for one in placed_shards(group, own_R)]
        return everywhere + self._with_copies(best.placement)

    def _attempt(self, threshold: float) -> _Attempt:
        groups = self._groups(threshold)
        everywhere: tuple[RowGroup, ...] = ()
        copied: tuple[RowGroup, ...] = ()
        if self.copies_in == _TRAINING:
            everywhere = hot_groups(groups, self._min_frequency(), self._hot_budget_bytes())
        elif self.copies_in == _INFERENCE:
            copied = hot_groups(groups, 0.0, self._copy_budget_bytes())
        hot_bytes = sum(group.num_bytes for group in everywhere)
        chosen = set(everywhere)
        others = [group for group in groups if group not in chosen]
        try:
            room_R = self.capacity_R - hot_bytes
            placement = place(others, room_R, self.own_ms_R, self.method, copied=frozenset(copied))
        except InfeasiblePlanError:
            # Copies come last: only memory that is left over is theirs.
            everywhere, hot_bytes = (), 0
            placement = self._without_copies(groups)
        balance = _balance(placement, self.capacity_R, hot_bytes)
        return _Attempt(everywhere=everywhere, placement=placement, num_groups=len(groups), balance=balance)

    def _without_copies(self, groups: list[RowGroup]) -> Placement:
        try:
            return place(groups, self.capacity_R, self.own_ms_R, self.method)
        except InfeasiblePlanError:
            return pack(groups, self.capacity_R, self.own_ms_R)

    def _groups(self, threshold: float) -> list[RowGroup]:
        of_table: dict[str, list[Shard]] = {}
        for shard in row_groups(self.request.tables, threshold):
            of_table.setdefault(shard.table.name, []).append(shard)
        groups: list[RowGroup] = []
        for unit, allowed_R in self.units:
            shards = [shard for table in unit for shard in of_table[table.name]]
            together = [tuple(shards)] if len(unit) > 1 else [(shard,) for shard in shards]
            groups += [RowGroup(shards=shards, allowed_R=allowed_R) for shards in together]
        return groups

    def _with_copies(self, placement: Placement) -> list[PlacedShard]:
        """Groups on their owners, or for inference with copies, which ranks near by read."""
        owners = placement.owners
        if self.copies_in != _INFERENCE:
            return [PlacedShard.table_wise(shard, rank) for group, rank in owners for shard in group.shards]
        budget_bytes = self._copy_budget_bytes()
        owners = finer(owners, budget_bytes, self.num_ranks)
        room_R = self.capacity_R - placement.held_R
        paths_NR = replicate_evenly(owners, room_R, budget_bytes, self.fetch_ms_RR, self.options.balance)
        pairs = zip(owners, paths_NR, strict=True)
        return [one for (group, _), path_R in pairs for one in placed_shards(group, path_R.tolist())]

    def _min_frequency(self) -> float:
        batch_per_rank = self.request.tables.batch_size / self.num_ranks
        return topology_frequency(self.request.topology, self.fetch_ms_RR, self.row_bytes, batch_per_rank)

    def _copy_budget_bytes(self) -> int:
        """Bytes of copies that each rank may hold on average."""
        return int(min(self.options.extra_memory_ratio * self.total_bytes / self.num_ranks, MAX_CAPACITY))

    def _hot_budget_bytes(self) -> int:
        """Bytes of rows that all ranks may hold: all but one of their copies are extra."""
        extra_bytes = self.options.extra_memory_ratio * self.total_bytes
        others = self.num_ranks - 1
        return int(min(extra_bytes / others, self.free_bytes / others, self.capacity_R.min()))


def _synced(placed: PlacedShard, request: PlanRequest, how: str) -> PlacedShard:
    """The shard with a synchronisation of its copies' gradients."""
    if len(placed.replicas) == 1:
        return placed
    if how == _AUTO:
        sync = cheapest_sync(placed, request.tables.batch_size, request.costs.comm, request.topology)
        return replace(placed, grad_sync=sync)
    return replace(placed, grad_sync=GradSync(how))


def _allowed_ranks(unit: Sequence[EmbeddingTable], world_size: int) -> NDArray[np.bool_]:
    """Ranks that may hold all rows of tables that must share one, shape (R,)."""
    allowed_R = np.all([allowed_ranks(table, world_size) for table in unit], axis=0)
    allowed_R &= all(Tier.TABLE_WISE not in table.constraints.forbidden_tiers for table in unit)
    if not allowed_R.any():
        label = "+".join(table.name for table in unit)
        raise InfeasiblePlanError(f"{label}: its constraints leave no rank that may hold it whole")
    return np.asarray(allowed_R)


def _balance(placement: Placement, capacity_R: IntArray, hot_bytes: int = 0) -> float:
    """The lesser of min / max over ranks with memory, of lookup time and of bytes; 1 where there is nothing."""
    ranks = np.flatnonzero(capacity_R > 0)
    work_R, held_R = placement.lookup_ms_R[ranks], placement.held_R[ranks] + hot_bytes
    return min((float(loads.min() / loads.max()) for loads in (work_R, held_R) if loads.any()), default=1.0)


def _whole_tables(request: PlanRequest, reason: InfeasiblePlanError) -> tuple[PlacedShard, ...]:
    """A plan of whole tables, which search for room more thoroughly than row groups; they need not balance."""
    try:
        plan = SizeGreedyPlanner().plan(replace(request, options={}))
    except InfeasiblePlanError:
        raise reason from None
    _log.warning("whole tables, since row groups do not fit: %s", reason)
    return plan.shards
