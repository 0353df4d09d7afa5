"""Predicted against measured steps of plans on processes of this machine: `python -m studies steps`.

Plans are of random tasks, by several planners, bad ones included, with seeds that calibration never uses.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import mean, median
from typing import Annotated, Any

import typer

from autoshard.commands.options import command_options
from autoshard.console import progress
from autoshard.core.accepted import WHOLE_AT_LEAST_1
from autoshard.core.step import StepPart
from autoshard.evaluation import price_step
from autoshard.formats import load_tables
from autoshard.planning import plan_costs
from autoshard.table import Table
from autoshard.whatif.trials import DEFAULT_PLANNERS, Trial, draw_trials, local_topology, plan_trial, run_trials
from bench.measuring.devices import find_device
from studies.frame import OutputOptions, PartsOption, PartStore, RegistryOption, StudyResult, names_in, numbers_in

SCHEMA = "autoshard.step-runs/1"
#: Largest relative error of a run that counts as within the tolerance.
TOLERANCE = 0.15
#: Trials of calibration are drawn with small seeds.
_SEED_OFFSET = 1_000_003
_RUN_BYTES = 8 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRun:
    """One plan's step, predicted and measured, in milliseconds.

    Attributes:
        trial: Task and planner.
        predicted_ms: The whole step.
        low_ms: Lower end of its 90% interval.
        high_ms: Upper end.
        measured_ms: The whole step.
        spread: How much longer the slowest run of the plan took than the quickest, which was measured.
        parts: For each part, predicted and measured.
        models: Names of the models that predict.
    """

    trial: Mapping[str, Any]
    predicted_ms: float
    low_ms: float
    high_ms: float
    measured_ms: float
    spread: float
    parts: Mapping[str, tuple[float, float]]
    models: Mapping[str, str]

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_ms / self.measured_ms - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PartErrors:
    """Medians over runs of a part's share of the step, its |error| and its error."""

    share_of_step: float = 0.0
    median_error: float = 0.0
    bias: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """Errors of predicted steps over a set of runs.

    Attributes:
        num_runs: Runs.
        share_within: Share of them whose prediction is within `TOLERANCE` of the measurement.
        median_error: Median of |predicted / measured - 1|.
        bias: Median of predicted / measured - 1.
        coverage: Share of measurements within the predicted 90% interval.
        spread: Median over plans of how much longer the slowest run took than the quickest: the noise.
        parts: Errors of each part.
    """

    num_runs: int
    share_within: float
    median_error: float
    bias: float
    coverage: float
    spread: float
    parts: Mapping[str, PartErrors]
    tolerance: float = TOLERANCE


