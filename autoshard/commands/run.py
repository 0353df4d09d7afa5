"""`autoshard run`, and kernels of plans that are replayed on this machine."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Group, RenderableType

from autoshard.commands.arguments import (
    HtmlOption,
    RegistryOption,
    completed_topologies,
    positive_option,
    seed_option,
    share_option,
)
from autoshard.commands.options import Needs, command_options
from autoshard.console import JsonOption, emit, log, progress, step_progress, warn
from autoshard.core.accepted import FINITE_ABOVE_0, WHOLE, Range
from autoshard.core.choices import BadIds, Device, Engine
from autoshard.core.declared import Meaning, declared
from autoshard.core.errors import InvalidOptionError
from autoshard.core.machine import device_family
from autoshard.core.optimizers import UpdateSettings
from autoshard.hardware import CPU, this_processor
from autoshard.table import Column, Table

if TYPE_CHECKING:
    from autoshard.core import CostModels, ShardingPlan
    from autoshard.core.costs import MsArray
    from autoshard.plugins import ReplayPlans, ReplayProtocol
    from autoshard.runtime import RunRequest, RunResult
    from autoshard.runtime.processes.launch import Launcher, Restart
    from autoshard.runtime.results import RunPrediction


_FILES = Needs("--data", lambda options: options.data is not None)
_KEPT = Needs("--checkpoints", lambda options: options.checkpoints is not None)


@command_options(panel="Data")
class DataOptions:
    """What a run trains on."""

    data: Annotated[
        Path | None,
        typer.Option(
            help="File or folder of samples: Parquet, or Criteo's tab-separated text. Left out: generated ones.",
            metavar="PATH",
        ),
    ] = None
    epochs: Annotated[int, typer.Option(min=1, help="How often the files are read."), _FILES] = 1
    shuffle: Annotated[
        int, typer.Option(min=0, help="Samples that are shuffled among each other; 0 keeps the files' order."), _FILES
    ] = 0
    on_bad_ids: Annotated[
        BadIds,
        typer.Option(
            help="What becomes of ids that are no rows: error, clip (to the nearest row), ignore (they are left out) "
            "or skip (their samples are left out)."
        ),
        _FILES,
    ] = BadIds.ERROR
    balance: Annotated[
        bool,
        typer.Option(
            "--balance", help="Deal the samples of a batch to processes so that all have about as many lookups."
        ),
        _FILES,
    ] = False
    drift_every: Annotated[
        int,
        typer.Option(min=0, help="Of generated samples: steps after which other rows are hot; 0 for never."),
        Needs("generated samples, without --data", lambda options: options.data is None),
    ] = 0


@command_options(panel="Training job")
class JobOptions:
    """How a run is saved, and goes on when it was interrupted."""

    checkpoints: Annotated[
        Path | None,
        typer.Option(help="Folder of checkpoints; a job goes on from the last one that it finds.", metavar="DIR"),
    ] = None
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps from one checkpoint to the next."), _KEPT] = 1000
    keep: Annotated[int, typer.Option(min=1, help="Checkpoints that are kept."), _KEPT] = 3
    metrics: Annotated[
        Path | None,
        typer.Option(
            help="Folder for loss, AUC, times, bytes and memory: TensorBoard's files, and metrics.jsonl.", metavar="DIR"
        ),
    ] = None
    metrics_every: Annotated[
        int,
        typer.Option(min=1, help="Steps from one line of metrics to the next."),
        Needs("--metrics", lambda options: options.metrics is not None),
    ] = 100
    max_restarts: Annotated[
        int,
        typer.Option(min=0, help="How often processes are started again after one was killed, hung or failed."),
        _KEPT,
    ] = 0
    replan_every: Annotated[
        int,
        typer.Option(
            min=0, help="Steps after which it plans again for what it looks up, and changes its plan if that pays."
        ),
    ] = 0
    replan_horizon: Annotated[
        float,
        positive_option("Steps within which changing the plan has to pay off, if the job has as many left."),
        Needs("--replan-every above 0", lambda options: options.replan_every > 0),
    ] = 10_000.0


@command_options(panel="Several machines")
class NodeOptions:
    """Which of several machines this one is; the command is called on each."""

    nnodes: Annotated[int, typer.Option(min=1, help="Machines that execute the plan together.")] = 1
    node_rank: Annotated[int, typer.Option(min=0, help="Number of this machine, from 0.")] = 0
    rdzv: Annotated[
        str | None,
        typer.Option(
            help="Where they meet: address of machine 0 and a free port; restarts take the ports after it.",
            metavar="HOST:PORT",
        ),
        Needs("--nnodes", lambda options: options.nnodes > 1),
    ] = None

    def __post_init__(self) -> None:
        if self.nnodes > 1 and self.rdzv is None:
            raise InvalidOptionError("must be told with --nnodes, as HOST:PORT", field="--rdzv")
        self.launcher()

    def launcher(self) -> Launcher:
        """Starts the processes.

        Raises:
            InvalidOptionError: If a number is out of range, or the address none.
        """
        from autoshard.runtime.processes.launch import LOCAL, NodeLauncher

        if self.rdzv is None:
            Range(at_least=0, at_most=0, kind=WHOLE).check_fields(self, "node_rank")
            return LOCAL
        return NodeLauncher(nnodes=self.nnodes, node_rank=self.node_rank, rdzv=self.rdzv)


_VIRTUAL = Needs("--virtual-time", lambda options: options.virtual_time)


@command_options(panel="Virtual time")
class VirtualOptions:
    """Whether steps take what they would on a machine for each rank."""

    virtual_time: Annotated[
        bool,
        typer.Option(
            "--virtual-time",
            help="Time steps as if each rank had a core of its own and the topology's wire, on as many processes as "
            "the plan has ranks; see docs/virtual-time.md.",
        ),
    ] = False
    topology: Annotated[
        str | None,
        typer.Option(
            help="Topology of the wire: a topology.json, or the name of a bundled one. Left out: the plan's.",
            autocompletion=completed_topologies,
        ),
        _VIRTUAL,
    ] = None
    registry: Annotated[RegistryOption, _VIRTUAL] = None
    row_share: Annotated[
        float | None,
        share_option(
            "Share of the rows of large tables that have memory of their own; the others share it with them. Left "
            "out: all if they fit this machine, else a half, a quarter and so on."
        ),
        _VIRTUAL,
    ] = None


@command_options(panel="Updates of tables")
class UpdateOptions(UpdateSettings):
    """Options of the updates of tables."""

    learning_rate: Annotated[float, FINITE_ABOVE_0, Meaning("Learning rate of the tables and of the dense layers.")] = (
        0.05
    )


@command_options()
class RunOptions:
    """Options of `autoshard run`."""

    plan: Annotated[Path, typer.Argument(help="Plan to execute.", metavar="PLAN")]
    nproc: Annotated[
        str | None,
        typer.Option(
            help="Processes of all machines; where there are fewer than ranks, each runs several ranks. `2:4` starts "
            "4, and one less at each restart, down to 2. Left out: one per core; on several machines, one per rank.",
            metavar="N",
        ),
    ] = None
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Training steps after 3 of warm-up; the last 1,000 are measured. Left out: 20, or with --data all "
            "that the files have.",
        ),
    ] = None
    engine: Annotated[Engine, typer.Option(help="`thin` (autoshard's own) or `torchrec`.")] = Engine.THIN
    verify_steps: Annotated[
        int, typer.Option(min=0, help="Steps to compare with an unsharded model, before the measured ones.")
    ] = 0
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples per step over all processes. Left out: the plan's.")
    ] = None
    seed: Annotated[int, seed_option("Seed of weights and batches.")] = 0
    device: Annotated[Device, typer.Option(help="`auto` (GPUs if there are enough), `cpu` or `cuda`.")] = Device.AUTO
    overlap: Annotated[
        str | None,
        typer.Option(
            help="`none`, or `pipelined`: communication hides behind computation, with the same results. Left out: "
            "`pipelined`; with TorchRec's engine `none`."
        ),
    ] = None
    updates: UpdateOptions = UpdateOptions()
    trace: Annotated[
        Path | None,
        typer.Option(help="Also write a Chrome trace (chrome://tracing) of two more steps; .gz is compressed."),
    ] = None
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Also write a Chrome trace of the last measured steps of all processes: parts, collectives, and who "
            "came last to each.",
            metavar="FILE",
        ),
    ] = None
    html: HtmlOption = None
    write_access: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also count which rows are looked up, and write the tables with that as a tables.json, for "
            "`autoshard drift` and `replan`.",
        ),
    ] = None
    append_to: Annotated[
        Path | None,
        typer.Option(
            help="Also add the plan and what its steps took to this folder, for `autoshard train step --runs`.",
            metavar="DIR",
        ),
    ] = None
    nodes: NodeOptions = field(default_factory=NodeOptions)
    virtual: VirtualOptions = field(default_factory=VirtualOptions)
    samples: DataOptions = field(default_factory=DataOptions)
    job: JobOptions = field(default_factory=JobOptions)

    def __post_init__(self) -> None:
        self.request()
        if self.least_nproc is not None and not self.job.max_restarts:
            raise InvalidOptionError("of two numbers needs --max-restarts", field="nproc")
        if self.least_nproc is not None and self.nodes.nnodes > 1:
            raise InvalidOptionError("must be one number on several machines", field="nproc")
        if self.virtual.virtual_time and self.nodes.nnodes > 1:
            raise InvalidOptionError("must be 1 in virtual time, whose ranks take turns on one machine", field="nnodes")
        for option, file in (
            ("--trace", self.trace),
            ("--profile", self.profile),
            ("--write-access", self.write_access),
        ):
            if file is not None and not file.absolute().parent.is_dir():
                raise InvalidOptionError(f"must be in a folder that is there, got {file}", field=option)

    @property
    def most_nproc(self) -> int | None:
        """Processes that are started; None if that is left out.

        Raises:
            InvalidOptionError: If it is no number, nor two.
        """
        return None if self.nproc is None else self._nprocs[-1]

    @property
    def least_nproc(self) -> int | None:
        """Least processes of a restart; None if they are as many as before."""
        return None if self.nproc is None or len(self._nprocs) == 1 else self._nprocs[0]

    @property
    def _nprocs(self) -> list[int]:
        words = str(self.nproc).split(":")
        numbers = [int(word) for word in words if word.isdecimal()]
        if len(numbers) != len(words) or len(words) > 2 or not 1 <= numbers[0] <= numbers[-1]:
            raise InvalidOptionError(
                f"must be a whole number of at least 1, or two such as 2:4, got {self.nproc}", field="--nproc"
            )
        return numbers

    def request(self) -> RunRequest:
        """The execution.

        Raises:
            InvalidOptionError: If options do not go together, or a setting of updates is not accepted.
        """
        from autoshard.core.step import Overlap
        from autoshard.runtime import RunRequest

        samples, job = self.samples, self.job
        usual = Overlap.PIPELINED if self.engine is Engine.THIN else Overlap.NONE
        return RunRequest(
            plan_path=str(self.plan),
            engine=self.engine,
            steps=20 if self.steps is None and samples.data is None else self.steps,
            verify_steps=self.verify_steps,
            batch_size=self.batch_size,
            seed=self.seed,
            device=self.device,
            overlap=usual if self.overlap is None else self.overlap,  # type: ignore[arg-type]
            trace_path=_absolute(self.trace),
            profile_path=_absolute(self.profile),
            access_path=_absolute(self.write_access),
            data_path=_absolute(samples.data),
            epochs=samples.epochs,
            shuffle=samples.shuffle,
            balance=samples.balance,
            drift_every=samples.drift_every,
            on_bad_ids=samples.on_bad_ids,
            checkpoints_path=_absolute(job.checkpoints),
            checkpoint_every=job.checkpoint_every,
            keep=job.keep,
            replan_every=job.replan_every,
            replan_horizon=job.replan_horizon,
            metrics_path=_absolute(job.metrics),
            metrics_every=job.metrics_every,
            virtual_time=self.virtual.virtual_time,
            topology_path=self.virtual.topology,
            registry_path=None if self.virtual.registry is None else str(self.virtual.registry),
            row_share=self.virtual.row_share,
            **{one.name: getattr(self.updates, one.name) for one in declared(UpdateSettings)},
        )


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())


def run(options: RunOptions, as_json: JsonOption = False) -> None:
    """Executes a plan's training steps on processes of this machine, and measures them.

    With files of samples it trains until they end, and with a folder of checkpoints it is a job that can be interrupted
    and started again.

    Example:
        autoshard run plan.json --nproc 4 --steps 20
        autoshard run plan.json --data clicks/ --epochs 2 --shuffle 100000 --checkpoints job/ --checkpoint-every 500
        autoshard run plan.json --nnodes 2 --node-rank 0 --rdzv 10.0.0.1:29500
        autoshard run plan.json --virtual-time --verify-steps 2
    """
    from autoshard.formats import read_plan

    plan = read_plan(options.plan)
    world_size = plan.topology.world_size
    is_shared = options.nodes.nnodes == 1 and not options.virtual.virtual_time
    left_out = _num_processes(world_size) if is_shared else world_size
    run_on(options.nodes.launcher(), options, options.most_nproc or left_out, as_json, plan)


def _machine_note(plan: ShardingPlan) -> str:
    """That a plan's prices are of another processor than the one that runs it; empty if not, or nobody knows."""
    priced_on = plan.provenance.models.get("kernel_machine") if plan.provenance else None
    here = this_processor()
    # Models that know less of their machine, as those of earlier versions do, are not told from this one by it.
    by_caches = replace(here, core="", core_threads=0, cache_threads=0, clock_mhz=0.0)
    names = (None, str(here), str(by_caches), here.device_name)
    if priced_on in names or device_family(plan.topology.device) != CPU:
        return ""
    return f"the plan's prices are of {priced_on}, and this machine is {here}"


