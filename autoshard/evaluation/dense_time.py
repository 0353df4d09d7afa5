"""Cost of dense layers from published arithmetic and memory bandwidths, where nothing was measured.

Shape suffixes: N parts of dense layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from autoshard.core import DType, TableSet
from autoshard.core.costs import DenseCosts
from autoshard.core.dense import DenseShape, dense_shapes
from autoshard.core.errors import InvalidOptionError, InvalidPlanError
from autoshard.core.machine import device_family
from autoshard.evaluation.device_memory import (
    DEVICE_MEMORY,
    UNKNOWN_DEVICE,
    UNKNOWN_HIGH_FACTOR,
    UNKNOWN_LOW_FACTOR,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceArithmetic:
    """Arithmetic of one device kind.

    Attributes:
        fp32_flops_per_s: Published peak of fp32, without TF32.
        half_flops_per_s: Published peak of fp16 and bf16 with dense matrices; that of fp32 where there is none.
        source: Where the figures are from.
        tf32_flops_per_s: Published peak of fp32 products in TF32 with dense matrices; 0 where there are none.
        share: Share of the peak that perceptrons reach.
        layer_s: Time of a layer besides its arithmetic, once forward and twice backward.
        bytes_per_s: Bandwidth of activations and weights; 0 for the published one of the device's memory.
    """

    fp32_flops_per_s: float
    half_flops_per_s: float
    source: str
    tf32_flops_per_s: float = 0.0
    share: float = 0.7
    layer_s: float = 2e-5
    bytes_per_s: float = 0.0


# Perceptrons reach at most 78.6% of a V100's and 70.5% of an A100's peak (Neo, Appendix B), and the A100's share stands
# for other GPUs. A layer launches two kernels forward (product, activation): 20 microseconds is an assumption. The CPU
# is one core with two AVX-512 units at 2.6 GHz: 2.6e9 * 2 * 16 * 2 operations per second.
DEVICE_ARITHMETIC: Final[dict[str, DeviceArithmetic]] = {
    "cpu": DeviceArithmetic(
        fp32_flops_per_s=166e9,
        half_flops_per_s=166e9,
        share=0.5,
        bytes_per_s=5e9,
        source="two AVX-512 FMA units per core at 2.6 GHz; its share and bandwidth are assumptions",
    ),
    "t4": DeviceArithmetic(fp32_flops_per_s=8.1e12, half_flops_per_s=65e12, source="NVIDIA T4 datasheet"),
    "l4": DeviceArithmetic(fp32_flops_per_s=30.3e12, half_flops_per_s=121e12, source="NVIDIA L4 datasheet"),
    "a10": DeviceArithmetic(fp32_flops_per_s=31.2e12, half_flops_per_s=125e12, source="NVIDIA A10 datasheet"),
    "v100": DeviceArithmetic(
        fp32_flops_per_s=15.7e12, half_flops_per_s=125e12, share=0.786, source="NVIDIA V100 datasheet, SXM2"
    ),
    "a100": DeviceArithmetic(
        fp32_flops_per_s=19.5e12,
        half_flops_per_s=312e12,
        tf32_flops_per_s=156e12,
        share=0.705,
        source="NVIDIA A100 datasheet",
    ),
    "h100": DeviceArithmetic(fp32_flops_per_s=67e12, half_flops_per_s=989e12, source="NVIDIA H100 datasheet, SXM"),
    "h200": DeviceArithmetic(fp32_flops_per_s=67e12, half_flops_per_s=989e12, source="NVIDIA H200 datasheet, SXM"),
    "b200": DeviceArithmetic(
        fp32_flops_per_s=75e12, half_flops_per_s=2250e12, source="NVIDIA HGX B200 datasheet: 600 TFLOP/s over 8 GPUs"
    ),
    "mi300x": DeviceArithmetic(
        fp32_flops_per_s=163.4e12, half_flops_per_s=1307e12, source="AMD Instinct MI300X datasheet"
    ),
}

#: Ends of the interval over the price, an assumption: narrow layers reach a tenth of what wide ones do.
_LOW_FACTOR, _HIGH_FACTOR = 0.5, 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyticDenseModel:
    """Roofline: arithmetic at a share of the peak, or bytes over bandwidth, whichever takes longer, and launches.

    Made with `for_device`.

    Attributes:
        device: Key of the device kind.
        known_as: Key of the device that it is priced as: itself, unless nothing is known of it.
        tf32: Whether fp32 products are computed in TF32, where the device has it.
    """

    device: str
    known_as: str
    tf32: bool = False

    @classmethod
    def for_device(cls, device: str, *, tf32: bool = False) -> AnalyticDenseModel:
        """The model of a device kind; an unknown one is priced as a slow GPU, and named so."""
        family = device_family(device)
        known_as = family if family in DEVICE_ARITHMETIC else UNKNOWN_DEVICE
        return cls(device=device, known_as=known_as, tf32=tf32 and DEVICE_ARITHMETIC[known_as].tf32_flops_per_s > 0)

    @property
    def name(self) -> str:
        """`analytic:` and the device; says so where the device is unknown, or products are in TF32."""
        unknown = "" if self._is_known else f" (unknown device, priced as {self.known_as})"
        return f"analytic:{self.device}{unknown}{' (TF32)' if self.tf32 else ''}"

    @property
    def _is_known(self) -> bool:
        return self.known_as == device_family(self.device)

    def predict_parts(self, shapes: Sequence[DenseShape]) -> DenseCosts:
        """Forward and backward of each part."""
        forward_ms_N = np.array([self._ms(shape, shape.forward_flops, 1) for shape in shapes])
        backward_ms_N = np.array([self._ms(shape, shape.backward_flops, 2) for shape in shapes])
        low, high = (_LOW_FACTOR, _HIGH_FACTOR) if self._is_known else (UNKNOWN_LOW_FACTOR, UNKNOWN_HIGH_FACTOR)
        return DenseCosts(
            forward_ms_N=forward_ms_N,
            backward_ms_N=backward_ms_N,
            low_ms_N=(forward_ms_N + backward_ms_N) * low,
            high_ms_N=(forward_ms_N + backward_ms_N) * high,
        )

    def _ms(self, shape: DenseShape, flops: int, num_passes: int) -> float:
        """`num_passes` is 1 forward and 2 backward, which touches weights and activations twice."""
        arithmetic = DEVICE_ARITHMETIC[self.known_as]
        fp32_flops_per_s = arithmetic.tf32_flops_per_s if self.tf32 else arithmetic.fp32_flops_per_s
        peak = fp32_flops_per_s if shape.dtype is DType.FP32 else arithmetic.half_flops_per_s
        bandwidth = arithmetic.bytes_per_s or DEVICE_MEMORY[self.known_as].bytes_per_s
        seconds = max(flops / (peak * arithmetic.share), num_passes * touched_bytes(shape) / bandwidth)
        num_layers = len(shape.widths) - 1 if shape.kind.is_mlp else 2
        return (seconds + num_passes * num_layers * arithmetic.layer_s) * 1e3


def touched_bytes(shape: DenseShape) -> float:
    """Bytes of a part's weights and of all its activations, each once."""
    activations = sum(shape.widths) + (0 if shape.kind.is_mlp else shape.output_width)
    return float(shape.dtype.num_bytes * (shape.num_parameters + shape.batch_size * activations))


def dense_parts(tables: TableSet, local_batch: float) -> tuple[DenseShape, ...]:
    """The parts of the dense layers on a rank: bottom perceptron, interaction and top perceptron.

    Args:
        tables: A task's tables.
        local_batch: Samples of the rank; rounded, to one at least.

    Returns:
        Nothing where the tables describe no dense layers.

    Raises:
        InvalidPlanError: If the layers make no model.
    """
    if tables.dense is None:
        return ()
    dims = [table.embedding_dim for table in tables.tables for _ in table.features]
    try:
        return dense_shapes(tables.dense, dims, max(1, round(local_batch)))
    except InvalidOptionError as error:
        raise InvalidPlanError(error.message, field="tables.dense") from error
