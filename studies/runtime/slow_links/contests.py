"""One task, planned by several planners and executed in one start of a cluster's processes; some as in three papers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from autoshard.core import (
    AccessProfile,
    Collective,
    DenseLayers,
    EmbeddingTable,
    Exchange,
    Feature,
    GradSync,
    Payload,
    PlacedShard,
    RowRange,
    RowsBy,
    Shard,
    ShardingPlan,
    TableSet,
    Tier,
    Topology,
)
from autoshard.core.costs import CollectiveName, MsArray
from autoshard.core.errors import InfeasiblePlanError, InputError, ModelError
from autoshard.core.step import StepPart
from autoshard.evaluation import AlphaBetaComm, plan_traffic, price_step
from autoshard.evaluation.traffic import Stream
from autoshard.planners.planner import PlanRequest
from autoshard.planners.space.options import placed_shard
from autoshard.planning import make_costs, make_plan, plan_costs
from autoshard.runtime import Engine, RunResult, ownership_of
from autoshard.runtime.processes.launch import Launcher
from autoshard.whatif.trials import MeasuredStep, execute_plans
from costmodel.kernel.learned import LearnedCostModel
from studies.papers.flexshard.models import LOCAL_BATCH, MODELS, PaperModel
from studies.papers.oper.results import THRESHOLD, kaggle
from studies.planners.step_runs import StepRun

#: Time limit of a planner. Most need less; `auto` takes it whole.
PLAN_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A planner in a contest, and what executes its plan.

    Attributes:
        label: Its name in tables.
        planner: Name of the planner; of none where tiers are given.
        options: Its options.
        tiers: How rows of the task's only table are held, from hot to cold, each with the access rank that its rows end
            before; none where a planner decides.
        engine: What executes the plan.
        time_limit_s: Of a planner that searches.
        grad_sync: How gradients of replicas are summed, whatever the plan says; None for what it says.
        collective: How sums over all ranks travel, likewise.
    """

    label: str
    planner: str = ""
    options: Mapping[str, object] = field(default_factory=dict)
    tiers: tuple[tuple[Tier, int], ...] = ()
    engine: Engine = Engine.THIN
    time_limit_s: float = PLAN_S
    grad_sync: GradSync | None = None
    collective: Collective | None = None

    def plan(self, request: PlanRequest) -> ShardingPlan:
        """The plan that is executed.

        Raises:
            AutoshardError: As `make_plan`.
        """
        request = replace(request, options=self.options, time_limit_s=self.time_limit_s)
        return self.changed(_tiered(request, self.tiers) if self.tiers else make_plan(self.planner, request))

    def changed(self, plan: ShardingPlan) -> ShardingPlan:
        """The plan, with what the entry says; prices are left out if that is anything."""
        if self.grad_sync is None and self.collective is None:
            return plan
        return replace(plan, shards=tuple(map(self._changed_shard, plan.shards)), predicted=None)

    def _changed_shard(self, placed: PlacedShard) -> PlacedShard:
        if self.grad_sync is not None and placed.grad_sync is not GradSync.NONE:
            placed = replace(placed, grad_sync=self.grad_sync)
        is_summed = placed.tier is Tier.ROW_WISE and placed.exchange is Exchange.PARTIAL_SUMS
        if self.collective is not None and is_summed:
            placed = replace(placed, collective=self.collective)
        return placed


def _tiered(request: PlanRequest, tiers: Sequence[tuple[Tier, int]]) -> ShardingPlan:
    (table,) = request.tables.tables
    shards, start = [], 0
    for tier, stop in tiers:
        rows = RowRange(start=start, stop=stop, by=RowsBy.ACCESS_RANK)
        shard = Shard(table=table, rows=rows, columns=(0, table.embedding_dim))
        shards.append(placed_shard(shard, tier, request.topology))
        start = stop
    return ShardingPlan(tables=request.tables, topology=request.topology, shards=tuple(shards))