#: Lookups of the fullest process above the mean from which on a run says so.
_TOLD_SHARE: Final = 0.05


def _predicted(plan: ShardingPlan, result: RunResult, *, is_random: bool) -> RunPrediction | None:
    """What the plan predicted for the run, and how the run differs from that; None without prices or measured steps.

    Args:
        plan: The plan.
        result: What was measured.
        is_random: Whether samples of files were dealt to processes as they came.
    """
    from autoshard.core.step import Overlap
    from autoshard.evaluation.batch_memory import largest_share
    from autoshard.runtime.results import RunPrediction

    predicted = plan.predicted
    if predicted is None or not result.steps:
        return None
    num_cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    is_shared = result.device == CPU and result.virtual is None
    tables = replace(plan.tables, batch_size=result.batch_size)
    above = largest_share(tables, result.num_processes) - 1
    device, overlap = plan.topology.device, predicted.overlap or Overlap.NONE
    differences = {
        f"{result.num_processes} processes share {num_cores} core{'' if num_cores == 1 else 's'}": (
            is_shared and result.num_processes > num_cores
        ),
        f"others use the machine: its load is {load:.1f} on {num_cores} cores": result.virtual is None
        and load > max(num_cores, result.num_processes),
        f"{result.num_processes} processes run the plan's {result.plan_world_size} ranks": result.folded,
        f"the plan is for {device}, and ran on {result.device}": (device_family(device) == CPU)
        != (result.device == CPU),
        _machine_note(plan): bool(_machine_note(plan)),
        f"the plan is for batches of {plan.tables.batch_size:,} samples": result.batch_size != plan.tables.batch_size,
        f"the prediction is for overlap {overlap}": overlap is not result.overlap,
        "the engine torchrec ran it, and models are fitted to the engine thin": result.engine == "torchrec",
        f"samples are dealt at random, and the price is of means: of {result.num_processes} processes one has about "
        f"{above:.0%} more lookups (--balance)": is_random and above >= _TOLD_SHARE,
        "the plan's tables have no dense layers, and those of the run are not predicted": plan.tables.dense is None,
        "the plan was changed on the way": result.job is not None and result.job.has_adopted,
    }
    reasons = tuple(text for text, applies in differences.items() if applies)
    return RunPrediction(step_ms=predicted.step_ms, parts=predicted.parts or None, reasons=reasons)


