"""A set of processes that executes requests: devices, the process group, measured steps.

Shape suffixes: S measured steps, M steps whose times are kept.
"""

from __future__ import annotations

import gc
import json
import os
import random
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.profiler import profile

from autoshard.core import DenseLayers, ShardingPlan, TableSet
from autoshard.core.choices import Device, Engine
from autoshard.core.errors import DivergedError, InvalidOptionError
from autoshard.core.machine import device_family
from autoshard.core.optimizers import BadGradients
from autoshard.core.step import CollectiveTime, StepCollective, StepPart
from autoshard.evaluation.communication import AlphaBetaComm
from autoshard.formats import atomic_write, digest, load_topology, plan_to_json, read_plan
from autoshard.formats.row_orders import read_row_orders
from autoshard.formats.sample_files import open_samples
from autoshard.formats.stores.remote_folders import folder_of
from autoshard.hardware import free_host_bytes
from autoshard.plugins import step_models
from autoshard.runtime.access_counts import HALF_LIFE, AccessCounter
from autoshard.runtime.checkpoints.manifest import PLAN_NAME, committed_folders
from autoshard.runtime.clock import WALL
from autoshard.runtime.engine.holdings import GroupOrder, Ownership
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.memory import processes_here
from autoshard.runtime.participation import check_alike
from autoshard.runtime.processes.devices import (
    check_memory,
    choose_device,
    fitting_row_share,
    joined,
    needed_bytes,
    peak_bytes,
    resident_bytes,
)
from autoshard.runtime.processes.heap import make_heap_ready
from autoshard.runtime.replanning import JobReplanning, ReplanSettings, merged_counts
from autoshard.runtime.results import (
    DEFAULT_DENSE_FEATURES,
    SENT,
    JobReport,
    RankTiming,
    ResumedPlan,
    RunRequest,
    RunResult,
    Verification,
    VirtualRun,
)
from autoshard.runtime.timeline import chrome_trace, gather_steps, rank_steps
from autoshard.runtime.timing import Part, Span, StepTimer, Timings
from autoshard.runtime.training.bad_ids import IdRepair
from autoshard.runtime.training.data import Feed, FileSamples, GeneratedSamples, Share, file_samples
from autoshard.runtime.training.dense import DenseModel, default_layers
from autoshard.runtime.training.loop import SavedJob, TrainingLoop
from autoshard.runtime.training.reference import Reference, check_verifiable, compare
from autoshard.runtime.training.step import EmbeddingEngine, TrainingStep, distributed_step
from autoshard.runtime.training.synthetic import IdsOfRanks, Samples, ranked_rows
from autoshard.runtime.virtual import BACKEND, GLOO_WORK, VirtualMachine, Wire

if TYPE_CHECKING:
    from autoshard.runtime.training.metrics import JobMetrics

#: Different batches that a measurement cycles through, drawn before it starts; fewer if they are large.
NUM_BATCHES = 8
#: Steps whose times are kept: a job's last ones.
_MAX_MEASURED = 1000
#: One part in so many of the memory that is free may be made ready.
_READY_PART = 4
#: Rows whose counts are written, of all processes together.
_ROWS_OF_A_FILE = 1 << 22
#: 256 MiB of ids per process.
MAX_DRAWN_IDS = 2**25
#: Steps of a profile, the last ones.
_PROFILED_STEPS = 10
#: How long a collective waits for a process that is silent but not dead, and where many processes share a core.
_COLLECTIVE_TIMEOUT, _SHARED_CORE_TIMEOUT = timedelta(minutes=5), timedelta(minutes=30)
#: Standard deviations on both sides of a mean that hold 95% of a normal distribution.
_95_PERCENT = 1.96

