"""Measured dense layers of a DLRM: one row per perceptron or interaction, stored as `sample_store` says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from autoshard.core.dense import DenseShape
from autoshard.core.machine import MeasuredMachine
from autoshard.formats.stores.sample_columns import MACHINE_COLUMNS, Amount, Count, MachineColumns, Milliseconds
from autoshard.formats.stores.sample_store import SampleStore


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSample(MachineColumns):
    """Measured latency of one part of a dense model. No optimizer step is part of it.

    Attributes:
        sample_id: Hash of all else; given by `identified`.
        collected_at: When the measurement ended, in UTC.
        device: Key of the kind of device, such as `cpu` or `h200`.
        device_name: Full name of the processor.
        num_threads: Intra-op threads; 1 on devices that do not care.
        source: How the shape was chosen, such as `square`.
        shape: What was measured.
        forward_ms: Forward pass.
        backward_ms: Backward pass: gradients of weights and biases, and of the inputs unless they are data.
        forward_spread: Standard deviation of single rounds over the mean, drift divided out.
        backward_spread: As `forward_spread`.
        reference_forward_ms: The device's reference perceptron in the same rounds.
        reference_backward_ms: As `reference_forward_ms`.
        num_rounds: Rounds measured, warm-ups left out.
        num_attempts: Measurements that this is the mean of: more than one if their spread asked for it.
        is_noisy: Whether the spread stayed above the harness's bound.
        sm_clock_mhz: Median clock of the GPU while it was measured; 0 where it is not read.
        throttle_reasons: Why the device held its clock back, separated by commas; empty for no reason.
    """

    sample_id: str = ""
    collected_at: datetime
    device: str
    device_name: str
    num_threads: Count
    torch_version: str
    fbgemm_version: str
    autoshard_version: str
    git_commit: str
    source: str
    shape: DenseShape
    forward_ms: Milliseconds
    backward_ms: Milliseconds
    forward_spread: Amount
    backward_spread: Amount
    reference_forward_ms: Milliseconds
    reference_backward_ms: Milliseconds
    num_rounds: Count
    num_attempts: Count = 1
    is_noisy: bool = False
    sm_clock_mhz: Amount = 0.0
    throttle_reasons: str = ""

    @property
    def machine(self) -> MeasuredMachine:
        """Where it was measured, as far as it says."""
        return self.on(
            device_name=self.device_name, torch_version=self.torch_version, fbgemm_version=self.fbgemm_version
        )

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
