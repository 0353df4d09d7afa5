"""Fused kernels: one table-batched embedding of FBGEMM for all tables that it can take.

Shape suffixes: F features, G samples of the global batch, O columns of the kernel's output, N rows, D embedding dim,
L lookups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from autoshard.core import DType, EmbeddingTable, Optimizer, Pooling
from autoshard.core.errors import InputError
from autoshard.runtime.huge_pages import advise_huge_pages
from autoshard.runtime.state import TableState
from autoshard.runtime.weights import initialise

#: FBGEMM's names of the optimizers that it fuses into the backward kernel.
FUSED_OPTIMIZERS = {
    Optimizer.SGD: EmbOptimType.EXACT_SGD,
    Optimizer.ROWWISE_ADAGRAD: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    Optimizer.ADAGRAD: EmbOptimType.EXACT_ADAGRAD,
}
_POOLING = {Pooling.SUM: PoolingMode.SUM, Pooling.MEAN: PoolingMode.MEAN}
_PRECISION = {DType.FP32: SparseType.FP32, DType.FP16: SparseType.FP16}


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedSettings:
    """What the fused kernels of all tables have in common.

    Attributes:
        learning_rate: Learning rate.
        eps: Added to the root of the moments.
        seed: Seed of the initial weights.
    """

    learning_rate: float
    eps: float = 1e-8
    seed: int = 0


class FusedKernel:
    """One table-batched embedding: tables of any dims with the same pooling, dtype and optimizer.

    Args:
        tables: The tables.
        settings: Learning rate, epsilon and seed.
        device: Where to hold them.
    """

    def __init__(self, tables: Sequence[EmbeddingTable], settings: FusedSettings, device: torch.device) -> None:
        self.tables = tables
        self.names = [table.name for table in tables]
        self._table_of_feature = [index for index, table in enumerate(tables) for _ in table.features]
        self.num_features = len(self._table_of_feature)
        on_gpu = device.type == "cuda"
        location = EmbeddingLocation.DEVICE if on_gpu else EmbeddingLocation.HOST
        compute = ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU
        first = tables[0]
        self._tbe = SplitTableBatchedEmbeddingBagsCodegen(
            [(table.num_embeddings, table.embedding_dim, location, compute) for table in tables],
            feature_table_map=self._table_of_feature,
            pooling_mode=_POOLING[first.pooling],
            weights_precision=_PRECISION[first.dtype],
            output_dtype=SparseType.FP32,
            optimizer=FUSED_OPTIMIZERS[first.optimizer],
            learning_rate=settings.learning_rate,
            eps=settings.eps,
            # FBGEMM's default would look up row 0 in place of an id that is none, and only print it.
            bounds_check_mode=BoundsCheckMode.FATAL,
            device=device,
            **({} if on_gpu else {"preallocated_host_buffers": _memory(tables)}),
        )
        for table, weights_ND in zip(tables, self._tbe.split_embedding_weights(), strict=True):
            initialise(weights_ND, table, settings.seed)

    def __call__(self, lengths_FG: torch.Tensor, ids_L: torch.Tensor) -> torch.Tensor:
        """Pooled embeddings, fp32 of shape (G, O).

        Raises:
            InputError: If an id is no row of its table.
        """
        offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths_FG.reshape(-1))
        try:
            output_GO: torch.Tensor = self._tbe(ids_L.long(), offsets)
        except RuntimeError:
            if not ids_L.is_cuda:  # after a failed check a GPU answers no more questions
                self._check_ids(lengths_FG, ids_L)
            raise
        return output_GO

    def state(self, name: str) -> TableState:
        """Weights and moments of a table: views, which training changes."""
        index = self.names.index(name)
        states: list[Any] = self._tbe.split_optimizer_states()
        moments = states[index][0] if states and states[index] else None
        return TableState(self._tbe.split_embedding_weights()[index], moments)

    def _check_ids(self, lengths_FG: torch.Tensor, ids_L: torch.Tensor) -> None:
        per_feature = torch.split(ids_L, lengths_FG.sum(1).tolist())
        features = [(table, feature.name) for table in self.tables for feature in table.features]
        for (table, feature_name), feature_ids in zip(features, per_feature, strict=True):
            bad = feature_ids[(feature_ids < 0) | (feature_ids >= table.num_embeddings)]
            if len(bad):
                raise InputError(
                    f"table {table.name!r} has rows 0 to {table.num_embeddings - 1}, got id {int(bad[0])}",
                    field=f"feature {feature_name!r}",
                )


def _memory(tables: Sequence[EmbeddingTable]) -> dict[str, torch.Tensor]:
    """Memory for the weights and moments of a CPU's kernel, zeroed, in large pages where the system has them."""
    num_weights = sum(table.num_embeddings * table.embedding_dim for table in tables)
    optimizer = tables[0].optimizer
    num_moments = sum(
        table.num_embeddings * optimizer.state_bytes_per_row(table.embedding_dim) // 4 for table in tables
    )
    memory = {"weights": torch.empty(num_weights, dtype=_PRECISION[tables[0].dtype].as_dtype())}
    if num_moments:
        memory["momentum1"] = torch.empty(num_moments)
    return {name: advise_huge_pages(piece).zero_() for name, piece in memory.items()}
