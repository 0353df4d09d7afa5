"""Synthetic training samples, drawn from the tables' access profiles.

Shape suffixes: B samples of a local batch, N dense features.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch

from autoshard.core import EmbeddingTable, RowsBy, ShardingPlan, TableSet
from autoshard.core.access import IntArray
from autoshard.core.batches import coprime_step, draw_bags, scatter_ranks
from autoshard.evaluation.traffic import is_weighted
from autoshard.runtime.batch import BatchOfIds
from autoshard.runtime.engine.ids.addresses import RowOrderMap

IdsOfRanks: TypeAlias = Callable[[IntArray], IntArray]


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """One local batch of samples.

    Attributes:
        ids: Ids of all features.
        dense_BN: Dense features.
        labels_B: Labels of 0 or 1.
        weight: By what its mean loss is multiplied, so that the mean over the processes is that over all samples:
            processes times the batch's share of the global one.
    """

    ids: BatchOfIds
    dense_BN: torch.Tensor
    labels_B: torch.Tensor
    weight: float = 1.0

    def to(self, device: torch.device) -> Samples:
        """The same samples on a device; a GPU copies them while the host goes on."""
        if device.type != "cuda" or self.labels_B.is_cuda:
            ids, dense_BN, labels_B = self.ids.to(device), self.dense_BN.to(device), self.labels_B.to(device)
        else:
            pinned = self.ids.changed(self.ids.lengths_FB.pin_memory(), torch.Tensor.pin_memory)
            ids = pinned.to(device, non_blocking=True)
            dense_BN = self.dense_BN.pin_memory().to(device, non_blocking=True)
            labels_B = self.labels_B.pin_memory().to(device, non_blocking=True)
        return replace(self, ids=ids, dense_BN=dense_BN, labels_B=labels_B)

    def only(self, places: range) -> Samples:
        """Those of some places of the batch, which follow each other."""
        if len(places) == len(self.labels_B):
            return self
        of = slice(places.start, places.stop)
        ends_FB = self.ids.lengths_FB.cumsum(1)
        starts_FB = ends_FB - self.ids.lengths_FB

        def kept(of_L: torch.Tensor) -> torch.Tensor:
            pieces = zip(self.ids.per_feature(of_L), starts_FB, ends_FB, strict=True)
            return torch.cat([piece[starts_B[of.start] : ends_B[of.stop - 1]] for piece, starts_B, ends_B in pieces])

        ids = self.ids.changed(self.ids.lengths_FB[:, of], kept)
        return Samples(ids, self.dense_BN[of], self.labels_B[of])

    @property
    def num_dense(self) -> int:
        """Dense features of a sample, N."""
        return self.dense_BN.shape[1]

    @classmethod
    def none(cls, num_features: int, num_dense: int) -> Samples:
        """A batch of no samples."""
        ids = BatchOfIds(torch.zeros(num_features, 0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
        dense_BN, labels_B = (torch.zeros(shape, dtype=torch.float32) for shape in ((0, num_dense), (0,)))
        return cls(ids, dense_BN, labels_B, weight=0.0)


def global_samples(parts: Sequence[Samples]) -> Samples:
    """Batches as one, in their order."""
    return Samples(
        BatchOfIds.joined([part.ids for part in parts]),
        torch.cat([part.dense_BN for part in parts]),
        torch.cat([part.labels_B for part in parts]),
    )


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


def _ids_of(table: EmbeddingTable, ids_of_ranks: IdsOfRanks | None, phase: int) -> IdsOfRanks:
    """Row ids of a table's access ranks.

    Rows without a known order are strewn over the table from a place of its own, as hashing does: the hottest rows of
    all tables would be in the same part of each else, and on the same rank where tables are cut into blocks of rows.

    Args:
        table: The table.
        ids_of_ranks: Its order of rows; None without.
        phase: Turns of the access ranks, each by a golden section of the rows, so that hot ones fall apart.
    """
    num_rows = table.num_embeddings
    shift = phase * coprime_step(num_rows) % num_rows
    first = zlib.crc32(table.name.encode()) * num_rows >> 32

    def ids(ranks_L: IntArray) -> IntArray:
        turned_L = (ranks_L + shift) % num_rows
        if ids_of_ranks is not None:
            return ids_of_ranks(turned_L)
        return (scatter_ranks(turned_L, num_rows) + first) % num_rows

    return ids


def draw_samples(
    tables: TableSet,
    num_dense: int,
    batch_size: int,
    key: Sequence[int],
    ranked: Mapping[str, IdsOfRanks] | None = None,
    phase: int = 0,
) -> Samples:
    """Draws one batch.

    Args:
        tables: Tables whose features are looked up.
        num_dense: Dense features per sample, N.
        batch_size: B.
        key: Same key, same batch: seed, number of the batch, rank of the process.
        ranked: Row ids of access ranks, by table; hot rows of other tables are strewn over them, as hashing does.
        phase: How often other rows have become hot; in each phase, rows have the places of other ones among the
            access ranks.
    """
    rng = np.random.default_rng(list(key))
    ids_of = {table.name: _ids_of(table, (ranked or {}).get(table.name), phase) for table in tables.tables}
    bags = [
        draw_bags(table.access, feature.pooling_factor, batch_size, rng, ids_of[table.name])
        for table in tables.tables
        for feature in table.features
    ]
    lengths_FB = torch.from_numpy(np.stack([bag.lengths_B for bag in bags]))
    ids_L = torch.from_numpy(np.concatenate([bag.ids_L for bag in bags]))
    dense_BN = torch.from_numpy(rng.standard_normal((batch_size, num_dense), dtype=np.float32))
    labels_B = torch.from_numpy(rng.integers(0, 2, batch_size).astype(np.float32))
    weighted = is_weighted(tables.tables)
    weights_L = torch.from_numpy(rng.random(len(ids_L), dtype=np.float32)) if weighted else None
    return Samples(BatchOfIds(lengths_FB, ids_L, weights_L=weights_L), dense_BN, labels_B)
