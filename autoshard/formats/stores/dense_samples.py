"""Measured dense layers of a DLRM: one row per perceptron or interaction, stored as `sample_store` says."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoshard.core.dense import DenseShape
from autoshard.formats.stores.measured_samples import MACHINE_COLUMNS, TimedSample
from autoshard.formats.stores.sample_columns import Milliseconds
from autoshard.formats.stores.sample_store import SampleStore


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSample(TimedSample):
    """Measured latency of one part of a dense model. No optimizer step is part of it.

    Attributes:
        source: How the shape was chosen, such as `square`.
        forward_ms: Forward pass.
        backward_ms: Backward pass: gradients of weights and biases, and of the inputs unless they are data.
        reference_forward_ms: The device's reference perceptron in the same rounds.
        shape: What was measured.
    """

    forward_ms: Milliseconds
    backward_ms: Milliseconds
    shape: DenseShape

    @property
    def forward_flops_per_s(self) -> float:
        """Achieved floating-point operations per second, forward."""
        return self.shape.forward_flops / self.forward_ms * 1e3

    @property
    def backward_flops_per_s(self) -> float:
        """Achieved floating-point operations per second, backward."""
        return self.shape.backward_flops / self.backward_ms * 1e3

    def identified(self) -> DenseSample:
        """The same sample with its id filled in."""
        return replace(self, sample_id=DENSE_SAMPLES.content_id(self))


DENSE_SAMPLES = SampleStore(
    DenseSample,
    schema="autoshard.dense-samples/2",
    earlier={"autoshard.dense-samples/1": MACHINE_COLUMNS},
    folder="dense",
    kind="samples of dense layers",
    command="autoshard collect --kinds dense",
)
