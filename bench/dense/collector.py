"""Collecting: measures dense layers for a while and appends them to a store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from autoshard.core.dense import DenseShape
from autoshard.formats.dense_samples import DENSE_SAMPLES, DenseSample
from bench.dense.harness import DenseHarness, DenseMeasurement
from bench.dense.sampling import ChosenShape
from bench.provenance import Software, installed_software


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseCollection:
    """What a run of the collector added.

    Attributes:
        num_samples: Samples written.
        num_noisy: Samples among them whose spread stayed above the bound.
        num_known: Shapes left out, since the store holds them, measured on this processor by this version of torch.
        num_skipped: Shapes left out, since the device does not run them, or not in the time or memory that there is.
        files: Files written, in order.
        seconds: Time taken.
    """

    num_samples: int
    num_noisy: int
    num_known: int
    num_skipped: int
    files: tuple[Path, ...]
    seconds: float


def collect_dense_samples(
    harness: DenseHarness,
    shapes: Iterator[ChosenShape],
    store: Path,
    *,
    num_samples: int | None = None,
    seconds: float | None = None,
    advance: Callable[[int, float], None] = lambda *_: None,
) -> DenseCollection:
    """Measures shapes and appends them to a store, until there are enough or time is up.

    Samples are written after every group, so a killed run loses a few seconds of them, see `DenseSettings`. A shape
    that the store holds is not measured again, unless it is chosen as a `repeat`.

    Args:
        harness: Measures.
        shapes: What to measure; ends the run when it runs out.
        store: Where samples go.
        num_samples: Samples to add; None for no limit.
        seconds: Time to use; the group in hand is finished. None for no limit.
        advance: Told how many samples have just been written, and how long it took.

    Raises:
        SampleStoreError: If the store cannot be read or written.
        FormatError: If it holds dense samples of another version.
        DeviceError: If memory runs out.
    """
    software, started = installed_software(), time.monotonic()
    files: list[Path] = []
    stop_at = None if seconds is None else started + seconds
    wanted = _Wanted(harness, shapes, _known_shapes(harness, store, software), num_samples, stop_at)
    num_written = num_noisy = 0
    before = started
    for group in harness.groups(wanted.shapes()):
        measured = harness.measure(group)
        sources = wanted.sources[num_written : num_written + len(group)]
        samples = [to_dense_sample(one, name, harness, software) for one, name in zip(measured, sources, strict=True)]
        files.append(DENSE_SAMPLES.write(store, samples))
        num_written += len(group)
        num_noisy += sum(sample.is_noisy for sample in samples)
        before, elapsed = time.monotonic(), time.monotonic() - before
        advance(len(group), elapsed)
    return DenseCollection(
        num_samples=num_written,
        num_noisy=num_noisy,
        num_known=wanted.num_known,
        num_skipped=wanted.num_skipped,
        files=tuple(files),
        seconds=time.monotonic() - started,
    )


def to_dense_sample(
    measurement: DenseMeasurement, source: str, harness: DenseHarness, software: Software
) -> DenseSample:
    """The record of a measurement."""
    measured = {name: getattr(measurement, name) for name in measurement.__dataclass_fields__}
    return DenseSample(
        collected_at=datetime.now(UTC),
        device=harness.device.key,
        device_name=harness.device.name,
        num_threads=harness.num_threads,
        source=source,
        **measured,
        **asdict(software),
    )


class _Wanted:
    """Passes on the shapes that can be measured, as long as there is time, and counts the others."""

    def __init__(
        self,
        harness: DenseHarness,
        chosen: Iterator[ChosenShape],
        known: set[DenseShape],
        limit: int | None,
        stop_at: float | None,
    ) -> None:
        self._harness = harness
        self._chosen = chosen
        self._known = known
        self._limit = limit
        self._stop_at = stop_at
        self.sources: list[str] = []
        self.num_known = self.num_skipped = 0

    def shapes(self) -> Iterator[DenseShape]:
        while self._limit is None or len(self.sources) < self._limit:
            chosen = next(self._chosen, None)
            if chosen is None or (self._stop_at is not None and time.monotonic() >= self._stop_at):
                return
            if not self._harness.can_measure(chosen.shape):
                self.num_skipped += 1
            elif chosen.shape in self._known and chosen.source != "repeat":
                self.num_known += 1
            else:
                self._known.add(chosen.shape)
                self.sources.append(chosen.source)
                yield chosen.shape


def _known_shapes(harness: DenseHarness, store: Path, software: Software) -> set[DenseShape]:
    if harness.device.key not in DENSE_SAMPLES.devices(store):
        return set()
    here = (harness.device.name, harness.num_threads, software.torch_version)
    return {
        sample.shape
        for sample in DENSE_SAMPLES.read(store, harness.device.key)
        if (sample.device_name, sample.num_threads, sample.torch_version) == here
    }