#: Called after every step with the number of steps made, and of all there are, by an estimate where files decide.
OnStep = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How a request's tables are sharded when its processes start.

    Attributes:
        plan: The plan, of the request or one that the job has adopted.
        row_orders: Its row orders that list ids, by table.
        resumed: Which plan it is, where the checkpoint that the job goes on from has an adopted one; None without.
    """

    plan: ShardingPlan
    row_orders: Mapping[str, torch.Tensor]
    resumed: ResumedPlan | None = None


class _Measured(NamedTuple):
    """What a process tells the others of its measured steps."""

    timing: RankTiming
    steps_ms: list[float]
    losses: list[float]


class Session:
    """The processes of one launch, and the device of this one.

    Args:
        requests: What to execute.
        device: This process's device.
        on_step: Called after every step.
        wants_stop: Whether a training job is to save and end.
        machine: The machine that this rank has in virtual time; None where steps are timed as they are.
        rounds: How often each request makes its steps. With several, requests take turns, and all are in memory.
    """

    def __init__(
        self,
        requests: Sequence[RunRequest],
        device: torch.device,
        on_step: OnStep,
        wants_stop: Callable[[], bool] = lambda: False,
        machine: VirtualMachine | None = None,
        rounds: int = 1,
    ) -> None:
        self._requests, self._machine, self._rounds = requests, machine, rounds
        self._clock = WALL if machine is None else machine.clock
        self._device = device
        self._on_step, self._wants_stop = on_step, wants_stop
        self._done = 0
        self._base_bytes, self._peak_before = resident_bytes(), 0
        self._total = rounds * sum(request.last_step or 0 for request in requests)

    def run_all(self) -> list[RunResult]:
        """Executes the requests, one after the other or in rounds.

        Raises:
            InputError: If a plan or request cannot be executed.
            DeviceError: If the device cannot hold the tables.
            DivergedError: If training diverges.
        """
        runs = [self._run(request) for request in self._requests]
        results: list[RunResult] = []
        for together in [runs] if self._rounds > 1 else [[run] for run in runs]:
            is_first = not results
            results += _in_turn(together)
            if is_first:
                gc.freeze()  # what libraries have made by now stays: later collections need not look at it
        return results

    def _on_wire(self, rounds: Generator[None, None, RunResult]) -> Generator[None, None, RunResult]:
        """Rounds over the links that the machine has now, whatever others have that run between two of them."""
        wire = None if self._machine is None else self._machine.wire
        while True:
            if self._machine is not None:
                self._machine.wire = wire
            try:
                next(rounds)
            except StopIteration as end:
                result: RunResult = end.value
                return result
            yield

    def _run(self, request: RunRequest) -> Generator[None, None, RunResult]:
        """Executes a request, with a break after each round."""
        plan = read_plan(request.plan_path)
        batch_size = request.batch_size or plan.tables.batch_size
        plan = replace(plan, tables=replace(plan.tables, batch_size=batch_size))
        # On several machines, each was told by itself.
        told = {name: value for name, value in asdict(request).items() if not name.endswith("_path")}
        self._agree({name.replace("_", " "): value for name, value in told.items()})
        sharding = resumed_sharding(request, plan, dist.get_world_size())
        row_share = self._row_share(request, plan)
        check_memory(sharding.plan, dist.get_rank(), dist.get_world_size(), self._device, row_share)
        if request.verify_steps:
            check_verifiable(plan.tables)
        if self._machine is not None:
            self._machine.wire = wire_of(request, plan)
        timer = StepTimer(self._device, clock=self._clock)
        counter = None
        if request.access_path is not None or request.replan_every:
            # Where plans follow the data, most of what is counted is younger than the last decision.
            half_life = request.replan_every / 2 or HALF_LIFE
            counter = AccessCounter(plan.tables, half_life=half_life, seed=(request.seed, dist.get_rank()))
        engine = make_engine(request, sharding, self._device, timer, counter, row_share)
        try:
            result = yield from self._on_wire(self._measured(request, plan, sharding, engine, timer, counter))
            if self._machine is not None and self._machine.wire is not None:
                virtual = VirtualRun(
                    wire=self._machine.wire.comm.name, num_cores=self._machine.num_cores, row_share=row_share
                )
                result = replace(result, virtual=virtual)
            if counter is not None and request.access_path is not None and result.has_trained:
                counts = merged_counts(counter, _ROWS_OF_A_FILE)
                if counts is not None:
                    counts.write(Path(request.access_path), plan.tables, Path(request.plan_path).parent)
            return result
        finally:
            engine.close()
            if counter is not None:
                counter.close()
            gc.collect()

    def _measured(
        self,
        request: RunRequest,
        plan: ShardingPlan,
        sharding: Sharding,
        engine: EmbeddingEngine,
        timer: StepTimer,
        counter: AccessCounter | None,
    ) -> Generator[None, None, RunResult]:
        """Trains, with a break after each round; batches are those of the request's plan, whatever the sharding."""
        layers = plan.tables.dense or default_layers(engine.feature_dims, _num_dense(request))
        ranked = ranked_rows(plan, _row_orders(plan, request.plan_path))
        samples = self._samples(request, plan.tables, layers.num_dense_features, ranked)
        smooth = request.verify_steps > 0
        dense = DenseModel(layers, engine.feature_dims, request.seed, smooth=smooth).to(self._device)
        training = distributed_step(
            engine, plan.tables, dense, request.learning_rate, overlap=request.overlap, timer=timer
        )
        verification = None
        if request.verify_steps:
            verification = self._verified(request, plan, engine, training, layers)
        repair = IdRepair(plan.tables, request.on_bad_ids)
        in_files = isinstance(samples, FileSamples)
        feed = Feed(
            samples, self._device, training.batches_ahead, in_thread=in_files, repair=repair if in_files else None
        )
        with (
            self._saved(request, plan, sharding, engine, training) as saved,
            self._replanned(request, sharding, engine, counter) as replanning,
        ):
            loop = TrainingLoop(training, feed, timer, last=request.last_step, wants_stop=self._wants_stop, saved=saved)
            begun_at = loop.number
            self._done += begun_at
            with self._metrics(request, sharding.plan, engine, timer, begun_at) as metrics:
                steps, losses = yield from self._steps(request, loop, samples, saved, replanning, metrics)
        num_steps = request.verify_steps + loop.number - begun_at
        sent = engine.sent_bytes()
        sent_bytes = {name: sent[name] / max(1, num_steps) for name in SENT} if sent else {}
        executed = sharding.plan if replanning is None else replanning.plan
        timings = [timings for _, timings in steps]
        timing = _rank_timing(executed, engine.owners, self._device, timings, self._peak_bytes(), sent_bytes)
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, _Measured(timing, [span.ms for span, _ in steps], losses))
        if request.trace_path is not None and loop.last_samples is not None and not loop.is_stopped:
            _trace(request.trace_path, training, loop.last_samples)
        job = None
        if request.is_job:
            resumed_from = None if saved is None else saved.resumed_from
            learning_rate = training.optimizer.param_groups[0]["lr"]
            is_resumed_rate = resumed_from is not None and learning_rate != request.learning_rate
            skipped, first_skipped = samples.skipped if isinstance(samples, FileSamples) else (0, None)
            job = JobReport(
                trained_steps=loop.number,
                resumed_from=resumed_from,
                restarts=0,
                is_stopped=loop.is_stopped,
                skipped_lines=skipped,
                first_skipped=first_skipped,
                plan_changes=() if replanning is None else tuple(replanning.changes),
                resumed_plan=sharding.resumed,
                resumed_learning_rate=learning_rate if is_resumed_rate else None,
            )
        result = _summary(
            request, executed, engine.owners, dense.interaction, self._device, everybody, verification, job
        )
        bad_ids = torch.tensor(repair.num_bad, device=self._device)
        dist.all_reduce(bad_ids)
        return replace(result, bad_steps=training.num_bad, bad_ids=int(bad_ids))

    def _row_share(self, request: RunRequest, plan: ShardingPlan) -> float:
        """Share of the rows that have memory of their own: the least of all processes.

        Rows are shared where nobody asks for their values: in virtual time, on the thin engine without replica groups.
        """
        may_share = request.virtual_time and request.engine is Engine.THIN and not request.verify_steps
        if plan.replica_groups.num_groups > 1 or not may_share:
            if request.row_share is not None and request.row_share < 1:
                raise InvalidOptionError("must be 1 for plans with replica groups", field="row_share")
            return 1.0
        share = request.row_share or fitting_row_share(plan, dist.get_rank(), dist.get_world_size())
        least = torch.tensor([share], dtype=torch.float64)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return float(least)

    def _verified(
        self,
        request: RunRequest,
        plan: ShardingPlan,
        engine: EmbeddingEngine,
        training: TrainingStep,
        layers: DenseLayers,
    ) -> Verification | None:
        reference, orders = None, _row_orders(plan, request.plan_path)
        if dist.get_rank() == 0:
            untrained = DenseModel(layers, engine.feature_dims, request.seed, smooth=True)
            reference = Reference(plan, untrained, request, dist.get_world_size(), orders)
        ranked = ranked_rows(plan, orders)
        return compare(engine, training, reference, request, layers.num_dense_features, ranked)

    def _samples(
        self, request: RunRequest, tables: TableSet, num_dense: int, ranked: Mapping[str, IdsOfRanks]
    ) -> GeneratedSamples | FileSamples:
        """This process's samples; generated ones are others than those of the verification."""
        share = Share(batch_size=tables.batch_size, process=dist.get_rank(), num_processes=dist.get_world_size())
        if request.data_path is not None:
            path = Path(request.data_path)
            samples = file_samples(
                path,
                tables,
                num_dense,
                share,
                epochs=request.epochs,
                buffer=request.shuffle,
                seed=request.seed,
                is_balanced=request.balance,
            )
            self._agree({"data": samples.identity})
            return samples
        ids_per_batch = max(1.0, share.largest * sum(table.pooling_factor for table in tables.tables))
        num_different = min(request.last_step or NUM_BATCHES, NUM_BATCHES, max(1, int(MAX_DRAWN_IDS / ids_per_batch)))
        return GeneratedSamples(
            tables,
            num_dense,
            share,
            seed=request.seed,
            device=self._device,
            first=request.verify_steps,
            num_different=num_different,
            drift_every=request.drift_every,
            ranked=ranked,
        )

    @contextmanager
    def _saved(
        self,
        request: RunRequest,
        plan: ShardingPlan,
        sharding: Sharding,
        engine: EmbeddingEngine,
        training: TrainingStep,
    ) -> Iterator[SavedJob | None]:
        """Where a request's job is saved; None if it is not."""
        if request.checkpoints_path is None:
            yield None
            return
        from autoshard.runtime.checkpoints import Checkpoints, RandomState
        from autoshard.runtime.embeddings import ShardedEmbeddings

        assert isinstance(engine, ShardedEmbeddings), "the request refuses others"
        # Their states are saved, so they are told where they begin.
        own_seed = int(np.random.SeedSequence([request.seed, dist.get_rank()]).generate_state(1)[0])
        random.seed(own_seed)
        np.random.seed(own_seed)
        torch.manual_seed(own_seed)
        state: dict[str, Stateful] = {
            "embeddings": engine,
            "learning_rate": engine.optimizer,
            "dense": training.dense,
            "dense_optimizer": training.optimizer,
            "random": RandomState(),
        }
        with Checkpoints(request.checkpoints_path, keep=request.keep) as checkpoints:
            saved = SavedJob(checkpoints, request.checkpoint_every, state, plan, engine, training.dense)
            if sharding.resumed is ResumedPlan.ADOPTED:
                saved.adopt(sharding.plan, sharding.row_orders)
            yield saved

    def _agree(self, statements: Mapping[str, object]) -> None:
        check_alike(statements, dist.distributed_c10d._get_default_group(), self._device)

    def _peak_bytes(self) -> int:
        return max(self._peak_before, peak_bytes(self._device, self._base_bytes))

    def _make_heap_ready(self) -> None:
        """Between steps, in nobody's time; what it takes is in no peak."""
        with self._clock.uncounted():
            self._peak_before, resident = self._peak_bytes(), resident_bytes()
            here = processes_here(dist.get_rank(), dist.get_world_size())
            make_heap_ready(free_host_bytes() // (_READY_PART * len(here)))
            self._base_bytes += max(0, resident_bytes() - resident)

    @contextmanager
    def _replanned(
        self, request: RunRequest, sharding: Sharding, engine: EmbeddingEngine, counter: AccessCounter | None
    ) -> Iterator[JobReplanning | None]:
        """What changes a request's plan; None if nothing does."""
        if not request.replan_every:
            yield None
            return
        from autoshard.runtime.embeddings import ShardedEmbeddings

        assert isinstance(engine, ShardedEmbeddings), "the request refuses others"
        assert counter is not None, "lookups are counted where plans are changed"
        settings = ReplanSettings(every=request.replan_every, horizon=request.replan_horizon, seed=request.seed)
        plan, orders = sharding.plan, sharding.row_orders
        with closing(
            JobReplanning(engine, counter, plan, orders, settings, request.last_step, self._device)
        ) as replanning:
            yield replanning

    @contextmanager
    def _metrics(
        self, request: RunRequest, plan: ShardingPlan, engine: EmbeddingEngine, timer: StepTimer, number: int
    ) -> Iterator[JobMetrics | None]:
        """Measures of a request while it runs; None if they are not wanted."""
        if request.metrics_path is None:
            yield None
            return
        from autoshard.runtime.training.metrics import JobMetrics  # TensorBoard takes a second to import

        planned_bytes = needed_bytes(plan, dist.get_rank(), dist.get_world_size(), self._device)
        folder, every = Path(request.metrics_path), request.metrics_every
        metrics = JobMetrics(
            folder, every, self._device, timer, engine.sent_bytes, planned_bytes, self._peak_bytes, number
        )
        try:
            yield metrics
        finally:
            metrics.close()

    def _steps(
        self,
        request: RunRequest,
        loop: TrainingLoop,
        samples: GeneratedSamples | FileSamples,
        saved: SavedJob | None,
        replanning: JobReplanning | None,
        metrics: JobMetrics | None,
    ) -> Generator[None, None, tuple[list[tuple[Span, Timings]], list[float]]]:
        """Trains, with a break after each round.

        Returns:
            The last measured steps, and the loss of each.
        """
        counted: deque[tuple[Span, Timings]] = deque(maxlen=_MAX_MEASURED)
        # A loss that is kept where the step left it, between its activations, keeps their memory from being one block
        # again: each further step then takes memory anew, for as long as losses are kept.
        losses_M, num_counted = torch.empty(_MAX_MEASURED, dtype=torch.float32, device=self._device), 0
        for turn in range(self._rounds):
            if turn:
                loop.go_on(request.last_step)
            warm_at = loop.number + request.warmup_steps
            for trained in loop:
                if trained.number > warm_at:
                    counted.append((trained.span, trained.timings))
                    losses_M[num_counted % _MAX_MEASURED] = trained.outcome.loss
                    num_counted += 1
                elif trained.number == warm_at and self._device.type == "cpu" and not request.is_job:
                    self._make_heap_ready()
                if replanning is not None:
                    replanning.after(trained.number)
                    if saved is not None and saved.plan is not replanning.plan:
                        saved.adopt(replanning.plan, replanning.row_orders)
                if metrics is not None:
                    metrics(trained)
                self._done += 1
                total = self._total
                if request.last_step is None and isinstance(samples, FileSamples):
                    total += round(loop.number / max(samples.share_read, 1e-9))
                self._on_step(self._done, max(self._done, total))
            yield
        if metrics is not None:
            metrics.write(loop.number)
        loop.wait()
        if request.profile_path is not None and counted:
            last = list(counted)[-_PROFILED_STEPS:]
            if (everybody := gather_steps(rank_steps(last))) is not None:
                atomic_write(Path(request.profile_path), json.dumps(chrome_trace(everybody)))
        losses = losses_M.roll(-num_counted).tolist()[_MAX_MEASURED - len(counted) :]
        return list(counted), losses


def _in_turn(runs: Sequence[Generator[None, None, RunResult]]) -> list[RunResult]:
    """Lets runs take turns until all of them have ended."""
    ended: dict[int, RunResult] = {}
    while len(ended) < len(runs):
        for number, run in enumerate(runs):
            if number not in ended:
                try:
                    next(run)
                except StopIteration as end:
                    ended[number] = end.value
    return [ended[number] for number in range(len(runs))]


def _trace(path: str, training: TrainingStep, samples: Samples) -> None:
    """Takes two more steps; process 0 writes what torch's profiler saw of them."""
    with profile() if dist.get_rank() == 0 else nullcontext() as found:
        training(samples, [samples])
        training(samples)
    if found is not None:
        found.export_chrome_trace(path)


def wire_of(request: RunRequest, plan: ShardingPlan) -> Wire:
    """What collectives take in virtual time: on the topology that is asked for, as its step is priced.

    Raises:
        ModelError: If there is a trained model of collectives, and it is damaged.
    """
    topology = plan.topology if request.topology_path is None else load_topology(request.topology_path)
    registry = None if request.registry_path is None else folder_of(request.registry_path)
    measured = step_models(topology.device, registry).comm
    if measured is None:
        return Wire(topology, AlphaBetaComm())
    # What processors compute for a collective is in the time that was measured; beside it they compute nothing else.
    return Wire(topology, measured, GLOO_WORK if device_family(topology.device) == "cpu" else None)


@contextmanager
def open_session(
    requests: Sequence[RunRequest],
    folder: Path,
    on_step: OnStep,
    wants_stop: Callable[[], bool] = lambda: False,
    rounds: int = 1,
) -> Iterator[Session]:
    """Joins the process group that torchrun's environment describes, and leaves it at the end.

    Args:
        requests: What to execute, all of it in virtual time, or none.
        folder: That the processes of this machine share.
        on_step: Called after every step.
        wants_stop: Whether a training job is to save and end.
        rounds: As `Session` has it.

    Raises:
        DeviceError: If CUDA is asked for and there is no GPU for each process.
    """
    if requests[0].virtual_time:
        machine = VirtualMachine(folder, int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]))
        dist.init_process_group(BACKEND, timeout=_SHARED_CORE_TIMEOUT)
        machine.clock.start()
        try:
            yield Session(requests, torch.device("cpu"), on_step, wants_stop, machine, rounds)
        finally:
            machine.clock.stop()
        dist.destroy_process_group()
        return
    device = choose_device({request.device for request in requests})
    if device.type == "cuda":
        # Collectives are launched in one order on all processes, in which NCCL runs them then (`Turn`).
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    with joined(device, _COLLECTIVE_TIMEOUT):
        yield Session(requests, device, on_step, wants_stop, rounds=rounds)


