"""Whose plans are executed fastest on clusters that nobody here has: `python -m studies virtual-contests`.

Drawn tasks are planned by several planners for clusters of 8 to 32 ranks, and all plans are executed in virtual time:
by real processes, with the topology's wire. Links are slower than those of the clusters that they stand for by as much
as a core's memory is slower than a GPU's, so that wire and computation are to each other as there.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import combinations
from math import sqrt
from pathlib import Path
from statistics import median
from typing import Annotated, Final

import numpy as np
import typer

from autoshard import console
from autoshard.commands.options import command_options
from autoshard.core import Level, Link, MemoryBytes, Pooling, TableSet, Topology
from autoshard.formats.torchrec.sharding import TorchRecType
from autoshard.runtime import Engine
from autoshard.runtime.processes.launch import LOCAL
from autoshard.table import Table
from bench.measuring.devices import find_device
from costmodel.registry.versions import default_registry
from studies.frame import Machine, OutputOptions, PartsOption, PartStore, RegistryOption, StudyResult, command_line
from studies.runtime.slow_links.contests import TORCHREC_WHOLE, Contest, ContestResult, Effort, Entry, run_contests
from studies.runtime.slow_links.models import drawn_task
from studies.runtime.slow_links.study import AUTO, RateSummary, measured_ms, summarised, tau_of, thin_runs, thin_steps

SCHEMA: Final = "autoshard.virtual-contests/1"
#: Bytes per second that lookups read with a core, and from an A100's memory. FBGEMM's of fp32 rows read 23 GB/s from a
#: table of 3 MB, 12 from 26 MB, 6 from 256 MB and 4 from 1 GB, with one thread of a virtual AMD EPYC: this is between.
_CORE_BYTES_PER_S, _GPU_BYTES_PER_S = 8e9, 1.5e12
#: Bytes per second between two GPUs of a node over NVLink.
_NVLINK_BYTES_PER_S = 3e11
_NODE_LATENCY_S, _NETWORK_LATENCY_S = 2e-5, 4e-5
_HBM_BYTES = 1 << 30
#: Drawn batches are for processes that share two cores.
_BATCHES = 4
#: Of `auto`, beside its own: whether searching longer pays in what is executed.
SHORT, LONG = "auto, 0.1 s", "auto, 10 s"
#: The plan of `auto` once more: how far apart two executions of one plan are.
AGAIN = "auto, again"
#: The learned policy's, one episode and a burst of the compiled search.
POLICY: Final = "policy"
#: TorchRec's planner places whole tables; or takes any sharding type, which its sharders offer by default on a GPU.
_TORCHREC: Final = "torchrec"
_ANY_TYPE: Final = {"sharding_types": "all"}
#: Its engine does not train data-parallel tables on a CPU.
_ANY_TRAINED: Final = {
    "sharding_types": ",".join(kind for kind in TorchRecType if kind is not TorchRecType.DATA_PARALLEL)
}
ALL_TYPES, ALL_TYPES_WHOLE = f"{_TORCHREC}, all types", f"{_TORCHREC}, all types, its engine"
#: The shortest of TorchRec's steps, whatever its planner was allowed and whichever engine executes it.
TORCHREC_BEST: Final = f"{_TORCHREC}, its shortest"


#: Tasks of a launch before those with means, and of so many tables one of these has.
_WITHOUT_MEANS, _MEANS_EVERY = 4, 4

#: Of a launch. Tasks have the same numbers however many there are.
_MOST_TASKS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterKind:
    """A cluster that tasks are planned for.

    Attributes:
        num_ranks: Ranks, one GPU each.
        ranks_per_node: Those of a node.
        gbit_per_s: Rate of the network for each of them; of no use where there is one node.
    """

    num_ranks: int
    ranks_per_node: int
    gbit_per_s: float = 0.0

    @property
    def label(self) -> str:
        """What it is called in tables."""
        network = f" at {self.gbit_per_s:g} Gbit/s" if self.num_ranks > self.ranks_per_node else ""
        return f"{self.num_ranks // self.ranks_per_node} x {self.ranks_per_node}{network}"

    def topology(self) -> Topology:
        """The cluster with its links as much slower as its processors."""
        slower = _CORE_BYTES_PER_S / _GPU_BYTES_PER_S
        inside = Link(bytes_per_s=_NVLINK_BYTES_PER_S * slower, latency_s=_NODE_LATENCY_S)
        levels = [Level(name="node", size=self.ranks_per_node, all_to_all=inside, all_reduce=inside)]
        if self.num_ranks > self.ranks_per_node:
            rate = self.gbit_per_s * 1e9 / 8 * slower
            # A ring enters each node once, over the network of all its ranks.
            ring = rate * self.ranks_per_node * self.num_ranks / (2 * (self.num_ranks - 1))
            across = Link(bytes_per_s=rate, latency_s=_NETWORK_LATENCY_S)
            reduced = Link(bytes_per_s=ring, latency_s=_NETWORK_LATENCY_S)
            levels.append(Level(name="cluster", size=self.num_ranks, all_to_all=across, all_reduce=reduced))
        return Topology(
            world_size=self.num_ranks, device="cpu", memory_bytes=MemoryBytes(hbm=_HBM_BYTES), levels=tuple(levels)
        )


#: In the order in which launches take turns.
CLUSTERS = (
    ClusterKind(num_ranks=8, ranks_per_node=8),
    ClusterKind(num_ranks=16, ranks_per_node=8, gbit_per_s=200),
    ClusterKind(num_ranks=8, ranks_per_node=4, gbit_per_s=25),
    ClusterKind(num_ranks=16, ranks_per_node=8, gbit_per_s=25),
    ClusterKind(num_ranks=8, ranks_per_node=4, gbit_per_s=100),
    ClusterKind(num_ranks=32, ranks_per_node=8, gbit_per_s=100),
)


@command_options()
class VirtualContestOptions:
    """Options of the study `virtual-contests`."""

    launches: Annotated[int, typer.Option(min=1, help="Groups of tasks, for the kinds of clusters in turn.")] = 20
    tasks: Annotated[int, typer.Option(min=1, max=_MOST_TASKS, help="Tasks of each launch.")] = 5
    most_tables: Annotated[int, typer.Option(min=20, help="Most tables of a task.")] = 100
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of a turn.")] = 3
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each plan; the median of their steps counts.")] = 5
    limits_every: Annotated[int, typer.Option(min=0, help="Also search 0.1 and 10 s in every so many launches.")] = 2
    weighted: Annotated[bool, typer.Option("--weighted", help="Weight all lookups, and average none.")] = False
    seed: Annotated[int, typer.Option(min=0, help="Of tasks.")] = 0
    registry: RegistryOption = None
    refresh: Annotated[
        Path | None,
        typer.Option(help="Tables that `autoshard calibrate --refresh` times for 5 s before each task is planned."),
    ] = None
    parts: PartsOption = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Tasks for one kind of cluster; plans of a task are executed in one start of the processes, and take turns.

    Attributes:
        cluster: Label of what they were planned for.
        contests: The tasks.
    """

    cluster: str
    contests: tuple[ContestResult, ...]


