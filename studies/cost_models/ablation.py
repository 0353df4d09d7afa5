"""Cost models without a group of their features, as in AutoShard's Table 2.

Shape suffixes: U distinct shards, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from autoshard.core import AccessProfile, DType, Exchange, MemoryLevel, Optimizer, Pooling, Update
from costmodel.kernel.dataset import CostDataset
from costmodel.kernel.features import FEATURE_NAMES, NUM_INPUTS

#: The model as it is, beside those that lack something.
FULL: Final = "nothing"

Removal = Callable[[CostDataset], CostDataset]


def _without_dimension(dataset: CostDataset) -> CostDataset:
    dim = _middle(dataset, "embedding_dim")
    return dataset.with_features_of(replace(shard, embedding_dim=dim) for shard in dataset.shards_U)


def _without_rows(dataset: CostDataset) -> CostDataset:
    """The access profile stays: how often rows are hit is the features of the distribution."""
    rows = _middle(dataset, "num_embeddings")
    return dataset.with_features_of(replace(shard, num_embeddings=rows) for shard in dataset.shards_U)


def _without_pooling_factor(dataset: CostDataset) -> CostDataset:
    pooling_factor = float(np.median([shard.pooling_factor for shard in dataset.shards_U]))
    return dataset.with_features_of(replace(shard, pooling_factor=pooling_factor) for shard in dataset.shards_U)


def _without_size(dataset: CostDataset) -> CostDataset:
    return _constant(dataset, [FEATURE_NAMES.index("log_weight_mib")])


def _without_distribution(dataset: CostDataset) -> CostDataset:
    return dataset.with_features_of(
        replace(shard, access=AccessProfile.uniform(shard.num_embeddings)) for shard in dataset.shards_U
    )


def _without_batch(dataset: CostDataset) -> CostDataset:
    bags = _middle(dataset, "num_bags")
    return dataset.with_features_of(replace(shard, num_bags=bags) for shard in dataset.shards_U)


def _without_kinds(dataset: CostDataset) -> CostDataset:
    return dataset.with_features_of(
        replace(
            shard,
            dtype=DType.FP32,
            pooling=Pooling.SUM,
            optimizer=Optimizer.ROWWISE_ADAGRAD,
            output=Exchange.PARTIAL_SUMS,
            update=Update.FUSED,
            level=MemoryLevel.HBM,
            cache_bytes=0,
        )
        for shard in dataset.shards_U
    )


def _without_work(dataset: CostDataset) -> CostDataset:
    """Leaves a network that predicts times from properties of shards, as AutoShard's does."""
    return _constant(dataset, range(NUM_INPUTS, len(FEATURE_NAMES)))


#: Removed groups of features, by their names in reports; the first five are AutoShard's. All that follows from a
#: removed feature goes with it: without the pooling factor, lookups and distinct rows are those of a middling one.
REMOVALS: Final[Mapping[str, Removal]] = {
    "dimension": _without_dimension,
    "rows (hash size)": _without_rows,
    "pooling factor": _without_pooling_factor,
    "table size": _without_size,
    "access distribution": _without_distribution,
    "batch size": _without_batch,
    "kinds of kernels": _without_kinds,
    "work": _without_work,
}


def without(dataset: CostDataset, removed: str) -> CostDataset:
    """The dataset with a group of features alike for all shards; FULL for none of them."""
    return dataset if removed == FULL else REMOVALS[removed](dataset)


def _middle(dataset: CostDataset, name: str) -> int:
    return round(float(np.median([getattr(shard, name) for shard in dataset.shards_U])))


def _constant(dataset: CostDataset, columns: range | list[int]) -> CostDataset:
    features_UF = dataset.features_UF.copy()
    # 1, so that prices per unit of work are times.
    features_UF[:, columns] = 1.0
    return replace(dataset, features_UF=features_UF)
