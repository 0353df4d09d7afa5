"""Samples as arrays, ready for training.

Shape suffixes: S samples, B samples of a batch, U distinct shards, N shards of all samples, F features, K kinds of
work, O outputs (forward, backward).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.core import LocalShard
from autoshard.core.errors import SampleStoreError
from autoshard.core.machine import MeasuredMachine
from autoshard.formats.stores.drift import corrected_ms
from autoshard.formats.stores.samples import Sample, SampleTable
from costmodel.kernel.card import TrainedCoverage
from costmodel.kernel.features import NUM_INPUTS, FeatureArray, shard_features
from costmodel.samples import stamp

IndexArray = NDArray[np.int64]

#: Groups of a minute from which on they tell how far apart they are.
_FEWEST_GROUPS = 4
#: Standard deviation over median absolute deviation of normally distributed values.
_SIGMA_PER_DEVIATION = 1.4826


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostDataset:
    """Measured sets of shards.

    Attributes:
        shards_U: The distinct shards.
        features_UF: Their features, not scaled.
        shard_N: Which shards the samples hold, sample after sample.
        num_shards_S: Shards of each sample, so that they can be told apart.
        set_S: Which set each sample measured; alike for samples of the same set, in any store.
        latency_ms_SO: Forward and backward latency, the machine's drift divided out.
        collected_at_S: When each was measured, see `costmodel.samples.stamp`; empty if that is not known.
        machine: Where they were measured; None if that is not known.
        speed_spread: How far apart the machine's speeds of one minute were: the standard deviation of the logarithm of
            the reference, of which each group of samples has one; of several minutes, that of the median one. 0 where
            no minute has groups enough.
    """

    shards_U: tuple[LocalShard, ...]
    features_UF: FeatureArray
    shard_N: IndexArray
    num_shards_S: IndexArray
    set_S: IndexArray
    latency_ms_SO: NDArray[np.float64]
    collected_at_S: NDArray[np.str_]
    machine: MeasuredMachine | None = None
    speed_spread: float = 0.0

    @classmethod
    def from_samples(cls, table: SampleTable) -> CostDataset:
        """Turns samples of one device into arrays; those that are marked as noisy, and empty sets, are left out.

        Raises:
            SampleStoreError: If no sample is left.
        """
        kept = tuple(sample for sample in table.samples if sample.shards and not sample.is_noisy)
        if not kept:
            raise SampleStoreError(f"none of {len(table)} samples can be trained on: all are noisy or of empty sets")
        index_of: dict[LocalShard, int] = {}
        shard_N = np.array(
            [index_of.setdefault(shard, len(index_of)) for sample in kept for shard in sample.local_shards]
        )
        return cls(
            shards_U=tuple(index_of),
            features_UF=shard_features(list(index_of)),
            shard_N=shard_N,
            num_shards_S=np.array([len(sample.shards) for sample in kept]),
            set_S=np.array([_number_of(sample.set_id) for sample in kept]),
            latency_ms_SO=np.stack(corrected_ms(kept), axis=1),
            collected_at_S=np.array([stamp(sample.collected_at) for sample in kept]),
            machine=table.machine,
            speed_spread=_speed_spread(kept),
        )

    def __len__(self) -> int:
        return len(self.num_shards_S)

    @property
    def kernel_ms(self) -> NDArray[np.float64]:
        """Forward plus backward, shape (S,)."""
        return self.latency_ms_SO.sum(axis=1)

    @property
    def mean_latency_ms(self) -> NDArray[np.float64]:
        """Forward and backward latency of the mean sample, shape (O,)."""
        mean_O: NDArray[np.float64] = self.latency_ms_SO.mean(axis=0)
        return mean_O

    @property
    def mean_work(self) -> NDArray[np.float64]:
        """Work of the mean sample by kind, shape (K,)."""
        starts_S = np.cumsum(self.num_shards_S) - self.num_shards_S
        work_SK = np.add.reduceat(self.features_UF[self.shard_N, NUM_INPUTS:], starts_S, axis=0)
        work_K: NDArray[np.float64] = work_SK.mean(axis=0)
        return work_K

    @property
    def coverage(self) -> TrainedCoverage:
        """The shards that its samples hold."""
        used = (self.shards_U[index] for index in np.unique(self.shard_N).tolist())
        return TrainedCoverage.of(used, num_tables=(int(self.num_shards_S.min()), int(self.num_shards_S.max())))

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
        return replace(
            self,
            shard_N=self.shards_of(samples_B)[0],
            num_shards_S=self.num_shards_S[samples_B],
            set_S=self.set_S[samples_B],
            latency_ms_SO=self.latency_ms_SO[samples_B],
            collected_at_S=self.collected_at_S[samples_B],
        )

    def split(self, held_out_share: float, seed: int) -> tuple[CostDataset, CostDataset]:
        """A random part for training and one held out; all samples of a set are in the same part.

        A set's part depends on the set, the share and the seed alone. So what a model was not trained on stays known
        when its store grows, and later models can be compared with it there.
        """
        is_held_out_S = self.are_held_out(held_out_share, seed)
        return self.take(np.flatnonzero(~is_held_out_S)), self.take(np.flatnonzero(is_held_out_S))

    def are_held_out(self, held_out_share: float, seed: int) -> NDArray[np.bool_]:
        """Which samples `split` holds out, shape (S,)."""
        draw_S = _draws(self.set_S, seed)
        return np.asarray(draw_S < max(held_out_share, np.nextafter(draw_S.min(), 1)))

    def with_features_of(self, shards: Iterable[LocalShard]) -> CostDataset:
        """The same measurements, said to be of other shards: one for each of `shards_U`."""
        others = tuple(shards)
        assert len(others) == len(self.shards_U)
        return replace(self, shards_U=others, features_UF=shard_features(others))


def _speed_spread(samples: Sequence[Sample]) -> float:
    """See `CostDataset.speed_spread`."""
    logs: dict[int, set[float]] = {}
    for sample in samples:
        minute = int(sample.collected_at.timestamp() // 60)
        logs.setdefault(minute, set()).add(math.log(sample.reference_forward_ms + sample.reference_backward_ms))
    minutes = [np.array(list(found)) for found in logs.values() if len(found) >= _FEWEST_GROUPS]
    deviations = [float(np.median(np.abs(found - np.median(found)))) for found in minutes]
    return _SIGMA_PER_DEVIATION * float(np.median(deviations)) if deviations else 0.0


def _number_of(set_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(set_id.encode(), digest_size=8).digest()) >> 1


def _draws(set_S: IndexArray, seed: int) -> NDArray[np.float64]:
    """A number in [0, 1) for every sample, drawn by its set and the seed (SplitMix64's mixing)."""
    mixed_S = set_S.astype(np.uint64) + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed_S = (mixed_S ^ (mixed_S >> np.uint64(shift))) * np.uint64(factor)
    mixed_S ^= mixed_S >> np.uint64(31)
    return (mixed_S >> np.uint64(11)) / 2.0**53
