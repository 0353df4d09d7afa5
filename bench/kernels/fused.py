"""Sets of shards as the runtime runs them: a kernel per kind of shard, fused table-batched embeddings and replicas.

Shape suffixes: B bags per table, X bags of all tables, D sum of the embedding dims, N rows, L lookups, S shards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import Any, TypeAlias

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DEFAULT_ASSOC,
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from autoshard.core import DType, LocalShard, MemoryLevel, Optimizer, Pooling, Update
from autoshard.runtime.engine.rows.fused import CACHE_POLICIES, FusedSettings
from autoshard.runtime.engine.rows.replicas import one_below_the_other, side_by_side
from autoshard.runtime.engine.rows.replicated import ReplicatedRows, places_of, summed_by_place
from autoshard.runtime.releases import fused_embedding
from bench.kernels.inputs import FusedInput, ShardBatch, fuse
from bench.measuring.arena import Arenas

_PRECISIONS = {DType.FP32: SparseType.FP32, DType.FP16: SparseType.FP16, DType.BF16: SparseType.BF16}
_OPTIMIZERS = {
    Optimizer.SGD: EmbOptimType.EXACT_SGD,
    Optimizer.ROWWISE_ADAGRAD: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    Optimizer.ADAGRAD: EmbOptimType.EXACT_ADAGRAD,
    Optimizer.ADAM: EmbOptimType.ADAM,
}

LEARNING_RATE = 0.01
EPSILON = 1e-8
_GRADIENT = 1e-3


class TimedFusedKernel:
    """One fused embedding: forward, and backward with the optimizer inside.

    Bounds are not checked in the timed kernel: the ids are made here, and a runtime checks ids where it receives
    them. Where rows live behind a cache, runs take turns among several batches, so that the cache has misses.
    """

    def __init__(self, shards: Sequence[LocalShard], inputs: Sequence[FusedInput], arenas: Arenas) -> None:
        """Builds the kernel.

        Args:
            shards: Shards of one kind.
            inputs: Batches of all of them, at least one; runs take turns.
            arenas: Where weights and optimizer state come from on a CPU; a GPU's allocator is quick.
        """
        self._module = _build_fused(shards, arenas, inputs[0].indices_L.device)
        self._inputs = inputs
        self._gradients = [_gradient(shards, item) for item in inputs]
        self._turn = -1

    @property
    def module(self) -> SplitTableBatchedEmbeddingBagsCodegen:
        """FBGEMM's module."""
        return self._module

    def forward(self) -> torch.Tensor:
        """Looks all bags up; shape (B, D) where they are pooled, else (L, D)."""
        self._turn = (self._turn + 1) % len(self._inputs)
        batch = self._inputs[self._turn]
        return self._module(batch.indices_L, batch.offsets_B)

    def backward(self, output: torch.Tensor) -> None:
        """Propagates a gradient and updates the weights."""
        output.backward(self._gradients[self._turn])


