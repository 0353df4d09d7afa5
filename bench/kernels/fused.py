"""Sets of shards as FBGEMM runs them: fused table-batched embeddings, one per kind of shard.

Shape suffixes: B bags per table, D sum of the embedding dims, L lookups.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import groupby
from typing import Any, TypeAlias

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DEFAULT_ASSOC,
    ComputeDevice,
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from autoshard.core import DType, LocalShard, MemoryLevel, Optimizer, Update
from autoshard.runtime.releases import fused_embedding
from bench.kernels.inputs import FusedInput, ShardBatch, fuse
from bench.measuring.arena import Arenas
from bench.measuring.devices import TORCH_DTYPES

_POOLING = {"sum": PoolingMode.SUM, "mean": PoolingMode.MEAN}
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


class FusedKernel:
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


class PooledGradientKernel:
    """One fused embedding whose backward makes the gradient of all its rows, for an all-reduce.

    The optimizer runs after the all-reduce and is not part of it.
    """

    def __init__(self, shards: Sequence[LocalShard], batch: FusedInput, arenas: Arenas) -> None:
        """Builds the kernel; arguments as those of `FusedKernel`, with one batch."""
        is_cuda = batch.indices_L.is_cuda
        self._module = DenseTableBatchedEmbeddingBagsCodegen(
            [(shard.num_embeddings, shard.embedding_dim) for shard in shards],
            weights_precision=_PRECISIONS[shards[0].dtype],
            pooling_mode=_POOLING[shards[0].pooling],
            use_cpu=not is_cuda,
        )
        if not is_cuda:
            self._module.weights = torch.nn.Parameter(arenas.weights(_num_weights(shards), shards[0].dtype))
        self._batch = batch
        self._gradient = _gradient(shards, batch)
        # torch warns that FBGEMM registers the gradient of this operator in a way that is going out of use.
        warnings.filterwarnings("ignore", message="fbgemm::dense_embedding_codegen_lookup_function")

    @property
    def module(self) -> DenseTableBatchedEmbeddingBagsCodegen:
        """FBGEMM's module."""
        return self._module

    def forward(self) -> torch.Tensor:
        """Looks all bags up; shape (B, D)."""
        self._module.weights.grad = None
        return self._module(self._batch.indices_L, self._batch.offsets_B)

    def backward(self, output: torch.Tensor) -> None:
        """Propagates a gradient, which is left in the module's weights."""
        output.backward(self._gradient)


class RowGradientKernel:
    """Lookups of single rows whose backward makes the gradient of all rows: torch's own embedding, table by table.

    FBGEMM's embeddings with dense gradients pool, whatever they are asked for.
    """

    def __init__(
        self, shards: Sequence[LocalShard], batches: Sequence[ShardBatch], arenas: Arenas, device: torch.device
    ) -> None:
        """Builds the kernel; arguments as those of `ShardSet`."""
        self._weights = [
            _rows(shard, arenas, device).view(shard.num_embeddings, shard.embedding_dim).requires_grad_()
            for shard in shards
        ]
        self._ids = [torch.from_numpy(batch.bags.ids_L).to(device) for batch in batches]

    @property
    def weights(self) -> list[torch.Tensor]:
        """One matrix per shard, with its gradient after a backward pass."""
        return self._weights

    def forward(self) -> torch.Tensor:
        """Looks all rows up, shard after shard, as one vector."""
        for weights in self._weights:
            weights.grad = None
        found = [
            torch.nn.functional.embedding(ids_L, weights).flatten()
            for ids_L, weights in zip(self._ids, self._weights, strict=True)
        ]
        return torch.cat(found)

    def backward(self, output: torch.Tensor) -> None:
        """Makes the gradients of the weights."""
        output.backward(torch.full_like(output, _GRADIENT))


#: Shards of one kind that run together.
Kernel: TypeAlias = FusedKernel | PooledGradientKernel | RowGradientKernel


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

    def forward(self) -> list[torch.Tensor]:
        """Runs all forward kernels."""
        return [kernel.forward() for kernel in self._kernels]

    def backward(self, outputs: list[torch.Tensor]) -> None:
        """Runs all backward kernels."""
        for kernel, output in zip(self._kernels, outputs, strict=True):
            kernel.backward(output)


def fusable(shard: LocalShard) -> tuple[str, int, int]:
    """Shards that agree in it run in one fused kernel. Rows that are not pooled need a common dim in FBGEMM."""
    return shard.kernel_kind, shard.num_bags, 0 if shard.is_pooled else shard.embedding_dim


def _build(draws: Sequence[Sequence[ShardBatch]], arenas: Arenas, device: torch.device) -> Kernel:
    shards = [batches[0].measured.shard for batches in draws]
    if shards[0].update is Update.FUSED:
        inputs = [fuse(batches, device) for batches in zip(*draws, strict=True)]
        return FusedKernel(shards, inputs, arenas)
    first = [batches[0] for batches in draws]
    if shards[0].is_pooled:
        return PooledGradientKernel(shards, fuse(first, device), arenas)
    return RowGradientKernel(shards, first, arenas, device)


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
        extra = {"cache_sets": _num_cache_sets(shards)} if is_cached else {}
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
        pooling_mode=_POOLING[kind.pooling] if kind.is_pooled else PoolingMode.NONE,
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


def _rows(shard: LocalShard, arenas: Arenas, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return torch.zeros(_num_weights([shard]), dtype=TORCH_DTYPES[shard.dtype], device=device)
    return arenas.weights(_num_weights([shard]), shard.dtype)


def _num_weights(shards: Sequence[LocalShard]) -> int:
    return sum(shard.num_embeddings * shard.embedding_dim for shard in shards)
