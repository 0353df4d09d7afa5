"""Steps of the same plans on both engines of the runtime: `python -m studies engines`.

Both engines run in the same processes, in turn: a busy machine slows both down alike, and the ratio of each round is
taken before the median over rounds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Final

import typer

from autoshard.commands.options import command_options
from autoshard.core import ShardingPlan
from autoshard.core.accepted import WHOLE_AT_LEAST_1
from autoshard.core.choices import Device, Engine
from autoshard.formats import load_tables, write_plan
from autoshard.runtime.processes.launch import run_requests
from autoshard.runtime.results import RunRequest, RunResult
from autoshard.table import Table
from autoshard.whatif.trials import local_topology
from studies.engines.layouts import Layout, plan_of
from studies.frame import (
    Machine,
    OutputOptions,
    PartsOption,
    PartStore,
    StudyResult,
    names_in,
    numbers_in,
    options_without,
)

_DEVICE: Final = "cpu"
_RUN_BYTES: Final = 8 << 30
#: Options that a batch size's numbers do not depend on.
_FREE: Final = ("batch_sizes", "parts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """TorchRec's time over that of the thin engine.

    Attributes:
        median: Over rounds.
        low: Of the round with the smallest.
        high: Of the round with the largest.
    """

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Ratio:
        """Sums up rounds."""
        return cls(median=median(ratios), low=min(ratios), high=max(ratios))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSteps:
    """Steps of one plan on both engines, in milliseconds, medians over rounds.

    Attributes:
        layout: How the tables are held.
        batch_size: Samples of all processes.
        thin_ms: Whole step of the thin engine, dense layers included.
        torchrec_ms: Of TorchRec's.
        ratio: Of these.
        thin_embedding_ms: Embedding part of the thin engine's step, mean over processes.
        torchrec_embedding_ms: Of TorchRec's.
        embedding_ratio: Of these.
    """

    layout: Layout
    batch_size: int
    thin_ms: float
    torchrec_ms: float
    ratio: Ratio
    thin_embedding_ms: float
    torchrec_embedding_ms: float
    embedding_ratio: Ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineComparison:
    """All plans at one or more batch sizes.

    Attributes:
        num_tables: Tables of each plan.
        num_processes: Processes.
        rounds: Runs of each engine.
        steps: Measured steps of each run.
        runs: What was found.
    """

    num_tables: int
    num_processes: int
    rounds: int
    steps: int
    runs: tuple[EngineSteps, ...]


def measure(
    plans: Mapping[Layout, ShardingPlan],
    batch_size: int,
    *,
    rounds: int,
    steps: int,
    nproc: int,
    device: Device = Device.CPU,
    traces: Path | None = None,
) -> list[EngineSteps]:
    """Runs plans on both engines in turn, in one start of the processes.

    Args:
        plans: What to run.
        batch_size: Samples of all processes.
        rounds: Runs of each engine.
        steps: Measured steps of each run.
        nproc: Processes.
        device: Where.
        traces: Folder for a Chrome trace of each plan's last round, LAYOUT-ENGINE.json; None for none.

    Raises:
        AutoshardError: As `run_requests`.
    """
    with tempfile.TemporaryDirectory(prefix="autoshard-engines-") as folder:
        requests: dict[tuple[Layout, Engine, int], RunRequest] = {}
        for layout, plan in plans.items():
            write_plan(plan, Path(folder, f"{layout}.json"))
        for number in range(rounds):
            for layout in plans:
                for engine in Engine:
                    is_traced = traces is not None and number == rounds - 1
                    requests[layout, engine, number] = RunRequest(
                        plan_path=str(Path(folder, f"{layout}.json")),
                        engine=engine,
                        steps=steps,
                        batch_size=batch_size,
                        device=device,
                        trace_path=str(traces / f"{layout}-{engine}.json") if traces and is_traced else None,
                    )
        results = dict(zip(requests, run_requests(list(requests.values()), nproc), strict=True))
    return [
        _summed_up(
            layout,
            batch_size,
            [results[layout, Engine.THIN, number] for number in range(rounds)],
            [results[layout, Engine.TORCHREC, number] for number in range(rounds)],
        )
        for layout in plans
    ]


def _summed_up(
    layout: Layout, batch_size: int, thin: Sequence[RunResult], torchrec: Sequence[RunResult]
) -> EngineSteps:
    pairs = list(zip(thin, torchrec, strict=True))
    return EngineSteps(
        layout=layout,
        batch_size=batch_size,
        thin_ms=median(one.step_ms for one in thin),
        torchrec_ms=median(one.step_ms for one in torchrec),
        ratio=Ratio.of([theirs.step_ms / ours.step_ms for ours, theirs in pairs]),
        thin_embedding_ms=median(map(_embedding_ms, thin)),
        torchrec_embedding_ms=median(map(_embedding_ms, torchrec)),
        embedding_ratio=Ratio.of([_embedding_ms(theirs) / _embedding_ms(ours) for ours, theirs in pairs]),
    )


def _embedding_ms(result: RunResult) -> float:
    """Input, lookups, both exchanges and updates; mean over processes."""
    return mean(
        rank.input_ms + rank.kernel_ms + rank.forward_exchange_ms + rank.backward_exchange_ms for rank in result.ranks
    )


@command_options()
class EngineOptions:
    """Options of the study `engines`."""

    batch_sizes: Annotated[str, typer.Option(help="Global batch sizes.")] = "64,512,2048"
    layouts: Annotated[str, typer.Option(help="Layouts of the plans.")] = ",".join(Layout)
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each engine, in turn; medians are taken.")] = 7
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each run.")] = 20
    nproc: Annotated[int, typer.Option(min=2, help="Processes, one per rank.")] = 4
    num_tables: Annotated[int, typer.Option(min=1, help="Tables of each plan.")] = 80
    tables: Annotated[str, typer.Option(help="Pool that they are drawn from.")] = "metasyn"
    scale: Annotated[int, typer.Option(min=1, help="Divides the rows of the pool.")] = 64
    parts: PartsOption = None

    def plans(self) -> dict[Layout, ShardingPlan]:
        """The plans.

        Raises:
            InvalidOptionError: If there is no such layout.
        """
        tables = load_tables(self.tables).scaled(self.scale).sample(self.num_tables, 0)
        topology = local_topology(_DEVICE, self.nproc, _RUN_BYTES)
        chosen = map(Layout, names_in(self.layouts, "--layouts", Layout))
        return {layout: plan_of(layout, tables, topology) for layout in chosen}

    def sizes(self) -> tuple[int, ...]:
        """The batch sizes.

        Raises:
            InvalidOptionError: If one is no whole number of at least 1.
        """
        return numbers_in(self.batch_sizes, "--batch-sizes", int, WHOLE_AT_LEAST_1)


def main(options: EngineOptions, output: OutputOptions) -> None:
    """Times the same plans on the thin engine and on TorchRec's, in the same processes in turn.

    Example:
        OMP_NUM_THREADS=1 python -m studies engines --batch-sizes 64,512 --rounds 9 --parts engine-runs
    """
    plans, sizes = options.plans(), options.sizes()
    parts = PartStore.of(options.parts, options_without(options, _FREE))
    makers = {f"batch-{size}": partial(_compared, plans, size, options) for size in sizes}
    found = parts.find_all("Running plans", EngineComparison, makers)
    whole = replace(found[0], runs=tuple(run for one in found for run in one.runs))
    on = Machine.of("engines", options)
    document = on.document(whole, "autoshard.engines/1")
    output.write(StudyResult(name="engines", document=document, tables=(engines_table(whole, on),)))


def _compared(plans: Mapping[Layout, ShardingPlan], batch_size: int, options: EngineOptions) -> EngineComparison:
    runs = measure(plans, batch_size, rounds=options.rounds, steps=options.steps, nproc=options.nproc)
    return EngineComparison(
        num_tables=options.num_tables,
        num_processes=options.nproc,
        rounds=options.rounds,
        steps=options.steps,
        runs=tuple(runs),
    )


def engines_table(found: EngineComparison, on: Machine) -> Table:
    """A line for each plan and batch size."""
    caption = (
        f"{found.num_tables} tables on {found.num_processes} processes, medians of {found.rounds} rounds of "
        f"{found.steps} steps, smallest and largest ratio in brackets; load average {on.load_average:.1f}"
    )
    lines = [
        (
            str(run.layout),
            str(run.batch_size),
            f"{run.thin_ms:.1f}",
            f"{run.torchrec_ms:.1f}",
            str(run.ratio),
            f"{run.thin_embedding_ms:.1f}",
            f"{run.torchrec_embedding_ms:.1f}",
            str(run.embedding_ratio),
        )
        for run in found.runs
    ]
    columns = ("layout", "batch", "step ms", "TorchRec", "ratio", "embedding ms", "TorchRec", "ratio")
    return Table(columns=columns, rows=tuple(lines), caption=caption)
