"""Embedding kernels of the published program, counted one by one.

A table is looked up, and its gradient made, by kernels of the library with one thread block per bag
(embedding_lookup_kernels.cu of the first commit). Keras' Adagrad then adds up gradients of equal rows (tf.unique and
unsorted_segment_sum, `_deduplicate_indexed_slices`) and updates rows. Kernels of all tables run one after the other.

Shape suffixes: N shards, S sets of shards, H width of a code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoshard.core import AccessProfile, KernelCosts, LocalShard
from autoshard.core.costs import CodeArray, MsArray
from studies.papers.nvidia.hardware import A100, Gpu

_ID_BYTES, _INDEX_BYTES, _VALUE_BYTES = 8, 4, 4
_SECTOR_BYTES = 32
#: Digits of a sort of 64-bit ids and of 32-bit positions, 8 bits each. A sort starts kernels for the range of
#: positions, clearing, the histogram and its sum, and for each digit one that clears and one that moves (CUB,
#: dispatch_radix_sort.cuh).
_ID_DIGITS, _POSITION_DIGITS, _SORT_KERNELS, _DIGIT_KERNELS = 8, 4, 4, 2
#: So many pairs of 32 bits are sorted by one block (CUB, 256 threads with 19 pairs each).
_SINGLE_TILE = 256 * 19
#: Integer operations for each element of unsorted_segment_sum: it divides 64-bit numbers (segment_reduction_ops), which
#: calls a procedure of some 50 (stackoverflow.com/questions/12252826), and 20 for addresses and loads, an assumption.
_SEGMENT_OPS = 70
#: Rows whose lookups a block has on their way at a time: `#pragma unroll 4`.
_UNROLLED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFlowKernels:
    """Prices shards as the program runs them; a `CostModel` whose codes are forward and backward milliseconds.

    Attributes:
        lengths: Ids per sample of each feature, by table.
        batch_size: Samples per step, all of which every rank looks up.
        is_distributed: Whether outputs are put together for an exchange, and taken apart after that of gradients.
        gpu: The GPU.
    """

    lengths: Mapping[str, tuple[float, ...]]
    batch_size: int
    is_distributed: bool
    gpu: Gpu = A100
    _known: dict[tuple[object, ...], tuple[float, float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the model in results."""
        return "published-program:a100"

    def encode(self, shards: Sequence[LocalShard]) -> CodeArray:
        """Codes of single shards, shape (N, 2)."""
        return np.array([self._seconds(shard) for shard in shards], dtype=np.float32).reshape(-1, 2) * np.float32(1e3)

    def predict_ms(self, codes_SH: CodeArray) -> MsArray:
        """Forward plus backward, shape (S,)."""
        return self.predict_parts(codes_SH).kernel_ms_S

    def predict_parts(self, codes_SH: CodeArray) -> KernelCosts:
        """Forward and backward; the interval is the tolerance that the prediction is checked with."""
        parts_SP = np.asarray(codes_SH, dtype=np.float64)
        total_S = parts_SP.sum(axis=1)
        return KernelCosts(
            forward_ms_S=parts_SP[:, 0],
            backward_ms_S=parts_SP[:, 1],
            low_ms_S=0.65 * total_S,
            high_ms_S=1.35 * total_S,
        )

    def _seconds(self, shard: LocalShard) -> tuple[float, float]:
        lengths = self.lengths[shard.table]
        key = (shard.num_embeddings, shard.embedding_dim, lengths)
        if key not in self._known:
            self._known[key] = self._forward_s(shard, lengths), self._backward_s(shard, lengths)
        return self._known[key]

    def _forward_s(self, shard: LocalShard, lengths: Sequence[float]) -> float:
        lookups = sum(self.gpu.kernel_s(self._lookup_s(shard, length)) for length in lengths)
        return lookups + (self._moved_s(shard, len(lengths)) if self.is_distributed else 0.0)

    def _lookup_s(self, shard: LocalShard, length: float) -> float:
        """One block per bag: waits for ids, then for rows, four at a time."""
        gpu, num_lookups = self.gpu, self.batch_size * length
        distinct, row_bytes = shard.access.expected_distinct(num_lookups), _sectors(shard.embedding_dim)
        moved_s = gpu.stream_s(
            num_lookups * _ID_BYTES + self.batch_size * shard.embedding_dim * _VALUE_BYTES + distinct * row_bytes
        )
        repeated_s = (num_lookups - distinct) * row_bytes / gpu.cache_bytes_per_s
        waits = 2 + math.ceil(length / _UNROLLED)
        waited_s = gpu.waves(self.batch_size, shard.embedding_dim) * waits * gpu.latency_s
        return max(moved_s + repeated_s, waited_s)

    def _backward_s(self, shard: LocalShard, lengths: Sequence[float]) -> float:
        """Gradients of lookups, of all features side by side, divided by the ranks, added up by row, and applied."""
        gpu, num_lookups = self.gpu, self.batch_size * sum(lengths)
        values = num_lookups * shard.embedding_dim * _VALUE_BYTES
        seconds = sum(gpu.kernel_s(self._expand_s(shard, length)) for length in lengths)
        if len(lengths) > 1:
            seconds += gpu.kernel_s(gpu.stream_s(2 * values)) + gpu.kernel_s(gpu.stream_s(2 * num_lookups * _ID_BYTES))
        seconds += gpu.kernel_s(gpu.stream_s(2 * values))
        seconds += unique_s(gpu, shard.access, num_lookups)
        seconds += self._segment_sum_s(shard, num_lookups) + self._adagrad_s(shard, num_lookups)
        return seconds + (self._moved_s(shard, len(lengths)) if self.is_distributed else 0.0)

    def _expand_s(self, shard: LocalShard, length: float) -> float:
        gpu, bag_bytes = self.gpu, shard.embedding_dim * _VALUE_BYTES
        waited_s = gpu.waves(self.batch_size, shard.embedding_dim) * 2 * gpu.latency_s
        return max(gpu.stream_s(self.batch_size * bag_bytes * (1 + length)), waited_s)

    def _segment_sum_s(self, shard: LocalShard, num_lookups: float) -> float:
        """Clears the sums, then adds each element to its row's by an atomic operation in the cache.

        Equal addresses take one operation per clock (NVIDIA Kepler GK110 whitepaper, since then no slower).
        """
        gpu, dim = self.gpu, shard.embedding_dim
        distinct = shard.access.expected_distinct(num_lookups)
        read_s = gpu.stream_s(num_lookups * (dim * _VALUE_BYTES + _INDEX_BYTES))
        added_s = 2 * num_lookups * _sectors(dim) / gpu.cache_bytes_per_s
        counted_s = num_lookups * dim * _SEGMENT_OPS / gpu.integer_ops_per_s
        hottest_s = num_lookups * float(shard.access.probability_at(0)) / gpu.clock_hz
        cleared_s = gpu.stream_s(distinct * dim * _VALUE_BYTES)
        return gpu.kernel_s(cleared_s) + gpu.kernel_s(max(read_s, added_s, counted_s, hottest_s))

    def _adagrad_s(self, shard: LocalShard, num_lookups: float) -> float:
        """Reads the sums; reads and writes rows and accumulators of the same width."""
        distinct, dim = shard.access.expected_distinct(num_lookups), shard.embedding_dim
        moved = distinct * (_ID_BYTES + dim * _VALUE_BYTES + 4 * _sectors(dim))
        return self.gpu.kernel_s(self.gpu.stream_s(moved))

    def _moved_s(self, shard: LocalShard, num_features: int) -> float:
        """Copies a shard's outputs into the buffer of the exchange, or gradients out of it: a slice per feature."""
        sliced = 2 * self.batch_size * shard.embedding_dim * _VALUE_BYTES
        return num_features * self.gpu.kernel_s(self.gpu.stream_s(sliced))


