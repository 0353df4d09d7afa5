"""Samples on their way to a store, written every few seconds and counted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol

from autoshard.core.errors import SampleStoreError
from autoshard.formats.stores.sample_store import SampleStore, SampleT
from bench.collecting.collection import CollectedSamples
from bench.collecting.options import SampleKind, check_folder
from bench.collecting.set_queue import StreamPosition
from bench.collecting.termination import Terminated

#: Told how many samples have just been measured, and how long it took.
Advance = Callable[[int, float], None]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending(Generic[SampleT]):
    """A sample that is yet to be written; see `SampleLog.add`."""

    sample: SampleT
    source: str
    timing: Repeated | None
    place: int | None


class SampleLog(Generic[SampleT]):
    """Collects a run's samples, so that a store gets one file every few seconds rather than thousands, and counts them.

    Args of the constructor:
        samples: Kind of the samples.
        store: Where they go.
        seconds_per_file: Time between two files: what a killed run can lose.
        position: Where in a stream the samples come from; saved after every file. None to keep it nowhere.
        on_file: Told of every file that has been written.
        advance: Told how many samples have just been measured, and how long it took.

    Raises:
        SampleStoreError: If the store is there and is no folder.
    """

    def __init__(
        self,
        samples: SampleStore[SampleT],
        store: Path,
        seconds_per_file: float,
        *,
        position: StreamPosition | None = None,
        on_file: Callable[[Path], None] = lambda _: None,
        advance: Advance = lambda *_: None,
    ) -> None:
        check_folder(store)
        self.store, self.position = store, position or StreamPosition()
        self._samples, self._seconds_per_file = samples, seconds_per_file
        self._on_file, self._advance = on_file, advance
        self._pending: list[_Pending[SampleT]] = []
        self._files: list[Path] = []
        self._added: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._reasons: dict[str, None] = {}
        self._num_noisy = self._num_measured_again = 0
        self._is_terminated = False
        self._written = self._advanced = time.monotonic()

    @property
    def num_samples(self) -> int:
        """Samples written or waiting."""
        return self._added.total() + len(self._pending)

    def add(self, sample: SampleT, source: str, timing: Repeated | None = None, place: int | None = None) -> None:
        """Takes a sample, which counts once it is written.

        Args:
            sample: The sample.
            source: How it was chosen.
            timing: Its measurement, where that may be noisy or repeated.
            place: Its place in the stream.
        """
        self._pending.append(_Pending(sample=sample, source=source, timing=timing, place=place))

    def fail(self, source: str, reason: str, *, count: int = 1, place: int | None = None) -> None:
        """Counts what could not be measured."""
        self._failed[source] += count
        self._reasons[reason] = None
        self._finish(place)

    def advance(self, count: int) -> None:
        """Tells that samples have been measured since the last call."""
        now = time.monotonic()
        self._advance(count, now - self._advanced)
        self._advanced = now

    def write_when_due(self) -> None:
        """Writes what waits if the last file is old enough."""
        if self._pending and time.monotonic() - self._written >= self._seconds_per_file:
            self.write()

    def write(self) -> None:
        """Writes what waits, one file for each device, and the position.

        Raises:
            SampleStoreError: If the store cannot be written.
        """
        for device in sorted({one.sample.device for one in self._pending}):
            batch = [one for one in self._pending if one.sample.device == device]
            # Taken off the list after the file is there: a run that is ended in between writes the same file again.
            self._files.append(self._samples.write(self.store, [one.sample for one in batch]))
            self._pending = [one for one in self._pending if one.sample.device != device]
            for one in batch:
                self._count(one)
            self._on_file(self._files[-1])
        self.position.save()
        self._written = time.monotonic()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Writes what waits when the block ends, however it ends; SIGTERM ends the block and no more."""
        try:
            yield
        except Terminated:
            self._is_terminated = True
        except SampleStoreError:
            raise  # what could not be written cannot be written now
        except BaseException:
            self.write()
            raise
        self.write()

    def collection(
        self, kind: SampleKind, device: str, *, skipped: Mapping[str, int], timed_share: float | None = None
    ) -> CollectedSamples:
        """What was added."""
        return CollectedSamples(
            kind=kind,
            device=device,
            files=tuple(self._files),
            added=dict(self._added),
            skipped=dict(skipped),
            failed=dict(self._failed),
            reasons=tuple(self._reasons),
            num_noisy=self._num_noisy,
            num_measured_again=self._num_measured_again,
            timed_share=timed_share,
            is_terminated=self._is_terminated,
        )

    def _count(self, one: _Pending[SampleT]) -> None:
        self._added[one.source] += 1
        if one.timing is not None:
            self._num_noisy += one.timing.is_noisy
            self._num_measured_again += one.timing.num_attempts > 1
        self._finish(one.place)

    def _finish(self, place: int | None) -> None:
        if place is not None:
            self.position.finish(place)
