"""Sets of shards as FBGEMM's fused table-batched embeddings.

Shape suffixes: B bags per table, D sum of the embedding dims.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from autoshard.core import DType, LocalShard, MemoryLevel, Optimizer, Pooling, Update
from autoshard.core.errors import InvalidTableError
from bench.arena import Arena
from bench.inputs import ShardBatch, fuse

_POOLING = {Pooling.SUM: PoolingMode.SUM, Pooling.MEAN: PoolingMode.MEAN}
#: FBGEMM 1.8 takes memory from its caller; older ones allocate, and get it replaced.
_TAKES_MEMORY = "preallocated_host_buffers" in inspect.signature(SplitTableBatchedEmbeddingBagsCodegen).parameters

LEARNING_RATE = 0.01
EPSILON = 1e-8


class FusedKernel:
    """One fused embedding over a set of shards: forward, and backward with the row-wise AdaGrad inside.

    Bounds are not checked in the timed kernel: the ids are made here, and a runtime checks ids where it receives
    them.
    """

    def __init__(self, batches: Sequence[ShardBatch], weights: Arena, moments: Arena, device: torch.device) -> None:
        """Builds the kernel on memory of the arenas.

        Args:
            batches: The shards with their batches, all of one pooling and one number of bags.
            weights: Where the weights come from; used on a CPU only, a GPU's allocator is quick.
            moments: Where the optimizer state comes from; likewise.
            device: Where to run.
        """
        shards = [batch.measured.shard for batch in batches]
        self._module = _build(shards, weights, moments, device)
        self._input = fuse(batches, device)
        width_D = sum(shard.embedding_dim for shard in shards)
        self._grad_BD = torch.full((shards[0].num_bags, width_D), 1e-3, device=device)

    @property
    def module(self) -> torch.nn.Module:
        """FBGEMM's module."""
        return self._module

    def forward(self) -> torch.Tensor:
        """Looks all bags up; shape (B, D)."""
        return self._module(self._input.indices_L, self._input.offsets_B)

    def backward(self, output_BD: torch.Tensor) -> None:
        """Propagates a gradient and updates the weights."""
        output_BD.backward(self._grad_BD)


class ShardSet:
    """A set of shards as one rank runs it: one fused kernel per pooling and number of bags."""

    def __init__(self, batches: Sequence[ShardBatch], weights: Arena, moments: Arena, device: torch.device) -> None:
        """Builds the kernels; arguments as those of `FusedKernel`."""
        self.measured = tuple(batch.measured for batch in batches)
        ordered = sorted(batches, key=_fusable)
        self._kernels = [
            FusedKernel(list(group), weights, moments, device) for _, group in groupby(ordered, key=_fusable)
        ]

    def forward(self) -> list[torch.Tensor]:
        """Runs all forward kernels."""
        return [kernel.forward() for kernel in self._kernels]

    def backward(self, outputs: list[torch.Tensor]) -> None:
        """Runs all backward kernels."""
        for kernel, output_BD in zip(self._kernels, outputs, strict=True):
            kernel.backward(output_BD)


def check_measurable(shard: LocalShard) -> None:
    """Raises unless the benchmark can measure shards of this kind.

    Raises:
        InvalidTableError: If it cannot, naming the field.
    """
    accepted: dict[str, tuple[object, ...]] = {
        "dtype": (DType.FP32,),
        "pooling": (Pooling.SUM, Pooling.MEAN),
        "optimizer": (Optimizer.ROWWISE_ADAGRAD,),
        "update": (Update.FUSED,),
        "level": (MemoryLevel.HBM,),
    }
    for name, values in accepted.items():
        if getattr(shard, name) not in values:
            kinds = " or ".join(map(str, values))
            raise InvalidTableError(
                f"the benchmark measures {kinds}, got {getattr(shard, name)}", field=f"{shard.table}.{name}"
            )
    if shard.embedding_dim % 4:
        raise InvalidTableError(
            f"must be a multiple of 4, got {shard.embedding_dim}", field=f"{shard.table}.embedding_dim"
        )


def weight_floats(shards: Sequence[LocalShard]) -> int:
    """Numbers of the weights of a set."""
    return sum(shard.num_embeddings * shard.embedding_dim for shard in shards)


def moment_floats(shards: Sequence[LocalShard]) -> int:
    """Numbers of the optimizer state of a set."""
    return sum(shard.num_embeddings for shard in shards)


def _fusable(batch: ShardBatch) -> tuple[str, int]:
    return str(batch.measured.shard.pooling), batch.measured.shard.num_bags


def _build(
    shards: Sequence[LocalShard], weights: Arena, moments: Arena, device: torch.device
) -> SplitTableBatchedEmbeddingBagsCodegen:
    is_cuda = device.type == "cuda"
    place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if is_cuda else (EmbeddingLocation.HOST, ComputeDevice.CPU)
    memory = {}
    if not is_cuda:
        memory = {"weights": weights.take(weight_floats(shards)), "momentum1": moments.take(moment_floats(shards))}
    extra: dict[str, Any] = {"preallocated_host_buffers": memory} if memory and _TAKES_MEMORY else {}
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(shard.num_embeddings, shard.embedding_dim, *place) for shard in shards],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=LEARNING_RATE,
        eps=EPSILON,
        pooling_mode=_POOLING[shards[0].pooling],
        bounds_check_mode=BoundsCheckMode.NONE,
        device=device,
        **extra,
    )
    if memory and not _TAKES_MEMORY:
        for name, piece in memory.items():
            setattr(module, f"{name}_host", torch.nn.Parameter(piece))
    return module
