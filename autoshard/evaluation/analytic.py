"""Kernel cost from published bandwidths, for devices that nobody has measured yet.

Shape suffixes: N shards, S sets of shards, H width of a code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.core import DType, Exchange, KernelCosts, LocalShard, Optimizer, Pooling, Update, weight_row_bytes
from autoshard.core.access import ProfileBatch
from autoshard.core.costs import CodeArray, KernelFloor, MsArray
from autoshard.core.machine import device_family
from autoshard.evaluation.cached_rows import TransferSpeeds, lfu_traffic, transfers_seconds
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
        stand_in = None if device_family(device) in DEVICE_MEMORY else UNKNOWN_DEVICE
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
        codes_NH[:, [_FORWARD, _BACKWARD]] = kernel_seconds(shards, self.memory) * 1e3
        kinds_N = np.array([_kind_of(shard) for shard in shards], dtype=np.int64)
        codes_NH[np.arange(len(shards)), _FIRST_KIND + kinds_N] = 1.0
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


def kernel_seconds(shards: Sequence[LocalShard], memory: DeviceMemory) -> MsArray:
    """Seconds that shards add to their ranks' forward and backward kernels, launches left out; shape (N, 2).

    Forward reads ids, offsets and the rows: from the memory where they are not in the device's cache, which starts
    empty, and writes the output. Backward reads the gradient, groups the lookups by row, and reads and writes each
    distinct row with its optimizer state; where an all-reduce comes before the update, it writes the gradient of
    every row instead; of placed shards, what `LocalShard.written_rows` counts. Rows behind a cache in the device's
    memory are fetched before, and written back after (`transfer_seconds`).

    Args:
        shards: Of any kind.
        memory: The device's.

    Source:
        Roofline of a memory-bound kernel, as Neo Appendix B and TorchRec's planner have it. Differs: rows that repeat
        come from the cache, the backward pass is counted instead of taken as twice the forward pass, and on CPUs the
        waits for single accesses are added.
    """
    work = _Work.of(shards)
    forward_N, backward_N = (
        _lookup_seconds(work, memory),
        _gradient_seconds(work, memory) + _update_seconds(work, memory),
    )
    return np.column_stack([forward_N, backward_N]) + transfers_seconds(shards, TransferSpeeds.of_device(memory))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Work:
    """What the kernels of N shards do in a step.

    Attributes:
        profiles: Of their rows.
        lookups_N: Lookups.
        distinct_N: Distinct rows.
        bags_N: Bags that are pooled.
        outputs_N: Vectors that the forward kernel writes.
        row_bytes_N: Bytes of a row's weights.
        vector_bytes_N: Bytes of an output, or of its gradient.
        state_bytes_N: Bytes of a row's optimizer state.
        is_reduced_N: Whether gradients are all-reduced before the update.
        gradient_rows_N: Rows that are then written.
    """

    profiles: ProfileBatch
    lookups_N: MsArray
    distinct_N: MsArray
    bags_N: MsArray
    outputs_N: MsArray
    row_bytes_N: MsArray
    vector_bytes_N: MsArray
    state_bytes_N: MsArray
    is_reduced_N: NDArray[np.bool_]
    gradient_rows_N: MsArray

    @classmethod
    def of(cls, shards: Sequence[LocalShard]) -> _Work:
        amounts = [
            (
                shard.num_lookups,
                shard.num_bags,
                shard.embedding_dim,
                weight_row_bytes(shard.dtype, shard.optimizer, shard.embedding_dim),
                shard.optimizer.state_bytes_per_row(shard.embedding_dim),
                shard.num_gradient_rows,
                shard.output is Exchange.ROWS,
                shard.update is Update.ALL_REDUCED,
            )
            for shard in shards
        ]
        columns = np.array(amounts, dtype=np.float64).reshape(-1, 8).T
        lookups_N, bags_N, dim_N, row_bytes_N, state_bytes_N, gradient_rows_N, gives_rows_N, is_reduced_N = columns
        profiles = ProfileBatch.of([shard.access for shard in shards])
        return cls(
            profiles=profiles,
            lookups_N=lookups_N,
            distinct_N=profiles.expected_distinct(lookups_N),
            bags_N=bags_N,
            outputs_N=np.where(gives_rows_N, lookups_N, bags_N),
            row_bytes_N=row_bytes_N,
            vector_bytes_N=dim_N * _GRADIENT_BYTES,
            state_bytes_N=state_bytes_N,
            is_reduced_N=is_reduced_N.astype(np.bool_),
            gradient_rows_N=gradient_rows_N,
        )


def _lookup_seconds(work: _Work, memory: DeviceMemory) -> MsArray:
    row_bytes_N = _whole_accesses(work.row_bytes_N, memory)
    from_memory_N = _first_reads(work, memory.cache_bytes // row_bytes_N)
    from_cache_N = np.maximum(work.lookups_N - from_memory_N, 0.0)
    return np.asarray(
        work.lookups_N * memory.lookup_s
        + (work.lookups_N + work.bags_N) * _ID_BYTES / memory.bytes_per_s
        + from_memory_N * row_bytes_N / memory.gather_bytes_per_s
        + from_cache_N * row_bytes_N / memory.cache_bytes_per_s
        + _output_seconds(work, memory)
    )


def _first_reads(work: _Work, num_cached_rows_N: MsArray) -> MsArray:
    """Rows read from memory where a batch's own rows are all that the cache holds: it starts empty."""
    hit_rate_N, missed_N = lfu_traffic(work.profiles, work.lookups_N, num_cached_rows_N)
    hot_distinct_N = np.maximum(work.distinct_N - missed_N, 0.0)
    read_anew_N = hot_distinct_N + work.lookups_N * (1 - hit_rate_N)
    return np.where(num_cached_rows_N >= work.distinct_N, work.distinct_N, read_anew_N)


def _gradient_seconds(work: _Work, memory: DeviceMemory) -> MsArray:
    """Reading the gradient of the output, once from memory and then from the cache, and grouping lookups by row."""
    repeats_N = np.maximum(work.lookups_N - work.outputs_N, 0.0)
    sort_s = memory.sort_s or _SORT_BYTES_PER_ID / memory.gather_bytes_per_s
    return np.asarray(
        _output_seconds(work, memory)
        + repeats_N * work.vector_bytes_N / memory.cache_bytes_per_s
        + work.lookups_N * sort_s
        + work.outputs_N * memory.bag_s
    )


def _update_seconds(work: _Work, memory: DeviceMemory) -> MsArray:
    reduced_N = work.gradient_rows_N * work.vector_bytes_N / _output_bytes_per_s(memory)
    row_s_N = memory.update_s + 2 * _whole_accesses(work.row_bytes_N, memory) / memory.gather_bytes_per_s
    state_s_N = memory.state_s + 2 * _whole_accesses(work.state_bytes_N, memory) / memory.gather_bytes_per_s
    row_s_N += np.where(work.state_bytes_N > 0, state_s_N, 0.0)
    return np.where(work.is_reduced_N, reduced_N, work.distinct_N * row_s_N)


def _output_seconds(work: _Work, memory: DeviceMemory) -> MsArray:
    return np.asarray(work.outputs_N * work.vector_bytes_N / _output_bytes_per_s(memory))


def _output_bytes_per_s(memory: DeviceMemory) -> float:
    return memory.output_bytes_per_s or memory.gather_bytes_per_s


def _whole_accesses(bytes_N: MsArray, memory: DeviceMemory) -> MsArray:
    return np.asarray(np.ceil(bytes_N / memory.access_bytes) * memory.access_bytes)
