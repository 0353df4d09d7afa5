"""Synthetic training samples, drawn from the tables' access profiles.

Shape suffixes: B samples of a local batch, N dense features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from autoshard.core import TableSet
from autoshard.core.batches import draw_bags
from autoshard.runtime.batch import BatchOfIds


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """One batch of samples: ids, dense features, and labels of 0 or 1."""

    ids: BatchOfIds
    dense_BN: torch.Tensor
    labels_B: torch.Tensor

    def to(self, device: torch.device) -> Samples:
        """The same samples on a device."""
        return Samples(self.ids.to(device), self.dense_BN.to(device), self.labels_B.to(device))


def draw_samples(tables: TableSet, num_dense: int, batch_size: int, key: Sequence[int]) -> Samples:
    """Draws one batch.

    Args:
        tables: Tables whose features are looked up.
        num_dense: Dense features per sample, N.
        batch_size: B.
        key: Same key, same batch: seed, number of the batch, rank of the process.
    """
    rng = np.random.default_rng(list(key))
    bags = [
        draw_bags(table.access, feature.pooling_factor, batch_size, rng)
        for table in tables.tables
        for feature in table.features
    ]
    lengths_FB = torch.from_numpy(np.stack([bag.lengths_B for bag in bags]))
    ids_L = torch.from_numpy(np.concatenate([bag.ids_L for bag in bags]))
    dense_BN = torch.from_numpy(rng.standard_normal((batch_size, num_dense), dtype=np.float32))
    labels_B = torch.from_numpy(rng.integers(0, 2, batch_size).astype(np.float32))
    return Samples(BatchOfIds(lengths_FB, ids_L), dense_BN, labels_B)
