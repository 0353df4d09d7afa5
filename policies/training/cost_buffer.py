"""The measured sets that joint training learns costs from.

Shape suffixes: S samples, B samples of a batch, M shards, F features, K kinds of work, O outputs (forward, backward,
their sum).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from costmodel.kernel.dataset import CostDataset
from costmodel.kernel.features import NUM_INPUTS, FeatureArray, FeatureScaling

#: AutoShard C.2.
BUFFER_SIZE = 5000


class CostBuffer:
    """The latest samples, whatever they came from; the oldest go first.

    Args:
        scaling: What brings features to a common scale.
        scale_ms: Unit of latencies.
        size: Most samples to hold.
    """

    def __init__(self, scaling: FeatureScaling, scale_ms: float, size: int = BUFFER_SIZE) -> None:
        self._scaling = scaling
        self._scale_ms = scale_ms
        self._samples: deque[tuple[NDArray[np.float32], NDArray[np.float32]]] = deque(maxlen=size)

    def __len__(self) -> int:
        return len(self._samples)

    def add_dataset(self, dataset: CostDataset) -> None:
        """Adds samples of a store, the latest last."""
        shards = np.split(dataset.shard_N, np.cumsum(dataset.num_shards_S)[:-1])
        for shard_M, parts_ms in zip(shards, dataset.latency_ms_SO, strict=True):
            self._add(dataset.features_UF[shard_M], (*parts_ms, parts_ms.sum()))

    def add_measured(self, features_MF: FeatureArray, kernel_ms: float) -> None:
        """Adds a rank's shards and what they took, forward and backward together."""
        self._add(features_MF, (np.nan, np.nan, kernel_ms))

    def _add(self, features_MF: FeatureArray, latency_ms: tuple[float, ...]) -> None:
        self._samples.append(
            (self._scaling.apply(features_MF), np.array(latency_ms, dtype=np.float32) / self._scale_ms)
        )

    def mean_sample(self) -> tuple[NDArray[np.float64], float]:
        """Work by kind, shape (K,), and latency in units of `scale_ms`, of the mean sample; there must be one."""
        work_SK = [features_MF[:, NUM_INPUTS:].sum(axis=0) for features_MF, _ in self._samples]
        work_K: NDArray[np.float64] = np.mean(work_SK, axis=0, dtype=np.float64)
        return work_K, float(np.mean([latency_O[-1] for _, latency_O in self._samples]))

    def batches(
        self, num_batches: int, batch_size: int, rng: np.random.Generator
    ) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]]:
        """Draws batches, with replacement.

        Yields:
            Scaled features of all shards (M, F), where each sample starts among them (B,), and the samples'
            latencies in units of `scale_ms` (B, O), not a number where unknown.
        """
        for _ in range(num_batches):
            drawn = [self._samples[index] for index in rng.integers(len(self._samples), size=batch_size)]
            counts_B = np.array([len(features_MF) for features_MF, _ in drawn])
            yield (
                np.concatenate([features_MF for features_MF, _ in drawn]),
                np.cumsum(counts_B) - counts_B,
                np.stack([latency_O for _, latency_O in drawn]),
            )
