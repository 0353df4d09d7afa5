"""The planner `oper`.

Shape suffixes: N row groups, R ranks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar

import numpy as np

from autoshard.core import Exchange, MemoryBytes, PlacedShard, Shard, ShardingPlan
from autoshard.core.accepted import AT_LEAST_0, Range, check_choice
from autoshard.core.costs import MsArray
from autoshard.core.errors import InfeasiblePlanError, InvalidTopologyError
from autoshard.evaluation.evaluate import evaluate
from autoshard.planners.heuristics.greedy import SizeGreedyPlanner
from autoshard.planners.oper.balance import MAX_CAPACITY, ByteArray, Method, Placement, pack, place
from autoshard.planners.oper.cost_matrix import FloatArray, fetch_matrix_ms, mean_row_bytes
from autoshard.planners.oper.held_groups import HeldGroup, placed_shards, with_exchange
from autoshard.planners.oper.partition import row_groups
from autoshard.planners.oper.replication import finer, hot_groups, replicate_evenly, topology_frequency
from autoshard.planners.oper.row_group import RowGroup
from autoshard.planners.planner import PlanRequest, parse_options
from autoshard.planners.space.placement import PlacementProblem

#: Finer partitions than this are not tried: about 10 s of planning at worst.
_MIN_THRESHOLD = 1e-5
#: The search for balance goes no further once it has this many groups.
_MAX_GROUPS = 20_000
#: A matrix of all pairs of ranks takes 128 MiB then, and a search has a handful.
_MAX_RANKS = 4096

_log = logging.getLogger(__name__)


class Mode(StrEnum):
    """What a step is: copies cost an all-reduce of their gradients when training."""

    TRAINING = "training"
    INFERENCE = "inference"


class ExchangeOption(StrEnum):
    """What owners answer with."""

    ROWS = "rows"
    PARTIAL_SUMS = "partial_sums"
    AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperOptions:
    """Options of the `oper` planner."""

    mode: str = field(
        default="training",
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

    def __post_init__(self) -> None:
        for label, accepted in (("mode", Mode), ("method", Method), ("exchange", ExchangeOption)):
            check_choice(getattr(self, label), accepted, f"options.{label}")
        Range(at_least=_MIN_THRESHOLD, at_most=1).check_fields(self, "threshold", within="options.")
        Range(at_least=0, at_most=1).check_fields(self, "balance", within="options.")
        AT_LEAST_0.check_fields(self, "extra_memory_ratio", within="options.")


class OperPlanner:
    """Row groups in two phases, with a finer partition until they balance, and copies of the hot ones.

    Source:
        OPER Sec. 4 and 6.4. Differs: when training, rows that every rank will hold are chosen before the others are
        placed, so that what is left to exchange is balanced; where row groups do not fit, whole tables may.
    """

    name: ClassVar[str] = "oper"
    summary: ClassVar[str] = "Row groups by access and memory, balanced, with copies of the hottest (OPER)."
    options_type: ClassVar[type] = OperOptions

    def plan(self, request: PlanRequest) -> ShardingPlan:
        """Makes a plan, without prediction or provenance."""
        options = parse_options(OperOptions, request.options)
        search = _Search(request, options)
        try:
            held = search.best()
        except InfeasiblePlanError as error:
            shards = _whole_tables(request, error)
        else:
            shards = placed_shards(held, request.tables, request.topology)
        return _with_exchange(shards, request, ExchangeOption(options.exchange))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """What one threshold gave.

    Attributes:
        everywhere: Groups that every rank holds.
        placement: The others.
        num_parts: Number of groups before any of them was cut further.
        balance: Of lookups and bytes, whichever is worse.
    """

    everywhere: tuple[RowGroup, ...]
    placement: Placement
    num_parts: int
    balance: float


class _Search:
    """The search over thresholds for one request."""

    def __init__(self, request: PlanRequest, options: OperOptions) -> None:
        self.request, self.options = request, options
        self.mode, self.method = Mode(options.mode), Method(options.method)
        tables, topology = request.tables, request.topology
        if topology.world_size > _MAX_RANKS:
            raise InvalidTopologyError(
                f"must be at most {_MAX_RANKS:,} for the planner oper, which has a number for each pair of ranks; "
                f"got {topology.world_size:,}",
                field="world_size",
            )
        self.num_ranks = topology.world_size
        self.may_copy = self.method is Method.OPER and self.num_ranks > 1
        capacities = [min(topology.memory_of(rank).hbm, MAX_CAPACITY) for rank in range(self.num_ranks)]
        self.capacity_R: ByteArray = np.array(capacities, dtype=np.int64)
        self.total_bytes = sum(table.storage_bytes for table in tables.tables)
        missing = self.total_bytes - sum(capacities)
        if missing > 0:
            raise InfeasiblePlanError(
                f"all tables need {self.total_bytes:,} bytes, {missing:,} bytes more than the {self.num_ranks} ranks "
                "have together"
            )
        self.row_bytes = mean_row_bytes(tables)
        self.fetch_ms_RR: MsArray = fetch_matrix_ms(topology, self.row_bytes)
        # Which tables must share a rank, and which ranks may hold them, whatever their size.
        room = MemoryBytes(hbm=MAX_CAPACITY // self.num_ranks)
        roomy = replace(topology, memory_bytes=room, overrides=())
        self.constrained = PlacementProblem.table_wise(tables, roomy, request.costs.kernel)

    def best(self) -> tuple[HeldGroup, ...]:
        """The most balanced groups, with their copies: the threshold is halved until they balance or get no better.

        Raises:
            InfeasiblePlanError: If nothing fits.
        """
        threshold = self.options.threshold
        best = self._attempt(threshold)
        while best.balance < self.options.balance and best.num_parts < _MAX_GROUPS and self.method is Method.OPER:
            threshold /= 2
            candidate = self._attempt(threshold)
            _log.info("threshold %.3g: balance %.4f, before %.4f", threshold, candidate.balance, best.balance)
            if candidate.balance <= best.balance:
                break
            best = candidate
        own_R = tuple(range(self.num_ranks))
        everywhere = [HeldGroup(group=group, read_from=own_R) for group in best.everywhere]
        return (*everywhere, *self._with_copies(best.placement))

    def _attempt(self, threshold: float) -> _Attempt:
        groups = self._groups(threshold)
        everywhere: tuple[RowGroup, ...] = ()
        copied: frozenset[RowGroup] = frozenset()
        if self.may_copy and self.mode is Mode.TRAINING:
            everywhere = hot_groups(groups, self._min_frequency(), self._hot_budget_bytes())
        elif self.may_copy:
            copied = frozenset(hot_groups(groups, 0.0, self._copy_budget_bytes()))
        chosen = set(everywhere)
        hot_bytes = sum(group.num_bytes for group in everywhere)
        others = [group for group in groups if group not in chosen]
        try:
            lookup_cost_R: FloatArray = self.fetch_ms_RR.diagonal()
            placement = place(others, self.capacity_R - hot_bytes, lookup_cost_R, self.method, copied=copied)
        except InfeasiblePlanError:
            # Copies come last: only memory that is left over is theirs.
            everywhere, hot_bytes = (), 0
            placement = self._place(groups)
        return _Attempt(
            everywhere=everywhere,
            placement=placement,
            num_parts=len(groups),
            balance=_balance(placement, self.capacity_R, hot_bytes),
        )

    def _groups(self, threshold: float) -> list[RowGroup]:
        tables = self.request.tables
        of_table: dict[str, list[Shard]] = {}
        for shard in row_groups(tables, threshold):
            of_table.setdefault(shard.table.name, []).append(shard)
        groups: list[RowGroup] = []
        for indices, allowed_R in zip(self.constrained.members, self.constrained.allowed_NR, strict=True):
            shards = [shard for index in indices for shard in of_table[tables.tables[index].name]]
            parts = [tuple(shards)] if len(indices) > 1 else [(shard,) for shard in shards]
            groups += [RowGroup(shards=part, allowed_R=allowed_R, cuttable=len(indices) == 1) for part in parts]
        return groups

    def _place(self, groups: list[RowGroup]) -> Placement:
        lookup_cost_R: FloatArray = self.fetch_ms_RR.diagonal()
        try:
            return place(groups, self.capacity_R, lookup_cost_R, self.method)
        except InfeasiblePlanError:
            return pack(groups, self.capacity_R, lookup_cost_R)

    def _with_copies(self, placement: Placement) -> list[HeldGroup]:
        """Groups with the ranks that they are read from: their owners, or for inference the copies near by."""
        owners = list(placement.owners)
        if not self.may_copy or self.mode is Mode.TRAINING:
            return [HeldGroup(group=group, read_from=(rank,) * self.num_ranks) for group, rank in owners]
        budget_bytes = self._copy_budget_bytes()
        owners = finer(owners, budget_bytes, self.num_ranks)
        groups = [group for group, _ in owners]
        room_R = self.capacity_R - placement.held_R
        owners_N = np.array([rank for _, rank in owners])
        paths_NR = replicate_evenly(groups, owners_N, room_R, budget_bytes, self.fetch_ms_RR, self.options.balance)
        paths = [tuple(paths_R.tolist()) for paths_R in paths_NR]
        return [HeldGroup(group=group, read_from=path) for group, path in zip(groups, paths, strict=True)]

    def _min_frequency(self) -> float:
        batch_per_rank = self.request.tables.batch_size / self.num_ranks
        return topology_frequency(self.request.topology, self.fetch_ms_RR, self.row_bytes, batch_per_rank)

    def _copy_budget_bytes(self) -> int:
        """Bytes of copies that each rank may hold on average."""
        return int(min(self.options.extra_memory_ratio * self.total_bytes / self.num_ranks, MAX_CAPACITY))

    def _hot_budget_bytes(self) -> int:
        """Bytes of rows that all ranks may hold: all but one of their copies are extra."""
        extra_bytes = self.options.extra_memory_ratio * self.total_bytes
        free_bytes = sum(self.capacity_R.tolist()) - self.total_bytes
        return int(min(extra_bytes / (self.num_ranks - 1), free_bytes / (self.num_ranks - 1), self.capacity_R.min()))


def _balance(placement: Placement, capacity_R: ByteArray, hot_bytes: int = 0) -> float:
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


def _with_exchange(shards: tuple[PlacedShard, ...], request: PlanRequest, option: ExchangeOption) -> ShardingPlan:
    plan = ShardingPlan(tables=request.tables, topology=request.topology, shards=shards)
    rows = replace(plan, shards=with_exchange(shards, Exchange.ROWS))
    sums = replace(plan, shards=with_exchange(shards, Exchange.PARTIAL_SUMS))
    if option is not ExchangeOption.AUTO:
        return rows if option is ExchangeOption.ROWS else sums
    each = replace(plan, shards=with_exchange(shards, None))
    return min((rows, sums, each), key=lambda candidate: evaluate(candidate, request.costs).step_ms.value)