def run_on(launcher: Launcher, options: RunOptions, num_processes: int, as_json: bool, plan: ShardingPlan) -> None:
    """Executes a plan on the nodes of a launcher, and prints what was measured.

    Args:
        launcher: Starts the processes.
        options: What to execute.
        num_processes: Processes.
        as_json: Whether to print JSON.
        plan: The plan of the options' file.

    Raises:
        AutoshardError: As `run_requests`.
    """
    from autoshard.runtime import run_requests
    from autoshard.runtime.processes.launch import DEFAULT_TIMEOUT_S
    from autoshard.runtime.result_json import RUN

    request = options.request()
    # The number of steps in all, warm-up included, comes with the first report.
    with step_progress(f"Running on {num_processes} processes") as on_step, _stopped_by_sigterm(request) as stop:

        def on_restart(restart: Restart) -> None:
            warn(
                f"{restart.error}; restart {restart.number} of {options.job.max_restarts}, on {restart.nproc} processes"
            )

        results = run_requests(
            [request],
            num_processes,
            timeout_s=math.inf if request.is_job else DEFAULT_TIMEOUT_S,
            on_progress=lambda state: on_step(state.done, state.total),
            launcher=launcher,
            max_restarts=options.job.max_restarts,
            least_nproc=options.least_nproc,
            on_restart=on_restart,
            stop=stop,
        )
    if not results:
        log("Done; machine 0 has the results.")
        if stop is not None and stop.is_set():
            raise typer.Exit(_TERMINATED_EXIT_CODE)
        return
    is_random = options.samples.data is not None and not options.samples.balance
    result = replace(results[0], predicted=_predicted(plan, results[0], is_random=is_random))
    if options.append_to is not None:
        from autoshard.runtime.run_store import append_run

        if not result.steps:
            log(f"Added nothing to {options.append_to}: no step was measured.")
        elif result.job is not None and result.job.has_adopted:
            log(f"Added nothing to {options.append_to}: the plan was changed on the way.")
        else:
            log(f"Wrote {append_run(options.append_to, plan, result)}")
    if options.html is not None and result.steps:
        from autoshard.formats import atomic_write
        from autoshard.report import run_page

        atomic_write(options.html, run_page(plan, result.ranks, _headline(result), title=f"Run of {options.plan.name}"))
    for written in _written(options, result):
        log(f"Wrote {written}")
    emit(RUN.to_json(result), _rendered(result), as_json=as_json)
    if result.job is not None and result.job.is_stopped:
        raise typer.Exit(_TERMINATED_EXIT_CODE)


