"""What the learned cost model and the policy see of a shard.

Shape suffixes: N shards, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from autoshard.core import NUM_REUSE_BINS, AccessProfile, DType, LocalShard, MemoryLevel, Optimizer, Pooling, Update
from autoshard.core.access import ProfileBatch
from autoshard.core.content_cache import ContentCache
from autoshard.core.declared import Role, undecided
from autoshard.core.errors import ModelError
from autoshard.core.tables import KernelTraits
from autoshard.formats.documents.kinds import Field, list_of, number_in, record
from costmodel.registry.card_fields import MAX_METRIC

FeatureArray = NDArray[np.float64]

#: What the shard is, in the order of the columns; amounts as binary logarithms of one more.
INPUT_NAMES: tuple[str, ...] = (
    "log_embedding_dim",
    "log_num_embeddings",
    "log_pooling_factor",
    "log_weight_mib",
    "log_num_bags",
    "log_lookups",
    "log_distinct_rows",
    "distinct_share",
    "cache_hit_share",
    *(f"lookups_reuse_{index}" for index in range(NUM_REUSE_BINS)),
    "is_unpooled",
    "is_mean",
    "is_fp16",
    "is_bf16",
    "is_sgd",
    "is_adagrad",
    "is_adam",
    "is_all_reduced",
    "is_behind_cache",
)
#: What its kernels do, in units of about a millisecond of a CPU; prices are learned per unit of each.
WORK_NAMES: tuple[str, ...] = (
    "tables",
    "bags",
    "lookups",
    "looked_up_numbers",
    "distinct_rows",
    "distinct_numbers",
    "gradient_numbers",
    "cache_misses",
)
_WORK_UNITS = np.array([1.0, 1e3, 1e4, 1e6, 1e4, 1e6, 1e7, 1e4])

#: Traits that flags tell; others have to have their defaults, which is what samples were measured with.
_SEEN_TRAITS = ("dtype", "pooling", "optimizer")

#: In the order of the columns: inputs, then work.
FEATURE_NAMES = (*INPUT_NAMES, *WORK_NAMES)
NUM_INPUTS, NUM_WORK = len(INPUT_NAMES), len(WORK_NAMES)
NUM_FEATURES = len(FEATURE_NAMES)

#: Scaled inputs beyond this many standard deviations look like the last of them; work is never cut off.
_FARTHEST = 6.0
_MIB = 2.0**20
# 18 numbers per entry; a search over column splits asks for the same few thousand profiles again and again.
_CACHED_PROFILES = 1 << 16


def shard_features(shards: Sequence[LocalShard]) -> FeatureArray:
    """Features of shards, not scaled; shape (N, NUM_FEATURES).

    The columns are INPUT_NAMES, then WORK_NAMES. Shares of reuse are of a batch's lookups: those that go to rows which
    the batch hits once, twice, 3 to 4 times and so on, as the access profile expects them.

    Of lookups they carry over better to tables that training did not see than of rows, which the paper leaves open:
    3.3% mean relative error instead of 4.3% (4,800 samples of MetaSyn / 64 for training, 312 of another draw of its
    tables for testing; Xeon, 1 thread).

    Raises:
        ModelError: If a shard has a trait that no feature tells.

    Source:
        AutoShard B.2 has embedding dimension, rows, pooling factor, size, and reuse bins counted on one batch. Here
        they are expected from the profile, since a plan is made before its batches are seen; batch size, distinct
        rows, kinds of kernel and work are added. The step feature belongs to the policy.
    """
    if not shards:
        return np.zeros((0, NUM_FEATURES))
    sizes_NC = np.array(
        [
            (
                shard.num_bags,
                shard.num_lookups,
                shard.embedding_dim,
                shard.num_embeddings,
                shard.pooling_factor,
                shard.weight_bytes,
                shard.num_gradient_rows,
            )
            for shard in shards
        ],
        dtype=np.float64,
    )
    bags_N, lookups_N, dim_N, rows_N, pooling_N, weight_bytes_N, gradient_rows_N = sizes_NC.T
    bins_NE, distinct_N = _expected(shards)
    hit_share_N = np.array([_hit_share(shard) for shard in shards], dtype=np.float64)
    distinct_share_N = np.divide(distinct_N, lookups_N, out=np.zeros(len(shards)), where=lookups_N > 0)
    amounts = (dim_N, rows_N, pooling_N, weight_bytes_N / _MIB, bags_N, lookups_N, distinct_N)
    work = (
        np.ones(len(shards)),
        bags_N,
        lookups_N,
        lookups_N * dim_N,
        distinct_N,
        distinct_N * dim_N,
        gradient_rows_N * dim_N,
        distinct_N * (1 - hit_share_N),
    )
    return np.column_stack(
        [
            np.log2(1.0 + np.column_stack(amounts)),
            distinct_share_N,
            hit_share_N,
            bins_NE,
            _flags(shards),
            np.column_stack(work) / _WORK_UNITS,
        ]
    )


def _flags(shards: Sequence[LocalShard]) -> FeatureArray:
    """What kinds of kernels shards need, shape (N, 9)."""
    known: dict[tuple[object, ...], tuple[bool, ...]] = {}
    flags = []
    for shard in shards:
        if unseen := undecided(shard, _SEEN_TRAITS, Role.PRICE, of=KernelTraits):
            raise ModelError(f"{shard.table} has another {unseen[0]} than the learned model was trained on")
        kind = (shard.is_pooled, shard.pooling, shard.dtype, shard.optimizer, shard.update, shard.level)
        if kind not in known:
            known[kind] = _kind_flags(shard)
        flags.append(known[kind])
    return np.array(flags, dtype=np.float64)


def _kind_flags(shard: LocalShard) -> tuple[bool, ...]:
    all_reduced = shard.update is Update.ALL_REDUCED
    optimizer = None if all_reduced else shard.optimizer
    return (
        not shard.is_pooled,
        shard.is_pooled and shard.pooling is Pooling.MEAN,
        shard.dtype is DType.FP16,
        shard.dtype is DType.BF16,
        optimizer is Optimizer.SGD,
        optimizer is Optimizer.ADAGRAD,
        optimizer is Optimizer.ADAM,
        all_reduced,
        shard.level is not MemoryLevel.HBM,
    )


def _hit_share(shard: LocalShard) -> float:
    """Share of lookups that find their row in device memory, when a cache holds the hottest rows."""
    if shard.level is MemoryLevel.HBM:
        return 1.0
    return float(shard.access.coverage(shard.cache_bytes / (shard.embedding_dim * shard.dtype.num_bytes)))


def _expected(shards: Sequence[LocalShard]) -> tuple[FeatureArray, FeatureArray]:
    """Shares of lookups by reuse bin, shape (N, 17), and distinct rows of a batch, (N,).

    Each profile and number of lookups is worked out once.
    """
    keys = [(shard.access, shard.num_lookups) for shard in shards]
    index_of = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    found_UE = np.array(_EXPECTED.of(list(index_of)))
    found_NE = found_UE[[index_of[key] for key in keys]]
    return found_NE[:, :-1], found_NE[:, -1]


def _worked_out(keys: Sequence[tuple[AccessProfile, float]]) -> FeatureArray:
    """Shares of lookups by reuse bin, then distinct rows, of profiles and numbers of lookups, shape (U, 18)."""
    profiles, lookups = zip(*keys, strict=True)
    batch, lookups_U = ProfileBatch.of(profiles), np.array(lookups)
    return np.column_stack([batch.reuse_bins(lookups_U, of="lookups"), batch.expected_distinct(lookups_U)])


_EXPECTED = ContentCache(_worked_out, max_entries=_CACHED_PROFILES)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureScaling:
    """Brings inputs to mean 0 and standard deviation 1; work stays as it is.

    Attributes:
        mean_F: Subtracted; 0 for work.
        std_F: Divided by; 1 for work.
    """

    mean_F: tuple[float, ...]
    std_F: tuple[float, ...]

    @classmethod
    def fit(cls, features_NF: FeatureArray) -> FeatureScaling:
        """The scaling that normalises the given shards; a feature without spread keeps its unit."""
        mean_F, std_F = np.zeros(NUM_FEATURES), np.ones(NUM_FEATURES)
        inputs = features_NF[:, :NUM_INPUTS]
        mean_F[:NUM_INPUTS] = inputs.mean(axis=0)
        std = inputs.std(axis=0)
        std_F[:NUM_INPUTS] = np.where(std > 1e-6, std, 1.0)
        return cls(mean_F=tuple(mean_F.tolist()), std_F=tuple(std_F.tolist()))

    def apply(self, features_NF: FeatureArray) -> NDArray[np.float32]:
        """Scaled features; shape (N, F)."""
        scaled = (features_NF - np.asarray(self.mean_F)) / np.asarray(self.std_F)
        np.clip(scaled[:, :NUM_INPUTS], -_FARTHEST, _FARTHEST, out=scaled[:, :NUM_INPUTS])
        return scaled.astype(np.float32)


#: The scaling on a card.
SCALING: Final = record(
    lambda mean, std: FeatureScaling(mean_F=mean, std_F=std),
    Field("mean", list_of(number_in(-MAX_METRIC, MAX_METRIC), NUM_FEATURES, NUM_FEATURES)),
    Field("std", list_of(number_in(1e-12, MAX_METRIC), NUM_FEATURES, NUM_FEATURES)),
    parts=lambda scaling: {"mean": scaling.mean_F, "std": scaling.std_F},
)
