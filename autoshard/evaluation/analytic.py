"""Kernel cost from published bandwidths, for devices that nobody has measured yet.

Shape suffixes: N shards, S sets of shards, H width of a code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.core import Exchange, KernelCosts, LocalShard, MemoryLevel, Update
from autoshard.core.costs import CodeArray, MsArray
from autoshard.core.errors import ModelError

ID_BYTES = 8
GRADIENT_BYTES = 4
#: A radix sort of 64-bit ids in four passes reads and writes each id with its position.
SORT_BYTES_PER_ID = 4 * 2 * (8 + 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Published memory bandwidth of one device kind."""

    bytes_per_s: float
    launch_ms: float
    """Assumed cost of starting one kernel, whatever it does."""
    source: str


#: By device key. The launch costs are round assumptions: about 10 microseconds on GPUs, of the order of a parallel
#: region on CPUs.
DEVICE_MEMORY: dict[str, DeviceMemory] = {
    "cpu": DeviceMemory(
        bytes_per_s=204.8e9,
        launch_ms=0.05,
        source="Intel ARK, Xeon Platinum 8380: 8 channels of DDR4-3200, 204.8 GB/s per socket",
    ),
    "v100": DeviceMemory(bytes_per_s=900e9, launch_ms=0.01, source="NVIDIA V100 datasheet: 900 GB/s HBM2"),
    "a100": DeviceMemory(bytes_per_s=1555e9, launch_ms=0.01, source="NVIDIA A100 datasheet, 40 GB: 1,555 GB/s HBM2"),
    "h100": DeviceMemory(bytes_per_s=3350e9, launch_ms=0.01, source="NVIDIA H100 datasheet, SXM: 3.35 TB/s HBM3"),
    "h200": DeviceMemory(bytes_per_s=4800e9, launch_ms=0.01, source="NVIDIA H200 datasheet, SXM: 4.8 TB/s HBM3e"),
}

#: Interval around an analytic price, as factors. Caches make hot rows cheaper than the memory's bandwidth says; row
#: gathers rarely reach it (Neo Appendix A: 850 of 900 GB/s on V100, 1,300 of 1,555 on A100, at best), and small
#: batches and CPUs are much further off.
LOW_FACTOR, HIGH_FACTOR = 0.3, 6.0

_FORWARD, _BACKWARD, _COUNT = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyticCostModel:
    """Bytes moved over the published bandwidth, plus the launch of each pass's kernels.

    A code is (forward ms, backward ms, 1), so that a sum of codes prices the set; only the launches are shared.
    Made with `for_device`.

    Source:
        Roofline of a memory-bound kernel, as Neo Appendix B and TorchRec's planner have it; here the backward pass
        is counted too (gradients, sorting of ids, read and write of the distinct rows and their optimizer state),
        instead of taken as twice the forward pass.
    """

    device: str
    memory: DeviceMemory

    @classmethod
    def for_device(cls, device: str) -> AnalyticCostModel:
        """The model of a device kind.

        Raises:
            ModelError: If its bandwidth is not in the table.
        """
        if device not in DEVICE_MEMORY:
            raise ModelError(
                f"no bandwidth is known for {device!r}: train a model on it with `autoshard collect` and "
                f"`autoshard train cost`, or name one of {', '.join(DEVICE_MEMORY)}",
                field="topology.device",
            )
        return cls(device=device, memory=DEVICE_MEMORY[device])

    @property
    def name(self) -> str:
        """`analytic:` and the device."""
        return f"analytic:{self.device}"

    def encode(self, shards: Sequence[LocalShard]) -> CodeArray:
        """Codes of single shards, shape (N, 3)."""
        codes_NH = np.zeros((len(shards), 3), dtype=np.float32)
        for index, shard in enumerate(shards):
            if shard.level is not MemoryLevel.HBM:
                raise ModelError(f"{shard.table}: {self.name} prices rows in hbm only, not in {shard.level}")
            forward_bytes, backward_bytes = kernel_bytes(shard)
            codes_NH[index] = (self._milliseconds(forward_bytes), self._milliseconds(backward_bytes), 1.0)
        return codes_NH

    def price(self, codes_SH: CodeArray) -> MsArray:
        """Forward plus backward, shape (S,)."""
        return self.price_parts(codes_SH).kernel_ms_S

    def price_parts(self, codes_SH: CodeArray) -> KernelCosts:
        """Forward, backward and the interval."""
        parts_SH = np.maximum(np.asarray(codes_SH, dtype=np.float64), 0.0)
        # Sums of float32 codes from which shards were taken off again may miss 0 by a little.
        launch_ms_S = np.where(parts_SH[:, _COUNT] > 0.5, self.memory.launch_ms, 0.0)
        forward_ms_S = parts_SH[:, _FORWARD] + launch_ms_S
        backward_ms_S = parts_SH[:, _BACKWARD] + launch_ms_S
        kernel_ms_S = forward_ms_S + backward_ms_S
        return KernelCosts(
            forward_ms_S=forward_ms_S,
            backward_ms_S=backward_ms_S,
            low_ms_S=LOW_FACTOR * kernel_ms_S,
            high_ms_S=HIGH_FACTOR * kernel_ms_S,
        )

    def _milliseconds(self, num_bytes: float) -> float:
        return num_bytes / self.memory.bytes_per_s * 1e3


def kernel_bytes(shard: LocalShard) -> tuple[float, float]:
    """Bytes that a shard's forward and backward kernels move per step.

    Forward reads ids, offsets and one row per lookup, and writes the output. Backward sorts the ids, reads one
    gradient per lookup, and reads and writes the distinct rows with their optimizer state; rows that are updated
    after an all-reduce have their gradients written instead.
    """
    num_lookups = shard.num_lookups
    row_bytes = shard.embedding_dim * shard.dtype.num_bytes
    gradient_bytes = shard.embedding_dim * GRADIENT_BYTES
    num_outputs = num_lookups if shard.output is Exchange.ROWS else float(shard.num_bags)
    read = num_lookups * (row_bytes + ID_BYTES) + shard.num_bags * ID_BYTES
    forward = read + num_outputs * shard.embedding_dim * GRADIENT_BYTES
    distinct = shard.access.expected_distinct(num_lookups)
    backward = num_lookups * (gradient_bytes + SORT_BYTES_PER_ID)
    if shard.update is Update.FUSED:
        backward += distinct * 2 * (row_bytes + shard.optimizer.state_bytes_per_row(shard.embedding_dim))
    else:
        backward += distinct * gradient_bytes
    return forward, backward
