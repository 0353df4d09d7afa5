"""The ratios of four papers, executed in virtual time: `python -m studies papers-executed`.

Each paper's comparison is made at a size that one machine executes, rank by rank, and on links that are to the ranks'
computation as those of the paper's cluster are: rows and batch are divided alike, so that lookups per row, tiers and
copies keep their shares, and links are slower by as much as makes the wire's share of a step the paper's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Annotated, Final

import plotly.graph_objects as go
import typer

from autoshard import console
from autoshard.commands.options import command_options
from autoshard.core import CostModels, GradSync, Level, Link, MemoryBytes, ShardingPlan, SyncRows, Topology
from autoshard.core.step import Overlap, StepPart
from autoshard.evaluation import price_step
from autoshard.planners.planner import PlanRequest
from autoshard.planners.replica_groups import ReplicaGroupsPlanner
from autoshard.planning import make_costs, plan_costs
from autoshard.report.figures import BLUE, GREY, ORANGE, SKY, in_house_style
from autoshard.runtime.processes.launch import LOCAL
from autoshard.table import Table
from costmodel.registry.versions import default_registry
from studies.frame import (
    Machine,
    OutputOptions,
    PartsOption,
    PartStore,
    RegistryOption,
    StudyResult,
    names_in,
)
from studies.papers import neo, two_d
from studies.papers.flexshard.models import (
    DIM,
    MODELS,
    NUM_NODES,
    RANKS_PER_NODE,
    WORLD,
    PaperModel,
    power_law_curve,
)
from studies.papers.flexshard.results import THREE_TIER_GAIN, TWO_TIER_GAIN, fitted_bandwidths, rest_of_step_ms
from studies.papers.oper.results import nodes_of_four, syn_small
from studies.runtime.slow_links.contests import (
    Contest,
    ContestResult,
    Effort,
    Entry,
    EntryRun,
    flexshard_contest,
    request_of,
    run_contests,
)
from studies.runtime.virtual_contests import Gain

FLEXSHARD, OPER, TWO_D, NEO = "flexshard", "oper", "two-d", "neo"
PAPERS: Final = (FLEXSHARD, OPER, TWO_D, NEO)
_HBM: Final = MemoryBytes(hbm=2 << 30)
#: Bytes per second of links that take no time.
_FREE: Final = 1e18


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A comparison of a paper, as one start of the processes executes it.

    Attributes:
        name: Of its part.
        paper: One of `PAPERS`.
        contests: What is planned and executed, with the paper's links.
        reference: Contest whose first plan tells how much slower the links have to be, with the paper's links.
        share: What the wire of that plan takes over its computation on the paper's cluster.
        row_share: Share of the rows that have memory of their own.
    """

    name: str
    paper: str
    contests: tuple[tuple[Contest, Topology], ...]
    reference: tuple[Contest, Topology]
    share: float
    row_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """What became of a setting.

    Attributes:
        name: The setting's.
        paper: Its paper.
        share: Its share.
        slower: By what the paper's bandwidths were divided.
        num_ranks: Ranks of each contest.
        contests: Results.
    """

    name: str
    paper: str
    share: float
    slower: float
    num_ranks: tuple[int, ...]
    contests: tuple[ContestResult, ...]


def with_links(topology: Topology, divisor: float) -> Topology:
    """The same ranks with all bandwidths divided, and without latencies, which messages of the papers' size hide."""

    def link(one: Link) -> Link:
        return Link(bytes_per_s=one.bytes_per_s / divisor)

    levels = tuple(
        replace(level, all_to_all=link(level.all_to_all), all_reduce=link(level.all_reduce))
        for level in topology.levels
    )
    return replace(topology, levels=levels)


def wire_and_work_ms(plan: ShardingPlan, costs: CostModels) -> tuple[float, float]:
    """What the wire adds to a priced step whose parts are one after the other, and all else."""

    def step_ms(topology: Topology) -> float:
        return price_step(replace(plan, topology=topology), costs, overlap=Overlap.NONE).step_ms.value

    free = tuple(
        replace(level, all_to_all=Link(bytes_per_s=_FREE), all_reduce=Link(bytes_per_s=_FREE))
        for level in plan.topology.levels
    )
    work_ms = step_ms(replace(plan.topology, levels=free))
    return step_ms(plan.topology) - work_ms, work_ms


