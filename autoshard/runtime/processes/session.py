"""A set of processes that executes requests: devices, the process group, measured steps.

Shape suffixes: S measured steps, P processes, M measured quantities.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.profiler import profile

from autoshard.core import DenseLayers, ShardingPlan
from autoshard.core.choices import Device, Engine
from autoshard.core.errors import ExecutionError
from autoshard.core.step import CollectiveTime, StepCollective
from autoshard.formats import read_plan
from autoshard.formats.row_orders import read_row_orders
from autoshard.runtime.engine.holdings import GroupOrder, Ownership
from autoshard.runtime.engine.rows.fused import FusedSettings
from autoshard.runtime.processes.devices import check_memory, choose_device
from autoshard.runtime.releases import all_gather
from autoshard.runtime.results import SENT, RankTiming, RunRequest, RunResult, Verification
from autoshard.runtime.timing import Part, Span, StepTimer, Timings
from autoshard.runtime.training.dense import DenseModel, default_layers
from autoshard.runtime.training.reference import Reference, check_verifiable, compare
from autoshard.runtime.training.step import EmbeddingEngine, TrainingStep, distributed_step
from autoshard.runtime.training.synthetic import IdsOfRanks, Samples, draw_samples, ranked_rows

#: Different batches that a measurement cycles through, drawn before it starts; fewer if they are large.
NUM_BATCHES = 8
#: 256 MiB of ids per process.
MAX_DRAWN_IDS = 2**25
#: How long a collective waits for a process that is silent but not dead.
_COLLECTIVE_TIMEOUT = timedelta(minutes=5)

OnStep = Callable[[int, int], None]


class Session:
    """The processes of one launch, and the device of this one.

    Args:
        requests: What to execute.
        device: This process's device.
        on_step: Called after every step, with the number of steps done and of all there are.
    """

    def __init__(self, requests: Sequence[RunRequest], device: torch.device, on_step: OnStep) -> None:
        self._requests = requests
        self._device = device
        self._on_step = on_step
        self._done = 0
        self._total = sum(request.warmup_steps + request.steps for request in requests)

    def run_all(self) -> list[RunResult]:
        """Executes the requests one after the other.

        Raises:
            InputError: If a plan or request cannot be executed.
            DeviceError: If the device cannot hold the tables.
            ExecutionError: If training diverges.
        """
        results = []
        for request in self._requests:
            results.append(self._run(request))
            if len(results) == 1:
                gc.freeze()  # what libraries have made by now stays: later collections need not look at it
        return results

    def _run(self, request: RunRequest) -> RunResult:
        plan = read_plan(request.plan_path)
        batch_size = request.batch_size or plan.tables.batch_size
        plan = replace(plan, tables=replace(plan.tables, batch_size=batch_size))
        check_memory(plan, dist.get_rank(), dist.get_world_size(), self._device)
        if request.verify_steps:
            check_verifiable(plan.tables)
        timer = StepTimer(self._device)
        engine = make_engine(request, plan, self._device, timer)
        try:
            return self._measured(request, plan, engine, timer)
        finally:
            engine.close()
            gc.collect()

    def _measured(
        self, request: RunRequest, plan: ShardingPlan, engine: EmbeddingEngine, timer: StepTimer
    ) -> RunResult:
        layers = plan.tables.dense or default_layers(engine.feature_dims)
        smooth = request.verify_steps > 0
        dense = DenseModel(layers, engine.feature_dims, request.seed, smooth=smooth).to(self._device)
        training = distributed_step(
            engine, plan.tables, dense, request.learning_rate, overlap=request.overlap, timer=timer
        )
        verification = None
        if request.verify_steps:
            verification = self._verified(request, plan, engine, training, layers)
        ranked = ranked_rows(plan, _row_orders(plan, request))
        batches = self._batches(request, engine, layers.num_dense_features, ranked)
        measured_SM = self._steps(request, training, batches, timer)
        num_steps = request.verify_steps + request.warmup_steps + request.steps
        sent = engine.sent_bytes()
        sent_E = measured_SM.new_tensor([sent[name] / num_steps for name in SENT] if sent else [])
        measured_SM = torch.cat([measured_SM, sent_E.expand(len(measured_SM), -1)], dim=1)
        measured_PSM = measured_SM.new_empty(dist.get_world_size(), *measured_SM.shape)
        all_gather(measured_PSM.view(-1, measured_SM.shape[1]), measured_SM)
        if request.trace_path is not None:
            _trace(request.trace_path, training, batches)
        return _summary(request, plan, engine.owners, dense.interaction, self._device, measured_PSM.cpu(), verification)

    def _verified(
        self,
        request: RunRequest,
        plan: ShardingPlan,
        engine: EmbeddingEngine,
        training: TrainingStep,
        layers: DenseLayers,
    ) -> Verification | None:
        reference = None
        if dist.get_rank() == 0:
            untrained = DenseModel(layers, engine.feature_dims, request.seed, smooth=True)
            reference = Reference(plan, untrained, request, dist.get_world_size(), _row_orders(plan, request))
        ranked = ranked_rows(plan, _row_orders(plan, request))
        return compare(engine, training, reference, request, layers.num_dense_features, ranked)

    def _batches(
        self, request: RunRequest, engine: EmbeddingEngine, num_dense: int, ranked: Mapping[str, IdsOfRanks]
    ) -> list[Samples]:
        """Batches of this process that verification has not seen."""
        tables, B = engine.owners.tables, engine.local_batch_size
        ids_per_batch = max(1.0, B * sum(table.pooling_factor for table in tables.tables))
        count = min(request.warmup_steps + request.steps, NUM_BATCHES, max(1, int(MAX_DRAWN_IDS / ids_per_batch)))
        keys = ((request.seed, request.verify_steps + index, dist.get_rank()) for index in range(count))
        return [draw_samples(tables, num_dense, B, key, ranked).to(self._device) for key in keys]

    def _steps(
        self, request: RunRequest, training: TrainingStep, batches: Sequence[Samples], timer: StepTimer
    ) -> torch.Tensor:
        """Trains; returns step time, loss and parts of every measured step, shape (S, M).

        Steps follow each other as in a trainer: a GPU is waited for when all are done, not after each.
        """
        counted: list[tuple[Span, torch.Tensor, Timings]] = []
        num_steps = request.warmup_steps + request.steps
        for step in range(num_steps):
            samples = batches[step % len(batches)]
            until = min(step + 1 + training.batches_ahead, num_steps)
            following = [batches[one % len(batches)] for one in range(step + 1, until)]
            timer.take()
            begun = timer.mark()
            loss = training(samples, following).loss
            if step >= request.warmup_steps:
                counted.append((Span(begun, timer.mark()), loss, timer.take()))
            self._done += 1
            self._on_step(self._done, self._total)
        timer.wait()
        measured = [
            [step.ms, loss.item(), *timings.parts.values(), *_flat(timings.collectives.values())]
            for step, loss, timings in counted
        ]
        return torch.tensor(measured, dtype=torch.float64, device=self._device)


def _trace(path: str, training: TrainingStep, batches: Sequence[Samples]) -> None:
    """Takes two more steps; process 0 writes what torch's profiler saw of them."""
    with profile() if dist.get_rank() == 0 else nullcontext() as found:
        training(batches[0], [batches[-1]])
        training(batches[-1])
    if found is not None:
        found.export_chrome_trace(path)


