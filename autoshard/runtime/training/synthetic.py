"""Synthetic training samples, drawn from the tables' access profiles.

Shape suffixes: B samples of a local batch, N dense features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from autoshard.core import RowsBy, ShardingPlan, TableSet
from autoshard.core.access import IntArray
from autoshard.core.batches import draw_bags
from autoshard.runtime.batch import BatchOfIds
from autoshard.runtime.engine.ids.addresses import RowOrderMap

IdsOfRanks: TypeAlias = Callable[[IntArray], IntArray]


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """One batch of samples: ids, dense features, and labels of 0 or 1."""

    ids: BatchOfIds
    dense_BN: torch.Tensor
    labels_B: torch.Tensor

    def to(self, device: torch.device) -> Samples:
        """The same samples on a device."""
        return Samples(self.ids.to(device), self.dense_BN.to(device), self.labels_B.to(device))


def ranked_rows(plan: ShardingPlan, row_orders: Mapping[str, torch.Tensor]) -> dict[str, IdsOfRanks]:
    """For each table that a plan cuts by access rank, row ids of access ranks: by its order, or the ranks themselves.

    Args:
        plan: The plan.
        row_orders: Row ids in falling access frequency, by table.
    """
    cut = {one.shard.table for one in plan.shards if one.shard.rows.by is RowsBy.ACCESS_RANK}
    return {table.name: _ids_of_ranks(row_orders.get(table.name), table.num_embeddings) for table in cut}


def _ids_of_ranks(ids_N: torch.Tensor | None, num_rows: int) -> IdsOfRanks:
    if ids_N is None:
        return lambda ranks_L: ranks_L
    order = RowOrderMap(ids_N, num_rows, torch.device("cpu"))
    return lambda ranks_L: order.ids(torch.from_numpy(ranks_L)).numpy()


def draw_samples(
    tables: TableSet,
    num_dense: int,
    batch_size: int,
    key: Sequence[int],
    ranked: Mapping[str, IdsOfRanks] | None = None,
) -> Samples:
    """Draws one batch.

    Args:
        tables: Tables whose features are looked up.
        num_dense: Dense features per sample, N.
        batch_size: B.
        key: Same key, same batch: seed, number of the batch, rank of the process.
        ranked: Row ids of access ranks, by table; hot rows of other tables are strewn over them, as hashing does.
    """
    rng = np.random.default_rng(list(key))
    bags = [
        draw_bags(table.access, feature.pooling_factor, batch_size, rng, (ranked or {}).get(table.name))
        for table in tables.tables
        for feature in table.features
    ]
    lengths_FB = torch.from_numpy(np.stack([bag.lengths_B for bag in bags]))
    ids_L = torch.from_numpy(np.concatenate([bag.ids_L for bag in bags]))
    dense_BN = torch.from_numpy(rng.standard_normal((batch_size, num_dense), dtype=np.float32))
    labels_B = torch.from_numpy(rng.integers(0, 2, batch_size).astype(np.float32))
    return Samples(BatchOfIds(lengths_FB, ids_L), dense_BN, labels_B)