def _written(options: RunOptions, result: RunResult) -> list[Path]:
    """The files that a run wrote; one without steps leaves older ones as they are, and one that is stopped no trace."""
    is_stopped = result.job is not None and result.job.is_stopped
    files = (
        (options.trace, result.has_trained and not is_stopped),
        (options.profile, result.steps > 0),
        (options.html, result.steps > 0),
        (options.write_access, result.has_trained),
    )
    return [file for file, is_written in files if file is not None and is_written]


#: That of a process which SIGTERM ended, so that a scheduler starts the job again.
_TERMINATED_EXIT_CODE = 128 + signal.SIGTERM


@contextmanager
def _stopped_by_sigterm(request: RunRequest) -> Iterator[threading.Event | None]:
    """An event that SIGTERM sets; None, and SIGTERM ends the command at once, if nothing could be saved."""
    if request.checkpoints_path is None or threading.current_thread() is not threading.main_thread():
        yield None
        return
    stop = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)


def _num_processes(world_size: int) -> int:
    return max(1, min(world_size, os.cpu_count() or 1))


def _rendered(result: RunResult) -> RenderableType:
    from autoshard.report.wording import write_ms

    lines = [
        *_of_job(result),
        *_headline(result),
    ]
    if result.verification is not None:
        lines.append(
            f"Largest error against an unsharded model over {result.verification.steps} steps: "
            f"{result.verification.max_error:.2g}"
        )
    ms = partial(Column, text=write_ms, justify="right")
    table = Table.of(
        result.ranks,
        [
            (Column("process", justify="right"), lambda rank: rank.process),
            ("tables", lambda rank: rank.num_tables),
            (ms("input"), lambda rank: rank.input_ms),
            (ms("forward"), lambda rank: rank.forward_kernel_ms),
            (ms("exchange"), lambda rank: rank.forward_exchange_ms),
            (ms("exchange back"), lambda rank: rank.backward_exchange_ms),
            (ms("backward"), lambda rank: rank.backward_kernel_ms),
            (ms("sync"), lambda rank: rank.sync_ms),
            (ms("kernel", "ms"), lambda rank: rank.kernel_ms),
        ],
    )
    met = {"steps had a loss or gradients that were not finite": result.bad_steps, "ids were no rows": result.bad_ids}
    lines += [f"{number:,} {what}" for what, number in met.items() if number]
    predicted = () if result.predicted is None else (*_comparison(result, result.predicted), "")
    return Group(*lines, "", *predicted, table, "", _collective_table(result))


