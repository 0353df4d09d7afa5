"""The study `slow-links`, who is fastest and how near predictions come: `python -m studies slow-links`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import numpy as np
import plotly.graph_objects as go
import typer
from plotly.subplots import make_subplots

from autoshard import console
from autoshard.commands.options import command_options
from autoshard.core.accepted import FINITE_ABOVE_0
from autoshard.report.figures import BLUE, GREEN, GREY, ORANGE, PINK, SKY, in_house_style
from autoshard.runtime import Engine
from autoshard.table import Table
from costmodel.kernel.metrics import kendall_tau
from studies.cluster.commands import opened_cluster
from studies.cluster.network import Cluster, ClusterSpec, check_support
from studies.frame import Machine, OutputOptions, PartStore, StudyResult, numbers_in
from studies.papers.flexshard.models import MODELS
from studies.planners.step_runs import TOLERANCE, StepRun, StepSummary, summary_of
from studies.runtime.slow_links.contests import (
    DENSE_LABEL,
    EXCHANGED_LABEL,
    FLEXSHARD,
    GATHERED_LABEL,
    GROUPS,
    GROUPS_RANKS,
    NUM_GROUPS,
    OPER,
    SCATTERED_LABEL,
    SPARSE_LABEL,
    SUMS,
    TIER_LABELS,
    TORCHREC_WHOLE,
    Contest,
    ContestResult,
    Effort,
    EntryRun,
    groups_contest,
    paper_contests,
    run_contests,
)
from studies.runtime.slow_links.models import (
    ClusterModels,
    ModelSettings,
    TaskKind,
    cluster_registry,
    drawn_task,
    train_cluster,
    train_kernels,
)

AUTO = "auto"
#: `auto` counts as near the shortest step if it takes at most this much longer.
NEAR = (0.02, 0.05, 0.10)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSummary:
    """All drawn tasks of one rate.

    Attributes:
        num_tasks: Tasks.
        wins: Tasks that each entry has the shortest measured step of.
        auto_over_best: For each task, the step of `auto` over the shortest.
        auto_near: For each of `NEAR`, the share of tasks whose `auto_over_best` is at most 1 plus that.
        over_auto: For each entry, the median of its step over that of `auto`.
        torchrec_over_auto: For each task that TorchRec's engine executes, the step of its planner there over `auto`'s.
        tau: Kendall's rank correlation of predicted and measured steps, all runs of the thin engine.
        tau_of_task: Mean over tasks of the same within a task.
        steps: Errors of the predictions of these runs.
        sent: For each stream, bytes executed over bytes predicted, summed over these runs.
    """

    num_tasks: int
    wins: Mapping[str, int]
    auto_over_best: tuple[float, ...]
    auto_near: Mapping[str, float]
    over_auto: Mapping[str, float]
    torchrec_over_auto: tuple[float, ...]
    tau: float
    tau_of_task: float
    steps: StepSummary
    sent: Mapping[str, float]


def measured_ms(result: ContestResult) -> dict[str, float]:
    """Measured steps by entry, of those that ran."""
    return {one.label: one.step.measured_ms for one in result.entries if one.step is not None}


def drawn(results: Sequence[ContestResult]) -> list[ContestResult]:
    """Contests of drawn tasks."""
    return [one for one in results if one.group in set(TaskKind)]


def thin_steps(result: ContestResult) -> list[StepRun]:
    """Runs of autoshard's own engine, which is what is predicted."""
    return [one.step for one in thin_runs(result) if one.step is not None]


def summarised(results: Sequence[ContestResult]) -> RateSummary:
    """Sums up the drawn tasks of one rate, at least one."""
    tasks = drawn(results)
    steps = [measured_ms(task) for task in tasks]
    best = [min(of_task.values()) for of_task in steps]
    over_best = tuple(of_task[AUTO] / shortest for of_task, shortest in zip(steps, best, strict=True))
    runs = [run for task in tasks for run in thin_steps(task)]
    labels = dict.fromkeys(label for of_task in steps for label in of_task)
    return RateSummary(
        num_tasks=len(tasks),
        # A plain dict: `asdict` cannot copy counters.
        wins=dict(Counter(min(of_task, key=of_task.__getitem__) for of_task in steps)),
        auto_over_best=over_best,
        auto_near={f"{share:.0%}": mean(one <= 1 + share for one in over_best) for share in NEAR},
        over_auto={label: median(_over_auto(label, steps)) for label in labels},
        torchrec_over_auto=tuple(_over_auto(TORCHREC_WHOLE, steps)),
        tau=tau_of(runs),
        tau_of_task=mean(tau_of(thin_steps(task)) for task in tasks),
        steps=summary_of(runs),
        sent=_sent_ratios(tasks),
    )


