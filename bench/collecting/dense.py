"""Collecting: measures dense layers for a while and appends them to a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from autoshard.core.dense import DenseShape
from autoshard.formats.stores.dense_samples import DENSE_SAMPLES, DenseSample
from bench.collecting.collector import CollectedKind, Collection, CollectorRun, recorded
from bench.collecting.set_queue import StreamPosition
from bench.dense.harness import DenseHarness, DenseMeasurement
from bench.dense.sampling import ChosenShape
from bench.measuring.provenance import installed_software


class DenseLayersKind(CollectedKind[ChosenShape, DenseShape, DenseMeasurement, DenseSample]):
    """Dense layers, as `CollectorRun` measures them.

    Args of the constructor:
        harness: Measures.
    """

    samples = DENSE_SAMPLES

    def __init__(self, harness: DenseHarness) -> None:
        self.harness: DenseHarness = harness
        self._software = installed_software()

    def known(self, store: Path) -> set[DenseShape]:
        """Shapes that a store holds, measured on this device by this version of torch."""
        if self.harness.device.key not in DENSE_SAMPLES.devices(store):
            return set()
        here = (self.harness.device.name, self.harness.num_threads, self._software.torch_version)
        return {
            sample.shape
            for sample in DENSE_SAMPLES.read(store, self.harness.device.key)
            if (sample.device_name, sample.num_threads, sample.torch_version) == here
        }

    def identity(self, chosen: ChosenShape) -> DenseShape:
        """The shape."""
        return chosen.shape

    def item(self, chosen: ChosenShape) -> DenseShape:
        """The shape."""
        return chosen.shape

    def sample(self, result: DenseMeasurement, source: str) -> DenseSample:
        """The record of a measurement."""
        return DenseSample(
            **recorded(result, source, self.harness, self._software),
            shape=result.shape,
            sm_clock_mhz=result.sm_clock_mhz,
            throttle_reasons=result.throttle_reasons,
        )


def collect_dense_samples(
    harness: DenseHarness,
    shapes: Iterator[ChosenShape],
    store: Path,
    *,
    num_samples: int | None = None,
    seconds: float | None = None,
    seconds_per_file: float = 3.0,
    advance: Callable[[int, float], None] = lambda *_: None,
) -> Collection:
    """Measures shapes and appends them to a store; arguments and errors as of `CollectorRun`."""
    run = CollectorRun(DenseLayersKind(harness), store, StreamPosition(), seconds_per_file)
    return run.measure(shapes, num_samples, seconds, advance)
