"""Tables as TorchRec's embedding configs and modules, and the names that both sides have for one thing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torchrec.optim
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType

from autoshard.core import DType, EmbeddingTable, Optimizer, Pooling

#: TorchRec's number formats.
DATA_TYPES = {
    DType.FP32: DataType.FP32,
    DType.FP16: DataType.FP16,
    DType.BF16: DataType.BF16,
    DType.INT8: DataType.INT8,
}
#: TorchRec's poolings of bags; sequences have configs of another type.
POOLING_TYPES = {Pooling.SUM: PoolingType.SUM, Pooling.MEAN: PoolingType.MEAN}
#: Optimizers that `apply_optimizer_in_backward` is given, as TorchRec's planner knows them.
OPTIMIZER_CLASSES: dict[Optimizer, type[torch.optim.Optimizer]] = {
    Optimizer.SGD: torchrec.optim.SGD,
    Optimizer.ROWWISE_ADAGRAD: torchrec.optim.RowWiseAdagrad,
    Optimizer.ADAGRAD: torchrec.optim.Adagrad,
    Optimizer.ADAM: torchrec.optim.Adam,
    Optimizer.PARTIAL_ROWWISE_ADAM: torchrec.optim.PartialRowWiseAdam,
    Optimizer.LAMB: torchrec.optim.LAMB,
    Optimizer.PARTIAL_ROWWISE_LAMB: torchrec.optim.PartialRowWiseLAMB,
}


def table_config(
    table: EmbeddingTable,
    *,
    name: str | None = None,
    features: Sequence[str] | None = None,
    pooling: Pooling | None = None,
) -> Any:
    """An `EmbeddingConfig` of a sequence table, or an `EmbeddingBagConfig`.

    Args:
        table: The table.
        name: Its name there; None for its own.
        features: Names of its features; None for their own.
        pooling: Its pooling; None for its own.
    """
    common = {
        "name": table.name if name is None else name,
        "num_embeddings": table.num_embeddings,
        "embedding_dim": table.embedding_dim,
        "feature_names": [feature.name for feature in table.features] if features is None else list(features),
        "data_type": DATA_TYPES[table.dtype],
    }
    if table.pooling is Pooling.SEQUENCE:
        return EmbeddingConfig(**common)
    return EmbeddingBagConfig(**common, pooling=POOLING_TYPES[pooling or table.pooling])


def meta_module(tables: Sequence[EmbeddingTable]) -> torch.nn.Module:
    """The tables as TorchRec modules without storage: pooled ones together, sequences by dimension.

    Parameters name their optimizers where TorchRec's planner looks for them.
    """
    meta = torch.device("meta")
    pooled = [table for table in tables if table.pooling is not Pooling.SEQUENCE]
    sequences: dict[int, list[EmbeddingTable]] = {}
    for table in tables:
        if table.pooling is Pooling.SEQUENCE:
            sequences.setdefault(table.embedding_dim, []).append(table)
    parts: list[torch.nn.Module] = []
    for weighted in (False, True):
        if configs := [table_config(table) for table in pooled if table.weighted is weighted]:
            parts.append(EmbeddingBagCollection(tables=configs, is_weighted=weighted, device=meta))
    for alike in sequences.values():
        parts.append(EmbeddingCollection(tables=[table_config(table) for table in alike], device=meta))
    optimizer_of = {table.name: table.optimizer for table in tables}
    for part in parts:
        for name, parameter in part.named_parameters():
            # Where TorchRec's own apply_optimizer_in_backward leaves it.
            optimizer = OPTIMIZER_CLASSES[optimizer_of[name.split(".")[-2]]]
            parameter._optimizer_classes = [optimizer]  # type: ignore[attr-defined]
    return torch.nn.ModuleList(parts)
