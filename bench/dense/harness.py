"""The benchmark of dense layers: perceptrons and interactions, forward and backward apart.

Source:
    Neo, Appendix A, and PARAM's linear benchmark, for the perceptrons' shapes and the way of counting operations.
    Differs: both time the optimizer step, and PARAM a softmax and its loss, together with the backward pass; here
    neither is part of it, since a step's price adds them up itself. The cache is flushed and rounds are interleaved, as
    for embeddings.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

from autoshard.core import DType
from autoshard.core.dense import DenseKind, DenseShape
from autoshard.core.errors import DeviceError
from bench.dense.kernels import DenseKernel, kernel_bytes, runnable_dtypes
from bench.measuring.attempts import Timing
from bench.measuring.caches import CacheFlush
from bench.measuring.devices import BenchDevice
from bench.measuring.rounds import GroupHarness, GroupSettings
from bench.measuring.timing import RoundSettings

#: Bytes per second that estimates of latency reckon with, for what is not arithmetic.
_SLOW_BYTES_PER_S = {"cpu": 1e9, "cuda": 2e11}


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSettings(GroupSettings):
    """How dense layers are measured."""

    group_seconds: float = 3.0
    """Estimated time of a group: what a killed run loses, twice that where a group is measured again."""
    max_run_seconds: float = 0.25
    """Estimated time of one forward and backward pass; larger shapes are not measured."""
    cache_bytes: int | None = None
    """Size of the cache that is flushed; None asks the device."""
    reference_batch: int = 256
    """Batch of the reference perceptron."""

    @classmethod
    def for_device(cls, device: BenchDevice) -> DenseSettings:
        """The usual settings of a device."""
        if device.is_cuda:
            return cls(reference_batch=4096)
        return cls(rounds=RoundSettings(num_warmup=1, num_measured=7, num_dropped=2, flush_every_run=False))

    @property
    def reference(self) -> DenseShape:
        """The perceptron that is measured beside all others."""
        return DenseShape(kind=DenseKind.BOTTOM_MLP, batch_size=self.reference_batch, widths=(512,) * 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseMeasurement(Timing):
    """Latency of one shape; the fields are those of `DenseSample`."""

    shape: DenseShape

    @property
    def spread(self) -> float:
        """The larger of both spreads: forward and backward are learned apart."""
        return max(self.forward_spread, self.backward_spread)


class DenseHarness(GroupHarness[DenseShape, DenseKernel, DenseMeasurement]):
    """Measures dense layers on one device.

    Args of the constructor:
        device: Where to measure.
        settings: How; the device's usual ones when left out.

    Raises:
        DeviceError: If there is no memory for the reference.

    Attributes:
        flops_per_s: What the reference perceptron reached, for each number format that the device runs.
    """

    def __init__(self, device: BenchDevice, settings: DenseSettings | None = None) -> None:
        self.settings = DenseSettings.for_device(device) if settings is None else settings
        self.flops_per_s = dict.fromkeys(runnable_dtypes(device.device), math.inf)  # until it is measured
        flush = CacheFlush(device.device, self.settings.cache_bytes)
        super().__init__(device, self.settings, self.settings.reference, flush)
        if self._reserved_bytes >= self._max_bytes:
            raise DeviceError(
                f"dense layers need more than {self._reserved_bytes:,} bytes on {device.name}, "
                f"the benchmark may fill {self._max_bytes:,}"
            )
        references = [replace(self.settings.reference, dtype=dtype) for dtype in self.flops_per_s]
        self.flops_per_s = {
            one.shape.dtype: _flops(one.shape) / (one.forward_ms + one.backward_ms) * 1e3
            for one in self._measure_group(references)
        }

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """Number formats that the device runs."""
        return tuple(self.flops_per_s)

    def estimated_s(self, item: DenseShape) -> float:
        """Rough time of one forward and backward pass, made for dividing the work, not for pricing it."""
        moving_s = kernel_bytes(item) / _SLOW_BYTES_PER_S[self.device.device.type]
        return _flops(item) / self.flops_per_s[item.dtype] + moving_s

    def can_measure(self, shape: DenseShape) -> bool:
        """Whether the device runs the shape's number format, has the memory, and is quick enough for it."""
        return (
            shape.dtype in self.flops_per_s
            and self._reserved_bytes + kernel_bytes(shape) <= self._max_bytes
            and self.estimated_s(shape) <= self.settings.max_run_seconds
        )

    def check(self, item: DenseShape) -> None:
        """Makes sure that a shape can be measured.

        Raises:
            DeviceError: If it cannot.
        """
        if not self.can_measure(item):
            raise DeviceError(
                f"{item.kind} of widths {list(item.widths)} in {item.dtype} at batch {item.batch_size} is not "
                f"run by {self.device.name}, or takes more than {self._max_bytes:,} bytes or "
                f"{self.settings.max_run_seconds:g} s"
            )

    def needs(self, item: DenseShape) -> tuple[int, float]:
        """Bytes that a shape takes while it is measured, and rough seconds of a run."""
        return kernel_bytes(item), self.estimated_s(item)

    def _build(self, item: DenseShape, seed: int) -> DenseKernel:
        return DenseKernel(item, self.device.device, seed)

    def _result(self, kernel: DenseKernel, timing: Timing) -> DenseMeasurement:
        return DenseMeasurement(**asdict(timing), shape=kernel.shape)


def _flops(shape: DenseShape) -> int:
    return shape.forward_flops + shape.backward_flops