def _headline(result: RunResult) -> list[str]:
    """What was run, what its step took and, in virtual time, what that is made of."""
    from autoshard.core.step import Overlap
    from autoshard.report.wording import write_ms, write_percent

    lines = [
        f"{result.steps} steps of {result.batch_size:,} samples on {result.num_processes} processes "
        f"({result.engine}, {result.backend}, {result.device})"
        + (f", {result.overlap}" if result.overlap is not Overlap.NONE else "")
        + (f", which ran the plan's {result.plan_world_size} ranks" if result.folded else ""),
    ]
    if result.first_loss is not None:
        lines.append(
            f"Step {write_ms(result.step_ms)} ms{_interval(result)}, {result.samples_per_s:,.0f} samples/s, "
            f"kernel balance {write_percent(result.balance)}, loss {result.first_loss:.4f} to {result.last_loss:.4f}"
        )
    if (virtual := result.virtual) is not None:
        shares = f"; {write_percent(virtual.row_share)} of the rows of large tables have memory of their own"
        lines.append(
            f"Virtual time: ranks took turns on {virtual.num_cores} cores, the wire is that of {virtual.wire}"
            + (shares if virtual.row_share < 1 else "")
        )
    return lines


def _interval(result: RunResult) -> str:
    """The 95% interval of the median step."""
    from autoshard.report.wording import write_ms

    if result.step_low_ms is None or result.step_high_ms is None:
        return ""
    return f" ({write_ms(result.step_low_ms)} to {write_ms(result.step_high_ms)})"