class ReplicaKernel:
    """Rows that other ranks have copies of, as the runtime looks them up and updates them.

    The collective in which gradients meet lies between their sums and the optimizer's step, and is not part of it. On
    a CPU, this takes 1.03 times as long as FBGEMM's and torch's kernels with dense gradients, which the samples of
    `docs/data` were measured with: 0.65 to 1.6 times for the middle 80% of 60 sets, 0.07 times for thin tiers of many
    rows (forward and backward, November 2026).
    """

    def __init__(
        self, shards: Sequence[LocalShard], batches: Sequence[ShardBatch], arenas: Arenas, device: torch.device
    ) -> None:
        """Builds the kernel; arguments as those of `ShardSet`, of shards with one dim."""
        kind = shards[0]
        num_rows = sum(shard.num_embeddings for shard in shards)
        on_cpu = device.type == "cpu"
        settings = FusedSettings(learning_rate=LEARNING_RATE, eps=EPSILON)
        self.rows = ReplicatedRows(
            0 if on_cpu else num_rows, kind.embedding_dim, kind.dtype, kind.optimizer, settings, device
        )
        if on_cpu:
            # Updates of memory that a fused kernel's forward pass has noted as well would make autograd refuse its
            # backward pass: `data` counts them by itself.
            self.rows.weights_ND = arenas.weights(_num_weights(shards), kind.dtype).data.view(num_rows, -1)
            if self.rows.moments is not None:
                shape = (num_rows, *self.rows.moments.shape[1:])
                self.rows.moments = arenas.moments(math.prod(shape)).data.view(shape)
        fused = fuse(batches, device)
        self._ids_L = fused.indices_L
        self._lengths_X = fused.offsets_B.diff()
        bases_S = torch.tensor([0, *accumulate(shard.num_embeddings for shard in shards[:-1])], device=device)
        counts_S = torch.tensor([len(batch.bags.ids_L) for batch in batches], device=device)
        self._bases_L = torch.repeat_interleave(bases_S, counts_S)
        self._is_pooled, self._num_shards, self._num_bags = kind.is_pooled, len(shards), kind.num_bags
        width = len(shards) * kind.embedding_dim
        shape = (kind.num_bags, width) if kind.is_pooled else (len(self._ids_L), kind.embedding_dim)
        self._gradient = torch.full(shape, _GRADIENT, device=device)
        self._sources = torch.arange(len(self._lengths_X if kind.is_pooled else self._ids_L), device=device)
        self._rows_L = self._sources_L = self._sources
        # Processes tell each other with the ids of a batch, ahead of the lookup.
        self._hit_U = torch.unique(self._ids_L + self._bases_L)

    def forward(self) -> torch.Tensor:
        """Looks all bags up; fp32, of shape (B, D) where they are pooled, else (L, D)."""
        self._rows_L = self._ids_L + self._bases_L
        if not self._is_pooled:
            return self.rows.rows(self._rows_L)
        sums_BD = side_by_side(self.rows.sums(self._rows_L, self._lengths_X), self._num_shards, self._num_bags)
        self._sources_L = torch.repeat_interleave(self._sources, self._lengths_X, output_size=len(self._ids_L))
        return sums_BD

    def backward(self, _output: torch.Tensor) -> None:
        """Sums a gradient row by row, and updates the rows."""
        gradients_XD = self._gradient
        if self._is_pooled:
            gradients_XD = one_below_the_other(gradients_XD, self._num_shards)
        places_L = places_of(self._rows_L, self._hit_U, len(self.rows.weights_ND))
        gradients_UD = summed_by_place(places_L, len(self._hit_U), self._sources_L, gradients_XD)
        self.rows.update(self._hit_U, gradients_UD, LEARNING_RATE)


#: Shards of one kind that run together.
Kernel: TypeAlias = TimedFusedKernel | ReplicaKernel


class ShardSet:
    """A set of shards as one rank runs it: one kernel per kind of shard."""

    def __init__(self, draws: Sequence[Sequence[ShardBatch]], arenas: Arenas, device: torch.device) -> None:
        """Builds the kernels.

        Args:
            draws: For each shard its batches, at least one; all shards of a kind have as many.
            arenas: Where weights and optimizer state come from.
            device: Where to run.
        """
        self.measured = tuple(batches[0].measured for batches in draws)
        ordered = sorted(draws, key=lambda batches: fusable(batches[0].measured.shard))
        self._kernels: list[Kernel] = [
            _build(list(group), arenas, device)
            for _, group in groupby(ordered, key=lambda batches: fusable(batches[0].measured.shard))
        ]

    @property
    def is_idle(self) -> bool:
        """Whether the set is empty."""
        return not self.measured

    @property
    def kernels(self) -> Sequence[Kernel]:
        """The kernels, in the order in which they run."""
        return self._kernels

    def forward(self) -> list[torch.Tensor]:
        """Runs all forward kernels."""
        return [kernel.forward() for kernel in self._kernels]

    def backward(self, outputs: list[torch.Tensor]) -> None:
        """Runs all backward kernels."""
        for kernel, output in zip(self._kernels, outputs, strict=True):
            kernel.backward(output)


