"""Collecting: measures sets of shards for a while and appends them to a store."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from autoshard.core import LocalShard
from autoshard.core.errors import AutoshardError, SampleStoreError
from autoshard.formats.samples import Sample, measured_sets, write_samples
from bench.collecting.set_queue import QueuedSet, SetQueue, StreamPosition
from bench.collecting.termination import Terminated
from bench.devices import BenchDevice
from bench.harness import Harness, Measurement
from bench.provenance import Software, installed_software
from bench.sampling.stream import ChosenSet

#: Sets that may fail one after the other before it is taken to be the device's fault.
_MOST_FAILURES = 100
#: Sets of the first pass of a run with a time limit: nothing is known yet of how long they take.
_FIRST_SETS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """What a run of the collector added.

    Attributes:
        files: Files written, in order.
        added: Samples written, by source.
        skipped: Sets left out because the store held them, by source.
        failed: Sets that could not be measured, by source.
        reasons: Why they could not, each reason once.
        num_noisy: Samples among those written whose runs disagreed.
        num_measured_again: Samples among those written that took more than one attempt.
        seconds: Time taken.
        timed_share: Share of it that went to counted runs of kernels.
        is_terminated: Whether SIGTERM ended the run.
    """

    files: tuple[Path, ...]
    added: Mapping[str, int]
    skipped: Mapping[str, int]
    failed: Mapping[str, int]
    reasons: tuple[str, ...] = ()
    num_noisy: int = 0
    num_measured_again: int = 0
    seconds: float
    timed_share: float = 0.0
    is_terminated: bool = False

    @property
    def num_samples(self) -> int:
        """Samples written."""
        return sum(self.added.values())


def collect_samples(
    harness: Harness,
    sets: Iterator[ChosenSet],
    store: Path,
    *,
    num_samples: int | None = None,
    seconds: float | None = None,
    seconds_per_file: float = 10.0,
    position: StreamPosition | None = None,
    advance: Callable[[int, float], None] = lambda *_: None,
    on_file: Callable[[Path], None] = lambda _: None,
) -> Collection:
    """Measures sets and appends them to a store, until there are enough or time is up.

    Sets that were measured before on a device of this name with these versions of torch and FBGEMM are left out. A
    set that cannot be measured is left out and counted; SIGTERM ends the run if `termination_raised` is in force.

    Args:
        harness: Measures.
        sets: What to measure; ends the run when it runs out.
        store: Where samples go.
        num_samples: Samples to add; None for no limit.
        seconds: Time to use: no group is begun that would take longer, but for the first. None for no limit.
        seconds_per_file: Samples are written this often: what a killed run can lose.
        position: Where in their stream the sets start; what is done is saved with the samples.
        advance: Told how many samples have just been measured, and how long it took.
        on_file: Told of every file that has been written.

    Raises:
        SampleStoreError: If the store cannot be read or written.
        FormatError: If the store is of another version.
        DeviceError: If no set can be measured.
    """
    run = _Run(harness, store, position or StreamPosition(), seconds_per_file, on_file)
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    return run.measure(sets, num_samples, deadline, advance)


class SampleWriter:
    """Samples that wait to be written, so that a store gets one file every few seconds rather than thousands.

    Args of the constructor:
        store: Where they go.
        seconds_per_file: Time between two files.
        on_file: Told of every file that has been written.
    """

    def __init__(self, store: Path, seconds_per_file: float, on_file: Callable[[Path], None] = lambda _: None) -> None:
        self.files: list[Path] = []
        self.added: Counter[str] = Counter()
        self.num_noisy = self.num_measured_again = 0
        self._store, self._seconds_per_file, self._on_file = store, seconds_per_file, on_file
        self._pending: list[tuple[Sample, Callable[[], None]]] = []
        self._written = time.monotonic()

    @property
    def num_samples(self) -> int:
        """Samples written or waiting."""
        return self.added.total() + len(self._pending)

    def add(self, sample: Sample, on_written: Callable[[], None]) -> None:
        """Takes a sample."""
        self._pending.append((sample, on_written))

    def write_when_due(self) -> bool:
        """Writes what waits if the last file is old enough; whether it did."""
        due = bool(self._pending) and time.monotonic() - self._written >= self._seconds_per_file
        if due:
            self.write()
        return due

    def write(self) -> None:
        """Writes what waits, one file for each device.

        Raises:
            SampleStoreError: If the store cannot be written.
        """
        for device in sorted({sample.device for sample, _ in self._pending}):
            batch = [(sample, on_written) for sample, on_written in self._pending if sample.device == device]
            # Taken off the list after the file is there: a run that is ended in between writes the same file again.
            self.files.append(write_samples(self._store, [sample for sample, _ in batch]))
            self._pending = [item for item in self._pending if item[0].device != device]
            for sample, on_written in batch:
                self.added[sample.source] += 1
                self.num_noisy += sample.is_noisy
                self.num_measured_again += sample.num_attempts > 1
                on_written()
            self._on_file(self.files[-1])
        self._written = time.monotonic()


class _Run:
    """One run of a collector."""

    def __init__(
        self,
        harness: Harness,
        store: Path,
        position: StreamPosition,
        seconds_per_file: float,
        on_file: Callable[[Path], None],
    ) -> None:
        self._harness, self._store, self._position = harness, store, position
        self._software = installed_software()
        self._writer = SampleWriter(store, seconds_per_file, on_file)
        self._failed: Counter[str] = Counter()
        self._reasons: dict[str, None] = {}
        self._num_failed_in_row = 0
        self._started = time.monotonic()
        self._taken: dict[int, QueuedSet] = {}

    def measure(
        self,
        sets: Iterator[ChosenSet],
        num_samples: int | None,
        deadline: float,
        advance: Callable[[int, float], None],
    ) -> Collection:
        self._started = time.monotonic()
        clock = GroupClock(deadline)
        queue = SetQueue(
            sets,
            position=self._position,
            known=known_sets(self._store, self._harness.device.name, self._software),
            device=self._harness.device.key,
            num_threads=num_threads_of(self._harness),
            is_over=clock.is_past,
        )
        is_terminated = False
        try:
            # Sets that cannot be measured leave room for others, so one pass may not be enough.
            while self._measure_pass(islice(queue, self._num_wanted(num_samples, clock)), clock, advance):
                pass
        except Terminated:
            is_terminated = True
        except SampleStoreError:
            raise  # what could not be written cannot be written now
        except BaseException:
            self._write()
            raise
        self._write()
        return Collection(
            files=tuple(self._writer.files),
            added=dict(self._writer.added),
            skipped=dict(queue.skipped),
            failed=dict(self._failed),
            reasons=tuple(self._reasons),
            num_noisy=self._writer.num_noisy,
            num_measured_again=self._writer.num_measured_again,
            seconds=time.monotonic() - self._started,
            timed_share=self._harness.timed_share,
            is_terminated=is_terminated,
        )

    def _num_wanted(self, num_samples: int | None, clock: GroupClock) -> int | None:
        """Sets of the next pass: a few until it is known how long one takes, then what the time left is enough for."""
        numbers = [] if num_samples is None else [num_samples - self._writer.num_samples]
        if clock.seconds_left < math.inf:
            took = time.monotonic() - self._started
            done = self._writer.num_samples
            numbers.append(max(1, int(clock.seconds_left / took * done)) if done else _FIRST_SETS)
        return min(numbers, default=None)

    def _measure_pass(
        self, queued: Iterator[QueuedSet], clock: GroupClock, advance: Callable[[int, float], None]
    ) -> bool:
        """Measures what is queued; whether there was anything and time is left."""
        taken, before = self._taken, time.monotonic()
        taken.clear()
        any_taken = False

        def shards() -> Iterator[tuple[LocalShard, ...]]:
            nonlocal any_taken
            for index, item in enumerate(queued):
                any_taken = True
                taken[index] = item
                yield item.chosen.shards

        for index, result in self._harness.measure_each(shards(), on_skip=self._skip, is_over=clock.is_over):
            item = taken.pop(index)
            self._num_failed_in_row = 0
            sample = to_sample(result, item.chosen.source, self._harness, self._software)
            self._writer.add(sample, lambda position=item.position: self._position.finish(position))  # type: ignore[misc]
            if self._writer.write_when_due():
                self._position.save()
            now = time.monotonic()
            advance(1, now - before)
            before = now
        return any_taken and not clock.is_past()

    def _skip(self, index: int, error: AutoshardError) -> None:
        item = self._taken.pop(index)
        self._failed[item.chosen.source] += 1
        self._reasons[str(error)] = None
        self._position.finish(item.position)
        self._num_failed_in_row += 1
        if self._num_failed_in_row >= _MOST_FAILURES:
            raise error

    def _write(self) -> None:
        self._writer.write()
        self._position.save()


class GroupClock:
    """Tells whether another group of sets fits into the time that is left, taking it to be as long as the last one.

    Args of the constructor:
        deadline: When the time is up, by the monotonic clock.
    """

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._begun: float | None = None

    @property
    def seconds_left(self) -> float:
        """Time left, at least 0; infinite without a deadline."""
        return max(0.0, self._deadline - time.monotonic())

    def is_over(self) -> bool:
        """Asked before every group; the first one is always measured."""
        now, last = time.monotonic(), self._begun
        self._begun = now
        return last is not None and now + (now - last) > self._deadline

    def is_past(self) -> bool:
        """Whether the time is up, and a group was begun."""
        return self._begun is not None and time.monotonic() >= self._deadline


def known_sets(store: Path, device_name: str, software: Software) -> set[str]:
    """Ids of the sets that a store holds of a device with the same versions of what runs the kernels.

    Raises:
        SampleStoreError: If a file cannot be read.
        FormatError: If a file is not of this version.
    """
    wanted = (device_name, software.torch_version, software.fbgemm_version)
    return {
        known.set_id
        for known in measured_sets(store)
        if (known.device_name, known.torch_version, known.fbgemm_version) == wanted
    }


def num_threads_of(harness: Harness) -> int:
    """Intra-op threads that samples of a harness name."""
    return 1 if harness.device.is_cuda else harness.settings.num_threads


def to_sample(measurement: Measurement, source: str, harness: Harness, software: Software) -> Sample:
    """The record of a measurement."""
    device: BenchDevice = harness.device
    clocks = measurement.clocks
    return Sample(
        collected_at=datetime.now(UTC),
        device=device.key,
        device_name=device.name,
        num_threads=num_threads_of(harness),
        source=source,
        shards=measurement.shards,
        forward_ms=measurement.forward_ms,
        backward_ms=measurement.backward_ms,
        forward_spread=measurement.forward_spread,
        backward_spread=measurement.backward_spread,
        reference_forward_ms=measurement.reference_forward_ms,
        reference_backward_ms=measurement.reference_backward_ms,
        num_rounds=measurement.num_rounds,
        num_attempts=measurement.num_attempts,
        is_noisy=measurement.is_noisy,
        sm_clock_mhz=0.0 if clocks is None or clocks.sm_mhz is None else float(clocks.sm_mhz),
        throttle_reasons="" if clocks is None else ",".join(clocks.throttle_reasons),
        **asdict(software),
    )