#: Label of TorchRec's planner with TorchRec's engine.
TORCHREC_WHOLE = "torchrec, its engine"
#: Entries of the drawn tasks.
ENTRIES = (
    *(
        Entry(label=name, planner=name)
        for name in ("auto", "cost-greedy", "neo", "flexshard", "oper", "replica-groups", "torchrec")
    ),
    Entry(label=TORCHREC_WHOLE, planner="torchrec", engine=Engine.TORCHREC),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long each plan is run.

    Attributes:
        steps: Measured steps of a run.
        warmup_steps: Steps before them.
        repeats: Times that all plans run, one round after the other; the quickest run of each counts.
        rounds: Turns that plans take within such a time, all in memory; the median of their steps counts.
        virtual_time: Whether a rank's time is that of a core of its own, and the topology's links.
        row_share: In virtual time, as `RunRequest` has it.
    """

    steps: int = 6
    warmup_steps: int = 2
    repeats: int = 2
    rounds: int = 1
    virtual_time: bool = False
    row_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamBytes:
    """Bytes of a step over all ranks, without those that stay on a rank.

    Attributes:
        executed: As the engine counts them.
        predicted: By the plan.
        across_share: Share of the predicted ones that leaves a node; 0 if there are none.
    """

    executed: float
    predicted: float
    across_share: float

    @property
    def across(self) -> float:
        """Executed bytes that leave a node, by the predicted share."""
        return self.executed * self.across_share


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRun:
    """What became of an entry.

    Attributes:
        label: The entry's.
        engine: What executed the plan, or would have.
        failure: Why there is no plan, or none that the engine executes; empty if there is one.
        planning_s: Time that planning took.
        step: Predicted and measured; None after a failure.
        now_ms: In virtual time, ends of the 90% interval without what cannot differ there: the wire, which is that of
            the prediction, and the speed of other hours.
        steps_ms: Step of each run, in the order in which plans took turns.
        work_ms: In virtual time, CPU time of the rank that has most, by part of the step, without waits.
        sent: Bytes by stream; empty where the engine does not count them.
        tiers: Number of shards of each sharding type.
    """

    label: str
    engine: Engine = Engine.THIN
    failure: str = ""
    planning_s: float = 0.0
    step: StepRun | None = None
    now_ms: tuple[float, ...] = ()
    steps_ms: tuple[float, ...] = ()
    work_ms: Mapping[str, float] = field(default_factory=dict)
    sent: Mapping[str, StreamBytes] = field(default_factory=dict)
    tiers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """A task and its entries.

    Attributes:
        name: Of its part.
        group: What it is compared with: a kind of task, or a paper.
        tables: The task.
        entries: Who plans it.
        seed: Of plans, weights and batches.
        payload: Number formats on the wire.
    """

    name: str
    group: str
    tables: TableSet
    entries: Sequence[Entry] = ENTRIES
    seed: int = 0
    payload: Payload = field(default_factory=Payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContestResult:
    """Entries of a contest, in their order."""

    name: str
    group: str
    num_tables: int
    batch_size: int
    entries: tuple[EntryRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    entry: Entry
    seconds: float
    plan: ShardingPlan | None = None
    failure: str = ""


def run_contests(
    contests: Sequence[tuple[Contest, Topology]],
    registry: Path,
    launcher: Launcher,
    effort: Effort,
    on_step: Callable[[int, int], None] | None = None,
) -> list[ContestResult]:
    """Plans tasks, and executes all plans in one start of the processes, round by round.

    Args:
        contests: The tasks, and what their plans are made for: topologies of as many ranks.
        registry: Models that price them.
        launcher: Starts a process for each rank.
        effort: How long each plan runs.
        on_step: Told how many steps are done, and of how many.

    Raises:
        AutoshardError: If a plan fails while it runs; one that cannot be made or executed is a failure of its entry.
    """
    planned = [(contest, one) for contest, topology in contests for one in _plan_all(contest, topology, registry)]
    executed = [(contest, one, one.plan) for contest, one in planned if one.plan is not None]
    results = execute_plans(
        [plan for *_, plan in executed],
        [{"engine": one.entry.engine, "seed": contest.seed} for contest, one, _ in executed],
        repeats=effort.repeats,
        rounds=effort.rounds,
        on_step=on_step,
        launcher=launcher,
        steps=effort.steps,
        warmup_steps=effort.warmup_steps,
        device="cpu",
        virtual_time=effort.virtual_time,
        registry_path=str(registry) if effort.virtual_time else None,
        row_share=effort.row_share,
    )
    runs = {
        (contest.name, one.entry.label): _entry_run(one, plan, contest, registry, of_plan)
        for (contest, one, plan), of_plan in zip(executed, results, strict=True)
    }
    return [
        ContestResult(
            name=contest.name,
            group=contest.group,
            num_tables=len(contest.tables.tables),
            batch_size=contest.tables.batch_size,
            entries=tuple(
                runs.get((contest.name, one.entry.label))
                or EntryRun(label=one.entry.label, engine=one.entry.engine, failure=one.failure, planning_s=one.seconds)
                for of, one in planned
                if of is contest
            ),
        )
        for contest, _ in contests
    ]


def _plan_all(contest: Contest, topology: Topology, registry: Path) -> list[_Planned]:
    request = request_of(contest, topology, registry)
    planned: list[_Planned] = []
    for entry in contest.entries:
        alike = (one for one in planned if replace(one.entry, label=entry.label, engine=entry.engine) == entry)
        planned.append(_plan(entry, request, next(alike, None)))
    return planned


def request_of(contest: Contest, topology: Topology, registry: Path) -> PlanRequest:
    """What entries of a contest plan."""
    return PlanRequest(
        tables=contest.tables,
        topology=topology,
        costs=make_costs(contest.tables, topology, registry),
        seed=contest.seed,
        registry=registry,
        payload=contest.payload,
    )


def _plan(entry: Entry, request: PlanRequest, alike: _Planned | None) -> _Planned:
    """An entry's plan: that of one which differs from it by its engine alone, if there is one."""
    started_s = time.perf_counter()
    try:
        plan = entry.plan(request) if alike is None or alike.plan is None else alike.plan
        _check_executable(plan, entry.engine)
    except (InfeasiblePlanError, InputError, ModelError) as error:
        return _Planned(entry=entry, seconds=time.perf_counter() - started_s, failure=error.message)
    seconds = time.perf_counter() - started_s if alike is None else alike.seconds
    return _Planned(entry=entry, seconds=seconds, plan=plan)


def _check_executable(plan: ShardingPlan, engine: Engine) -> None:
    ownership = ownership_of(plan, plan.topology.world_size)
    if engine is Engine.TORCHREC:
        # Its import takes seconds.
        from autoshard.runtime.torchrec_engine import layouts_of

        layouts_of(plan, ownership, device_type="cpu")


def _entry_run(
    planned: _Planned, plan: ShardingPlan, contest: Contest, registry: Path, results: Sequence[RunResult]
) -> EntryRun:
    price = price_step(plan, plan_costs(plan, registry))
    runs = [MeasuredStep.of(result) for result in results]
    measured = MeasuredStep.quickest(runs)
    tiers = [placed.tier.value for placed in plan.shards]
    step = StepRun(
        trial={
            "planner": planned.entry.label,
            "num_tables": len(contest.tables.tables),
            "batch_size": contest.tables.batch_size,
        },
        predicted_ms=price.step_ms.value,
        low_ms=price.step_ms.low,
        high_ms=price.step_ms.high,
        measured_ms=measured.step_ms,
        spread=measured.spread,
        parts={part.value: (price.part_ms(part), measured.part_ms[part]) for part in StepPart},
        models={**price.models, "overlap": price.overlap.value},
    )
    return EntryRun(
        label=planned.entry.label,
        engine=planned.entry.engine,
        planning_s=planned.seconds,
        step=step,
        now_ms=_now_ms(plan, registry) if results[0].virtual else (),
        steps_ms=tuple(one.step_ms for one in runs),
        work_ms={part.value: max((one.get(part, 0.0) for one in measured.work_ms_R), default=0.0) for part in StepPart},
        sent=_sent(plan, results[0]),
        tiers={tier: tiers.count(tier) for tier in dict.fromkeys(tiers)},
    )


class _GivenLinks(AlphaBetaComm):
    """Links that are what the topology says."""

    def bounds_ms(self, _collective: CollectiveName, value_ms: MsArray, _topology: Topology) -> tuple[MsArray, MsArray]:
        """Nothing but the value."""
        return value_ms, value_ms


def _now_ms(plan: ShardingPlan, registry: Path) -> tuple[float, float]:
    """The 90% interval of a step on links that are given, by kernels that were measured just now."""
    costs = plan_costs(plan, registry)
    if isinstance(costs.comm, AlphaBetaComm):
        costs = replace(costs, comm=_GivenLinks())
    if isinstance(costs.kernel, LearnedCostModel):
        model = costs.kernel
        card = replace(model.card, interval=replace(model.card.interval, drift=0.0))
        costs = replace(costs, kernel=LearnedCostModel(model.tensors(), card, model.version))
    step_ms = price_step(plan, costs).step_ms
    return step_ms.low, step_ms.high


def _sent(plan: ShardingPlan, result: RunResult) -> dict[str, StreamBytes]:
    group = plan.of_one_group()
    traffic = plan_traffic(group)
    links = traffic.links(group.topology)
    num_ranks, local = group.group_size, group.topology.local_world_size
    executed = {
        stream: sum(rank.sent_bytes.get(stream.value, 0.0) for rank in result.ranks)
        for stream in Stream
        if result.ranks[0].sent_bytes
    }
    found = {}
    for stream, num_bytes in executed.items():
        by_level = links[stream].leaving_LR.sum(axis=1)
        # Of a reduce-scatter or an all-gather, every rank sends a part to each other one.
        to_each = traffic.scattered_bytes(stream) if stream in (Stream.FORWARD, Stream.BACKWARD) else 0.0
        all_levels = float(by_level.sum()) + to_each * (num_ranks - 1)
        across = to_each * (num_ranks - local) + (float(by_level[-1]) if len(by_level) > 1 else 0.0)
        found[stream.value] = StreamBytes(
            executed=num_bytes,
            predicted=plan.replica_groups.num_groups * all_levels,
            across_share=across / all_levels if all_levels else 0.0,
        )
    return found


#: Rows and batches of FlexShard's models are divided by it; lookups per sample and coverage stay.
FLEXSHARD_SCALE, FLEXSHARD_DIM = 512, 32
#: The same of OPER's data.
OPER_SCALE = 128
FLEXSHARD, OPER, GROUPS, SUMS = "flexshard", "oper", "replica-groups", "sums"
#: Labels of FlexShard's runs, in the order of its Table 6.
TIER_LABELS = ("row-wise", "2-tier", "3-tier")
SPARSE_LABEL, DENSE_LABEL, GATHERED_LABEL = "oper, sparse", "oper, dense", "oper, all-gather"
#: Labels of the contest of collectives.
SCATTERED_LABEL, EXCHANGED_LABEL = "reduce-scatter", "all-to-all"
#: Processes of the contest of replica groups, and its numbers of groups.
GROUPS_RANKS, NUM_GROUPS = 16, (1, 2, 4)
_DENSE = DenseLayers(num_dense_features=13, bottom_mlp=(64, 32), top_mlp=(64, 1))


def flexshard_contest(
    model: PaperModel, num_ranks: int, *, scale: int = FLEXSHARD_SCALE, dim: int = FLEXSHARD_DIM
) -> Contest:
    """Row-wise, 2-tier and 3-tier sharding of one of FlexShard's models (Table 6), with the tiers of Table 5.

    The paper's rule would choose others where a node has two ranks to hold a copy and not eight.

    Args:
        model: One of Table 4.
        num_ranks: Ranks.
        scale: Divides rows and batch.
        dim: Columns of the table.
    """
    whole = TableSet(batch_size=LOCAL_BATCH * num_ranks, tables=(model.table(model.measured_length),))
    scaled = whole.scaled(scale)
    tables = tuple(replace(table, embedding_dim=dim) for table in scaled.tables)
    all_rows = tables[0].num_embeddings
    two_tier, replicated, flexed = (
        round(share.num_rows / scale) for share in (model.two_tier, model.replicated, model.flexed)
    )
    tiers = (
        ((Tier.ROW_WISE, all_rows),),
        ((Tier.DATA_PARALLEL, two_tier), (Tier.ROW_WISE, all_rows)),
        ((Tier.DATA_PARALLEL, replicated), (Tier.FLEX, replicated + flexed), (Tier.ROW_WISE, all_rows)),
    )
    entries = tuple(Entry(label=label, tiers=of_label) for label, of_label in zip(TIER_LABELS, tiers, strict=True))
    return Contest(
        name=f"flexshard-{model.name.lower()}",
        group=FLEXSHARD,
        tables=replace(scaled, tables=tables, dense=replace(_DENSE, bottom_mlp=(64, dim))),
        entries=entries,
    )


def oper_contest(num_ranks: int) -> Contest:
    """OPER's plan of Criteo Kaggle with each way to sum gradients, and TorchRec's planner (Sec. 5.3 and 6).

    Every rank holds the rows that it looks up at least once in a step, by the mean.
    """
    tables = replace(kaggle(num_ranks).scaled(OPER_SCALE), dense=_DENSE)
    papers = {"threshold": THRESHOLD, "copy_frequency": num_ranks / tables.batch_size}
    ways = {SPARSE_LABEL: GradSync.SPARSE, DENSE_LABEL: GradSync.DENSE, GATHERED_LABEL: GradSync.ALL_GATHER}
    entries = (
        *(Entry(label=label, planner="oper", options=papers, grad_sync=how) for label, how in ways.items()),
        Entry(label="torchrec", planner="torchrec"),
        Entry(label=TORCHREC_WHOLE, planner="torchrec", engine=Engine.TORCHREC),
    )
    return Contest(name="oper-kaggle", group=OPER, tables=tables, entries=entries)


def groups_contest(num_ranks: int) -> Contest:
    """Replica groups of tables with few rows, whose copies are cheap beside the exchange of embeddings (2D)."""
    entries = tuple(
        Entry(label=f"{number} groups", planner="replica-groups", options={"num_groups": number})
        for number in NUM_GROUPS
    )
    return Contest(name="replica-groups", group=GROUPS, tables=_equal_tables(500, num_ranks), entries=entries)


def sums_contest(num_ranks: int) -> Contest:
    """Tables split by rows over all ranks, whose sums travel by reduce-scatter or by all-to-all (Neo Fig. 5b)."""
    entries = tuple(
        Entry(label=label, planner="neo", options={"sharding_types": "row_wise"}, collective=collective)
        for label, collective in (
            (SCATTERED_LABEL, Collective.REDUCE_SCATTER),
            (EXCHANGED_LABEL, Collective.ALL_TO_ALL),
        )
    )
    return Contest(name="row-wise-sums", group=SUMS, tables=_equal_tables(20_000, num_ranks), entries=entries)


def _equal_tables(num_rows: int, num_ranks: int) -> TableSet:
    tables = tuple(
        EmbeddingTable(
            name=f"t{index}",
            num_embeddings=num_rows,
            embedding_dim=32,
            features=(Feature(name=f"f{index}", pooling_factor=4.0),),
            access=AccessProfile.zipf(num_rows, 1.05),
        )
        for index in range(24)
    )
    return TableSet(batch_size=128 * num_ranks, tables=tables, dense=_DENSE)


def paper_contests(num_ranks: int) -> tuple[Contest, ...]:
    """Contests on as many ranks as the drawn tasks have."""
    return (
        *(flexshard_contest(model, num_ranks) for model in MODELS),
        oper_contest(num_ranks),
        sums_contest(num_ranks),
    )