#: What is said of the plan that a job went on under, by `ResumedPlan`.
_RESUMED: Final = {
    "adopted": "Went on under the plan that the job had adopted.",
    "plan_changed": "Went on under this plan, which is another than the job was begun with, and left the adopted one.",
    "processes_changed": "Went on under this plan: the adopted one is for another number of processes.",
}


def _of_job(result: RunResult) -> list[str]:
    """What became of a training job."""
    job = result.job
    if job is None:
        return []
    began = "" if job.resumed_from is None else f", from the checkpoint of step {job.resumed_from:,} on"
    lines = [
        f"Trained {job.trained_steps:,} steps{began}" + (", and stopped on request" if job.is_stopped else "") + "."
    ]
    if job.skipped_lines:
        lines.append(
            f"Lines that are no samples and were left out: {job.skipped_lines:,}; the first: {job.first_skipped}"
        )
    if job.resumed_plan is not None:
        lines.append(_RESUMED[job.resumed_plan])
    if job.resumed_learning_rate is not None:
        lines.append(f"Went on with the checkpoint's learning rate, {job.resumed_learning_rate:g}, not the command's.")
    for one in job.plan_changes:
        what = "changed the plan" if one.is_changed else "kept the plan"
        took = "" if one.adopt_ms is None else f", which took {one.adopt_ms:,.0f} ms"
        lines.append(f"Step {one.decided_at:,}: {what}{took} ({one.reason}).")
    return lines