def summary_of(runs: Sequence[StepRun]) -> StepSummary:
    """Sums up at least one run."""
    parts = {}
    for part in StepPart:
        both = [(run, *run.parts[part.value]) for run in runs if run.parts[part.value][1] > 0]
        errors = [predicted / measured - 1.0 for _, predicted, measured in both]
        if errors:
            parts[part.value] = PartErrors(
                share_of_step=median(measured / run.measured_ms for run, _, measured in both),
                median_error=median(map(abs, errors)),
                bias=median(errors),
            )
    return StepSummary(
        num_runs=len(runs),
        share_within=mean(abs(run.error) <= TOLERANCE for run in runs),
        median_error=median(abs(run.error) for run in runs),
        bias=median(run.error for run in runs),
        spread=median(run.spread for run in runs),
        coverage=mean(run.low_ms <= run.measured_ms <= run.high_ms for run in runs),
        parts=parts,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRuns:
    """Runs of one start of the processes."""

    runs: tuple[StepRun, ...]


def run_chunk(trials: Sequence[Trial], options: StepRunOptions) -> StepRuns:
    """Plans trials, measures the plans in the same processes and prices them by models of the registry.

    Raises:
        AutoshardError: If a plan cannot be made, executed or priced.
    """
    pool = load_tables(options.tables).scaled(options.scale)
    topology = local_topology(find_device(options.device).key, options.num_ranks, _RUN_BYTES)
    plans = [plan_trial(trial, pool, topology, options.registry) for trial in trials]
    seeds = [trial.seed for trial in trials]
    measured = run_trials(plans, seeds, steps=options.steps, repeats=options.repeats, device=options.device)
    runs = []
    for trial, plan, one in zip(trials, plans, measured, strict=True):
        price = price_step(plan, plan_costs(plan, options.registry))
        runs.append(
            StepRun(
                trial=trial.to_json(),
                predicted_ms=price.step_ms.value,
                low_ms=price.step_ms.low,
                high_ms=price.step_ms.high,
                measured_ms=one.step_ms,
                spread=one.spread,
                parts={part.value: (price.part_ms(part), one.part_ms[part]) for part in StepPart},
                models={**price.models, "overlap": price.overlap.value},
            )
        )
    return StepRuns(runs=tuple(runs))


@command_options()
class StepRunOptions:
    """Options of the study `steps`."""

    runs: Annotated[int, typer.Option(min=1, help="Runs in all.")] = 20
    registry: RegistryOption = None
    nproc: Annotated[
        int | None, typer.Option(min=2, help="Processes.", show_default="the machine's cores, at most 8")
    ] = None
    device: Annotated[str, typer.Option(help="`cpu` (gloo) or `cuda` (NCCL, a GPU for each process).")] = "cpu"
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each run.")] = 20
    repeats: Annotated[int, typer.Option(min=1, help="Times that each plan runs; the quickest counts.")] = 2
    seed: Annotated[int, typer.Option(min=0, help="Of tasks, plans and runs.")] = 0
    planners: Annotated[
        str, typer.Option(help="Planners that take turns; `lopsided` puts most tables on one rank.")
    ] = ",".join(DEFAULT_PLANNERS)
    min_tables: Annotated[int, typer.Option(min=1, help="Fewest tables of a task.")] = 8
    max_tables: Annotated[int, typer.Option(min=1, help="Most tables of a task.")] = 80
    batch_sizes: Annotated[str, typer.Option(help="Global batch sizes that tasks have.")] = "256,512,1024,2048"
    tables: Annotated[str, typer.Option(help="Pool that tasks are drawn from.")] = "metasyn"
    scale: Annotated[int, typer.Option(min=1, help="Divides the rows of the pool.")] = 64
    per_launch: Annotated[int, typer.Option(min=1, help="Runs per start of the processes.")] = 5
    parts: PartsOption = None

    @property
    def num_ranks(self) -> int:
        """Processes of each run."""
        return self.nproc or min(8, max(2, os.cpu_count() or 2))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batch sizes.

        Raises:
            InvalidOptionError: If one is no whole number of at least 1.
        """
        return numbers_in(self.batch_sizes, "--batch-sizes", int, WHOLE_AT_LEAST_1)

    def settings(self) -> dict[str, Any]:
        """Settings that runs must share to be summed up."""
        return {
            "seed": self.seed,
            "num_ranks": self.num_ranks,
            "device": find_device(self.device).name,
            "steps": self.steps,
            "repeats": self.repeats,
            "planners": list(names_in(self.planners)),
            "num_tables": [self.min_tables, self.max_tables],
            "batch_sizes": list(self.sizes),
            "tables": self.tables,
            "scale": self.scale,
        }

    def trials(self) -> Sequence[Trial]:
        """Tasks with their planners, in the order of the runs."""
        return draw_trials(
            self.runs,
            seed=_SEED_OFFSET + self.seed,
            planners=names_in(self.planners),
            num_tables=(self.min_tables, self.max_tables),
            batch_sizes=self.sizes,
        )


def main(options: StepRunOptions, output: OutputOptions) -> None:
    """Runs plans, and compares their steps with the predicted ones.

    Example:
        python -m studies steps --runs 20 --parts step-runs -o docs/figures
    """
    trials, settings = options.trials(), options.settings()
    parts = PartStore.of(options.parts, settings)
    runs: list[StepRun] = []
    with progress("Running plans", options.runs) as advance:
        for start in range(0, options.runs, options.per_launch):
            chunk = trials[start : start + options.per_launch]
            name = f"runs-{start}-to-{start + len(chunk) - 1}"
            runs += parts.find_data(name, StepRuns, partial(run_chunk, chunk, options)).runs
            advance(len(chunk))
    summary = summary_of(runs)
    document = {
        "schema": SCHEMA,
        "settings": settings,
        "summary": asdict(summary),
        "runs": [asdict(run) for run in runs],
    }
    output.write(StudyResult(name="step-runs", document=document, tables=(runs_table(runs, summary),)))


def runs_table(runs: Sequence[StepRun], summary: StepSummary) -> Table:
    """Errors of each run, then their medians and the parts' shares of the step."""
    caption = (
        f"{summary.num_runs} runs: {summary.share_within:.0%} within {TOLERANCE:.0%}, median error "
        f"{summary.median_error:.1%}, bias {summary.bias:+.1%}, {summary.coverage:.0%} within the 90% interval; "
        f"repeated runs differ by {summary.spread:.1%}"
    )
    columns = ("planner", "tables", "batch", "predicted ms", "measured ms", "error")
    lines = []
    for run in runs:
        trial = run.trial
        start = (str(trial["planner"]), str(trial["num_tables"]), str(trial["batch_size"]))
        errors = (_error(*run.parts[part.value]) for part in StepPart)
        lines.append((*start, f"{run.predicted_ms:.1f}", f"{run.measured_ms:.1f}", f"{run.error:+.0%}", *errors))
    known = [summary.parts.get(part.value, PartErrors()) for part in StepPart]
    lines.append(("median", *[""] * 4, f"{summary.median_error:.0%}", *(f"{part.median_error:.0%}" for part in known)))
    lines.append(("share of step", *[""] * 5, *(f"{part.share_of_step:.0%}" for part in known)))
    names = (part.value.replace("_", " ") for part in StepPart)
    return Table(columns=(*columns, *names), rows=tuple(lines), caption=caption)


def _error(predicted_ms: float, measured_ms: float) -> str:
    return f"{predicted_ms / measured_ms - 1.0:+.0%}" if measured_ms > 0 else ""
