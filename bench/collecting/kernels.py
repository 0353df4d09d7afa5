"""Samples of kernels: sets of shards."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from autoshard.core import LocalShard
from autoshard.core.machine import MeasuredMachine
from autoshard.formats.stores.samples import KERNEL_SAMPLES, Sample, measured_sets, set_id_of
from bench.collecting.collector import CollectedKind
from bench.collecting.options import SampleKind
from bench.kernels.harness import Measurement
from bench.sampling.stream import ChosenSet


class KernelKind(CollectedKind[ChosenSet, Sequence[LocalShard], Measurement, Sample]):
    """Sets of shards, each run as one rank runs it; known by the versions of torch and FBGEMM."""

    kind = SampleKind.KERNELS
    seconds_per_file = 10.0
    samples = KERNEL_SAMPLES

    def known(self, store: Path) -> set[str]:
        """Ids of the sets that a store holds."""
        software, hardware = self.machine.software, self.machine.hardware

        @cache
        def is_of_here(machine: MeasuredMachine) -> bool:
            versions = (machine.torch_version, machine.fbgemm_version)
            return versions == (software.torch_version, software.fbgemm_version) and machine.is_like(hardware)

        return {known.set_id for known in measured_sets(store) if is_of_here(known.machine)}

    def identity(self, chosen: ChosenSet) -> str:
        """Id of the set."""
        return set_id_of(chosen.shards, device=self.machine.device.key, num_threads=self.machine.num_threads)

    def item(self, chosen: ChosenSet) -> Sequence[LocalShard]:
        """The set."""
        return chosen.shards

    def sample(self, result: Measurement, source: str) -> Sample:
        """The record of a measurement."""
        return Sample(
            **self.recorded(result, source),
            shards=result.shards,
            sums_hit_rows=True,
            updated_rows=result.num_updated_S,
        )
