"""Kernel cost from published bandwidths, for devices that nobody has measured yet.

Shape suffixes: N shards, S sets of shards, H width of a code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.core import DType, Exchange, KernelCosts, LocalShard, Optimizer, Pooling, Update
from autoshard.core.costs import CodeArray, KernelFloor, MsArray
from autoshard.evaluation.cached_rows import LFU, CacheTraffic, TransferSpeeds, transfer_seconds
from autoshard.evaluation.device_memory import (
    DEVICE_MEMORY,
    UNKNOWN_DEVICE,
    UNKNOWN_HIGH_FACTOR,
    UNKNOWN_LOW_FACTOR,
    DeviceMemory,
    device_memory,
)

__all__ = ["DEVICE_MEMORY", "AnalyticCostModel", "DeviceMemory"]

_FORWARD, _BACKWARD, _FIRST_KIND = range(3)
_POOLINGS, _DTYPES = list(Pooling), list(DType)
#: What runs in the backward pass: an optimizer, or None for the gradient that an all-reduce takes.
_UPDATES: list[Optimizer | None] = [*Optimizer, None]
_CODE_WIDTH = _FIRST_KIND + len(_POOLINGS) * len(_DTYPES) * len(_UPDATES)

_ID_BYTES = 8
_GRADIENT_BYTES = 4
#: A radix sort of 64-bit ids in four passes reads and writes each id with its position.
_SORT_BYTES_PER_ID = 4 * 2 * (8 + 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyticCostModel:
    """Bytes moved over published bandwidths, waits for memory, and the launch of each kernel.

    A code is (forward ms, backward ms, shards by kind), so that a sum of codes prices the set. Shards of one kind
    (pooling, number format, optimizer) share the launches of a fused kernel, all else adds up. The interval is a fixed
    factor either way, `low_factor` and `high_factor` of the device. Made with `for_device`.

    Attributes:
        device: Key of the device kind.
        memory: What it is priced with.
        stand_in: Key of the device whose memory that is, if nothing is known of this one.
        is_stated: Whether the memory's bandwidth is not that of the device kind.
    """

    device: str
    memory: DeviceMemory
    stand_in: str | None = None
    is_stated: bool = False

    @classmethod
    def for_device(cls, device: str, gather_bytes_per_s: float | None = None) -> AnalyticCostModel:
        """The model of a device kind; one that is not in `DEVICE_MEMORY` is priced as a slow GPU, and named so.

        Args:
            device: Its key.
            gather_bytes_per_s: What gathers of whole rows reach, where this card's memory is not that of its kind.
        """
        stand_in = None if device in DEVICE_MEMORY else UNKNOWN_DEVICE
        memory = device_memory(device, gather_bytes_per_s)
        if stand_in:
            memory = replace(memory, low_factor=UNKNOWN_LOW_FACTOR, high_factor=UNKNOWN_HIGH_FACTOR)
        return cls(device=device, memory=memory, stand_in=stand_in, is_stated=gather_bytes_per_s is not None)

    @property
    def name(self) -> str:
        """`analytic:` and the device; says so where the device is unknown, or its memory another one."""
        unknown = f" (unknown device, priced as {self.stand_in})" if self.stand_in else ""
        stated = f" (rows at {self.memory.gather_bytes_per_s / 1e9:,.0f} GB/s)" if self.is_stated else ""
        return f"analytic:{self.device}{unknown}{stated}"

    def encode(self, shards: Sequence[LocalShard]) -> CodeArray:
        """Codes of single shards, shape (N, H)."""
        codes_NH = np.zeros((len(shards), _CODE_WIDTH), dtype=np.float32)
        for index, shard in enumerate(shards):
            forward_s, backward_s = kernel_seconds(shard, self.memory)
            codes_NH[index, _FORWARD] = forward_s * 1e3
            codes_NH[index, _BACKWARD] = backward_s * 1e3
            codes_NH[index, _FIRST_KIND + _kind_of(shard)] = 1.0
        return codes_NH

    def predict_ms(self, codes_SH: CodeArray) -> MsArray:
        """Forward plus backward, shape (S,)."""
        return self.predict_parts(codes_SH).kernel_ms_S

    def predict_parts(self, codes_SH: CodeArray) -> KernelCosts:
        """Forward, backward and the interval."""
        # Sums of float32 codes from which shards were taken off again may miss 0 by a little; counts do not.
        parts_SP = np.maximum(np.asarray(codes_SH[:, :_FIRST_KIND], dtype=np.float64), 0.0)
        num_kernels_S = (codes_SH[:, _FIRST_KIND:] > 0.5).sum(axis=1)
        parts_SP[num_kernels_S == 0] = 0.0
        forward_ms_S = parts_SP[:, _FORWARD] + num_kernels_S * self.memory.forward_launch_ms
        backward_ms_S = parts_SP[:, _BACKWARD] + num_kernels_S * self.memory.backward_launch_ms
        kernel_ms_S = forward_ms_S + backward_ms_S
        return KernelCosts(
            forward_ms_S=forward_ms_S,
            backward_ms_S=backward_ms_S,
            low_ms_S=self.memory.low_factor * kernel_ms_S,
            high_ms_S=self.memory.high_factor * kernel_ms_S,
        )

    def floor(self, codes_NH: CodeArray) -> KernelFloor:
        """What shards add, and the launches of each kernel."""
        return KernelFloor(
            forward_ms_N=np.asarray(codes_NH[:, _FORWARD], dtype=np.float64),
            backward_ms_N=np.asarray(codes_NH[:, _BACKWARD], dtype=np.float64),
            kernel_N=codes_NH[:, _FIRST_KIND:].argmax(axis=1),
            forward_base_ms=self.memory.forward_launch_ms,
            backward_base_ms=self.memory.backward_launch_ms,
            is_exact=True,
        )


def _kind_of(shard: LocalShard) -> int:
    """Index of the fused kernel that a shard runs in."""
    pooling = shard.pooling if shard.is_pooled else Pooling.SEQUENCE
    update = shard.optimizer if shard.update is Update.FUSED else None
    kind = _POOLINGS.index(pooling) * len(_DTYPES) + _DTYPES.index(shard.dtype)
    return kind * len(_UPDATES) + _UPDATES.index(update)


def kernel_seconds(shard: LocalShard, memory: DeviceMemory) -> tuple[float, float]:
    """Seconds that a shard adds to its rank's forward and backward kernels, launches left out.

    Forward reads ids, offsets and the rows: from the memory where they are not in the device's cache, which starts
    empty, and writes the output. Backward reads the gradient, groups the lookups by row, and reads and writes each
    distinct row with its optimizer state; where an all-reduce comes before the update, it writes the gradient of
    every row instead; of placed shards, what `LocalShard.written_rows` counts. Rows behind a cache in the device's
    memory are fetched before, and written back after (`transfer_seconds`).

    Args:
        shard: Of any kind.
        memory: The device's.

    Source:
        Roofline of a memory-bound kernel, as Neo Appendix B and TorchRec's planner have it. Differs: rows that repeat
        come from the cache, the backward pass is counted instead of taken as twice the forward pass, and on CPUs the
        waits for single accesses are added.
    """
    num_distinct = shard.access.expected_distinct(shard.num_lookups)
    fetch_s, store_s = transfer_seconds(shard, TransferSpeeds.of_device(memory))
    forward_s = _lookup_seconds(shard, memory, num_distinct)
    backward_s = _gradient_seconds(shard, memory) + _update_seconds(shard, memory, num_distinct)
    return forward_s + fetch_s, backward_s + store_s


def _lookup_seconds(shard: LocalShard, memory: DeviceMemory, num_distinct: float) -> float:
    row_bytes = _whole_accesses(shard.embedding_dim * shard.dtype.num_bytes, memory)
    from_memory = _first_reads(shard, memory.cache_bytes // row_bytes, num_distinct)
    from_cache = max(shard.num_lookups - from_memory, 0.0)
    return (
        shard.num_lookups * memory.lookup_s
        + (shard.num_lookups + shard.num_bags) * _ID_BYTES / memory.bytes_per_s
        + from_memory * row_bytes / memory.gather_bytes_per_s
        + from_cache * row_bytes / memory.cache_bytes_per_s
        + _output_bytes(shard) / _output_bytes_per_s(memory)
    )


def _first_reads(shard: LocalShard, num_cached_rows: int, num_distinct: float) -> float:
    """Rows read from memory where a batch's own rows are all that the cache holds: it starts empty."""
    if num_cached_rows >= num_distinct:
        return num_distinct
    found = CacheTraffic.of(shard.access, num_lookups=shard.num_lookups, num_cached_rows=num_cached_rows, policy=LFU)
    hot_distinct = max(num_distinct - found.num_missed, 0.0)
    return hot_distinct + shard.num_lookups * (1 - found.hit_rate)


