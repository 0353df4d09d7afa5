"""What a step of the thin engine takes the host: `python -m studies host-time`.

Tables of a few rows of 4 columns leave kernels and collectives next to nothing to do. What is counted is the processor
time of the thread that calls the engine, forward and backward: Python and the operators that it calls, but no waiting
for other processes and no other thread, so that it is the same however many processes share a core.

Shape suffixes: S steps, P processes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

import torch
import torch.distributed as dist
import typer

from autoshard.commands.options import command_options
from autoshard.core import AccessProfile, EmbeddingTable, Feature, ShardingPlan, TableSet
from autoshard.formats import read_plan
from autoshard.runtime.batch import Embedded
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.releases import all_gather
from autoshard.runtime.training.synthetic import draw_samples
from autoshard.whatif.trials import local_topology
from studies.engines.layouts import Layout, plan_of
from studies.frame import Machine, OutputOptions, StudyResult
from studies.frame.jobs import do_job, run_job

_NUM_BATCHES = 4


def _measured(job: Mapping[str, Any]) -> dict[str, float]:
    ms_PS = measured_steps(read_plan(job["plan_paths"][0]), job["steps"], pipelined=job["pipelined"])
    return {"median_ms": ms_PS.median().item(), "slowest_ms": ms_PS.median(dim=1).values.max().item()}


def measured_steps(plan: ShardingPlan, steps: int, *, pipelined: bool = False) -> torch.Tensor:
    """Processor time of this thread in every step of every process, in milliseconds, shape (P, S).

    Args:
        plan: The plan.
        steps: S.
        pipelined: Whether another thread distributes ids ahead.
    """
    engine = ShardedEmbeddings(plan, FusedSettings(learning_rate=0.05))
    B, rank = engine.local_batch_size, dist.get_rank()
    batches = [draw_samples(plan.tables, 0, B, (0, number, rank)).ids for number in range(_NUM_BATCHES)]
    gradients_BC = torch.ones(B, sum(engine.feature_dims))
    ms: list[float] = []
    stream = (batches[step % _NUM_BATCHES] for step in range(_NUM_BATCHES + steps))
    turns = engine.pipelined(stream) if pipelined else ((ids, engine.start(ids)) for ids in stream)
    begun = time.thread_time()
    for _, lookup in turns:
        embedded = lookup.wait()
        assert isinstance(embedded, Embedded), "the batch has no keys"
        # On a CPU, the backward pass runs on the thread that asks for it.
        embedded.pooled_BC.backward(gradients_BC)
        engine.end_step()
        ended = time.thread_time()
        ms.append((ended - begun) * 1e3)
        begun = ended
    engine.close()
    own_S = torch.tensor(ms[_NUM_BATCHES:], dtype=torch.float64)
    ms_PS = own_S.new_empty(dist.get_world_size(), steps)
    all_gather(ms_PS.view(-1), own_S)
    return ms_PS


_DEVICE, _DIM, _TABLE_BYTES = "cpu", 4, 1 << 30
_BATCH_PER_PROCESS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTime:
    """Processor time of the calling thread of a step, in milliseconds.

    Attributes:
        layout: How the tables are held.
        num_features: Features, each of a table of its own.
        num_processes: Processes.
        pipelined: Whether another thread distributes ids ahead.
        steps: Measured steps.
        median_ms: Over steps and processes.
        slowest_ms: Median over steps of the process with the largest.
    """

    layout: Layout
    num_features: int
    num_processes: int
    pipelined: bool
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
    pipelined: Annotated[bool, typer.Option(help="Distribute the next batch on another thread, as trainers do.")] = True

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
    medians = run_job(
        "studies.engines.host_time", {"steps": options.steps, "pipelined": options.pipelined}, [plan], options.nproc
    )
    return HostTime(
        layout=options.layout,
        num_features=options.features,
        num_processes=options.nproc,
        pipelined=options.pipelined,
        steps=options.steps,
        **medians,
    )


def main(options: HostTimeOptions, output: OutputOptions) -> None:
    """Measures the processor time that a step of many features takes the calling thread.

    Example:
        python -m studies host-time --features 1000 --nproc 8
    """
    found = measure(options)
    text = (
        f"{found.num_features} features on {found.num_processes} processes, {found.layout}, "
        f"{'pipelined' if found.pipelined else 'blocking'}: {found.median_ms:.1f} ms a step, {found.slowest_ms:.1f} ms "
        f"on the slowest process (medians of {found.steps} steps)"
    )
    document = Machine.of("host-time", options).document(found, "autoshard.host_time/1")
    output.write(StudyResult(name="host-time", document=document, notes=(text,)))


if __name__ == "__main__":
    do_job(_measured)
