"""The planner `oper`.

Shape suffixes: R ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import ClassVar

import numpy as np

from autoshard.core import (
    CostBreakdown,
    Exchange,
    GradSync,
    MemoryLevel,
    PlacedShard,
    Pooling,
    Shard,
    ShardingPlan,
    Tier,
)
from autoshard.core.accepted import AT_LEAST_0, Range, check_choice
from autoshard.core.access import IntArray
from autoshard.core.errors import InfeasiblePlanError, InvalidOptionError, InvalidTopologyError
from autoshard.core.step import StepPart
from autoshard.evaluation.evaluate import PricedPlan, breakdown_of, price_with_kernels
from autoshard.evaluation.stages import cheapest_syncs
from autoshard.evaluation.traffic import cheaper_exchange
from autoshard.planners.heuristics.greedy import SizeGreedyPlanner
from autoshard.planners.oper.copies import (
    FEW_PIECES,
    MANY_PIECES,
    MAX_BYTES,
    HotRows,
    RowFrequencies,
    copy_nearby,
    cut_to_copy,
    fetch_ms,
    worthwhile,
)
from autoshard.planners.oper.partition import row_groups, row_range
from autoshard.planners.oper.placement import Method, Owners, place
from autoshard.planners.planner import PlanRequest, parse_options
from autoshard.planners.space.constraints import allowed_ranks, check_constraints, colocated
from autoshard.planners.space.placement import exceeds_total

#: Finer partitions than this are not tried: about 10 s of planning at worst.
_MIN_THRESHOLD = 1e-5
#: Thresholds that are tried where none is asked for, and tries in a row that end the search if none of them is better:
#: one is enough where there are more groups for each table than these.
_THRESHOLDS, _MAX_IDLE, _FEW_GROUPS = [4.0**-power for power in range(1, 6)], 2, 4
#: The search goes no further once it has this many groups.
_MAX_GROUPS = 20_000
#: A matrix of all pairs of ranks takes 128 MiB then, and a search has a handful.
_MAX_RANKS = 4096
#: Values of options.
_TRAINING, _INFERENCE, _AUTO = "training", "inference", "auto"
#: Parts of the step that inference has, too.
_FORWARD_PARTS = (StepPart.INPUT, StepPart.FORWARD_KERNEL, StepPart.FORWARD_EXCHANGE)

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
        default=0.0,
        metadata={
            "help": "Largest share of all lookups and of all bytes that a row group may have; 0 for the one of least "
            "predicted step."
        },
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
    copy_frequency: float = field(
        default=0.0,
        metadata={
            "help": "Lookups of a row per sample above which every rank holds it when training; 0 for the limit of "
            "least predicted step."
        },
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
        if self.threshold and not _MIN_THRESHOLD <= self.threshold <= 1:
            raise InvalidOptionError(
                f"must be 0 or in [{_MIN_THRESHOLD:g}, 1], got {self.threshold:g}", field="options.threshold"
            )
        Range(at_least=0, at_most=1).check_fields(self, "balance", within="options.")
        AT_LEAST_0.check_fields(self, "extra_memory_ratio", "copy_frequency", within="options.")

    @property
    def cuts_by_access(self) -> bool:
        """Whether rows may be held by how often they are looked up: always."""
        return True


class OperPlanner:
    """Row groups in two phases, with a finer partition as long as that makes the step faster, and copies of hot rows.

    Source:
        OPER Sec. 4 and 6.4. Differs: plans are compared by their predicted step, for inference by its forward parts;
        when training, rows that every rank will hold are chosen before the others are placed, so that what is left to
        exchange is balanced; where row groups do not fit, whole tables may.
    """

    name: ClassVar[str] = "oper"
    summary: ClassVar[str] = "Row groups by access and memory, balanced, with copies of the hottest (OPER)."
    when: ClassVar[str] = "skewed tables of few bytes per row, uneven links"
    cuts_tables: ClassVar[bool] = True
    options_type: ClassVar[type] = OperOptions

    def plan(self, request: PlanRequest) -> ShardingPlan:
        """Makes a plan with its prediction, without provenance."""
        search = _Search(request, parse_options(OperOptions, request.options))
        try:
            found = search.best()
        except InfeasiblePlanError as error:
            found = search.of_whole_tables(error)
        return replace(found.plan, predicted=found.predicted)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """What one threshold gave.

    Attributes:
        plan: The plan.
        priced: Its step and kernels.
        cost_ms: What is to be short of it.
        hot: Rows that were to be copied.
        threshold: The threshold; 0 for whole tables.
        num_groups: Number of groups before any of them was cut further.
        balance: Least over most loaded rank, of lookups or of bytes, whichever is worse.
    """

    plan: ShardingPlan
    priced: PricedPlan
    cost_ms: float
    hot: HotRows = field(default_factory=dict)
    threshold: float = 0.0
    num_groups: int = 0
    balance: float = 1.0

    @property
    def predicted(self) -> CostBreakdown:
        """The plan's prediction."""
        return breakdown_of(self.plan, self.priced)


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
        check_constraints(tables, topology)
        self.has_copies = self.method is Method.OPER and self.num_ranks > 1
        self.is_inference = self.has_copies and options.mode == _INFERENCE
        self.capacity_R: IntArray = np.array([min(room, MAX_BYTES) for room in topology.hbm_bytes], dtype=np.int64)
        total_bytes, room = tables.storage_bytes, sum(self.capacity_R.tolist())
        if total_bytes > room:
            raise exceeds_total(total_bytes, {MemoryLevel.HBM: room}, self.num_ranks)
        #: Bytes of copies that all ranks may hold together.
        self.extra_bytes = min(options.extra_memory_ratio * total_bytes, float(MAX_BYTES))
        self.free_bytes = room - total_bytes

    def best(self) -> _Attempt:
        """The plan of least predicted step, or of the threshold that was asked for.

        Raises:
            InfeasiblePlanError: If nothing fits.
        """
        hot, *others = self._hot_rows()
        best = self._even(self._attempt(self.options.threshold, hot)) if self.options.threshold else self._fastest(hot)
        # Which of two steps is shorter where rows lie level is not always the shorter one of plans.
        best = _faster(best, *(self._attempt(best.threshold, rows) for rows in others))
        return self._with_room(self._attempt(best.threshold, hot, is_last=True) if self.is_inference else best)

    def _even(self, best: _Attempt) -> _Attempt:
        """An attempt, or one with a smaller threshold: halved as long as groups do not balance and get more even."""
        while self.method is Method.OPER and best.balance < self.options.balance and best.num_groups < _MAX_GROUPS:
            finer = self._attempt(best.threshold / 2, best.hot)
            _log.info("threshold %.3g: balance %.4f, before %.4f", finer.threshold, finer.balance, best.balance)
            if finer.balance <= best.balance:
                break
            best = finer
        return best

    def _fastest(self, hot: HotRows) -> _Attempt:
        """The attempt of least predicted step over thresholds: coarse ones first, and then those next to the best.

        Where groups balance, finer ones have nothing left to even out.
        """
        best = last = self._attempt(_THRESHOLDS[0], hot)
        num_idle = 0
        for threshold in _THRESHOLDS[1:]:
            is_cheap = last.num_groups <= _FEW_GROUPS * len(self.request.tables.tables)
            if last.balance >= self.options.balance or num_idle >= (_MAX_IDLE if is_cheap else 1):
                break
            if len(row_groups(self.request.tables, threshold, hot)) > last.num_groups:
                last = self._attempt(threshold, hot)
                best, num_idle = (last, 0) if last.cost_ms < best.cost_ms else (best, num_idle + 1)
        beside = (2.0,) if best.balance >= self.options.balance else (2.0, 0.5)
        return _faster(best, *(self._attempt(factor * best.threshold, hot) for factor in beside))

    def of_whole_tables(self, reason: InfeasiblePlanError) -> _Attempt:
        """A plan of whole tables, which search for room more thoroughly than row groups; they need not balance.

        Raises:
            InfeasiblePlanError: The reason, if whole tables do not fit either.
        """
        try:
            plan = SizeGreedyPlanner().plan(replace(self.request, options={}))
        except InfeasiblePlanError:
            raise reason from None
        _log.warning("whole tables, since row groups do not fit: %s", reason)
        return self._priced(plan.shards)

    def _with_room(self, attempt: _Attempt) -> _Attempt:
        """The attempt, or one like it that leaves room for what training needs for a batch, where that can be."""
        ranks, memory_R = attempt.predicted.ranks, np.array(self.request.topology.hbm_bytes)
        if all(rank.used_bytes <= memory_R[rank.rank] for rank in ranks):
            return attempt
        active_R = np.array([rank.training_bytes for rank in ranks], dtype=np.int64)
        try:
            less_R = np.maximum(self.capacity_R - active_R, 0)
            return self._attempt(attempt.threshold, attempt.hot, less_R, is_last=True)
        except InfeasiblePlanError:
            return attempt

    def _attempt(
        self, threshold: float, hot: HotRows, capacity_R: IntArray | None = None, *, is_last: bool = False
    ) -> _Attempt:
        """Row groups of a threshold beside hot rows on every rank.

        Args:
            threshold: The threshold.
            hot: The hot rows.
            capacity_R: Bytes of each rank that may be used; all if left out.
            is_last: Whether, for inference, copies are to be where Algorithm 1 wants them, which takes its time.

        Raises:
            InfeasiblePlanError: If nothing fits.
        """
        capacity_R, is_nearby = self.capacity_R if capacity_R is None else capacity_R, is_last and self.is_inference
        tables, topology = self.request.tables, self.request.topology
        groups = row_groups(tables, threshold, hot)
        everywhere = {} if is_nearby else hot
        copies = [row_range(tables[name], 0, count) for name, count in everywhere.items()]
        hot_bytes = sum(shard.storage_bytes for shard in copies)
        alone = [shard for shard in groups if shard.rows.stop > everywhere.get(shard.table.name, 0)]
        try:
            owners = place(tables, topology, alone, capacity_R - hot_bytes, self.method, copied=hot)
        except InfeasiblePlanError:
            if not hot:
                raise
            # Copies come last: only memory that is left over is theirs.
            return self._attempt(threshold, {}, capacity_R, is_last=is_last)
        everyone = tuple(range(self.num_ranks))
        held = [(shard, everyone) for shard in copies]
        if is_nearby:
            held += self._copied(owners, capacity_R)
        else:
            held += [(shard, (rank,)) for shard, rank in zip(owners.shards, owners.ranks, strict=True)]
        order = {table.name: index for index, table in enumerate(tables.tables)}
        held.sort(key=lambda one: (order[one[0].table.name], one[0].rows.start))
        loads = [load_R[self.capacity_R > 0] for load_R in (owners.read_R, owners.held_R + hot_bytes)]
        balance = min((float(load_R.min() / load_R.max()) for load_R in loads if load_R.any()), default=1.0)
        shards = [_placed_shard(shard, path) for shard, path in _joined(held)]
        return replace(self._priced(shards), hot=hot, threshold=threshold, num_groups=len(groups), balance=balance)

    def _hot_rows(self) -> list[HotRows]:
        """Rows that all ranks are to hold when training, the likeliest first; for inference, that all have room for."""
        tables, topology = self.request.tables, self.request.topology
        if not self.has_copies or not self.extra_bytes:
            return [{}]
        if self.is_inference:
            return [RowFrequencies(tables, topology).above(0.0, int(self.extra_bytes / self.num_ranks))]
        # All but one of the copies are extra.
        others = self.num_ranks - 1
        budget_bytes = int(min(self.extra_bytes / others, self.free_bytes / others, self.capacity_R.min()))
        if self.options.copy_frequency:
            return [RowFrequencies(tables, topology).above(self.options.copy_frequency, budget_bytes)]
        exchange = None if self.options.exchange == _AUTO else Exchange(self.options.exchange)
        return worthwhile(
            self.request, budget_bytes, lambda shards: [_exchanged(one, exchange) for one in self._synced(shards)]
        )

    def _copied(self, owners: Owners, capacity_R: IntArray) -> list[tuple[Shard, tuple[int, ...]]]:
        """Shards with the rank that each rank reads them from, copies on ranks near by among these."""
        tables, num_ranks = self.request.tables, self.num_ranks
        together = {table.name for unit in colocated(tables) if len(unit) > 1 for table in unit}
        budget_bytes = int(self.extra_bytes / num_ranks)
        joined = _joined((shard, (rank,)) for shard, rank in zip(owners.shards, owners.ranks, strict=True))
        whole = [(shard, path) for shard, path in joined if shard.table.name in together]
        others = [(shard, path[0]) for shard, path in joined if shard.table.name not in together]
        if not others:
            return whole
        cut = cut_to_copy(others, budget_bytes, num_ranks, MANY_PIECES if self.options.threshold else FEW_PIECES)
        may_R = {
            table.name: allowed_ranks(table, num_ranks) & (Tier.REPLICATED not in table.constraints.forbidden_tiers)
            for table in tables.tables
        }
        paths_NR = copy_nearby(
            cut,
            np.stack([may_R[shard.table.name] for shard, _ in cut]),
            capacity_R - owners.held_R,
            budget_bytes,
            fetch_ms(self.request.topology, self.request.costs.comm),
            self.options.balance,
        )
        return whole + [(shard, tuple(path)) for (shard, _), path in zip(cut, paths_NR.tolist(), strict=True)]

    def _priced(self, shards: Sequence[PlacedShard]) -> _Attempt:
        """The plan of some shards, with the exchange of least predicted step where any may be taken."""
        request, asked = self.request, self.options.exchange
        ways = (Exchange.ROWS, Exchange.PARTIAL_SUMS, None) if asked == _AUTO else (Exchange(asked),)
        synced = self._synced(shards)
        found = []
        for exchange in ways:
            plan = ShardingPlan(
                tables=request.tables,
                topology=request.topology,
                shards=tuple(_exchanged(placed, exchange) for placed in synced),
                payload=request.payload,
            )
            priced = price_with_kernels(plan, request.costs)
            forward_ms = sum(priced.step.part_ms(part) for part in _FORWARD_PARTS)
            cost_ms = forward_ms if self.options.mode == _INFERENCE else priced.step.step_ms.value
            found.append(_Attempt(plan=plan, priced=priced, cost_ms=cost_ms))
        return _faster(*found)

    def _synced(self, shards: Sequence[PlacedShard]) -> list[PlacedShard]:
        """The shards with the synchronisation that was asked for."""
        request, asked = self.request, self.options.grad_sync
        if asked == _AUTO:
            ways = cheapest_syncs(shards, request.tables.batch_size, request.costs.comm, request.topology)
        else:
            ways = [GradSync(asked) if len(placed.replicas) > 1 else GradSync.NONE for placed in shards]
        return [replace(placed, grad_sync=way) for placed, way in zip(shards, ways, strict=True)]