def unique_s(gpu: Gpu, access: AccessProfile, num_lookups: float) -> float:
    """tf.unique of a table's ids, as unique_op_gpu.cu.cc has it: sort, number, sort by first place, look up, scatter.

    Args:
        gpu: The GPU.
        access: Profile of the rows.
        num_lookups: Ids.
    """
    distinct = access.expected_distinct(num_lookups)
    pair = _ID_BYTES + _INDEX_BYTES
    seconds = _sort_s(gpu, num_lookups, _ID_BYTES, _ID_DIGITS)
    # Numbers of rows: a prefix sum of two kernels, and the last one is copied to the host.
    seconds += gpu.kernel_s() + gpu.kernel_s(gpu.stream_s(num_lookups * pair)) + gpu.kernel_s()
    seconds += gpu.kernel_s(gpu.stream_s(num_lookups * 2 * _INDEX_BYTES + distinct * _SECTOR_BYTES))
    seconds += _sort_s(gpu, distinct, _INDEX_BYTES, _POSITION_DIGITS)
    # Ids by first place, and where each row's went; then each lookup's row, scattered.
    seconds += gpu.kernel_s(gpu.stream_s(distinct * (pair + pair + 2 * _SECTOR_BYTES)))
    scattered_s = num_lookups * (2 * _INDEX_BYTES + _SECTOR_BYTES) / gpu.cache_bytes_per_s
    return seconds + gpu.kernel_s(scattered_s + gpu.stream_s(num_lookups * 2 * _INDEX_BYTES))


def _sort_s(gpu: Gpu, num_keys: float, key_bytes: int, num_digits: int) -> float:
    """A radix sort of keys with their positions."""
    ranged_s = gpu.kernel_s(gpu.stream_s(num_keys * _INDEX_BYTES))
    if num_keys <= _SINGLE_TILE:
        return ranged_s + gpu.kernel_s()
    histogram_s = gpu.kernel_s(num_keys * key_bytes / gpu.sort_bytes_per_s)
    digit_s = gpu.kernel_s(2 * num_keys * (key_bytes + _INDEX_BYTES) / gpu.sort_bytes_per_s)
    others_s = (_SORT_KERNELS - 2) * gpu.kernel_s()
    return ranged_s + others_s + histogram_s + num_digits * (digit_s + (_DIGIT_KERNELS - 1) * gpu.kernel_s())


def _sectors(dim: int) -> int:
    """Bytes that a row moves: whole sectors."""
    return -(-dim * _VALUE_BYTES // _SECTOR_BYTES) * _SECTOR_BYTES