def make_engine(
    request: RunRequest,
    sharding: Sharding,
    device: torch.device,
    timer: StepTimer | None = None,
    counter: AccessCounter | None = None,
    row_share: float = 1.0,
) -> EmbeddingEngine:
    """The engine that a request names, for the plan's batch size, over all processes."""
    settings, plan = FusedSettings.of(request, seed=request.seed, row_share=row_share), sharding.plan
    if request.engine is Engine.TORCHREC:
        from autoshard.runtime.torchrec_engine import TorchRecEmbeddings

        return TorchRecEmbeddings(plan, settings, device=device, timer=timer)
    from autoshard.runtime.embeddings import ShardedEmbeddings

    return ShardedEmbeddings(
        plan,
        settings,
        device=device,
        timer=timer,
        row_orders=sharding.row_orders,
        counter=counter,
    )


def resumed_sharding(request: RunRequest, plan: ShardingPlan, num_processes: int) -> Sharding:
    """The sharding that a request's processes start with.

    A job keeps the plan that it has adopted, if it was begun with the request's, on as many processes.

    Args:
        request: The request.
        plan: Its plan, for its batch size.
        num_processes: Processes that start.

    Raises:
        InputError: If the last checkpoint, its plan or a row order of that cannot be read.
    """
    own = Sharding(plan=plan, row_orders=_row_orders(plan, request.plan_path))
    folders = [] if request.checkpoints_path is None else committed_folders(Path(request.checkpoints_path))
    if not folders:
        return own
    from autoshard.runtime.checkpoints import Checkpoint

    last = Checkpoint(folders[-1])
    saved, now = last.manifest, digest(plan_to_json(plan))
    if saved.begun_with is None or saved.plan_digest == now:
        return own
    if saved.begun_with != now:
        return replace(own, resumed=ResumedPlan.PLAN_CHANGED)
    if saved.num_processes != num_processes:
        return replace(own, resumed=ResumedPlan.PROCESSES_CHANGED)
    orders = _row_orders(last.plan, last.folder / PLAN_NAME)
    return Sharding(plan=last.plan, row_orders=orders, resumed=ResumedPlan.ADOPTED)