def thin_runs(result: ContestResult) -> Iterator[EntryRun]:
    """Entries whose plans autoshard's own engine executes."""
    return (one for one in result.entries if one.engine is Engine.THIN)


def _over_auto(label: str, steps: Sequence[Mapping[str, float]]) -> list[float]:
    return [of_task[label] / of_task[AUTO] for of_task in steps if label in of_task]


def tau_of(runs: Sequence[StepRun]) -> float:
    """Kendall's tau of predicted and measured steps."""
    return kendall_tau(np.array([run.predicted_ms for run in runs]), np.array([run.measured_ms for run in runs]))


def _sent_ratios(tasks: Sequence[ContestResult]) -> dict[str, float]:
    """Of the streams that something is predicted of."""
    executed: dict[str, float] = defaultdict(float)
    predicted: dict[str, float] = defaultdict(float)
    for sent in (one.sent for task in tasks for one in thin_runs(task)):
        for stream, num_bytes in sent.items():
            executed[stream] += num_bytes.executed
            predicted[stream] += num_bytes.predicted
    return {stream: executed[stream] / of_stream for stream, of_stream in predicted.items() if of_stream}


_HEIGHT = 480
#: Labels of plans and of those that they are compared with.
_OPER_PAIRS = tuple((SPARSE_LABEL, base) for base in (DENSE_LABEL, GATHERED_LABEL, "torchrec", TORCHREC_WHOLE))
_SUMS_PAIRS = ((SCATTERED_LABEL, EXCHANGED_LABEL),)
_COLOURS = (BLUE, ORANGE, GREEN, PINK, SKY, GREY)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateResults:
    """Everything of one rate.

    Attributes:
        mbit_per_s: Rate of a node's link.
        models: What priced the plans.
        contests: Drawn tasks and papers.
    """

    mbit_per_s: float
    models: ClusterModels
    contests: tuple[ContestResult, ...]

    def summary(self) -> RateSummary:
        """Of the drawn tasks."""
        return summarised(self.contests)


def tables(rates: Sequence[RateResults]) -> tuple[Table, ...]:
    """For each rate the tasks, the summary and the papers."""
    return tuple(table for rate in rates for table in (_summary(rate), _tasks(rate), *_papers(rate)) if table.lines)


def figures(rates: Sequence[RateResults]) -> dict[str, go.Figure]:
    """Steps beside those of `auto`, and predicted against measured steps, by the ends of their files' names."""
    return {"-steps": _ratio_boxes(rates), "-predicted": _predicted(rates)}


def _summary(rate: RateResults) -> Table:
    found = rate.summary()
    steps, slower = found.steps, found.torchrec_over_auto
    lines = [
        ("tasks with the shortest step", ", ".join(f"{label} {wins}" for label, wins in found.wins.items())),
        (
            "auto over the shortest, median and largest",
            f"{median(found.auto_over_best):.3f}, {max(found.auto_over_best):.3f}",
        ),
        *((f"auto within {near} of the shortest", f"{share:.0%}") for near, share in found.auto_near.items()),
        *((f"{label} over auto, median", f"{ratio:.2f}") for label, ratio in found.over_auto.items() if label != AUTO),
        ("Kendall's tau of predicted and measured, all runs", f"{found.tau:.2f}"),
        ("the same within a task, mean", f"{found.tau_of_task:.2f}"),
        (f"runs within {TOLERANCE:.0%} of the prediction", f"{steps.share_within:.0%} of {steps.num_runs}"),
        ("median error and bias of the prediction", f"{steps.median_error:.1%}, {steps.bias:+.1%}"),
        ("steps within the 90% interval", f"{steps.coverage:.0%}"),
        ("repeated runs differ by, median", f"{steps.spread:.1%}"),
        *((f"bytes of {stream}, executed over predicted", f"{ratio:.3f}") for stream, ratio in found.sent.items()),
    ]
    if slower:
        wins = sum(ratio > 1 for ratio in slower)
        lines.insert(1, ("TorchRec slower than auto", f"{wins} of {len(slower)} tasks that its engine executes"))
    return Table(
        columns=("all tasks", "found"),
        rows=tuple(lines),
        caption=f"{rate.mbit_per_s:g} Mbit/s: {found.num_tasks} tasks",
    )