def entries(*, with_limits: bool) -> tuple[Entry, ...]:
    """Who plans a task."""
    found = [
        Entry(label=AUTO, planner="auto", time_limit_s=1.0),
        Entry(label=AGAIN, planner="auto", time_limit_s=1.0),
        Entry(label="cost-greedy", planner="cost-greedy"),
        Entry(label=POLICY, planner=POLICY),
        Entry(label=_TORCHREC, planner=_TORCHREC),
        Entry(label=TORCHREC_WHOLE, planner=_TORCHREC, engine=Engine.TORCHREC),
        Entry(label=ALL_TYPES, planner=_TORCHREC, options=_ANY_TYPE),
        Entry(label=ALL_TYPES_WHOLE, planner=_TORCHREC, options=_ANY_TRAINED, engine=Engine.TORCHREC),
    ]
    if with_limits:
        limits = ((SHORT, 0.1), (LONG, 10.0))
        found += [Entry(label=label, planner="auto", time_limit_s=limit_s) for label, limit_s in limits]
    return tuple(found)


def executed(launch: int, index: int, options: VirtualContestOptions, registry: Path) -> ContestResult:
    """A task of a launch, planned by all and executed."""
    cluster, task = CLUSTERS[launch % len(CLUSTERS)], launch * _MOST_TASKS + index
    kind, tables = drawn_task(task, options.seed, most_tables=options.most_tables)
    if options.weighted:
        tables = replace(tables, tables=tuple(replace(table, weighted=True) for table in tables.tables))
    elif index >= _WITHOUT_MEANS:
        tables = _with_means(tables)
    contest = Contest(
        name=f"{task}",
        group=kind,
        tables=_for_ranks(tables, cluster.num_ranks),
        entries=entries(with_limits=options.limits_every > 0 and launch % options.limits_every == 0),
        seed=task,
    )
    if options.refresh is not None:
        _refresh(options.refresh, registry)
    effort = Effort(steps=options.steps, warmup_steps=1, repeats=1, rounds=options.rounds, virtual_time=True)
    with console.step_progress(f"task {task}, {cluster.label}") as on_step:
        (result,) = run_contests([(contest, cluster.topology())], registry, LOCAL, effort, on_step)
    steps = ", ".join(f"{label} {step_ms:.1f}" for label, step_ms in measured_ms(result).items())
    console.log(f"{cluster.label}, task {result.name} ({result.group}): ms {steps}")
    return result