def _gradient_seconds(shard: LocalShard, memory: DeviceMemory) -> float:
    """Reading the gradient of the output, once from memory and then from the cache, and grouping lookups by row."""
    repeats = max(shard.num_lookups - _num_outputs(shard), 0.0)
    gradient_bytes = shard.embedding_dim * _GRADIENT_BYTES
    sort_s = memory.sort_s or _SORT_BYTES_PER_ID / memory.gather_bytes_per_s
    return (
        _output_bytes(shard) / _output_bytes_per_s(memory)
        + repeats * gradient_bytes / memory.cache_bytes_per_s
        + shard.num_lookups * sort_s
        + _num_outputs(shard) * memory.bag_s
    )


def _update_seconds(shard: LocalShard, memory: DeviceMemory, num_distinct: float) -> float:
    if shard.update is Update.ALL_REDUCED:
        return shard.num_gradient_rows * shard.embedding_dim * _GRADIENT_BYTES / _output_bytes_per_s(memory)
    row_bytes = _whole_accesses(shard.embedding_dim * shard.dtype.num_bytes, memory)
    row_s = memory.update_s + 2 * row_bytes / memory.gather_bytes_per_s
    state_bytes = shard.optimizer.state_bytes_per_row(shard.embedding_dim)
    if state_bytes:
        row_s += memory.state_s + 2 * _whole_accesses(state_bytes, memory) / memory.gather_bytes_per_s
    return num_distinct * row_s


def _num_outputs(shard: LocalShard) -> float:
    return shard.num_lookups if shard.output is Exchange.ROWS else float(shard.num_bags)


def _output_bytes(shard: LocalShard) -> float:
    return _num_outputs(shard) * shard.embedding_dim * _GRADIENT_BYTES


def _output_bytes_per_s(memory: DeviceMemory) -> float:
    return memory.output_bytes_per_s or memory.gather_bytes_per_s


def _whole_accesses(num_bytes: int, memory: DeviceMemory) -> int:
    return -(-num_bytes // memory.access_bytes) * memory.access_bytes