@contextmanager
def open_session(requests: Sequence[RunRequest], on_step: OnStep) -> Iterator[Session]:
    """Joins the process group that torchrun's environment describes, and leaves it at the end.

    Raises:
        DeviceError: If CUDA is asked for and there is no GPU for each process.
    """
    device = choose_device({request.device for request in requests})
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # Collectives are launched in one order on all processes, in which NCCL runs them then (`Turn`).
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        dist.init_process_group("nccl", timeout=_COLLECTIVE_TIMEOUT, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=_COLLECTIVE_TIMEOUT)
    yield Session(requests, device, on_step)
    # Not after an error: a group whose peers are gone would wait for them.
    dist.destroy_process_group()


def make_engine(
    request: RunRequest, plan: ShardingPlan, device: torch.device, timer: StepTimer | None = None
) -> EmbeddingEngine:
    """The engine that a request names, for the plan's batch size, over all processes."""
    settings = FusedSettings.of(request, seed=request.seed)
    if request.engine is Engine.TORCHREC:
        from autoshard.runtime.torchrec_engine import TorchRecEmbeddings

        return TorchRecEmbeddings(plan, settings, device=device, timer=timer)
    from autoshard.runtime.embeddings import ShardedEmbeddings

    orders = _row_orders(plan, request)
    return ShardedEmbeddings(plan, settings, device=device, timer=timer, row_orders=orders)


