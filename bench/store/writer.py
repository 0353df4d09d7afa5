"""Samples on their way to a store."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic

from autoshard.formats.stores.sample_store import SampleStore, SampleT


class SampleWriter(Generic[SampleT]):
    """Samples that wait to be written, so that a store gets one file every few seconds rather than thousands.

    Args of the constructor:
        samples: Kind of the samples.
        store: Where they go.
        seconds_per_file: Time between two files.
        on_file: Told of every file that has been written.
    """

    def __init__(
        self,
        samples: SampleStore[SampleT],
        store: Path,
        seconds_per_file: float,
        on_file: Callable[[Path], None] = lambda _: None,
    ) -> None:
        self.files: list[Path] = []
        self._samples, self._store, self._seconds_per_file, self._on_file = samples, store, seconds_per_file, on_file
        self._num_written = 0
        self._pending: list[tuple[SampleT, Callable[[], None]]] = []
        self._written = time.monotonic()

    @property
    def num_samples(self) -> int:
        """Samples written or waiting."""
        return self._num_written + len(self._pending)

    def add(self, sample: SampleT, on_written: Callable[[], None] = lambda: None) -> None:
        """Takes a sample; `on_written` is called when it lies in the store."""
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
            self.files.append(self._samples.write(self._store, [sample for sample, _ in batch]))
            self._pending = [item for item in self._pending if item[0].device != device]
            self._num_written += len(batch)
            for _, on_written in batch:
                on_written()
            self._on_file(self.files[-1])
        self._written = time.monotonic()
