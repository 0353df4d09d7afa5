"""Sets of shards as the runtime runs them, by its own kernels: one per kind of shard, fused or of replicas.

Shape suffixes: B bags per table, X bags of all tables, D sum of the embedding dims, N rows, L lookups, S shards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import TypeAlias

import torch

from autoshard.core import LocalShard, MemoryPlacement, Pooling, Update
from autoshard.runtime.engine.rows.fused import FusedKernel, FusedSettings, UpdateStep
from autoshard.runtime.engine.rows.replicated import places_of
from autoshard.runtime.engine.rows.torch_rows import TorchRows, one_below_the_other, side_by_side, summed_by_place
from bench.kernels.inputs import FusedInput, ShardBatch, fuse, in_one_table
from bench.measuring.arena import Arenas

LEARNING_RATE = 0.01
EPSILON = 1e-8
_GRADIENT = 1e-3
_SETTINGS = FusedSettings(learning_rate=LEARNING_RATE, eps=EPSILON)
_STEP = UpdateStep(LEARNING_RATE, 1)


class TimedFusedKernel:
    """Shards of one kind in a kernel of the runtime: forward, and backward with the optimizer inside.

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
        kind, device = shards[0], inputs[0].ids_L.device
        sizes = [(shard.num_embeddings, shard.embedding_dim) for shard in shards]
        memory = MemoryPlacement(
            level=kind.level, cache_bytes=sum(shard.cache_bytes for shard in shards), policy=kind.cache_policy
        )

        def allocate(name: str, number: int) -> torch.Tensor:
            return arenas.weights(number, kind.dtype) if name == "weights" else arenas.moments(number)

        self.kernel = FusedKernel(
            # Rows are of one table, as the runtime holds them.
            sizes if kind.is_pooled else [(sum(rows for rows, _ in sizes), kind.embedding_dim)],
            kind.dtype,
            kind.optimizer,
            _SETTINGS,
            device,
            range(len(shards)) if kind.is_pooled else None,
            memory,
            allocate,
        )
        self._inputs, self._is_pooled, self._turn = inputs, kind.is_pooled, -1
        width = sum(dim for _, dim in sizes)
        shapes = [(kind.num_bags, width) if kind.is_pooled else (len(one.ids_L), kind.embedding_dim) for one in inputs]
        self._gradients = [torch.full(shape, _GRADIENT, device=device) for shape in shapes]

    def forward(self) -> torch.Tensor:
        """Looks all bags up; shape (B, D) where they are pooled, else (L, D)."""
        self._turn = (self._turn + 1) % len(self._inputs)
        batch = self._inputs[self._turn]
        # Means are sums here, which the rank that reads them divides when they come.
        return self.kernel.sums(batch.ids_L, batch.lengths_SB) if self._is_pooled else self.kernel.rows(batch.ids_L)

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
        self.rows = TorchRows(
            0 if on_cpu else num_rows, kind.embedding_dim, kind.dtype, kind.optimizer, _SETTINGS, device
        )
        if on_cpu:
            # Updates of memory that a fused kernel's forward pass has noted as well would make autograd refuse its
            # backward pass: `data` counts them by itself.
            numbers = num_rows * kind.embedding_dim
            self.rows.weights_ND = arenas.weights(numbers, kind.dtype).data.view(num_rows, -1)
            for name, empty in self.rows.moments.items():
                shape = (num_rows, *empty.shape[1:])
                self.rows.moments[name] = arenas.moments(math.prod(shape)).data.view(shape)
        fused = fuse(batches, as_one_table=True)
        self._rows_L, self._lengths_X = fused.ids_L, fused.lengths_SB.reshape(-1)
        self._is_pooled, self._num_shards, self._num_bags = kind.is_pooled, len(shards), kind.num_bags
        width = len(shards) * kind.embedding_dim
        shape = (kind.num_bags, width) if kind.is_pooled else (len(self._rows_L), kind.embedding_dim)
        self._gradient = torch.full(shape, _GRADIENT, device=device)
        self._sources = torch.arange(len(self._lengths_X if kind.is_pooled else self._rows_L), device=device)
        self._sources_L = self._sources
        # Processes tell each other with the ids of a batch, ahead of the lookup.
        self._updated_U = in_one_table(batches, [batch.updated_U for batch in batches])

    def forward(self) -> torch.Tensor:
        """Looks all bags up; fp32, of shape (B, D) where they are pooled, else (L, D)."""
        if not self._is_pooled:
            return self.rows.rows(self._rows_L)
        sums_BD = side_by_side(self.rows.sums(self._rows_L, self._lengths_X), self._num_shards, self._num_bags)
        self._sources_L = torch.repeat_interleave(self._sources, self._lengths_X, output_size=len(self._rows_L))
        return sums_BD

    def backward(self, _output: torch.Tensor) -> None:
        """Sums a gradient row by row, and updates the rows; those that only other ranks hit, by 0."""
        gradients_XD = self._gradient
        if self._is_pooled:
            gradients_XD = one_below_the_other(gradients_XD, self._num_shards)
        places_L = places_of(self._rows_L, self._updated_U, len(self.rows.weights_ND))
        gradients_UD = summed_by_place(places_L, len(self._updated_U), self._sources_L, gradients_XD)
        self.rows.update(self._updated_U, gradients_UD, _STEP)


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
        self.num_updated_S = tuple(len(batches[0].updated_U) for batches in draws)
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
    inputs = [fuse(batches, as_one_table=not shards[0].is_pooled) for batches in zip(*draws, strict=True)]
    return TimedFusedKernel(shards, inputs, arenas)
