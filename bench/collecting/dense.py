"""Samples of dense layers."""

from __future__ import annotations

from pathlib import Path

from autoshard.core.dense import DenseShape
from autoshard.core.errors import AutoshardError
from autoshard.formats.stores.dense_samples import DENSE_SAMPLES, DenseSample
from bench.collecting.collector import CollectedKind
from bench.collecting.options import SampleKind
from bench.dense.harness import DenseMeasurement
from bench.dense.sampling import ChosenShape


class DenseLayersKind(CollectedKind[ChosenShape, DenseShape, DenseMeasurement, DenseSample]):
    """Dense layers, forward and backward; known by the version of torch."""

    kind = SampleKind.DENSE
    seconds_per_file = 3.0
    samples = DENSE_SAMPLES

    def known(self, store: Path) -> set[DenseShape]:
        """Shapes that a store holds."""
        device = self.machine.device
        if device.key not in DENSE_SAMPLES.devices(store):
            return set()
        here = (device.name, self.machine.num_threads, self.machine.software.torch_version)
        return {
            sample.shape
            for sample in DENSE_SAMPLES.read(store, device.key)
            if (sample.device_name, sample.num_threads, sample.torch_version) == here
        }

    def identity(self, chosen: ChosenShape) -> DenseShape:
        """The shape."""
        return chosen.shape

    def item(self, chosen: ChosenShape) -> DenseShape:
        """The shape."""
        return chosen.shape

    def reason(self, _error: AutoshardError) -> str:
        """The same for all shapes: no two that fail are alike."""
        return "not run by the device, or not in the time or memory there is"

    def sample(self, result: DenseMeasurement, source: str) -> DenseSample:
        """The record of a measurement."""
        return DenseSample(**self.recorded(result, source), shape=result.shape)
