"""Collecting: measures sets of shards for a while and appends them to a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from autoshard.core import LocalShard
from autoshard.formats.stores.samples import KERNEL_SAMPLES, Sample, measured_sets, set_id_of
from bench.collecting.collector import Advance, CollectedKind, Collection, CollectorRun, recorded
from bench.collecting.set_queue import StreamPosition
from bench.kernels.harness import Harness, Measurement
from bench.measuring.provenance import Software, installed_software
from bench.sampling.stream import ChosenSet


class KernelKind(CollectedKind[ChosenSet, Sequence[LocalShard], Measurement, Sample]):
    """Sets of shards.

    Args of the constructor:
        harness: Measures.
    """

    samples = KERNEL_SAMPLES

    def __init__(self, harness: Harness) -> None:
        self.harness: Harness = harness
        self._software = installed_software()

    def known(self, store: Path) -> set[str]:
        """Ids of the sets that a store holds, measured on this device by this software."""
        return known_sets(store, self.harness.device.name, self._software)

    def identity(self, chosen: ChosenSet) -> str:
        """Id of the set."""
        return set_id_of(chosen.shards, device=self.harness.device.key, num_threads=self.harness.num_threads)

    def item(self, chosen: ChosenSet) -> Sequence[LocalShard]:
        """The set."""
        return chosen.shards

    def sample(self, result: Measurement, source: str) -> Sample:
        """The record of a measurement."""
        return to_sample(result, source, self.harness, self._software)


def collect_samples(
    harness: Harness,
    sets: Iterator[ChosenSet],
    store: Path,
    *,
    num_samples: int | None = None,
    seconds: float | None = None,
    seconds_per_file: float = 10.0,
    position: StreamPosition | None = None,
    advance: Advance = lambda *_: None,
    on_file: Callable[[Path], None] = lambda _: None,
) -> Collection:
    """Measures sets of shards and appends them to a store; arguments and errors as of `CollectorRun`."""
    run = CollectorRun(KernelKind(harness), store, position or StreamPosition(), seconds_per_file, on_file)
    return run.measure(sets, num_samples, seconds, advance)


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


def to_sample(measurement: Measurement, source: str, harness: Harness, software: Software) -> Sample:
    """The record of a measurement."""
    clocks = measurement.clocks
    return Sample(
        **recorded(measurement, source, harness, software),
        shards=measurement.shards,
        sm_clock_mhz=0.0 if clocks is None or clocks.sm_mhz is None else float(clocks.sm_mhz),
        throttle_reasons="" if clocks is None else ",".join(clocks.throttle_reasons),
    )
