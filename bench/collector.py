"""Collecting: measures sets of shards for a while and appends them to a store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from autoshard.formats.samples import Sample, write_samples
from bench.devices import BenchDevice
from bench.harness import Harness, Measurement
from bench.provenance import Software, installed_software
from bench.sampling import ChosenSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """What a run of the collector added.

    Attributes:
        num_samples: Samples written.
        files: Files written, in order.
        seconds: Time taken.
    """

    num_samples: int
    files: tuple[Path, ...]
    seconds: float


def collect_samples(
    harness: Harness,
    sets: Iterator[ChosenSet],
    store: Path,
    *,
    num_samples: int | None = None,
    seconds: float | None = None,
    seconds_per_file: float = 10.0,
    advance: Callable[[int, float], None] = lambda *_: None,
) -> Collection:
    """Measures sets and appends them to a store, until there are enough or time is up.

    Args:
        harness: Measures.
        sets: What to measure; ends the run when it runs out.
        store: Where samples go.
        num_samples: Samples to add; None for no limit.
        seconds: Time to use; the group in hand is finished. None for no limit.
        seconds_per_file: Samples are written this often: what a killed run can lose.
        advance: Told how many samples have just been measured, and how long it took.

    Raises:
        SampleStoreError: If the store cannot be written.
        DeviceError: If a set does not fit in memory.
    """
    software = installed_software()
    started = written = time.monotonic()
    remaining = num_samples
    pending: list[Sample] = []
    files: list[Path] = []
    added = 0
    try:
        while True:
            size, before = harness.settings.max_group_sets, time.monotonic()
            group = list(islice(sets, size if remaining is None else min(size, remaining)))
            if not group:
                break
            measured = harness.measure([chosen.shards for chosen in group])
            pending += [
                to_sample(result, chosen.source, harness, software)
                for chosen, result in zip(group, measured, strict=True)
            ]
            added += len(group)
            remaining = None if remaining is None else remaining - len(group)
            if time.monotonic() - written >= seconds_per_file:
                files.append(write_samples(store, pending))
                pending, written = [], time.monotonic()
            advance(len(group), time.monotonic() - before)
            if seconds is not None and time.monotonic() - started >= seconds:
                break
    finally:
        if pending:
            files.append(write_samples(store, pending))
    return Collection(num_samples=added, files=tuple(files), seconds=time.monotonic() - started)


def to_sample(measurement: Measurement, source: str, harness: Harness, software: Software) -> Sample:
    """The record of a measurement."""
    device: BenchDevice = harness.device
    return Sample(
        collected_at=datetime.now(UTC),
        device=device.key,
        device_name=device.name,
        num_threads=1 if device.is_cuda else harness.settings.num_threads,
        source=source,
        shards=measurement.shards,
        forward_ms=measurement.forward_ms,
        backward_ms=measurement.backward_ms,
        forward_spread=measurement.forward_spread,
        backward_spread=measurement.backward_spread,
        reference_forward_ms=measurement.reference_forward_ms,
        reference_backward_ms=measurement.reference_backward_ms,
        num_rounds=measurement.num_rounds,
        **asdict(software),
    )