def _exchanged(placed: PlacedShard, exchange: Exchange | None) -> PlacedShard:
    """The shard with an exchange; None for that with fewer values."""
    if exchange is None or placed.shard.table.pooling is Pooling.SEQUENCE:
        exchange = cheaper_exchange(placed.shard, len(placed.replicas[0]))
    return replace(placed, exchange=exchange)


def _faster(first: _Attempt, *others: _Attempt) -> _Attempt:
    """The attempt that costs least; of several, the first."""
    return min((first, *others), key=lambda one: one.cost_ms)


def _joined(held: Iterable[tuple[Shard, tuple[int, ...]]]) -> list[tuple[Shard, tuple[int, ...]]]:
    """Shards with the ranks that they are read from, in the order of their rows; neighbours held alike become one."""
    joined = []
    for (_, path), of_table in groupby(held, key=lambda one: (one[0].table.name, one[1])):
        shards = [shard for shard, _ in of_table]
        joined.append((row_range(shards[0].table, shards[0].rows.start, shards[-1].rows.stop), path))
    return joined


def _placed_shard(shard: Shard, path: tuple[int, ...]) -> PlacedShard:
    """A shard with a copy on each rank that is read from: one rank for all, or one for each."""
    holders = sorted(set(path))
    if len(holders) == 1:
        return PlacedShard.table_wise(shard, holders[0])
    is_own = list(path) == holders and Tier.DATA_PARALLEL not in shard.table.constraints.forbidden_tiers
    replica_of = {rank: index for index, rank in enumerate(holders)}
    return PlacedShard(
        shard=shard,
        tier=Tier.DATA_PARALLEL if is_own else Tier.REPLICATED,
        replicas=tuple((rank,) for rank in holders),
        grad_sync=GradSync.SPARSE,
        fetch=None if is_own else tuple(replica_of[rank] for rank in path),
    )