def fusable(shard: LocalShard) -> tuple[str, int, int]:
    """Shards that agree in it run in one kernel: rows are of one dim in FBGEMM, and replicas in the runtime."""
    if shard.pooling is Pooling.MEAN:
        shard = replace(shard, pooling=Pooling.SUM)
    if shard.update is Update.ALL_REDUCED:
        return f"{shard.kernel_kind}/{shard.optimizer}", shard.num_bags, shard.embedding_dim
    return shard.kernel_kind, shard.num_bags, 0 if shard.is_pooled else shard.embedding_dim


def _build(draws: Sequence[Sequence[ShardBatch]], arenas: Arenas, device: torch.device) -> Kernel:
    shards = [batches[0].measured.shard for batches in draws]
    if shards[0].update is Update.ALL_REDUCED:
        return ReplicaKernel(shards, [batches[0] for batches in draws], arenas, device)
    inputs = [fuse(batches, device) for batches in zip(*draws, strict=True)]
    return TimedFusedKernel(shards, inputs, arenas)


def _build_fused(
    shards: Sequence[LocalShard], arenas: Arenas, device: torch.device
) -> SplitTableBatchedEmbeddingBagsCodegen:
    kind, optimizer = shards[0], shards[0].optimizer
    is_cuda = device.type == "cuda"
    place = (EmbeddingLocation.HOST, ComputeDevice.CPU)
    memory: dict[str, torch.Tensor] = {}
    extra: dict[str, Any] = {}
    if is_cuda:
        is_cached = kind.level is MemoryLevel.DDR
        location = EmbeddingLocation.MANAGED_CACHING if is_cached else EmbeddingLocation.DEVICE
        place = (location, ComputeDevice.CUDA)
        if is_cached:
            extra = {"cache_sets": _num_cache_sets(shards), "cache_algorithm": CACHE_POLICIES[kind.cache_policy]}
    else:
        memory = {"weights": arenas.weights(_num_weights(shards), kind.dtype)}
        if optimizer is not Optimizer.SGD:
            state_bytes = sum(s.num_embeddings * optimizer.state_bytes_per_row(s.embedding_dim) for s in shards)
            memory["momentum1"] = arenas.moments(state_bytes // 4)
    return fused_embedding(
        [(shard.num_embeddings, shard.embedding_dim, *place) for shard in shards],
        memory,
        optimizer=_OPTIMIZERS[optimizer],
        learning_rate=LEARNING_RATE,
        eps=EPSILON,
        weights_precision=_PRECISIONS[kind.dtype],
        # Means are sums here, which the rank that reads them divides when they come.
        pooling_mode=PoolingMode.SUM if kind.is_pooled else PoolingMode.NONE,
        bounds_check_mode=BoundsCheckMode.NONE,
        device=device,
        **extra,
    )


def _num_cache_sets(shards: Sequence[LocalShard]) -> int:
    """Sets of FBGEMM's set-associative cache that hold the cache bytes of all shards."""
    row_bytes = max(shard.embedding_dim for shard in shards) * shards[0].dtype.num_bytes
    return max(1, sum(shard.cache_bytes for shard in shards) // (DEFAULT_ASSOC * row_bytes))


def _gradient(shards: Sequence[LocalShard], batch: FusedInput) -> torch.Tensor:
    if shards[0].is_pooled:
        shape = (shards[0].num_bags, sum(shard.embedding_dim for shard in shards))
    else:
        shape = (len(batch.indices_L), shards[0].embedding_dim)
    return torch.full(shape, _GRADIENT, device=batch.indices_L.device)


def _num_weights(shards: Sequence[LocalShard]) -> int:
    return sum(shard.num_embeddings * shard.embedding_dim for shard in shards)