def _num_dense(request: RunRequest) -> int:
    """Dense features of a sample, for plans that describe no dense layers."""
    return DEFAULT_DENSE_FEATURES if request.data_path is None else open_samples(Path(request.data_path)).num_dense


def _row_orders(plan: ShardingPlan, path: str | Path) -> dict[str, torch.Tensor]:
    """Row orders of tables whose order is not that of their ids.

    Tables that are cut by access rank and have no order are in that of their ids, which generated batches follow.
    """
    return {name: torch.from_numpy(ids_N) for name, ids_N in read_row_orders(plan, path).items()}


def _summary(
    request: RunRequest,
    plan: ShardingPlan,
    owners: Ownership,
    interaction: str,
    device: torch.device,
    everybody: Sequence[_Measured],
    verification: Verification | None,
    job: JobReport | None,
) -> RunResult:
    steps_S = np.sort(np.array([one.steps_ms for one in everybody]).max(axis=0))
    num_measured = len(steps_S)  # none where a job is resumed at its end
    step_ms = float(np.median(steps_S)) if num_measured else 0.0
    low_ms, high_ms = _median_interval(steps_S) if num_measured else (None, None)
    losses_S = torch.tensor([one.losses for one in everybody], dtype=torch.float64).mean(dim=0)
    good_S = losses_S[losses_S.isfinite()]
    is_met = request.on_bad_gradients in (BadGradients.SKIP, BadGradients.CLIP)
    if num_measured and len(good_S) < (1 if is_met else len(losses_S)):
        raise DivergedError(f"training diverged: the loss became {float(losses_S[-1])}")
    ranks = tuple(one.timing for one in everybody)
    kernel_ms = [rank.kernel_ms for rank in ranks]
    batch_size = plan.tables.batch_size
    return RunResult(
        plan_path=request.plan_path,
        engine=request.engine,
        device=Device(device.type),
        backend=dist.get_backend(),
        num_processes=dist.get_world_size(),
        plan_world_size=plan.topology.world_size,
        folded=owners.is_folded,
        batch_size=batch_size,
        steps=num_measured,
        warmup_steps=request.warmup_steps,
        seed=request.seed,
        interaction=interaction,
        step_ms=step_ms,
        samples_per_s=batch_size / step_ms * 1e3 if step_ms else 0.0,
        balance=min(kernel_ms) / max(kernel_ms) if num_measured else 0.0,
        first_loss=float(good_S[0]) if num_measured else None,
        last_loss=float(good_S[-1]) if num_measured else None,
        ranks=ranks,
        verification=verification,
        overlap=request.overlap,
        job=job,
        step_low_ms=low_ms,
        step_high_ms=high_ms,
    )


