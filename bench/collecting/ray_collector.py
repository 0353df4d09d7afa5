"""Collecting on a Ray cluster: one worker per GPU measures, this process chooses the sets and writes the samples.

Nothing but this process needs the store, so the cluster needs no file system in common.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from types import ModuleType
from typing import Any

from autoshard import console
from autoshard.core.errors import DeviceError, ExecutionError
from autoshard.formats.stores.samples import KERNEL_SAMPLES, Sample
from autoshard.ray_library import connect, import_ray
from bench.collecting.collection import CollectedSamples
from bench.collecting.kernels import KernelKind
from bench.collecting.options import CollectOptions, SampleKind
from bench.collecting.run import check_names, check_store, set_source
from bench.collecting.sample_log import Advance, SampleLog
from bench.collecting.set_queue import Queued, SetQueue, StreamPosition
from bench.collecting.store_lock import CollectorBusyError, CollectorLock, Measuring, device_claimed
from bench.kernels.harness import Harness, Settings
from bench.measuring.devices import find_device
from bench.measuring.provenance import Machine
from bench.sampling.stream import ChosenSet, stream_sets

#: Time that a batch of sets should take a worker: what is lost with one that dies.
_BATCH_SECONDS = 5.0
_FIRST_BATCH = 4
_LARGEST_BATCH = 96
#: Times that a set is tried: one that kills its worker twice is to blame itself.
_MOST_TRIES = 2
#: Deaths per worker after which it is given up.
_MOST_DEATHS = 3
_POLL_S = 0.5
#: Time that is left to batches in hand when the time is up.
_GRACE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResult:
    """What became of a batch of sets, by their places in it."""

    samples: dict[int, Sample]
    failures: dict[int, str]


class KernelWorker:
    """Measures batches of sets on one device; runs as an actor on the cluster.

    Args of the constructor:
        device: `cpu` or `cuda`; Ray shows an actor its own GPU only.
        settings: How to measure; the device's usual ones for collecting when left out.
        num_rounds: Rounds in which each set is measured, where settings are left out.
    """

    def __init__(self, device: str, settings: Settings | None = None, num_rounds: int | None = None) -> None:
        found = find_device(device)
        self._device, self._claims = found, ExitStack()
        self._harness = Harness(found, Settings.for_collecting(found, num_rounds) if settings is None else settings)
        self._kind = KernelKind(self._harness.machine)

    def machine(self) -> Machine:
        """Where this measures; from now on, `collect` on this host does not measure there.

        Raises:
            CollectorBusyError: If it does.
        """
        self._claims.enter_context(device_claimed(self._device, Measuring.RAY))
        return self._kind.machine

    def measure(self, batch: list[Queued[ChosenSet]]) -> WorkerResult:
        """Measures sets; those that cannot be are told with the reason."""
        failures: dict[int, str] = {}

        def skip(index: int, error: Exception) -> None:
            failures[index] = str(error)

        results = self._harness.measure_each((item.chosen.shards for item in batch), on_skip=skip)
        samples = {index: self._kind.sample(result, batch[index].chosen.source) for index, result in results}
        return WorkerResult(samples=samples, failures=failures)


def collect_on_ray(
    options: CollectOptions,
    advance: Advance = lambda *_: None,
    settings: Settings | None = None,
) -> tuple[CollectedSamples, ...]:
    """Measures kernels on all workers of a Ray cluster and appends the samples to a store of this machine.

    Each worker gets a stream of sets of its own. When one dies, its sets go to the next batch of its successor; a set
    with which two workers died is counted as failed.

    Args:
        options: What to do; a cluster that is started here ends with this call.
        advance: Told how many samples have just arrived, and how long it took.
        settings: How workers measure; the usual ones of their devices when left out.

    Raises:
        InvalidOptionError: If Ray is not installed.
        ExecutionError: If there is no cluster at the address, or workers keep dying.
        DeviceError: If the cluster has no GPU and `device` is `cuda`, another collector feeds this store from
            Ray, or `collect` measures on the hosts of all workers.
        SampleStoreError: If the store cannot be read or written.
        FormatError: If the store is of another version.
    """
    ray = import_ray()
    check_names(options)
    with CollectorLock(options.store, "ray"):
        check_store(options.store)
        with _cluster(ray, options.ray_address, options.workers):
            return (_Driver(ray, options, advance, settings).run(),)


@contextmanager
def _cluster(ray: ModuleType, address: str, num_workers: int | None) -> Iterator[None]:
    connect(ray, address, num_workers)
    try:
        yield
    finally:
        ray.shutdown()


@dataclass(slots=True)
class _Seat:
    """One worker's place: its actor, which may be replaced, and the sets that it has yet to measure."""

    index: int
    actor: Any
    queue: SetQueue[ChosenSet] | None = None
    again: deque[Queued[ChosenSet]] = field(default_factory=deque)
    batch: list[Queued[ChosenSet]] = field(default_factory=list)
    sent: float = 0.0
    size: int = _FIRST_BATCH
    num_deaths: int = 0


