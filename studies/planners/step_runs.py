"""Predicted against measured steps of plans on processes of this machine: `python -m studies steps`.

Plans are of random tasks, by several planners, bad ones included, with seeds that calibration never uses. What is done
is kept in a file, so that an interrupted benchmark goes on where it was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import typer
from rich.table import Table

from autoshard.console import JsonOption, emit, progress
from autoshard.core import ShardingPlan
from autoshard.core.errors import FormatError, InvalidOptionError
from autoshard.core.step import StepPart
from autoshard.evaluation import price_step
from autoshard.formats import load_tables
from autoshard.formats.files import atomic_write
from autoshard.planning import plan_costs
from autoshard.trials import DEFAULT_PLANNERS, Trial, draw_trials, local_topology, plan_trial, run_trials
from bench.measuring.devices import find_device

SCHEMA = "autoshard.step-runs/1"
#: What the share of runs within it is of.
TOLERANCE = 0.15
#: Trials of calibration are drawn with small seeds.
_SEED_OFFSET = 1_000_003
_RUN_BYTES = 8 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRun:
    """One plan's step, predicted and measured, in milliseconds.

    Attributes:
        trial: What ran.
        predicted_ms: The whole step.
        low_ms: Lower end of its 90% interval.
        high_ms: Upper end.
        measured_ms: The whole step.
        spread: How much longer the slowest run of the plan took than the quickest, which was measured.
        parts: For each part, predicted and measured.
        models: What the prediction comes from.
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

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "trial": dict(self.trial),
            "predicted_ms": self.predicted_ms,
            "low_ms": self.low_ms,
            "high_ms": self.high_ms,
            "measured_ms": self.measured_ms,
            "spread": self.spread,
            "parts": {name: list(both) for name, both in self.parts.items()},
            "models": dict(self.models),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepRun:
        """Reads what `to_json` wrote."""
        names = ("predicted_ms", "low_ms", "high_ms", "measured_ms", "spread")
        numbers = {name: float(data[name]) for name in names}
        parts = {name: (float(one), float(other)) for name, (one, other) in data["parts"].items()}
        return cls(trial=data["trial"], parts=parts, models=data["models"], **numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """What a set of runs shows.

    Attributes:
        num_runs: Runs.
        share_within: Share of them whose prediction is within `TOLERANCE` of the measurement.
        median_error: Median of |predicted / measured - 1|.
        bias: Median of predicted / measured - 1.
        coverage: Share of measurements within the predicted 90% interval.
        spread: Median over plans of how much longer the slowest run took than the quickest: what noise there is.
        parts: For each part: its median share of the step, median |error| and median error.
    """

    num_runs: int
    share_within: float
    median_error: float
    bias: float
    coverage: float
    spread: float
    parts: Mapping[str, tuple[float, float, float]]

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "num_runs": self.num_runs,
            "tolerance": TOLERANCE,
            "share_within": self.share_within,
            "median_error": self.median_error,
            "bias": self.bias,
            "coverage": self.coverage,
            "spread": self.spread,
            "parts": {
                name: {"share_of_step": share, "median_error": error, "bias": bias}
                for name, (share, error, bias) in self.parts.items()
            },
        }


def summary_of(runs: Sequence[StepRun]) -> StepSummary:
    """Sums up at least one run."""
    parts = {}
    for part in StepPart:
        both = [(run, *run.parts[part.value]) for run in runs if run.parts[part.value][1] > 0]
        errors = [predicted / measured - 1.0 for _, predicted, measured in both]
        if errors:
            share = median(measured / run.measured_ms for run, _, measured in both)
            parts[part.value] = (share, median(map(abs, errors)), median(errors))
    return StepSummary(
        num_runs=len(runs),
        share_within=mean(abs(run.error) <= TOLERANCE for run in runs),
        median_error=median(abs(run.error) for run in runs),
        bias=median(run.error for run in runs),
        spread=median(run.spread for run in runs),
        coverage=mean(run.low_ms <= run.measured_ms <= run.high_ms for run in runs),
        parts=parts,
    )


def run_chunk(
    trials: Sequence[Trial],
    plans: Sequence[ShardingPlan],
    *,
    registry: Path | None,
    steps: int,
    repeats: int,
    device: str,
) -> tuple[StepRun, ...]:
    """Measures plans in the same processes and prices them with what the registry has.

    Raises:
        AutoshardError: If a plan cannot be executed or priced.
    """
    measured = run_trials(plans, [trial.seed for trial in trials], steps=steps, repeats=repeats, device=device)
    runs = []
    for trial, plan, one in zip(trials, plans, measured, strict=True):
        price = price_step(plan, plan_costs(plan, registry))
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
    return tuple(runs)


class RunLog:
    """Runs in a JSON file, written anew by rename after every chunk.

    Args:
        file: The file; None to keep nothing.
        settings: What has to be the same for runs to go together.
    """

    def __init__(self, file: Path | None, settings: Mapping[str, Any]) -> None:
        self._file = file
        self._settings = json.loads(json.dumps(settings))
        self.runs: list[StepRun] = []
        if file is not None and file.exists():
            self.runs = self._read(file)

    def append(self, runs: Sequence[StepRun]) -> None:
        """Adds runs and writes the file."""
        self.runs += runs
        if self._file is not None:
            document = {"schema": SCHEMA, "settings": self._settings, "runs": [run.to_json() for run in self.runs]}
            atomic_write(self._file, json.dumps(document, indent=1).encode())

    def _read(self, file: Path) -> list[StepRun]:
        try:
            document = json.loads(file.read_bytes())
            if document["schema"] != SCHEMA:
                raise FormatError(f"must be {SCHEMA}, got {document['schema']!r}", field="schema", source=str(file))
            if document["settings"] != self._settings:
                raise FormatError(
                    "are those of another benchmark; name another file or remove it", field="settings", source=str(file)
                )
            return [StepRun.from_json(run) for run in document["runs"]]
        except (ValueError, KeyError, TypeError, OSError) as error:
            if isinstance(error, FormatError):
                raise
            raise FormatError(f"is no file of step runs: {error}", source=str(file)) from error