def _rank_timing(
    plan: ShardingPlan,
    owners: Ownership,
    device: torch.device,
    steps: Sequence[Timings],
    memory_bytes: int,
    sent_bytes: Mapping[str, float],
) -> RankTiming:
    """What this process took, medians over the measured steps; 0 where there are none.

    Args:
        plan: The plan that was executed last.
        owners: Who holds what in a replica group.
        device: This process's device.
        steps: What was counted in each.
        memory_bytes: As `RankTiming` has it.
        sent_bytes: The same.
    """
    process, order = dist.get_rank(), GroupOrder.of(plan.replica_groups, dist.get_world_size())
    group = order.group_of(process)
    place = order.groups[group].index(process)
    parts, collectives = [one.parts for one in steps], [one.collectives for one in steps]
    part_ms: dict[str, Any] = {part: _median([one[part] for one in parts]) for part in Part}
    medians = {
        kind: CollectiveTime(
            serialised_ms=_median([one[kind].serialised_ms for one in collectives]),
            exposed_ms=_median([one[kind].exposed_ms for one in collectives]),
        )
        for kind in StepCollective
    }
    work_ms = {part: _median([one.work_ms[part] for one in steps]) for part in StepPart}
    return RankTiming(
        process=process,
        plan_ranks=tuple(
            plan.replica_groups.world_ranks(rank, plan.topology)[group] for rank in owners.plan_ranks_of(place)
        ),
        num_tables=len(owners.tables_of(place)),
        **part_ms,
        memory_bytes=memory_bytes,
        sent_bytes=sent_bytes,
        collectives={kind: one for kind, one in medians.items() if one.serialised_ms > 0},
        work_ms=work_ms if device.type == "cpu" else {},
    )


def _median(values: Sequence[float]) -> float:
    """The lower median; 0 of no values."""
    return median_low(values) if values else 0.0


def _median_interval(sorted_S: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, float]:
    """The 95% interval of the median, whatever the distribution of the values: as many of them as lie beside it."""
    count = len(sorted_S)
    aside = _95_PERCENT * count**0.5 / 2
    low, high = int(max(0, np.floor(count / 2 - aside))), int(min(count - 1, np.ceil(count / 2 + aside)))
    return float(sorted_S[low]), float(sorted_S[high])