def _tasks(rate: RateResults) -> Table:
    tasks = drawn(rate.contests)
    labels = [one.label for one in tasks[0].entries]
    return Table.of(
        tasks,
        (
            ("task", lambda one: f"{one.name} ({one.group}, {one.num_tables} tables, batch {one.batch_size})"),
            *((label, _step_of(label)) for label in labels),
        ),
        caption=f"{rate.mbit_per_s:g} Mbit/s: measured step in ms; - where there is no plan that is executed",
    )


def _step_of(label: str) -> Any:
    return lambda result: f"{measured_ms(result)[label]:.1f}" if label in measured_ms(result) else "-"


def _papers(rate: RateResults) -> list[Table]:
    of = {group: [one for one in rate.contests if one.group == group] for group in (FLEXSHARD, OPER, SUMS, GROUPS)}
    where = f"{rate.mbit_per_s:g} Mbit/s"
    return [
        _flexshard(of[FLEXSHARD], where),
        _speedups(of[OPER], _OPER_PAIRS, "plans of Criteo Kaggle", f"OPER at {where}"),
        _speedups(of[SUMS], _SUMS_PAIRS, "row-wise sums", f"Collectives at {where}"),
        _groups(of[GROUPS], where),
    ]


def _flexshard(results: Sequence[ContestResult], where: str) -> Table:
    """Measured all-to-all volume and throughput over those of row-wise sharding, beside Table 6."""
    lines = []
    for model, result in zip(MODELS, results, strict=False):
        entries = {one.label: one for one in result.entries}
        base = entries[TIER_LABELS[0]]
        for label, published in zip(TIER_LABELS, model.runs, strict=True):
            one = entries[label]
            lines.append(
                (
                    f"{model.name}, {label}",
                    _ratio(_volume(one), _volume(base)),
                    f"{published.volume / model.row_wise_run.volume:.3f}",
                    _ratio(_step_ms(base), _step_ms(one)),
                    f"{model.row_wise_run.exposed_ms / published.exposed_ms:.2f}",
                )
            )
    return Table(
        columns=(
            "model",
            "volume over row-wise",
            "Table 6",
            "throughput over row-wise",
            "Table 6, communication alone",
        ),
        rows=tuple(lines),
        caption=f"FlexShard at {where}",
    )


def _speedups(results: Sequence[ContestResult], pairs: Sequence[tuple[str, str]], what: str, caption: str) -> Table:
    lines = []
    for steps in map(measured_ms, results):
        lines += [(f"{label} over {base}", _ratio(steps.get(base), steps.get(label))) for label, base in pairs]
    return Table(columns=(what, "speedup"), rows=tuple(lines), caption=caption)


def _groups(results: Sequence[ContestResult], where: str) -> Table:
    lines = []
    for result in results:
        steps = measured_ms(result)
        base = steps.get(f"{NUM_GROUPS[0]} groups")
        for label, step_ms in steps.items():
            lines.append((label, f"{step_ms:.1f}", _ratio(base, step_ms)))
    return Table(
        columns=("replica groups", "measured step, ms", "speedup"), rows=tuple(lines), caption=f"2D at {where}"
    )


def _volume(entry: EntryRun) -> float | None:
    """Bytes of embeddings that leave nodes forward: those of the global all-to-all, without Flex's within nodes."""
    return entry.sent["forward"].across if "forward" in entry.sent else None


def _step_ms(entry: EntryRun) -> float | None:
    return None if entry.step is None else entry.step.measured_ms


def _ratio(above: float | None, below: float | None) -> str:
    return f"{above / below:.3f}" if above is not None and below else "-"


def _ratio_boxes(rates: Sequence[RateResults]) -> go.Figure:
    figure = in_house_style(go.Figure(), height=_HEIGHT)
    for rate, colour in zip(rates, _COLOURS, strict=False):
        points = [
            (label, step_ms / steps[AUTO])
            for steps in map(measured_ms, drawn(rate.contests))
            for label, step_ms in steps.items()
            if label != AUTO
        ]
        figure.add_box(
            name=f"{rate.mbit_per_s:g} Mbit/s",
            x=[label for label, _ in points],
            y=[ratio for _, ratio in points],
            boxpoints="all",
            marker_color=colour,
        )
    figure.add_hline(y=1.0, line={"color": GREY, "dash": "dot"})
    figure.update_layout(boxmode="group")
    figure.update_yaxes(title_text="measured step over that of auto", type="log")
    return figure


