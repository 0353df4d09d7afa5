"""The benchmark of dense layers: perceptrons and interactions, forward and backward apart.

Shape suffixes: S shapes, R rounds.

Source:
    Neo, Appendix A, and PARAM's linear benchmark, for the perceptrons' shapes and the way of counting operations.
    Differs: both time the optimizer step, and PARAM a softmax and its loss, together with the backward pass; here
    neither is part of it, since a step's price adds them up itself. The cache is flushed and rounds are interleaved, as
    for embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from autoshard.core import DType
from autoshard.core.dense import DenseKind, DenseShape
from autoshard.core.errors import DeviceError
from autoshard.runtime.threads import intra_op_threads
from bench.arena import free_bytes
from bench.attempts import Timing, mean_of
from bench.caches import CacheFlush
from bench.clocks import DeviceClocks, read_clocks
from bench.dense.kernels import DenseKernel, kernel_bytes, runnable_dtypes
from bench.devices import BenchDevice
from bench.location import locate
from bench.timing import RoundSettings, time_rounds

#: Copies of the reference that each group holds; their mean is the reference.
_REFERENCE_COPIES = 3
#: Bytes per second that estimates of latency reckon with, for what is not arithmetic.
_SLOW_BYTES_PER_S = {"cpu": 1e9, "cuda": 2e11}


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSettings:
    """How dense layers are measured."""

    rounds: RoundSettings = field(default_factory=RoundSettings)
    num_threads: int = 1
    """Intra-op threads on a CPU: what one of several ranks on a machine gets."""
    max_group_shapes: int = 24
    """Shapes that share their rounds."""
    group_seconds: float = 3.0
    """Estimated time of a group: what a killed run loses, twice that where a group is measured again."""
    max_run_seconds: float = 0.25
    """Estimated time of one forward and backward pass; larger shapes are not measured."""
    max_spread: float = 0.1
    """Spread of a sample, forward or backward, above which it is measured once more. Both measurements are averaged
    (`mean_of`), and their mean is marked as noisy if its spread is above the bound still."""
    max_bytes: int | None = None
    """Memory for a group; None for a share of what is free."""
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
    sm_clock_mhz: float = 0.0
    throttle_reasons: str = ""

    @property
    def spread(self) -> float:
        """The larger of both spreads: forward and backward are learned apart."""
        return max(self.forward_spread, self.backward_spread)


class DenseHarness:
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
        self.device = device
        self.settings = DenseSettings.for_device(device) if settings is None else settings
        self._max_bytes = self.settings.max_bytes or free_bytes(device.device)
        if self._reserved_bytes() >= self._max_bytes:
            raise DeviceError(
                f"dense layers need more than {self._reserved_bytes():,} bytes on {device.name}, "
                f"the benchmark may fill {self._max_bytes:,}"
            )
        self._flush = CacheFlush(device.device, self.settings.cache_bytes)
        self._num_groups = 0
        references = [replace(self.settings.reference, dtype=dtype) for dtype in runnable_dtypes(device.device)]
        self.flops_per_s = {
            one.shape.dtype: _flops(one.shape) / (one.forward_ms + one.backward_ms) * 1e3
            for one in self._time(references)
        }

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """Number formats that the device runs."""
        return tuple(self.flops_per_s)

    @property
    def num_threads(self) -> int:
        """Intra-op threads that samples are recorded with; 1 on a GPU."""
        return 1 if self.device.is_cuda else self.settings.num_threads

    def estimated_s(self, shape: DenseShape) -> float:
        """Rough time of one forward and backward pass, made for dividing the work, not for pricing it."""
        moving_s = kernel_bytes(shape) / _SLOW_BYTES_PER_S[self.device.device.type]
        return _flops(shape) / self.flops_per_s[shape.dtype] + moving_s

    def can_measure(self, shape: DenseShape) -> bool:
        """Whether the device runs the shape's number format, has the memory, and is quick enough for it."""
        return (
            shape.dtype in self.flops_per_s
            and self._reserved_bytes() + kernel_bytes(shape) <= self._max_bytes
            and self.estimated_s(shape) <= self.settings.max_run_seconds
        )

    def measure(
        self, shapes: Sequence[DenseShape], advance: Callable[[int], None] = lambda _: None
    ) -> list[DenseMeasurement]:
        """Measures shapes, in groups whose rounds are interleaved; those that spread too much once more.

        Args:
            shapes: What to measure.
            advance: Told after every group how many shapes it held.

        Returns:
            One measurement per shape, in order.

        Raises:
            DeviceError: If a shape cannot be measured, or memory runs out.
        """
        for shape in shapes:
            if not self.can_measure(shape):
                raise DeviceError(
                    f"{shape.kind} of widths {list(shape.widths)} in {shape.dtype} at batch {shape.batch_size} is not "
                    f"run by {self.device.name}, or takes more than {self._max_bytes:,} bytes or "
                    f"{self.settings.max_run_seconds:g} s"
                )
        result: list[DenseMeasurement] = []
        for group in self.groups(iter(shapes)):
            result += self._measure_group(group)
            advance(len(group))
        return result

    def groups(self, shapes: Iterator[DenseShape]) -> Iterator[list[DenseShape]]:
        """Cuts shapes into groups by number, memory and estimated time."""
        group: list[DenseShape] = []
        used_bytes, used_s = self._reserved_bytes(), 0.0
        for shape in shapes:
            needed_bytes = kernel_bytes(shape)
            needed_s = self.estimated_s(shape) * self.settings.rounds.num_rounds
            is_full = len(group) >= self.settings.max_group_shapes or used_bytes + needed_bytes > self._max_bytes
            if group and (is_full or used_s + needed_s > self.settings.group_seconds):
                yield group
                group, used_bytes, used_s = [], self._reserved_bytes(), 0.0
            group.append(shape)
            used_bytes, used_s = used_bytes + needed_bytes, used_s + needed_s
        if group:
            yield group

    def _reserved_bytes(self) -> int:
        return _REFERENCE_COPIES * kernel_bytes(self.settings.reference)

    def _measure_group(self, shapes: Sequence[DenseShape]) -> list[DenseMeasurement]:
        result = self._time(shapes)
        unsteady = [index for index, one in enumerate(result) if one.spread > self.settings.max_spread]
        if unsteady:
            for index, again in zip(unsteady, self._time([shapes[index] for index in unsteady]), strict=True):
                result[index] = mean_of([result[index], again], self.settings.max_spread)
        return result

    def _time(self, shapes: Sequence[DenseShape]) -> list[DenseMeasurement]:
        self._num_groups += 1
        rounds, all_shapes = self.settings.rounds, [*[self.settings.reference] * _REFERENCE_COPIES, *shapes]
        before = read_clocks(self.device)
        try:
            with intra_op_threads(self.settings.num_threads):
                kernels = [DenseKernel(shape, self.device.device, seed) for seed, shape in enumerate(all_shapes)]
                forward_ms_SR, backward_ms_SR = time_rounds(kernels, self._flush, rounds, seed=self._num_groups)
        except torch.OutOfMemoryError as error:
            raise DeviceError(f"{self.device.name} ran out of memory; others may be using it") from error
        after = read_clocks(self.device)
        forward, backward = (locate(ms_SR, rounds.num_dropped) for ms_SR in (forward_ms_SR, backward_ms_SR))
        reference_forward_ms, reference_backward_ms = (
            float(np.mean(one.mean_ms_S[:_REFERENCE_COPIES])) for one in (forward, backward)
        )
        return [
            DenseMeasurement(
                shape=shape,
                forward_ms=float(forward.mean_ms_S[row]),
                backward_ms=float(backward.mean_ms_S[row]),
                forward_spread=float(forward.spread_S[row]),
                backward_spread=float(backward.spread_S[row]),
                reference_forward_ms=reference_forward_ms,
                reference_backward_ms=reference_backward_ms,
                num_rounds=rounds.num_measured,
                sm_clock_mhz=float((after.sm_mhz if after else None) or 0),
                throttle_reasons=_throttle_reasons(before, after),
            )
            for row, shape in enumerate(shapes, start=_REFERENCE_COPIES)
        ]


def _flops(shape: DenseShape) -> int:
    return shape.forward_flops + shape.backward_flops


def _throttle_reasons(*clocks: DeviceClocks | None) -> str:
    """What held the clock back before or after; the GPU worked in between."""
    return ",".join(sorted({reason for one in clocks if one is not None for reason in one.throttle_reasons}))