class _Driver:
    """Hands out sets and gathers samples."""

    def __init__(self, ray: ModuleType, options: CollectOptions, advance: Advance, settings: Settings | None) -> None:
        self._ray, self._options, self._advance = ray, options, advance
        self._on_gpus, num_workers = self._workers()
        self._settings = settings
        self._log = SampleLog(KERNEL_SAMPLES, options.store, KernelKind.seconds_per_file)
        self._tries: Counter[tuple[int, int]] = Counter()
        self._known: dict[Machine, set[str]] = {}
        self._devices: dict[str, None] = {}
        self._seats = [_Seat(index, self._actor()) for index in range(num_workers)]
        self._running: dict[Any, _Seat] = {}
        self._busy: CollectorBusyError | None = None

    def run(self) -> CollectedSamples:
        """Until there are enough samples, or time is up."""
        console.log(f"Measuring on {len(self._seats)} workers of a Ray cluster.")
        with self._log.recording():
            for seat in self._seats:
                self._running[seat.actor.machine.remote()] = seat
            self._gather()
        if self._busy is not None and not self._devices:
            raise self._busy
        queues = [seat.queue for seat in self._seats if seat.queue is not None]
        skipped = sum((queue.skipped for queue in queues), Counter[str]())
        return self._log.collection(SampleKind.KERNELS, ", ".join(self._devices), skipped=skipped)

    def _workers(self) -> tuple[bool, int]:
        """Whether workers have GPUs, and how many there are."""
        resources = self._ray.cluster_resources()
        num_gpus, num_cores = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
        on_gpus = self._options.device == "cuda" or (self._options.device == "auto" and num_gpus > 0)
        available = num_gpus if on_gpus else num_cores
        if not available:
            raise DeviceError(
                "the Ray cluster has no GPU; `--device cpu` measures on its processors"
                if on_gpus
                else "the Ray cluster has no processors for workers"
            )
        return on_gpus, min(available, self._options.workers or available)

    def _actor(self) -> Any:
        kinds = {"num_gpus": 1, "num_cpus": 0} if self._on_gpus else {"num_cpus": 1}
        worker = self._ray.remote(**kinds, max_restarts=0)(KernelWorker)
        return worker.remote("cuda" if self._on_gpus else "cpu", self._settings, self._options.rounds)

    def _gather(self) -> None:
        grace = self._options.deadline + _GRACE_S
        while self._running and time.monotonic() < grace:
            ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=_POLL_S)
            for reference in ready:
                seat = self._running.pop(reference)
                try:
                    answer = self._ray.get(reference)
                except self._ray.exceptions.RayActorError:
                    self._replace(seat)
                    continue
                except self._ray.exceptions.RayTaskError as error:
                    if isinstance(error.cause, CollectorBusyError):
                        self._busy = error.cause
                        console.log(f"A worker is left out: {error.cause}")
                        continue
                    raise error.cause if isinstance(error.cause, Exception) else ExecutionError(str(error)) from error
                if isinstance(answer, Machine):
                    self._admit(seat, answer)
                else:
                    self._take(seat, answer)
                self._send(seat)
            self._log.write_when_due()

    def _admit(self, seat: _Seat, machine: Machine) -> None:
        """Opens the worker's stream, when it is new."""
        self._devices[machine.device.key] = None
        if seat.queue is not None:
            return
        kind = KernelKind(machine)
        if machine not in self._known:
            self._known[machine] = kind.known(self._options.store)
        sets = stream_sets(
            set_source(self._options, machine.device),
            seed=self._options.set_seed + seat.index,
            weights=self._options.shares,
        )
        seat.queue = SetQueue(
            sets,
            position=StreamPosition(),
            known=self._known[machine],
            identity=kind.identity,
            is_over=lambda: time.monotonic() >= self._options.deadline,
        )

    def _send(self, seat: _Seat) -> None:
        """Gives a worker its next batch, unless there is nothing left to do."""
        size = seat.size
        if self._options.num_samples is not None:
            in_hand = sum(len(other.batch) for other in self._seats)
            size = min(size, self._options.num_samples - self._log.num_samples - in_hand)
        is_first = seat.sent == 0.0
        if size < 1 or seat.queue is None or (time.monotonic() >= self._options.deadline and not is_first):
            return
        batch = [seat.again.popleft() for _ in range(min(size, len(seat.again)))]
        batch += islice(seat.queue, size - len(batch))
        if batch:
            seat.batch, seat.sent = batch, time.monotonic()
            self._running[seat.actor.measure.remote(batch)] = seat

    def _take(self, seat: _Seat, result: WorkerResult) -> None:
        batch, seat.batch = seat.batch, []
        took = time.monotonic() - seat.sent
        left = max(0.0, self._options.deadline - time.monotonic())
        seat.size = max(1, min(_LARGEST_BATCH, int(len(batch) / took * min(_BATCH_SECONDS, left))))
        for sample in result.samples.values():
            self._log.add(sample, sample.source, sample)
        for index, reason in result.failures.items():
            self._log.fail(batch[index].chosen.source, reason)
        self._advance(len(result.samples), took / len(self._seats))

    def _replace(self, seat: _Seat) -> None:
        """A worker has died: its sets are queued again, for another one in its place."""
        seat.num_deaths += 1
        for item in seat.batch:
            self._tries[seat.index, item.position] += 1
            if self._tries[seat.index, item.position] < _MOST_TRIES:
                seat.again.append(item)
            else:
                self._log.fail(item.chosen.source, "the worker that measured it died, twice")
        seat.batch = []
        if seat.num_deaths > _MOST_DEATHS:
            raise ExecutionError(f"a Ray worker died {seat.num_deaths} times; see the logs of the cluster")
        seat.size = max(1, seat.size // 2)
        seat.actor = self._actor()
        self._running[seat.actor.machine.remote()] = seat