def slowdown(setting: Setting, registry: Path) -> float:
    """By what the bandwidths of the reference are divided, so that its priced step has the setting's share of wire."""
    contest, topology = setting.reference
    plan = contest.entries[0].plan(request_of(contest, with_links(topology, 1.0), registry))
    wire_ms, work_ms = wire_and_work_ms(plan, plan_costs(plan, registry))
    return setting.share * work_ms / wire_ms


#: FlexShard's rows and batch are divided by these; all columns are kept.
_FLEX_SCALES: Final = (1024, 2048)
#: Wire over computation of the row-wise step, at the second size: beside the one that the paper's gain implies.
_FLEX_SHARES: Final = (6.0,)


def flexshard_topology() -> Topology:
    """Four nodes of eight, on which the volumes of Table 6 take its times (`fitted_bandwidths`)."""
    fitted = fitted_bandwidths()
    # Table 3 counts all bytes, links those that leave: 24 of 32 parts leave a node, 7 of 8 a rank within one.
    inside = Link(bytes_per_s=fitted.all_to_all_intra * (1 - 1 / RANKS_PER_NODE))
    across = Link(bytes_per_s=fitted.all_to_all_global * (1 - 1 / NUM_NODES))
    levels = (
        Level(name="node", size=RANKS_PER_NODE, all_to_all=inside, all_reduce=inside),
        Level(name="cluster", size=WORLD, all_to_all=across, all_reduce=Link(bytes_per_s=fitted.all_reduce_global)),
    )
    return Topology(world_size=WORLD, device="cpu", memory_bytes=_HBM, levels=levels)


def flexshard_settings() -> tuple[Setting, ...]:
    """RM-1 row-wise and in tiers, by the wire's share of the row-wise step, and at a second size."""
    model = MODELS[0]
    implied = model.row_wise_run.exposed_ms / rest_of_step_ms(model)
    lines = [*((scale, implied) for scale in _FLEX_SCALES), *((_FLEX_SCALES[1], share) for share in _FLEX_SHARES)]
    found = []
    for scale, share in lines:
        pair = (_flexshard_contest(model, scale), flexshard_topology())
        setting = Setting(
            name=f"{FLEXSHARD}-{scale}-{share:.2f}", paper=FLEXSHARD, contests=(pair,), reference=pair, share=share
        )
        found.append(setting)
    return tuple(found)


def _flexshard_contest(model: PaperModel, scale: int) -> Contest:
    """The model with rows of the first tier looked up alike.

    A row here stands for as many of the paper's as the table is smaller, which are spread over ranks there. The hottest
    one would be 5% of all lookups, and make its rank by far the slowest of the row-wise step.
    """
    contest = flexshard_contest(model, WORLD, scale=scale, dim=DIM)
    (table,) = contest.tables.tables
    *points, _ = ((rows / scale, coverage) for rows, coverage in model.points)
    access = power_law_curve((*points, (table.num_embeddings, 1.0)), first_exponent=1.0)
    return replace(contest, tables=replace(contest.tables, tables=(replace(table, access=access),)))


#: Rows and batch of Syn_Small are divided by it.
_OPER_SCALE: Final = 64
_OPER_RANKS: Final = 16
#: Memory for copies, over all tables': the paper's first, and others, since Fig. 9b does not name its own.
_OPER_RATIOS: Final = (0.05, 0.02, 0.01)
#: Groups of rows are coarser and loads less even than the paper's 0.1%, since each group costs kernel calls on a CPU.
_OPER_THRESHOLD, _OPER_BALANCE = 0.02, 0.8
#: Of rows with copies: next to nothing, so that memory decides which they are.
_ANY_FREQUENCY: Final = 1e-12
#: Sec. 6.3: sparse all-reduce over dense.
SPARSE_GAIN: Final = 0.37
_WAYS: Final = {"dense": GradSync.DENSE, "sparse": GradSync.SPARSE, "all-gather": GradSync.ALL_GATHER}


