"""The 21 features of a shard that the learned cost model and the policy see.

Shape suffixes: N shards, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autoshard.core import NUM_REUSE_BINS, AccessProfile, LocalShard

FeatureArray = NDArray[np.float64]

#: In the order of the columns.
FEATURE_NAMES: tuple[str, ...] = (
    "embedding_dim",
    "num_embeddings",
    "pooling_factor",
    "size_gb",
    *(f"lookups_reuse_{index}" for index in range(NUM_REUSE_BINS)),
)
NUM_FEATURES = len(FEATURE_NAMES)
_NUM_NORMALISED = 3
_BYTES_PER_GB = 1e9
# 17 numbers per entry; a search over column splits asks for the same few thousand profiles again and again.
_CACHED_BINS = 1 << 16


def shard_features(shards: Sequence[LocalShard]) -> FeatureArray:
    """Features of shards, not normalised; shape (N, F).

    The columns are FEATURE_NAMES: columns of the shard, its rows, lookups per bag, weights in GB (1e9 bytes), and the
    shares of a batch's lookups that go to rows which the batch hits once, twice, 3 to 4 times and so on, as the
    access profile expects them.

    The paper leaves open whether its shares are of rows or of lookups. Of lookups they carry over better to tables
    that training did not see: 3.3% mean relative error instead of 4.3% (2% either way on those that it saw; 4,800
    samples of MetaSyn / 64 for training, 312 of another draw of its tables for testing; Xeon, 1 thread).

    Source:
        AutoShard B.2. Differs: the bins are expected from the profile, not counted on one batch, since a plan is made
        before its batches are seen (equally accurate: 2.03% and 2.01%). The step feature belongs to the policy.
    """
    features_NF = np.empty((len(shards), NUM_FEATURES))
    for index, shard in enumerate(shards):
        features_NF[index, 0] = shard.embedding_dim
        features_NF[index, 1] = shard.num_embeddings
        features_NF[index, 2] = shard.pooling_factor
        features_NF[index, 3] = shard.weight_bytes / _BYTES_PER_GB
        features_NF[index, 4:] = _expected_bins(shard.access, shard.num_lookups)
    return features_NF


@lru_cache(maxsize=_CACHED_BINS)
def _expected_bins(access: AccessProfile, num_lookups: float) -> FeatureArray:
    bins = access.reuse_bins(num_lookups, of="lookups")
    bins.setflags(write=False)
    return bins


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureScaling:
    """Brings dimension, rows and pooling factor to mean 0 and standard deviation 1.

    Attributes:
        mean_F: Subtracted; 0 for features that are taken as they are.
        std_F: Divided by; 1 for features that are taken as they are.

    Source:
        AutoShard B.2: table size and reuse bins stay as they are.
    """

    mean_F: tuple[float, ...]
    std_F: tuple[float, ...]

    @classmethod
    def fit(cls, features_NF: FeatureArray) -> FeatureScaling:
        """The scaling that normalises the given shards; a feature without spread keeps its unit."""
        mean_F, std_F = np.zeros(NUM_FEATURES), np.ones(NUM_FEATURES)
        scaled = features_NF[:, :_NUM_NORMALISED]
        mean_F[:_NUM_NORMALISED] = scaled.mean(axis=0)
        std = scaled.std(axis=0)
        std_F[:_NUM_NORMALISED] = np.where(std > 0, std, 1.0)
        return cls(mean_F=tuple(mean_F.tolist()), std_F=tuple(std_F.tolist()))

    def apply(self, features_NF: FeatureArray) -> NDArray[np.float32]:
        """Scaled features; shape (N, F)."""
        return ((features_NF - np.asarray(self.mean_F)) / np.asarray(self.std_F)).astype(np.float32)
