"""Samples as arrays, ready for training.

Shape suffixes: S samples, B samples of a batch, U distinct shards, N shards of all samples, F features, O outputs
(forward, backward).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.core import Exchange, LocalShard, MemoryLevel, Update
from autoshard.core.errors import SampleStoreError
from autoshard.formats.samples import SampleTable
from costmodel.card import Coverage
from costmodel.features import FEATURE_NAMES, FeatureArray, shard_features

IndexArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostDataset:
    """Measured sets of shards.

    Attributes:
        features_UF: Features of the distinct shards, not scaled.
        shard_N: Which shards the samples hold, sample after sample.
        num_shards_S: Shards of each sample, so that they can be told apart.
        latency_ms_SO: Forward and backward latency, the machine's drift divided out.
        coverage: The kinds of shards that occur.
    """

    features_UF: FeatureArray
    shard_N: IndexArray
    num_shards_S: IndexArray
    latency_ms_SO: NDArray[np.float64]
    coverage: Coverage

    @classmethod
    def from_samples(cls, table: SampleTable, num_bags: int | None = None) -> CostDataset:
        """Turns samples of one device into arrays; noisy ones are left out.

        Args:
            table: The samples.
            num_bags: Bags per step of the samples to take; may be left out when all have the same.

        Raises:
            SampleStoreError: If no sample is left, they differ in their number of bags and none was named, or they
                are of shards that cost models do not cover.
        """
        table = replace(table, samples=tuple(sample for sample in table.samples if not sample.is_noisy))
        bags_S = [{shard.num_bags for shard in sample.local_shards} for sample in table.samples]
        found = sorted(set().union(*bags_S))
        if num_bags is None and len(found) == 1:
            num_bags = found[0]
        chosen = [index for index, bags in enumerate(bags_S) if bags == {num_bags}]
        if not chosen:
            listed = ", ".join(map(str, found)) or "none"
            raise SampleStoreError(
                f"a cost model is for one number of bags per step; there are samples of: {listed}", field="num_bags"
            )
        sets = [table.samples[index].local_shards for index in chosen]
        index_of: dict[LocalShard, int] = {}
        shard_N = np.array([index_of.setdefault(shard, len(index_of)) for members in sets for shard in members])
        features_UF = shard_features(list(index_of))
        num_shards_S = np.array([len(members) for members in sets])
        return cls(
            features_UF=features_UF,
            shard_N=shard_N,
            num_shards_S=num_shards_S,
            latency_ms_SO=np.stack(table.corrected_ms(), axis=1)[chosen],
            coverage=_coverage(list(index_of), features_UF, num_shards_S),
        )

    def __len__(self) -> int:
        return len(self.num_shards_S)

    @property
    def kernel_ms(self) -> NDArray[np.float64]:
        """Forward plus backward, shape (S,)."""
        return self.latency_ms_SO.sum(axis=1)

    def shards_of(self, samples_B: IndexArray) -> tuple[IndexArray, IndexArray]:
        """Indices of the shards that some samples hold, and where each of these samples starts among them."""
        counts_B = self.num_shards_S[samples_B]
        starts_B = np.cumsum(counts_B) - counts_B
        # Each shard's place in `shard_N`: where its sample starts there, plus its place within the sample.
        shift_B = np.cumsum(self.num_shards_S)[samples_B] - counts_B - starts_B
        places_N = np.repeat(shift_B, counts_B) + np.arange(counts_B.sum())
        return self.shard_N[places_N], starts_B

    def take(self, samples_B: IndexArray) -> CostDataset:
        """The samples with the given indices, in that order."""
        return CostDataset(
            features_UF=self.features_UF,
            shard_N=self.shards_of(samples_B)[0],
            num_shards_S=self.num_shards_S[samples_B],
            latency_ms_SO=self.latency_ms_SO[samples_B],
            coverage=self.coverage,
        )

    def split(self, held_out_share: float, rng: np.random.Generator) -> tuple[CostDataset, CostDataset]:
        """A random part for training and one held out; samples are never divided."""
        order = rng.permutation(len(self))
        num_held_out = max(1, round(len(self) * held_out_share))
        return self.take(np.sort(order[num_held_out:])), self.take(np.sort(order[:num_held_out]))


def _coverage(shards: Sequence[LocalShard], features_UF: FeatureArray, num_shards_S: IndexArray) -> Coverage:
    for shard in shards:
        kind = (shard.update, shard.level, shard.output)
        if kind != (Update.FUSED, MemoryLevel.HBM, Exchange.PARTIAL_SUMS):
            raise SampleStoreError(
                "cost models are trained on pooled shards in device memory with a fused update only; there are "
                f"samples of shards with update {shard.update}, level {shard.level}, output {shard.output}"
            )
    ends = zip(features_UF.min(axis=0).tolist(), features_UF.max(axis=0).tolist(), strict=True)
    return Coverage(
        num_bags=shards[0].num_bags,
        dtypes=tuple(sorted({shard.dtype for shard in shards})),
        poolings=tuple(sorted({shard.pooling for shard in shards})),
        optimizers=tuple(sorted({shard.optimizer for shard in shards})),
        num_tables=(int(num_shards_S.min()), int(num_shards_S.max())),
        ranges=dict(zip(FEATURE_NAMES, ends, strict=True)),
    )