def oper_settings() -> tuple[Setting, ...]:
    """Syn_Small on 4 x 4 GPUs, its copies' gradients summed in each way, by the memory that copies have (Fig. 9b)."""
    topology = replace(nodes_of_four(_OPER_RANKS // 4), device="cpu", memory_bytes=_HBM)
    entries = tuple(
        Entry(label=f"{ratio:.0%}, {way}", planner=OPER, options=_oper_options(ratio), grad_sync=sync)
        for ratio in _OPER_RATIOS
        for way, sync in _WAYS.items()
        if sync is not GradSync.ALL_GATHER or ratio == _OPER_RATIOS[0]
    )
    tables = syn_small(_OPER_RANKS).scaled(_OPER_SCALE)
    contest = (Contest(name="syn-small", group=OPER, tables=tables, entries=entries), topology)
    return (
        Setting(
            name=f"{OPER}-{_OPER_SCALE}",
            paper=OPER,
            contests=(contest,),
            reference=contest,
            share=_oper_share(entries[0]),
            row_share=0.25,
        ),
    )


def _oper_options(ratio: float) -> dict[str, object]:
    return {
        "threshold": _OPER_THRESHOLD,
        "balance": _OPER_BALANCE,
        "copy_frequency": _ANY_FREQUENCY,
        "extra_memory_ratio": ratio,
    }


def _oper_share(entry: Entry) -> float:
    """Wire over computation of an entry's plan at the paper's size, by the prices of A100."""
    tables, topology = syn_small(_OPER_RANKS), nodes_of_four(_OPER_RANKS // 4)
    plan = entry.plan(PlanRequest(tables=tables, topology=topology, costs=make_costs(tables, topology)))
    wire_ms, work_ms = wire_and_work_ms(plan, plan_costs(plan))
    return wire_ms / work_ms


#: A rank here stands for so many GPUs of the paper's; its tables and ranks are as many fewer.
_TWO_D_GPUS: Final = 32
#: Samples of a rank; rows are divided as they are.
_TWO_D_BATCH: Final = 8
_TWO_D_RANKS: Final = (8, 32, 64)
FULL_LABEL, GROUPED_LABEL = "full", "groups"


def two_d_settings() -> tuple[Setting, ...]:
    """ExFM on 8 to 64 ranks, in one group and in groups of 8, for Table 2's 256 to 2,048 GPUs and groups of 256."""
    pairs = [(_two_d_contest(ranks), _eight_hosts(ranks)) for ranks in _TWO_D_RANKS]
    return tuple(
        Setting(
            name=f"{TWO_D}-{topology.world_size}",
            paper=TWO_D,
            contests=((contest, topology),),
            reference=pairs[0],
            share=_two_d_share(),
        )
        for contest, topology in pairs
    )


def _two_d_contest(num_ranks: int) -> Contest:
    # A rank looks up as many rows fewer as it has samples and the model has tables fewer, and holds as many fewer.
    shrink = _TWO_D_BATCH / two_d.FULL_RUNS[0].local_batch / _TWO_D_GPUS**2
    model = replace(
        two_d.EXFM,
        num_tables=two_d.EXFM.num_tables // _TWO_D_GPUS,
        total_bytes=two_d.EXFM.total_bytes * shrink,
        dense=replace(two_d.EXFM.dense, bottom_mlp=(16,), top_mlp=(1,)),
    )
    num_groups = num_ranks // _TWO_D_RANKS[0]
    grouped = {"num_groups": num_groups, "layout": "across_nodes", "sync_rows": SyncRows.ALL.value}
    entries = [Entry(label=FULL_LABEL, planner="replica-groups", options={"num_groups": 1})]
    if num_groups > 1:
        entries.append(Entry(label=GROUPED_LABEL, planner="replica-groups", options=grouped))
    tables = model.tables(_TWO_D_BATCH * num_ranks)
    return Contest(name=f"exfm-{num_ranks}", group=TWO_D, tables=tables, entries=tuple(entries))


def _eight_hosts(num_ranks: int) -> Topology:
    """Eight hosts of one rank and more: groups of 8 have one in each, and all copies of a rank are in one host."""
    machine = two_d.MACHINE
    if num_ranks > _TWO_D_RANKS[0]:
        hosts = replace(machine, host_ranks=num_ranks // _TWO_D_RANKS[0]).topology(num_ranks, _HBM.hbm)
        return replace(hosts, device="cpu")
    port = machine.card_bytes_per_s
    ring = Link(bytes_per_s=port * num_ranks / (2 * (num_ranks - 1)))
    level = Level(name="hosts", size=num_ranks, all_to_all=Link(bytes_per_s=port), all_reduce=ring)
    return Topology(world_size=num_ranks, device="cpu", memory_bytes=_HBM, levels=(level,))


@cache
def _two_d_share() -> float:
    """All-to-alls over computation of 256 GPUs; the dense layers' all-reduce hides behind their backward pass there."""
    request = two_d.request_of(two_d.FULL_RUNS[0], num_groups=1)
    _, work_ms = wire_and_work_ms(ReplicaGroupsPlanner().plan(request), request.costs)
    return two_d.outcome(two_d.FULL_RUNS[0]).all_to_all_ms / work_ms


#: Ranks of Fig. 9's runs: 1 and 16 nodes as in the paper, of 2 ranks for its 8, and a quarter of the tables.
_SCALING_RANKS, _SCALING_NODE = (2, 32), 2
#: Ranks of Fig. 11's runs, in nodes of 4.
_OPTIMISED_RANKS, _OPTIMISED_NODE = 16, 4
_BATCHES: Final = {"A": 32, "I": 16}
#: Floating-point operations of a sample: few, since the all-reduce of dense layers does not shrink with the batch.
_FLOPS: Final = {"A": 1e6, "I": 4e5}


def neo_settings() -> tuple[Setting, ...]:
    """Fig. 9's model I on 1 and 16 nodes, and Fig. 11's runs of model A on 4 nodes, planned by `neo`."""
    full = neo.throughput_runs(NEO)
    scaled_i = next(run for run in full if run.model is neo.MODEL_I)
    most = _SCALING_RANKS[-1]
    pairs = [_neo_pair(scaled_i, ranks, most, _SCALING_NODE) for ranks in _SCALING_RANKS]
    scaling = tuple(
        Setting(
            name=f"{NEO}-fig9-{topology.world_size}",
            paper=NEO,
            contests=((contest, topology),),
            reference=pairs[-1],
            share=_neo_share(scaled_i),
            row_share=0.25,
        )
        for contest, topology in pairs
    )
    runs = neo.optimisation_runs(NEO)
    optimised = tuple(_neo_pair(run, _OPTIMISED_RANKS, _OPTIMISED_RANKS, _OPTIMISED_NODE) for run in runs)
    return (
        Setting(
            name=f"{NEO}-fig11",
            paper=NEO,
            contests=optimised,
            reference=optimised[0],
            share=_neo_share(runs[0]),
            row_share=0.25,
        ),
        *scaling,
    )


def _neo_pair(run: neo.Run, num_ranks: int, most: int, node_ranks: int) -> tuple[Contest, Topology]:
    """A run with as many tables and rows fewer as its largest run has fewer ranks and samples.

    Args:
        run: The paper's run on 128 GPUs.
        num_ranks: Ranks here.
        most: Ranks that stand for 128 GPUs.
        node_ranks: Ranks of a node.
    """
    model = run.model
    shrink, fewer = _BATCHES[model.name] / model.local_batch, most / neo.FULL_RANKS
    scaled = replace(
        model,
        num_tables=round(model.num_tables * fewer),
        num_parameters=model.num_parameters * fewer * shrink,
        flops=_FLOPS[model.name],
    )
    local_batch = round((run.local_batch or model.local_batch) * shrink)
    # Tables of fewer ranks have fewer rows by `tables`, which counts from 128.
    tables = scaled.tables(num_ranks, run.dtype, local_batch)
    machine = neo.zionex(neo.FULL_RANKS)
    node, cluster = machine.levels
    levels = [replace(node, size=node_ranks)]
    if num_ranks > node_ranks:
        levels.append(replace(cluster, size=num_ranks))
    hbm = round(machine.memory_bytes.hbm * shrink * fewer)
    topology = Topology(world_size=num_ranks, device="cpu", memory_bytes=MemoryBytes(hbm=hbm), levels=tuple(levels))
    entry = Entry(label=run.name, planner=NEO, options={"sharding_types": run.sharding_types})
    return Contest(name=run.name, group=NEO, tables=tables, entries=(entry,), payload=run.payload), topology


@cache
def _neo_share(run: neo.Run) -> float:
    """All-to-alls over computation as the study `neo` prices the run, whose all-reduce is hidden."""
    found = neo.outcome(run)
    serialised = {name: ms for name, (ms, _) in found.operators().items()}
    wire_ms = serialised["input all-to-all"] + serialised["embedding all-to-all"]
    return wire_ms / (found.step_with(Overlap.NONE) - wire_ms - serialised["all-reduce"])


_MAKERS: Final = {
    FLEXSHARD: flexshard_settings,
    OPER: oper_settings,
    TWO_D: two_d_settings,
    NEO: neo_settings,
}


@command_options()
class PapersExecutedOptions:
    """Options of the study `papers-executed`."""

    papers: Annotated[str, typer.Option(help="Papers, with commas between them.")] = ",".join(PAPERS)
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of a run.")] = 3
    rounds: Annotated[int, typer.Option(min=2, help="Runs of each plan, in turns.")] = 5
    registry: RegistryOption = None
    parts: PartsOption = None

    def wanted(self) -> tuple[str, ...]:
        """The papers.

        Raises:
            InvalidOptionError: If one of them is none.
        """
        return names_in(self.papers, "--papers", PAPERS)


def executed(setting: Setting, registry: Path, effort: Effort) -> Executed:
    """Plans and executes a setting on links of its share of wire.

    Raises:
        AutoshardError: As `run_contests`.
    """
    divisor = slowdown(setting, registry)
    pairs = [(contest, with_links(topology, divisor)) for contest, topology in setting.contests]
    with console.step_progress(setting.name) as on_step:
        results = run_contests(pairs, registry, LOCAL, replace(effort, row_share=setting.row_share), on_step)
    return Executed(
        name=setting.name,
        paper=setting.paper,
        share=setting.share,
        slower=divisor,
        num_ranks=tuple(topology.world_size for _, topology in pairs),
        contests=tuple(results),
    )


def main(options: PapersExecutedOptions, output: OutputOptions) -> None:
    """Executes the comparisons of FlexShard, OPER, 2D sparse parallelism and Neo in virtual time, scaled down.

    Kernels are priced by the registry: `autoshard calibrate` first.

    Example:
        python -m studies papers-executed --parts papers-executed -o docs/figures
    """
    wanted, registry = options.wanted(), options.registry or default_registry()
    effort = Effort(steps=options.steps, warmup_steps=1, repeats=options.rounds, virtual_time=True)
    parts = PartStore.of(options.parts, {"steps": options.steps, "rounds": options.rounds, "registry": str(registry)})
    settings = [setting for paper in wanted for setting in _MAKERS[paper]()]
    makers = {setting.name: partial(executed, setting, registry, effort) for setting in settings}
    found = parts.find_all("settings", Executed, makers, line=_line)
    output.write(_result(options, found))


def _line(one: Executed) -> str:
    steps = ", ".join(
        f"{contest.name} {run.label} {_ms(run.steps_ms)}" for contest in one.contests for run in contest.entries
    )
    return f"{one.name}: links {one.slower:.0f} times slower; ms {steps}"


def _ms(steps_ms: Sequence[float]) -> str:
    return f"{median(steps_ms):.1f}" if steps_ms else "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Throughput of a rank under one plan over that under another.

    Attributes:
        paper: One of `PAPERS`.
        label: What is compared.
        published: The paper's ratio less 1; None where it has none.
        predicted: By the prices of this machine, on the same links.
        executed: Over rounds.
    """

    paper: str
    label: str
    published: float | None
    predicted: float
    executed: Gain

    @classmethod
    def of(
        cls,
        paper: str,
        label: str,
        base: EntryRun,
        run: EntryRun,
        published: float | None = None,
        *,
        samples: float = 1.0,
    ) -> Ratio:
        """Of two plans that were executed.

        Args:
            paper: One of `PAPERS`.
            label: What is compared.
            base: The plan that others are compared with.
            run: The other.
            published: The paper's ratio, less 1.
            samples: Samples of a rank over those of the base.
        """
        assert base.step is not None, "comparisons are of plans that were executed"
        assert run.step is not None, "comparisons are of plans that were executed"
        rounds = zip(base.steps_ms, run.steps_ms, strict=True)
        return cls(
            paper=paper,
            label=label,
            published=published,
            predicted=samples * base.step.predicted_ms / run.step.predicted_ms - 1,
            executed=Gain.of([samples * base_ms / run_ms for base_ms, run_ms in rounds]),
        )


def ratios(found: Sequence[Executed]) -> tuple[Ratio, ...]:
    """The papers' ratios, in the order of `PAPERS`."""
    of = {paper: [one for one in found if one.paper == paper] for paper in PAPERS}
    optimised = [one for one in of[NEO] if len(one.contests) > 1]
    scaled = [one for one in of[NEO] if len(one.contests) == 1]
    return (
        *(ratio for one in of[FLEXSHARD] for ratio in _flexshard_ratios(one)),
        *(ratio for one in of[OPER] for ratio in _oper_ratios(one)),
        *_two_d_ratios(of[TWO_D]),
        *_scaling_ratios(scaled),
        *(ratio for one in optimised for ratio in _optimisation_ratios(one)),
    )


def _flexshard_ratios(one: Executed) -> list[Ratio]:
    base, *tiers = one.contests[0].entries
    model = MODELS[0]
    is_published = abs(one.share - model.row_wise_run.exposed_ms / rest_of_step_ms(model)) < 1e-6
    published = (TWO_TIER_GAIN, THREE_TIER_GAIN) if is_published else (None, None)
    samples = one.contests[0].batch_size // WORLD
    return [
        Ratio.of(one.paper, f"{run.label}, wire {one.share:.2g}, {samples} samples", base, run, gain)
        for run, gain in zip(tiers, published, strict=True)
    ]


def _oper_ratios(one: Executed) -> list[Ratio]:
    runs = {run.label: run for run in one.contests[0].entries}
    others = {label: run for label, run in runs.items() if not label.endswith("dense")}
    return [
        Ratio.of(
            one.paper,
            f"{label} over dense",
            runs[f"{label.split(',')[0]}, dense"],
            run,
            SPARSE_GAIN if label.endswith("sparse") else None,
        )
        for label, run in others.items()
    ]


def _two_d_ratios(found: Sequence[Executed]) -> list[Ratio]:
    if not found or found[0].num_ranks[0] != _TWO_D_RANKS[0]:
        return []
    base = found[0].contests[0].entries[0]
    lines = []
    for one in found[1:]:
        gpus = one.num_ranks[0] * _TWO_D_GPUS
        for run, published in zip(one.contests[0].entries, (two_d.FULL_RUNS, two_d.GROUPED_RUNS), strict=True):
            factor = next(line.paper_factor for line in published if line.world_size == gpus)
            gain = None if factor is None else factor - 1
            lines.append(Ratio.of(one.paper, f"{one.num_ranks[0]} ranks, {run.label}", base, run, gain))
    return lines


def _scaling_ratios(found: Sequence[Executed]) -> list[Ratio]:
    if not found or found[0].num_ranks[0] != _SCALING_RANKS[0]:
        return []
    base = found[0].contests[0].entries[0]
    return [
        Ratio.of(
            one.paper,
            f"I, {one.num_ranks[0] // _SCALING_NODE} nodes",
            base,
            one.contests[0].entries[0],
            (neo.MODEL_I.paper_scaling or 0) - 1 if one.num_ranks[0] == _SCALING_RANKS[-1] else None,
        )
        for one in found[1:]
    ]


def _optimisation_ratios(one: Executed) -> list[Ratio]:
    runs = [contest.entries[0] for contest in one.contests]
    batches = [contest.batch_size for contest in one.contests]
    lines = [
        Ratio.of(one.paper, f"A, {run.label}", before, run, gain, samples=batches[number] / batches[number - 1])
        for number, (before, run, gain) in enumerate(zip(runs, runs[1:], neo.FIG11_GAINS[1:], strict=False), start=1)
    ]
    return [*lines, Ratio.of(one.paper, "A, all but the last", runs[0], runs[-2], neo.FIG11_TOTAL)]


def _result(options: PapersExecutedOptions, found: Sequence[Executed]) -> StudyResult:
    lines = ratios(found)
    numbers = {
        "ratios": [asdict(line) for line in lines],
        "settings": [asdict(one) for one in found],
    }
    by_paper = {paper: [line for line in lines if line.paper == paper] for paper in options.wanted()}
    return StudyResult(
        name="papers-executed",
        document=Machine.of("papers-executed", options).document(numbers, "autoshard.papers-executed/1"),
        tables=(
            *(ratio_table(paper, of) for paper, of in by_paper.items()),
            *(part_table(paper, [one for one in found if one.paper == paper]) for paper in by_paper),
        ),
        images={f"-{paper}": ratio_figure(of) for paper, of in by_paper.items()},
    )


def ratio_table(paper: str, lines: Sequence[Ratio]) -> Table:
    """Published, predicted and executed ratios."""
    return Table.of(
        lines,
        (
            ("", lambda line: line.label),
            ("paper", lambda line: "-" if line.published is None else f"{line.published:+.0%}"),
            ("predicted", lambda line: f"{line.predicted:+.1%}"),
            ("executed", lambda line: str(line.executed)),
        ),
        caption=f"{paper}: throughput of a rank over the one compared with; 90% intervals over rounds",
    )


def part_table(paper: str, found: Sequence[Executed]) -> Table:
    """Parts of each plan's step, predicted and executed, in milliseconds."""
    rows = []
    for one in found:
        for contest in one.contests:
            for run in contest.entries:
                if run.step is None:
                    rows.append((one.name, run.label, run.failure, *[""] * (len(StepPart) + 1)))
                    continue
                cells = (f"{run.step.parts[part][0]:.1f} / {run.step.parts[part][1]:.1f}" for part in StepPart)
                step = f"{run.step.predicted_ms:.1f} / {median(run.steps_ms):.1f}"
                rows.append((one.name, run.label, step, *cells, f"{sum(run.work_ms.values()):.1f}"))
    return Table(
        columns=("setting", "plan", "step", *(part.value.replace("_", " ") for part in StepPart), "work"),
        rows=tuple(rows),
        caption=f"{paper}: ms, predicted / executed; work is CPU time of the slowest rank of each part",
    )


#: Height of the images in pixels.
_HEIGHT: Final = 480


def ratio_figure(lines: Sequence[Ratio]) -> go.Figure:
    """Bars of predicted and executed ratios with intervals, and marks of the paper's."""
    figure = in_house_style(go.Figure(), height=_HEIGHT)
    labels = [line.label.replace(", ", "<br>") for line in lines]
    figure.add_bar(name="predicted", x=labels, y=[1 + line.predicted for line in lines], marker_color=SKY)
    figure.add_bar(
        name="executed in virtual time",
        x=labels,
        y=[1 + line.executed.median for line in lines],
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [line.executed.high - line.executed.median for line in lines],
            "arrayminus": [line.executed.median - line.executed.low for line in lines],
        },
        marker_color=BLUE,
    )
    published = [
        (label, 1 + line.published) for label, line in zip(labels, lines, strict=True) if line.published is not None
    ]
    figure.add_scatter(
        name="paper",
        x=[label for label, _ in published],
        y=[value for _, value in published],
        mode="markers",
        marker={"color": ORANGE, "size": 12, "symbol": "diamond"},
    )
    figure.add_hline(y=1.0, line={"color": GREY, "width": 1, "dash": "dot"})
    figure.update_layout(barmode="group")
    figure.update_yaxes(title_text="throughput of a rank over the base", rangemode="tozero")
    return figure