def main(
    runs: Annotated[int, typer.Option(min=1, help="Runs in all.")] = 20,
    registry: Annotated[Path | None, typer.Option(help="Folder of trained models.")] = None,
    nproc: Annotated[
        int | None, typer.Option(min=2, help="Processes. Left out: the machine's cores, at most 8.")
    ] = None,
    device: Annotated[str, typer.Option(help="`cpu` (gloo) or `cuda` (NCCL, a GPU for each process).")] = "cpu",
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each run.")] = 20,
    repeats: Annotated[int, typer.Option(min=1, help="Times that each plan runs; the quickest counts.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Of tasks, plans and runs.")] = 0,
    planners: Annotated[
        str, typer.Option(help="Planners that take turns; `lopsided` puts most tables on one rank.")
    ] = ",".join(DEFAULT_PLANNERS),
    min_tables: Annotated[int, typer.Option(min=1, help="Fewest tables of a task.")] = 8,
    max_tables: Annotated[int, typer.Option(min=1, help="Most tables of a task.")] = 80,
    batch_sizes: Annotated[str, typer.Option(help="Global batch sizes that tasks have.")] = "256,512,1024,2048",
    tables: Annotated[str, typer.Option(help="Pool that tasks are drawn from.")] = "metasyn",
    scale: Annotated[int, typer.Option(min=1, help="Divides the rows of the pool.")] = 64,
    per_launch: Annotated[int, typer.Option(min=1, help="Runs per start of the processes.")] = 5,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="JSON of all runs; continued if it is there.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Runs plans, and compares their steps with what they were predicted to take."""
    num_ranks = nproc or min(8, max(2, os.cpu_count() or 2))
    names = tuple(name.strip() for name in planners.split(","))
    batches = _whole_numbers(batch_sizes)
    trials = draw_trials(
        runs, seed=_SEED_OFFSET + seed, planners=names, num_tables=(min_tables, max_tables), batch_sizes=batches
    )
    pool = load_tables(tables).scaled(scale)
    found = find_device(device)
    topology = local_topology(found.key, num_ranks, _RUN_BYTES)
    settings = {
        "seed": seed,
        "num_ranks": num_ranks,
        "device": found.name,
        "steps": steps,
        "repeats": repeats,
        "planners": names,
        "num_tables": [min_tables, max_tables],
        "batch_sizes": batches,
        "tables": tables,
        "scale": scale,
    }
    log = RunLog(output, settings)
    with progress("Running plans", runs) as advance:
        advance(min(runs, len(log.runs)))
        while len(log.runs) < runs:
            chunk = trials[len(log.runs) : len(log.runs) + per_launch]
            plans = [plan_trial(trial, pool, topology, registry) for trial in chunk]
            log.append(run_chunk(chunk, plans, registry=registry, steps=steps, repeats=repeats, device=device))
            advance(len(chunk))
    summary = summary_of(log.runs)
    result = {"settings": settings, "summary": summary.to_json(), "runs": [run.to_json() for run in log.runs]}
    emit(result, _table(log.runs, summary), as_json=as_json)


def _whole_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        message = f"must be whole numbers with commas between them, got {text!r}"
        raise InvalidOptionError(message, field="--batch-sizes") from None


def _table(runs: Sequence[StepRun], summary: StepSummary) -> Table:
    title = (
        f"{summary.num_runs} runs: {summary.share_within:.0%} within {TOLERANCE:.0%}, median error "
        f"{summary.median_error:.1%}, bias {summary.bias:+.1%}, {summary.coverage:.0%} within the 90% interval; "
        f"repeated runs differ by {summary.spread:.1%}"
    )
    table = Table(title=title, title_justify="left")
    for heading in ("tables", "batch", "planner", "predicted ms", "measured ms", "error"):
        table.add_column(heading, justify="left" if heading == "planner" else "right")
    for part in StepPart:
        table.add_column(part.value.replace("_", " "), justify="right")
    for run in runs:
        errors = (_error(*run.parts[part.value]) for part in StepPart)
        trial = run.trial
        start = (str(trial["num_tables"]), str(trial["batch_size"]), str(trial["planner"]))
        table.add_row(*start, f"{run.predicted_ms:.1f}", f"{run.measured_ms:.1f}", f"{run.error:+.0%}", *errors)
    table.add_section()
    known = [summary.parts.get(part.value, (0.0, 0.0, 0.0)) for part in StepPart]
    table.add_row("median", "", "", "", "", f"{summary.median_error:.0%}", *(f"{error:.0%}" for _, error, _ in known))
    table.add_row("share of step", "", "", "", "", "", *(f"{share:.0%}" for share, _, _ in known))
    return table


def _error(predicted_ms: float, measured_ms: float) -> str:
    return f"{predicted_ms / measured_ms - 1.0:+.0%}" if measured_ms > 0 else ""
