"""Collecting: measures things of one kind for a while and appends their samples to a store."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from dataclasses import asdict, fields
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Generic

from autoshard.core.errors import AutoshardError
from autoshard.formats.stores.measured_samples import machine_columns
from autoshard.formats.stores.sample_store import SampleStore, SampleT
from bench.collecting.collection import CollectedSamples
from bench.collecting.options import SampleKind
from bench.collecting.sample_log import Advance, SampleLog
from bench.collecting.set_queue import ChosenT, Queued, SetQueue, StreamPosition
from bench.measuring.attempts import Timing
from bench.measuring.provenance import Machine
from bench.measuring.rounds import GroupHarness, ItemT, ResultT

#: Sets that may fail one after the other before it is taken to be the device's fault.
_MOST_FAILURES = 100
#: Sets of the first pass of a run with a time limit: nothing is known yet of how long they take.
_FIRST_SETS = 8


class CollectedKind(ABC, Generic[ChosenT, ItemT, ResultT, SampleT]):
    """A kind of samples that a harness measures: what is measured, how it is told apart, and its record.

    Args of the constructor:
        machine: Where it is measured.

    Attributes:
        kind: Its name.
        seconds_per_file: Samples are written this often: what a killed run can lose.
        samples: How they are stored.
    """

    kind: ClassVar[SampleKind]
    seconds_per_file: ClassVar[float]
    samples: SampleStore[SampleT]

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

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

    def reason(self, error: AutoshardError) -> str:
        """Why something could not be measured, as reports tell it."""
        return str(error)

    @classmethod
    def collect(
        cls,
        harness: GroupHarness[ItemT, Any, ResultT],
        chosen: Iterator[ChosenT],
        store: Path,
        *,
        num_samples: int | None = None,
        seconds: float | None = None,
        seconds_per_file: float | None = None,
        position: StreamPosition | None = None,
        advance: Advance = lambda *_: None,
        on_file: Callable[[Path], None] = lambda _: None,
    ) -> CollectedSamples:
        """Measures and appends to a store, until there are enough samples or time is up.

        What was measured before on a device of this name with these versions is left out. What cannot be measured is
        left out and counted; SIGTERM ends the run if `termination_raised` is in force.

        Args:
            harness: Measures.
            chosen: What to measure; ends the run when it runs out.
            store: Where samples go.
            num_samples: Samples to add; None for no limit.
            seconds: Time to use: no group is begun that would take longer, but for the first. None for no limit.
            seconds_per_file: The kind's own when left out.
            position: Where in their stream the sets start; what is done is saved with the samples.
            advance: Told how many samples have just been measured, and how long it took.
            on_file: Told of every file that has been written.

        Raises:
            SampleStoreError: If the store cannot be read or written.
            FormatError: If the store is of another version.
            DeviceError: If nothing can be measured.
        """
        per_file = cls.seconds_per_file if seconds_per_file is None else seconds_per_file
        log = SampleLog(cls.samples, store, per_file, position=position, on_file=on_file, advance=advance)
        return _Run(cls(harness.machine), harness, log).measure(chosen, num_samples, seconds)

    def recorded(self, measurement: Timing, source: str) -> dict[str, Any]:
        """Fields of a sample by name, those of `TimedSample`: when, where, with which software, why, and how long."""
        return {
            "collected_at": datetime.now(UTC),
            "device": self.machine.device.key,
            "device_name": self.machine.device.name,
            "num_threads": self.machine.num_threads,
            "source": source,
            **asdict(self.machine.software),
            **machine_columns(self.machine.hardware),
            **{item.name: getattr(measurement, item.name) for item in fields(Timing)},
        }


class _Run(Generic[ChosenT, ItemT, ResultT, SampleT]):
    """One run of a collector."""

    def __init__(
        self,
        kind: CollectedKind[ChosenT, ItemT, ResultT, SampleT],
        harness: GroupHarness[ItemT, Any, ResultT],
        log: SampleLog[SampleT],
    ) -> None:
        self._kind, self._harness, self._log = kind, harness, log
        self._num_failed_in_row = 0
        self._started = time.monotonic()
        self._taken: dict[int, Queued[ChosenT]] = {}

    def measure(self, chosen: Iterator[ChosenT], num_samples: int | None, seconds: float | None) -> CollectedSamples:
        """See `CollectedKind.collect`."""
        clock = GroupClock(math.inf if seconds is None else self._started + seconds)
        queue = SetQueue(
            chosen,
            position=self._log.position,
            known=self._kind.known(self._log.store),
            identity=self._kind.identity,
            is_over=clock.is_past,
        )
        with self._log.recording():
            # Sets that cannot be measured leave room for others, so one pass may not be enough.
            while self._measure_pass(islice(queue, self._num_wanted(num_samples, clock)), clock):
                pass
        return self._log.collection(
            self._kind.kind, self._harness.device.key, skipped=queue.skipped, timed_share=self._harness.timed_share
        )

    def _num_wanted(self, num_samples: int | None, clock: GroupClock) -> int | None:
        """Sets of the next pass: a few until it is known how long one takes, then what the time left is enough for."""
        done = self._log.num_samples
        numbers = [] if num_samples is None else [num_samples - done]
        if clock.seconds_left < math.inf:
            took = time.monotonic() - self._started
            numbers.append(max(1, int(clock.seconds_left / took * done)) if done else _FIRST_SETS)
        return min(numbers, default=None)

    def _measure_pass(self, queued: Iterator[Queued[ChosenT]], clock: GroupClock) -> bool:
        """Measures what is queued; whether there was anything and time is left."""
        self._taken.clear()
        any_taken = False

        def items() -> Iterator[ItemT]:
            nonlocal any_taken
            for index, one in enumerate(queued):
                any_taken = True
                self._taken[index] = one
                yield self._kind.item(one.chosen)

        for index, result in self._harness.measure_each(items(), on_skip=self._skip, is_over=clock.is_over):
            one = self._taken.pop(index)
            self._num_failed_in_row = 0
            self._log.add(self._kind.sample(result, one.chosen.source), one.chosen.source, result, one.position)
            self._log.write_when_due()
            self._log.advance(1)
        return any_taken and not clock.is_past()

    def _skip(self, index: int, error: AutoshardError) -> None:
        one = self._taken.pop(index)
        self._log.fail(one.chosen.source, self._kind.reason(error), place=one.position)
        self._num_failed_in_row += 1
        if self._num_failed_in_row >= _MOST_FAILURES:
            raise error


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