def _predicted(rates: Sequence[RateResults]) -> go.Figure:
    figure = make_subplots(1, len(rates), horizontal_spacing=0.1)
    in_house_style(figure, height=_HEIGHT)
    for column, rate in enumerate(rates, start=1):
        runs = [run for task in drawn(rate.contests) for run in thin_steps(task)]
        labels = dict.fromkeys(str(run.trial["planner"]) for run in runs)
        for number, label in enumerate(labels):
            of_label = [run for run in runs if run.trial["planner"] == label]
            figure.add_scatter(
                name=label,
                x=[run.measured_ms for run in of_label],
                y=[run.predicted_ms for run in of_label],
                mode="markers",
                marker={"color": _COLOURS[number % len(_COLOURS)], "symbol": number},
                showlegend=column == 1,
                row=1,
                col=column,
            )
        ends = [min(run.measured_ms for run in runs), max(run.measured_ms for run in runs)]
        figure.add_scatter(
            x=ends, y=ends, mode="lines", line={"color": GREY, "dash": "dot"}, showlegend=False, row=1, col=column
        )
        figure.update_xaxes(title_text=f"{rate.mbit_per_s:g} Mbit/s: measured ms", type="log", row=1, col=column)
    figure.update_yaxes(title_text="predicted ms", type="log")
    return figure


@command_options()
class SlowLinkOptions:
    """Options of the study `slow-links`."""

    parts: Annotated[
        Path, typer.Option(help="Folder of models and finished parts: a study that was stopped continues from them.")
    ]
    kernel_samples: Annotated[
        Path, typer.Option(help="Store of kernel samples of this machine, made by `autoshard collect`.")
    ]
    rates: Annotated[str, typer.Option(help="Rates of a node's link in Mbit/s, with commas between them.")] = "200,1000"
    tasks: Annotated[int, typer.Option(min=1, help="Drawn tasks of each rate.")] = 20
    papers: Annotated[bool, typer.Option(help="Also run the papers' proportions.")] = True
    num_nodes: Annotated[int, typer.Option(min=1, help="Nodes of the cluster.")] = 4
    ranks_per_node: Annotated[int, typer.Option(min=1, help="Processes of each node.")] = 2
    max_tables: Annotated[int, typer.Option(min=20, help="Most tables of a task.")] = 80
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each run.")] = 6
    warmup_steps: Annotated[int, typer.Option(min=0, help="Steps before them.")] = 2
    repeats: Annotated[int, typer.Option(min=1, help="Rounds over all plans of a task; the quickest run counts.")] = 2
    calibration_runs: Annotated[int, typer.Option(min=4, help="Runs that steps are calibrated on.")] = 24
    kernel_updates: Annotated[int, typer.Option(min=1, help="Updates of the training of the model of kernels.")] = 5000
    max_bytes: Annotated[int, typer.Option(min=2**20, help="Bytes per rank of the largest collective.")] = 2**22
    seed: Annotated[int, typer.Option(min=0, help="Of tasks, plans and runs.")] = 0

    def specs(self) -> tuple[ClusterSpec, ...]:
        """A cluster for each rate.

        Raises:
            InvalidOptionError: If a rate is no number or out of range.
        """
        return tuple(
            ClusterSpec(num_nodes=self.num_nodes, ranks_per_node=self.ranks_per_node, bits_per_s=rate * 1e6)
            for rate in numbers_in(self.rates, "--rates", float, FINITE_ABOVE_0)
        )

    def effort(self) -> Effort:
        """How long each plan runs."""
        return Effort(steps=self.steps, warmup_steps=self.warmup_steps, repeats=self.repeats)

    def models(self) -> ModelSettings:
        """How much is measured for the models."""
        return ModelSettings(
            kernel_samples=self.kernel_samples,
            kernel_updates=self.kernel_updates,
            max_bytes=self.max_bytes,
            calibration_runs=self.calibration_runs,
            calibration_tables=self.max_tables,
        )

    def contests(self, num_ranks: int) -> tuple[Contest, ...]:
        """Drawn tasks, then the papers'."""
        tasks = []
        for number in range(self.tasks):
            kind, tables = drawn_task(number, self.seed, most_tables=self.max_tables)
            tasks.append(Contest(name=f"task-{number}", group=kind.value, tables=tables, seed=self.seed + number))
        return (*tasks, *(paper_contests(num_ranks) if self.papers else ()))

    def identity(self) -> dict[str, object]:
        """What parts must share."""
        settings = asdict(replace(self.models(), kernel_samples=Path()))
        del settings["kernel_samples"]
        return {
            "cluster": [self.num_nodes, self.ranks_per_node],
            "models": settings,
            "effort": asdict(self.effort()),
            "max_tables": self.max_tables,
            "seed": self.seed,
        }