def _row_orders(plan: ShardingPlan, request: RunRequest) -> dict[str, torch.Tensor]:
    """Row orders of tables whose order is not that of their ids.

    Tables that are cut by access rank and have no order are in that of their ids, which generated batches follow.
    """
    return {name: torch.from_numpy(ids_N) for name, ids_N in read_row_orders(plan, request.plan_path).items()}


def _summary(
    request: RunRequest,
    plan: ShardingPlan,
    owners: Ownership,
    interaction: str,
    device: torch.device,
    measured_PSM: torch.Tensor,
    verification: Verification | None,
) -> RunResult:
    step_ms = float(measured_PSM[:, :, 0].max(dim=0).values.median())
    medians_PM = measured_PSM.median(dim=1).values
    losses_S = measured_PSM[:, :, 1].mean(dim=0)
    if not losses_S.isfinite().all():
        raise ExecutionError(f"training diverged: the loss became {float(losses_S[-1])}")
    order = GroupOrder.of(plan.replica_groups, dist.get_world_size())
    places = {process: place for group in order.groups for place, process in enumerate(group)}
    first = 2 + len(Part)
    times_PC = medians_PM[:, first : first + 2 * len(StepCollective)]
    ranks = tuple(
        RankTiming(
            process=process,
            plan_ranks=tuple(
                plan.replica_groups.world_ranks(rank, plan.topology)[order.group_of(process)]
                for rank in owners.plan_ranks_of(places[process])
            ),
            num_tables=len(owners.tables_of(places[process])),
            **dict(zip(Part, medians_M[2 : 2 + len(Part)].tolist(), strict=True)),
            sent_bytes=dict(zip(SENT, medians_M[first + 2 * len(StepCollective) :].tolist(), strict=False)),
            collectives=_collective_times(times_PC[process].tolist()),
        )
        for process, medians_M in enumerate(medians_PM)
    )
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
        steps=request.steps,
        warmup_steps=request.warmup_steps,
        seed=request.seed,
        interaction=interaction,
        step_ms=step_ms,
        samples_per_s=batch_size / step_ms * 1e3,
        balance=min(kernel_ms) / max(kernel_ms),
        first_loss=float(losses_S[0]),
        last_loss=float(losses_S[-1]),
        ranks=ranks,
        verification=verification,
        overlap=request.overlap,
    )


def _flat(times: Iterable[CollectiveTime]) -> list[float]:
    """Pairs of serialised and exposed milliseconds."""
    return [ms for one in times for ms in (one.serialised_ms, one.exposed_ms)]


def _collective_times(times: Sequence[float]) -> dict[StepCollective, CollectiveTime]:
    """Of pairs of serialised and exposed milliseconds; without collectives that took no time."""
    return {
        one: CollectiveTime(serialised_ms=serialised_ms, exposed_ms=exposed_ms)
        for one, serialised_ms, exposed_ms in zip(StepCollective, times[::2], times[1::2], strict=True)
        if serialised_ms > 0
    }