def _refresh(tables: Path, registry: Path) -> None:
    """Scales the registry's model of kernels to the speed that this machine has now."""
    with tempfile.TemporaryDirectory() as store:
        places = ["--tables", str(tables), "--scale", "1", "--store", store, "--registry", str(registry)]
        command = [sys.executable, "-m", "autoshard", "calibrate", "--refresh", *places]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _with_means(tables: TableSet) -> TableSet:
    """A task some of whose sums are means."""
    averaged = tuple(
        replace(table, pooling=Pooling.MEAN) if number % _MEANS_EVERY == 0 and table.pooling is Pooling.SUM else table
        for number, table in enumerate(tables.tables)
    )
    return replace(tables, tables=averaged)


def _for_ranks(tables: TableSet, num_ranks: int) -> TableSet:
    """A task whose batch is larger, by `_BATCHES` on 8 ranks, and by as much on each further one."""
    return replace(tables, batch_size=tables.batch_size * _BATCHES * num_ranks // 8)


def main(options: VirtualContestOptions, output: OutputOptions) -> None:
    """Has several planners plan drawn tasks for clusters of 8 to 32 ranks, and executes all plans in virtual time.

    Example:
        python -m studies virtual-contests --parts virtual-contests -o docs/figures
    """
    registry = options.registry or default_registry()
    parts = PartStore(options.parts)
    kept = ("most_tables", "steps", "rounds", "limits_every", "weighted", "seed")
    places = {"registry": str(registry), "refresh": str(options.refresh)}
    parts.check_identity({**{name: getattr(options, name) for name in kept}, **places})
    # All kinds of clusters before the next task of each.
    makers = {
        f"{launch:03}-{index:03}": partial(executed, launch, index, options, registry)
        for index in range(options.tasks)
        for launch in range(options.launches)
    }
    contests = parts.find_all("tasks", ContestResult, makers)
    launches = [
        Launch(cluster=CLUSTERS[number % len(CLUSTERS)].label, contests=tuple(contests[number :: options.launches]))
        for number in range(options.launches)
    ]
    output.write(_result(options, launches))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What a plan's step takes over `auto`'s, less 1, over tasks.

    Attributes:
        num_tasks: Tasks.
        median: Half of them have more.
        low: 5% of medians of drawn tasks are below.
        high: And 5% above.
    """

    num_tasks: int
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Gain:
        """Of ratios of steps, at least one; the interval is a bootstrap's."""
        drawn = np.random.default_rng(0).choice(ratios, (2_000, len(ratios)))
        low, high = np.quantile(np.median(drawn, axis=1), (0.05, 0.95))
        return cls(num_tasks=len(ratios), median=median(ratios) - 1, low=float(low) - 1, high=float(high) - 1)

    def __str__(self) -> str:
        return f"{self.median:+.1%} ({self.low:+.1%} to {self.high:+.1%})"


def gains(contests: Sequence[ContestResult]) -> Mapping[str, Gain]:
    """For each entry but `auto`, and for the shortest of TorchRec's, how much longer its steps are."""
    steps = [measured_ms(one) for one in contests]
    for of_task in steps:
        of_torchrec = [step_ms for label, step_ms in of_task.items() if label.startswith(_TORCHREC)]
        if of_torchrec:
            of_task[TORCHREC_BEST] = min(of_torchrec)
    labels = dict.fromkeys(label for of_task in steps for label in of_task if label != AUTO)
    return {
        label: Gain.of([of_task[label] / of_task[AUTO] for of_task in steps if label in of_task and AUTO in of_task])
        for label in labels
    }


#: Two plans are told apart if one is executed so much longer: a plan once more is 1% longer or shorter.
_APART: Final = 0.02
#: Times that a task is executed twice by chance.
_DRAWS: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Whether the longer of two plans of a task is the one that was predicted to be.

    Attributes:
        num_pairs: Pairs of plans whose executed steps differ by more than `_APART`.
        tau: Share of them in the order that was predicted, less the share in the other one: Kendall's tau of these.
    """

    num_pairs: int
    tau: float

    @classmethod
    def of(cls, contests: Sequence[ContestResult], label: str | None = None) -> Order:
        """Of all pairs of plans on our engine, or those of one entry with others."""
        signs = []
        for contest in contests:
            runs = [(one.label, one.step) for one in thin_runs(contest) if one.step is not None]
            for (first, left), (second, right) in combinations(runs, 2):
                executed_log = np.log(left.measured_ms / right.measured_ms)
                if label in (None, first, second) and abs(executed_log) > np.log1p(_APART):
                    signs.append(np.sign(executed_log) * np.sign(left.predicted_ms - right.predicted_ms))
        return cls(num_pairs=len(signs), tau=float(np.mean(signs)) if signs else 0.0)

    def __str__(self) -> str:
        return f"{self.tau:.2f} of {self.num_pairs}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """How far executions of one plan are apart in one start of the processes, which no prediction can know.

    Attributes:
        num_pairs: Pairs of entries on our engine with one plan.
        median: Half of them are further apart than this ratio, less 1.
        share_apart: Share of them that is further apart than `_APART`.
        contests: The tasks, each `_DRAWS` times, as if an earlier execution had been the prediction: steps of both are
            the executed ones times a distance that is drawn from those of one plan, divided by the square root of 2,
            since a distance has the noise of two executions.
    """

    num_pairs: int
    median: float
    share_apart: float
    contests: tuple[ContestResult, ...] = field(repr=False)

    @classmethod
    def of(cls, kinds: Sequence[Sequence[ContestResult]]) -> Repeats | None:
        """Of tasks by kind of cluster; None if no two entries of one have one plan."""
        draws = np.random.default_rng(0)
        found: list[float] = []
        contests: list[ContestResult] = []
        for tasks in kinds:
            pairs = [pair for task in tasks for pair in combinations(thin_steps(task), 2)]
            alike = [(left, right) for left, right in pairs if left.predicted_ms == right.predicted_ms]
            logs = [float(np.log(left.measured_ms / right.measured_ms)) for left, right in alike]
            if logs:
                found += logs
                either = [sign * log / sqrt(2) for log in logs for sign in (1, -1)]
                contests += [_executed_twice(task, either, draws) for task in tasks for _ in range(_DRAWS)]
        if not found:
            return None
        apart = np.abs(found)
        return cls(
            num_pairs=len(found),
            median=float(np.expm1(np.median(apart))),
            share_apart=float(np.mean(apart > np.log1p(_APART))),
            contests=tuple(contests),
        )

    @property
    def tau_in_task(self) -> float:
        """Mean over tasks of Kendall's tau of two executions."""
        return float(np.mean([tau_of(thin_steps(contest)) for contest in self.contests]))

    @property
    def near(self) -> float:
        """Share of the tasks in which the shortest plan of the first execution is within `_APART` in the second."""
        steps = [thin_steps(contest) for contest in self.contests]
        shortest = [min(of_task, key=lambda one: one.predicted_ms).measured_ms for of_task in steps]
        best = [min(one.measured_ms for one in of_task) for of_task in steps]
        return float(np.mean([ms <= (1 + _APART) * least for ms, least in zip(shortest, best, strict=True)]))

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """As columns of a table."""
        tau = Order.of(self.contests).tau
        return f"{self.tau_in_task:.2f}", f"{tau:.2f}", f"{self.near:.0%}", f"{self.median:.1%}"

    def to_json(self) -> Mapping[str, object]:
        """Its numbers; `num_pairs` of orders are of all draws."""
        orders = {"any": Order.of(self.contests), POLICY: Order.of(self.contests, POLICY)}
        return {
            "num_pairs": self.num_pairs,
            "median": self.median,
            "share_apart": self.share_apart,
            "tau_in_task": self.tau_in_task,
            "near": self.near,
            "orders": {label: asdict(order) for label, order in orders.items()},
        }


def _executed_twice(contest: ContestResult, logs: Sequence[float], draws: np.random.Generator) -> ContestResult:
    entries = []
    for one in _without_repeats(contest).entries:
        if one.step is not None:
            first_ms, second_ms = one.step.measured_ms * np.exp(draws.choice(logs, 2))
            one = replace(one, step=replace(one.step, predicted_ms=float(first_ms), measured_ms=float(second_ms)))
        entries.append(one)
    return replace(contest, entries=tuple(entries))


def _without_repeats(contest: ContestResult) -> ContestResult:
    """A task with one plan of `auto`: others of it are mostly the same plan, and the shortest by chance."""
    return replace(contest, entries=tuple(one for one in contest.entries if one.label not in (AGAIN, SHORT, LONG)))


def _result(options: VirtualContestOptions, launches: Sequence[Launch]) -> StudyResult:
    by_cluster: dict[str, list[ContestResult]] = {}
    for launch in launches:
        by_cluster.setdefault(launch.cluster, []).extend(launch.contests)
    by_cluster["all"] = [contest for launch in launches for contest in launch.contests]
    once = {label: [_without_repeats(one) for one in contests] for label, contests in by_cluster.items()}
    summaries = {label: summarised(contests) for label, contests in once.items()}
    found = {label: gains(contests) for label, contests in by_cluster.items()}
    orders = {label: {"any": Order.of(of), POLICY: Order.of(of, POLICY)} for label, of in once.items()}
    kinds = {label: [contests] for label, contests in by_cluster.items()}
    kinds["all"] = [contests for label, contests in by_cluster.items() if label != "all"]
    repeats = {label: again for label, of in kinds.items() if (again := Repeats.of(of)) is not None}
    others = [label for label in found["all"] if label not in (SHORT, LONG)]
    rows = [
        (
            label,
            f"{one.num_tasks}",
            *map(str, orders[label].values()),
            *_accuracy(one),
            *(repeats[label].cells if label in repeats else ("-",) * 4),
            f"{_within_now(once[label]):.0%}",
            f"{one.auto_near['2%']:.0%}",
            *(str(found[label].get(other, "-")) for other in others),
        )
        for label, one in summaries.items()
    ]
    tau = f"tau of pairs {_APART:.0%} apart"
    columns = (
        "cluster",
        "tasks",
        tau,
        f"{tau}, with policy",
        "tau in a task",
        "within 15%",
        "bias",
        "in interval",
        "tau in a task of two executions",
        f"{tau} of two",
        "shortest of one within 2% in the other",
        "one plan's steps apart",
        "in that of the hour, links as given",
        "auto within 2% of shortest",
    )
    table = Table(
        columns=(*columns, *(f"{other} over auto" for other in others)),
        rows=tuple(rows),
        caption="Steps in virtual time; medians over tasks, with 90% intervals of them",
    )
    limits = [(label, str(found["all"][label])) for label in (SHORT, LONG) if label in found["all"]]
    tables = [table]
    if limits:
        tables.append(Table(columns=("search", "step over that of 1 s"), rows=tuple(limits)))
    document = {
        "schema": SCHEMA,
        "machine": Machine.this(find_device("cpu"), command_line("virtual-contests", options)).to_json(),
        "summaries": {label: asdict(one) for label, one in summaries.items()},
        "within_now": {label: _within_now(of) for label, of in once.items()},
        "gains": {label: {name: asdict(gain) for name, gain in of.items()} for label, of in found.items()},
        "orders": {label: {name: asdict(order) for name, order in of.items()} for label, of in orders.items()},
        "repeats": {label: one.to_json() for label, one in repeats.items()},
        "launches": [asdict(one) for one in launches],
    }
    return StudyResult(name="virtual-contests", document=document, tables=tuple(tables))


def _within_now(contests: Sequence[ContestResult]) -> float:
    """Share of the plans on our engine whose step is in `EntryRun.now_ms`; 0 if there are none."""
    runs = [(one.step.measured_ms, *one.now_ms) for of in contests for one in thin_runs(of) if one.step and one.now_ms]
    return float(np.mean([low <= ms <= high for ms, low, high in runs])) if runs else 0.0


def _accuracy(one: RateSummary) -> tuple[str, ...]:
    steps = one.steps
    return f"{one.tau_of_task:.2f}", f"{steps.share_within:.0%}", f"{steps.bias:+.0%}", f"{steps.coverage:.0%}"
