"""Collecting: measures things of one kind for a while and appends their samples to a store."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Protocol

from autoshard.core.errors import AutoshardError, SampleStoreError
from autoshard.formats.stores.sample_store import SampleStore, SampleT
from bench.collecting.set_queue import ChosenT, Queued, SetQueue, StreamPosition
from bench.collecting.termination import Terminated
from bench.measuring.attempts import Timing
from bench.measuring.provenance import Software
from bench.measuring.rounds import GroupHarness, ItemT, ResultT
from bench.store.writer import SampleWriter

#: Sets that may fail one after the other before it is taken to be the device's fault.
_MOST_FAILURES = 100
#: Sets of the first pass of a run with a time limit: nothing is known yet of how long they take.
_FIRST_SETS = 8

Advance = Callable[[int, float], None]


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
        timed_share: Share of the time that went to counted runs; None where it is not known.
        is_terminated: Whether SIGTERM ended the run.
    """

    files: tuple[Path, ...] = ()
    added: Mapping[str, int] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, int] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    num_noisy: int = 0
    num_measured_again: int = 0
    timed_share: float | None = None
    is_terminated: bool = False

    @property
    def num_samples(self) -> int:
        """Samples written."""
        return sum(self.added.values())


class CollectedKind(ABC, Generic[ChosenT, ItemT, ResultT, SampleT]):
    """What the collector has to know of a kind of samples."""

    samples: SampleStore[SampleT]
    harness: GroupHarness[ItemT, Any, ResultT]

    @abstractmethod
    def known(self, store: Path) -> set[Any]:
        """Identities of what a store holds, measured on this device by this software.

        Raises:
            SampleStoreError: If a file cannot be read.
            FormatError: If a file is not of this version.
        """

    @abstractmethod
    def identity(self, chosen: ChosenT) -> Hashable:
        """What tells whether two chosen ones are measured alike."""

    @abstractmethod
    def item(self, chosen: ChosenT) -> ItemT:
        """What is measured."""

    @abstractmethod
    def sample(self, result: ResultT, source: str) -> SampleT:
        """The record of a measurement."""


class Repeated(Protocol):
    """A measurement that may be the mean of several."""

    @property
    def num_attempts(self) -> int:
        """Measurements that it is the mean of."""
        ...

    @property
    def is_noisy(self) -> bool:
        """Whether its runs disagreed."""
        ...


class Tally:
    """Counts what a run added, and what failed."""

    def __init__(self) -> None:
        self._added: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._reasons: dict[str, None] = {}
        self._num_noisy = self._num_measured_again = 0

    def add(self, result: Repeated, source: str) -> None:
        """Counts a sample that has been written."""
        self._added[source] += 1
        self._num_noisy += result.is_noisy
        self._num_measured_again += result.num_attempts > 1

    def fail(self, source: str, reason: str) -> None:
        """Counts what could not be measured."""
        self._failed[source] += 1
        self._reasons[reason] = None

    def counts(self) -> dict[str, Any]:
        """Fields of a `Collection`."""
        return {
            "added": dict(self._added),
            "failed": dict(self._failed),
            "reasons": tuple(self._reasons),
            "num_noisy": self._num_noisy,
            "num_measured_again": self._num_measured_again,
        }


class CollectorRun(Generic[ChosenT, ItemT, ResultT, SampleT]):
    """One run of a collector.

    Args of the constructor:
        kind: What is measured.
        store: Where samples go.
        position: Where in their stream the sets start; what is done is saved with the samples.
        seconds_per_file: Samples are written this often: what a killed run can lose.
        on_file: Told of every file that has been written.
    """

    def __init__(
        self,
        kind: CollectedKind[ChosenT, ItemT, ResultT, SampleT],
        store: Path,
        position: StreamPosition,
        seconds_per_file: float,
        on_file: Callable[[Path], None] = lambda _: None,
    ) -> None:
        self._kind, self._store, self._position = kind, store, position
        self._writer = SampleWriter(kind.samples, store, seconds_per_file, on_file)
        self._tally = Tally()
        self._num_failed_in_row = 0
        self._started = time.monotonic()
        self._taken: dict[int, Queued[ChosenT]] = {}

    def measure(
        self, chosen: Iterator[ChosenT], num_samples: int | None, seconds: float | None, advance: Advance
    ) -> Collection:
        """Measures and appends to the store, until there are enough samples or time is up.

        What was measured before on a device of this name with these versions is left out. What cannot be measured is
        left out and counted; SIGTERM ends the run if `termination_raised` is in force.

        Args:
            chosen: What to measure; ends the run when it runs out.
            num_samples: Samples to add; None for no limit.
            seconds: Time to use: no group is begun that would take longer, but for the first. None for no limit.
            advance: Told how many samples have just been measured, and how long it took.

        Raises:
            SampleStoreError: If the store cannot be read or written.
            FormatError: If the store is of another version.
            DeviceError: If nothing can be measured.
        """
        self._started = time.monotonic()
        clock = GroupClock(math.inf if seconds is None else self._started + seconds)
        queue = SetQueue(
            chosen,
            position=self._position,
            known=self._kind.known(self._store),
            identity=self._kind.identity,
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
            **self._tally.counts(),
            files=tuple(self._writer.files),
            skipped=dict(queue.skipped),
            timed_share=self._kind.harness.timed_share,
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

    def _measure_pass(self, queued: Iterator[Queued[ChosenT]], clock: GroupClock, advance: Advance) -> bool:
        """Measures what is queued; whether there was anything and time is left."""
        taken, before = self._taken, time.monotonic()
        taken.clear()
        any_taken = False

        def items() -> Iterator[ItemT]:
            nonlocal any_taken
            for index, one in enumerate(queued):
                any_taken = True
                taken[index] = one
                yield self._kind.item(one.chosen)

        for index, result in self._kind.harness.measure_each(items(), on_skip=self._skip, is_over=clock.is_over):
            one = taken.pop(index)
            self._num_failed_in_row = 0
            self._writer.add(self._kind.sample(result, one.chosen.source), partial(self._on_written, result, one))
            if self._writer.write_when_due():
                self._position.save()
            now = time.monotonic()
            advance(1, now - before)
            before = now
        return any_taken and not clock.is_past()

    def _on_written(self, result: ResultT, one: Queued[ChosenT]) -> None:
        self._tally.add(result, one.chosen.source)
        self._position.finish(one.position)

    def _skip(self, index: int, error: AutoshardError) -> None:
        one = self._taken.pop(index)
        self._tally.fail(one.chosen.source, str(error))
        self._position.finish(one.position)
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


def recorded(
    measurement: Timing, source: str, harness: GroupHarness[Any, Any, Any], software: Software
) -> dict[str, Any]:
    """Fields that samples of kernels and of dense layers have in common."""
    return {
        "collected_at": datetime.now(UTC),
        "device": harness.device.key,
        "device_name": harness.device.name,
        "num_threads": harness.num_threads,
        "source": source,
        **asdict(software),
        **{item.name: getattr(measurement, item.name) for item in fields(Timing)},
    }