def _comparison(result: RunResult, predicted: RunPrediction) -> tuple[RenderableType, ...]:
    """Predicted beside measured times, and why they may differ."""
    from autoshard.report.wording import write_interval, write_ms, write_percent

    lines = [(str(part).replace("_", " "), one, result.part_ms(part)) for part, one in (predicted.parts or {}).items()]
    rows = []
    for name, estimate, measured_ms in (*lines, ("step", predicted.step_ms, result.step_ms)):
        error = write_percent(estimate.value / measured_ms - 1, signed=True) if measured_ms > 0 else ""
        rows.append((name, write_ms(estimate.value), write_interval(estimate), write_ms(measured_ms), error))
    columns = ("part of the step", "predicted ms", "90% interval", "measured ms", "predicted against measured")
    table = Table(columns=columns, rows=rows)
    if predicted.step_ms.low <= result.step_ms <= predicted.step_ms.high:
        return (table,)
    why = f": {'; '.join(predicted.reasons)}" if predicted.reasons else ", and no difference of the run is known"
    return (table, f"The measured step is outside of the predicted interval{why}.")


def _collective_table(result: RunResult) -> RenderableType:
    """How long each collective took at its slowest process, and how long the step waited for it there."""
    from autoshard.core.step import StepCollective
    from autoshard.report.terminal import collective_table

    timed = [
        collective for collective in StepCollective if any(collective in rank.collectives for rank in result.ranks)
    ]
    slowest = {
        collective: max(
            (rank.collectives[collective] for rank in result.ranks if collective in rank.collectives),
            key=lambda time: time.exposed_ms,
        )
        for collective in timed
    }
    return collective_table(slowest)


RefineOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Measure all ranks on this machine up to N times, and relieve the slowest in between; 1 only measures.",
    ),
]


def replay(replay_plans: ReplayPlans, plans: Sequence[ShardingPlan], device: str, title: str) -> ReplayProtocol:
    """Measures plans with a progress bar.

    Args:
        replay_plans: The benchmark.
        plans: At least one.
        device: `auto`, `cpu` or `cuda`.
        title: Title of the bar.
    """
    sizes = [plan.group_size for plan in plans]
    with progress(title, sum(sizes) + max(sizes)) as advance:
        return replay_plans(plans, device=device, advance=advance)


def refined(plan: ShardingPlan, costs: CostModels, num_measurements: int, device: str) -> ShardingPlan:
    """A plan refined by measuring it on this machine; logs what that changed.

    Args:
        plan: The plan, its shards on single ranks.
        costs: Models that it was planned with.
        num_measurements: Most measurements, at least 1.
        device: `auto`, `cpu` or `cuda`.

    Raises:
        InvalidOptionError: If the plan has shards on several ranks, or no benchmark is installed.
        AutoshardError: Those of the benchmark, for tables or devices that it cannot measure.
    """
    import numpy as np

    from autoshard.planning import refine_plan
    from autoshard.plugins import find_replay
    from autoshard.report.caveats import device_warnings

    replay_plans = find_replay("--replay-refine")
    measured_on: list[str] = []

    def measure(plans: Sequence[ShardingPlan]) -> list[MsArray]:
        title = f"Measurement {len(measured_on) + 1} of {num_measurements}"
        result = replay(replay_plans, plans, device, title)
        measured_on.append(result.device)
        return [np.array(plan.kernel_ms_per_rank) for plan in result.plans]

    plan, status = refine_plan(plan, costs, measure, num_measurements=num_measurements)
    log(status)
    for warning in device_warnings(measured_on[0], plan):
        warn(warning)
    return plan
