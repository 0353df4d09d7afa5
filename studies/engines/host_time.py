"""What a step of the thin engine takes the host: `python -m studies host-time`.

Tables of a few rows of 4 columns leave kernels and collectives next to nothing to do. What is counted is the processor
time of the thread that calls the engine, forward and backward: Python and the operators that it calls, but no waiting
for other processes and no other thread, so that it is the same however many processes share a core.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from autoshard.commands.options import command_options
from autoshard.core import AccessProfile, EmbeddingTable, Feature, TableSet
from autoshard.formats import write_plan
from autoshard.runtime.processes.job import RESULTS_FILE
from autoshard.runtime.processes.launch import running_workers
from autoshard.whatif.trials import local_topology
from bench.measuring.devices import find_device
from studies.engines.layouts import Layout, plan_of
from studies.frame import Machine, OutputOptions, StudyResult, command_line, to_document

SCHEMA: Final = "autoshard.host_time/1"
_WORKER: Final = "studies.engines.host_worker"
#: Where the processes find it.
_PATH: Final = (str(Path(__file__).parents[2]),)
_DEVICE, _DIM, _TABLE_BYTES = "cpu", 4, 1 << 30
_BATCH_PER_PROCESS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTime:
    """Processor time of the calling thread of a step, in milliseconds.

    Attributes:
        layout: How the tables are held.
        num_features: Features, each of a table of its own.
        num_processes: Processes.
        steps: Measured steps.
        median_ms: Over steps and processes.
        slowest_ms: Median over steps of the process with the largest.
    """

    layout: Layout
    num_features: int
    num_processes: int
    steps: int
    median_ms: float
    slowest_ms: float


@command_options()
class HostTimeOptions:
    """Options of the study `host-time`."""

    layout: Annotated[Layout, typer.Option(help="How the tables are held.")] = Layout.TABLE_WISE
    features: Annotated[int, typer.Option(min=1, help="Features, each of a table of its own.")] = 1000
    nproc: Annotated[int, typer.Option(min=1, help="Processes, one per rank.")] = 8
    steps: Annotated[int, typer.Option(min=1, help="Measured steps.")] = 50

    def small_tables(self) -> TableSet:
        """Tables with a row for every process."""
        access = AccessProfile.zipf(self.nproc, 0.0)
        return TableSet(
            batch_size=_BATCH_PER_PROCESS * self.nproc,
            tables=tuple(
                EmbeddingTable(
                    name=f"t{number}",
                    num_embeddings=self.nproc,
                    embedding_dim=_DIM,
                    features=(Feature(name=f"f{number}", pooling_factor=1.0),),
                    access=access,
                )
                for number in range(self.features)
            ),
        )


def measure(options: HostTimeOptions) -> HostTime:
    """Runs steps on processes of this machine.

    Raises:
        AutoshardError: If a process fails.
    """
    plan = plan_of(options.layout, options.small_tables(), local_topology(_DEVICE, options.nproc, _TABLE_BYTES))
    with tempfile.TemporaryDirectory(prefix="autoshard-host-time-") as own:
        write_plan(plan, Path(own, "plan.json"))
        job = {"plan_path": str(Path(own, "plan.json")), "steps": options.steps}
        with running_workers(_WORKER, job, options.nproc, path=_PATH) as (folder, documents):
            for _ in documents:
                pass
            medians = json.loads((folder / RESULTS_FILE).read_text(encoding="utf-8"))
    return HostTime(
        layout=options.layout,
        num_features=options.features,
        num_processes=options.nproc,
        steps=options.steps,
        **medians,
    )


def main(options: HostTimeOptions, output: OutputOptions) -> None:
    """Measures the processor time that a step of many features takes the calling thread.

    Example:
        python -m studies host-time --features 1000 --nproc 8
    """
    found = measure(options)
    on = Machine.this(find_device(_DEVICE), command_line("host-time", options))
    text = (
        f"{found.num_features} features on {found.num_processes} processes, {found.layout}: {found.median_ms:.1f} ms a "
        f"step, {found.slowest_ms:.1f} ms on the slowest process (medians of {found.steps} steps)"
    )
    document = {**to_document(found, SCHEMA), "machine": on.to_json()}
    output.write(StudyResult(name="host-time", document=document, notes=(text,)))