def main(options: SlowLinkOptions, output: OutputOptions) -> None:
    """Plans tasks with all planners and executes the plans on a test cluster: needs Linux, root and iproute2.

    The cluster's links are network namespaces of this machine. First its models are measured: kernels come from a
    store of samples, links and calibration from the cluster.

    Example:
        python -m studies slow-links --parts slow-links --kernel-samples samples -o docs/figures
    """
    specs = options.specs()
    check_support()
    parts = PartStore.of(options.parts, options.identity())
    console.log("Training the model of kernels.")
    kernels = parts.find("kernels", lambda: train_kernels(options.parts, options.models()))
    rates = tuple(_run_rate(options, spec, parts) for spec in specs)
    numbers = {
        "settings": options.identity(),
        "kernels": kernels,
        "rates": [{"summary": asdict(rate.summary()), **asdict(rate)} for rate in rates],
    }
    output.write(
        StudyResult(
            name="slow-links",
            document=Machine.of("slow-links", options).document(numbers, "autoshard.slow-links/1"),
            tables=tables(rates),
            images=figures(rates),
            width=1400,
        )
    )


def _run_rate(options: SlowLinkOptions, spec: ClusterSpec, parts: PartStore) -> RateResults:
    rate = f"{spec.bits_per_s / 1e6:g}"
    with opened_cluster(spec) as cluster:
        models = _models(options, cluster, parts, f"{rate}-models")
        lab = _Lab(folder=options.parts, parts=parts, rate=rate, effort=options.effort())
        contests = options.contests(spec.num_ranks)
        registry = cluster_registry(options.parts, cluster)
        found = [
            lab.run(contest, f"{number} of {len(contests)}", cluster, models, registry)
            for number, contest in enumerate(contests, start=1)
        ]
    if options.papers:
        found.append(_groups_result(options, spec, lab))
    return RateResults(mbit_per_s=spec.bits_per_s / 1e6, models=models, contests=tuple(found))


def _models(options: SlowLinkOptions, cluster: Cluster, parts: PartStore, name: str) -> ClusterModels:
    console.log(f"Measuring the cluster: {name}.")
    with console.progress("Calibrating steps", options.calibration_runs) as advance:
        return parts.find_data(
            name, ClusterModels, lambda: train_cluster(options.parts, cluster, options.models(), advance)
        )


def _groups_result(options: SlowLinkOptions, spec: ClusterSpec, lab: _Lab) -> ContestResult:
    """Replica groups on more ranks per node, with links as they are set and no calibration: none was measured."""
    larger = replace(spec, ranks_per_node=GROUPS_RANKS // spec.num_nodes)
    models = ClusterModels(topology={}, metrics={})
    with opened_cluster(larger) as cluster:
        return lab.run(groups_contest(larger.num_ranks), "replica groups", cluster, models, options.parts / "kernels")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lab:
    """Runs contests of one rate, or reads what is finished."""

    folder: Path
    parts: PartStore
    rate: str
    effort: Effort

    def run(
        self, contest: Contest, place: str, cluster: Cluster, models: ClusterModels, registry: Path
    ) -> ContestResult:
        """The result of a contest."""
        topology = models.read_topology() if models.topology else cluster.spec.topology()
        with console.step_progress(f"{self.rate} Mbit/s, {contest.name}") as on_step:
            result = self.parts.find_data(
                f"{self.rate}-{contest.name}",
                ContestResult,
                lambda: run_contests([(contest, topology)], registry, cluster, self.effort, on_step)[0],
            )
        steps = ", ".join(f"{label} {step_ms:.0f}" for label, step_ms in measured_ms(result).items())
        console.log(f"{self.rate} Mbit/s, {contest.name} ({place}): ms {steps}")
        return result
