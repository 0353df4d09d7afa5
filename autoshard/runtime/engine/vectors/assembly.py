"""Embeddings put together from what processes sent, and their gradients taken apart for them.

Shape suffixes: B samples of a local batch, C columns of all pooled features, F pooled features, W columns of a block, D
embedding dim, L lookups, R rows, X bags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import embedding_bag

from autoshard.core import Pooling
from autoshard.runtime.engine.holdings import KernelKey, Ownership
from autoshard.runtime.engine.ids.requests import DistributedBatch
from autoshard.runtime.engine.rows.replicas import ReplicaLookups
from autoshard.runtime.engine.rows.torch_rows import one_below_the_other, side_by_side, summed_by_place
from autoshard.runtime.engine.vectors.reading import ColumnCuts, Reading, RowIndex, RowKernel, SumGroup, row_index


@dataclass(frozen=True, slots=True, eq=False)
class ReceivedVectors:
    """What one process sent."""

    sums_BW: torch.Tensor
    rows: dict[KernelKey, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Assembled:
    """How a batch was put together, which its gradients are taken apart by.

    Attributes:
        indices: Where the rows of each kernel went.
        scale_BC: What sums were multiplied by; None for nothing.
    """

    indices: tuple[RowIndex, ...]
    scale_BC: torch.Tensor | None


#: Of a batch that has not come.
NOT_ASSEMBLED = Assembled((), None)


class Assembly:
    """Puts the embeddings of a process's batch together, and takes their gradients apart.

    Args:
        ownership: Who holds what.
        reading: How this process puts together what it reads.
        device: Where batches are.
    """

    def __init__(self, ownership: Ownership, reading: Reading, device: torch.device) -> None:
        self._reading, self._device = reading, device
        self._columns = [one.columns for one in ownership.holdings]
        self._block_cuts = [ColumnCuts(runs) for runs in reading.block_runs()]
        self._gathered = [
            (block, self._block_cuts[block].pieces(start, stop)) for block, start, stop in reading.gathered
        ]
        self._pooled_cuts = ColumnCuts([run for runs in reading.scattered for run in runs])
        self._scattered = [[self._pooled_cuts.pieces(*run) for run in runs] for runs in reading.scattered]
        features = [table for table in ownership.tables.tables for _ in table.features]
        pooled = [n for n, table in enumerate(features) if table.pooling is not Pooling.SEQUENCE]
        dims = [features[n].embedding_dim for n in pooled]
        self._has_means = any(table.pooling is Pooling.MEAN for table in features)
        self._pooled = torch.tensor(pooled, dtype=torch.int64, device=device)
        self._is_mean_F = torch.tensor([features[n].pooling is Pooling.MEAN for n in pooled], device=device)
        self._pooled_dims, self._num_columns = torch.tensor(dims, dtype=torch.int64, device=device), sum(dims)

    def put_together(
        self,
        batch: DistributedBatch,
        came: Sequence[ReceivedVectors],
        local: ReplicaLookups,
        reduced_BW: torch.Tensor | None,
    ) -> tuple[list[torch.Tensor], Assembled]:
        """Pooled embeddings of all features, shape (B, C), and those of every sequence, (L, D).

        Args:
            batch: The batch.
            came: What each process sent.
            local: What was read from replicas here.
            reduced_BW: Sums that were added up on the way; None for none.
        """
        indices: list[RowIndex] = []
        sums = [*(one.sums_BW for one in came), local.sums_BW, reduced_BW]
        blocks = [_group_block(group, sums) for group in self._reading.groups]
        own_rows = dict(zip((key for key, _ in local.asked), local.rows, strict=True))
        sequences = {feature: self._empty_sequence(batch, feature) for feature in self._reading.sequences}
        for kernel in self._reading.rows:
            index = row_index(kernel, batch)
            indices.append(index)
            of_key = [one.rows[kernel.key] for one in came if kernel.key in one.rows]
            if kernel.key in own_rows:
                of_key.append(own_rows[kernel.key])
            rows_RD = of_key[0] if len(of_key) == 1 else torch.cat(of_key)
            blocks.append(_pooled(kernel, index, rows_RD, batch.batch_size))
            self._place_sequences(kernel, index, rows_RD, sequences)
        pooled_BC = self._pooled_features(blocks, batch.batch_size)
        scale_BC = self._mean_scales(batch) if self._has_means else None
        if scale_BC is not None:
            pooled_BC *= scale_BC
        return [pooled_BC, *sequences.values()], Assembled(tuple(indices), scale_BC)

    def _pooled_features(self, blocks: Sequence[torch.Tensor], B: int) -> torch.Tensor:
        if not self._reading.gathered:
            return torch.empty(B, 0, dtype=torch.float32, device=self._device)
        pieces = [cuts(block) for cuts, block in zip(self._block_cuts, blocks, strict=True)]
        pooled_BC = torch.cat(
            [piece for block, run in self._gathered for piece in pieces[block][run]],
            dim=1,
        )
        for at, (block, start, stop) in self._reading.added:
            pooled_BC[:, at : at + stop - start] += blocks[block][:, start:stop]
        return pooled_BC

    def _mean_scales(self, batch: DistributedBatch) -> torch.Tensor:
        """One over the bag length of features that are averaged, 1 for those that are summed; shape (B, C)."""
        lengths_FB = batch.lengths_FB.index_select(0, self._pooled).clamp(min=1).float()
        ones = torch.ones_like(lengths_FB)
        scale_FB = torch.where(self._is_mean_F[:, None], lengths_FB.reciprocal(), ones)
        scale_CB = torch.repeat_interleave(scale_FB, self._pooled_dims, dim=0, output_size=self._num_columns)
        return scale_CB.T.contiguous()

    def _empty_sequence(self, batch: DistributedBatch, feature: int) -> torch.Tensor:
        shape = (batch.counts_F[feature], self._reading.dim_F[feature])
        return torch.empty(shape, dtype=torch.float32, device=self._device)

    def _place_sequences(
        self, kernel: RowKernel, index: RowIndex, rows_RD: torch.Tensor, sequences: dict[int, torch.Tensor]
    ) -> None:
        at = index.num_pooled
        for one, positions, count in zip(kernel.sequences, index.positions, index.num_sequence, strict=True):
            rows = rows_RD[index.arrival_L[at : at + count]]
            first, last = self._columns[one.holding]
            if positions is None:
                sequences[one.feature][:, first:last] = rows
            else:
                sequences[one.feature][positions, first:last] = rows
            at += count

    def take_apart(
        self, assembled: Assembled, gradients: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], dict[KernelKey, torch.Tensor]]:
        """Gradients of every block of sums, and of the rows of every kernel in the order in which they came.

        Args:
            assembled: The batch.
            gradients: Of what `put_together` gave.
        """
        pooled_BC = gradients[0] if assembled.scale_BC is None else gradients[0] * assembled.scale_BC
        blocks = self._block_gradients(pooled_BC)
        sequences = dict(zip(self._reading.sequences, gradients[1:], strict=True))
        return blocks, self._row_gradients(assembled.indices, blocks, sequences)

    def _block_gradients(self, pooled_BC: torch.Tensor) -> list[torch.Tensor]:
        """Gradients of every block: of groups of sums, and of features that are pooled from rows."""
        blocks = []
        pieces = self._pooled_cuts(pooled_BC)
        for runs in self._scattered:
            parts = [piece for run in runs for piece in pieces[run]] or [pooled_BC[:, :0]]
            blocks.append(torch.cat(parts, dim=1) if len(parts) > 1 else parts[0].contiguous())
        return blocks

    def _row_gradients(
        self, indices: Sequence[RowIndex], blocks: Sequence[torch.Tensor], sequences: Mapping[int, torch.Tensor]
    ) -> dict[KernelKey, torch.Tensor]:
        """Gradients of the rows of every kernel, in the order in which they came."""
        found = {}
        for kernel, index, block in zip(self._reading.rows, indices, blocks[len(self._reading.groups) :], strict=True):
            sources = [one_below_the_other(block, len(kernel.pooled))] if kernel.pooled else []
            for one, positions in zip(kernel.sequences, index.positions, strict=True):
                first, last = self._columns[one.holding]
                of_feature = sequences[one.feature][:, first:last]
                sources.append(of_feature if positions is None else of_feature[positions])
            found[kernel.key] = _by_arrival(kernel, index, torch.cat(sources) if len(sources) > 1 else sources[0])
        return found


def _group_block(group: SumGroup, sums: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Sums of a group over its owners, by the numbers that `SumGroup.starts` has for them."""
    parts = []
    for owner, start in group.starts.items():
        whole = sums[owner]
        assert whole is not None, "the group has sums there"
        parts.append(whole[:, start : start + group.width])
    if len(parts) == 1:
        return parts[0]
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def _pooled(kernel: RowKernel, index: RowIndex, rows_RD: torch.Tensor, B: int) -> torch.Tensor:
    """Sums of bags from rows that came, shape (B, features x D)."""
    if not kernel.pooled:
        return rows_RD.new_empty(B, 0)
    arrival_L = index.arrival_L[: index.num_pooled]
    if not len(rows_RD):
        return rows_RD.new_zeros(B, len(kernel.pooled) * kernel.dim)
    sums_XD = embedding_bag(arrival_L, rows_RD, index.offsets, mode="sum", include_last_offset=True)
    return side_by_side(sums_XD, len(kernel.pooled), B)


def _by_arrival(kernel: RowKernel, index: RowIndex, sources_XD: torch.Tensor) -> torch.Tensor:
    """Gradients of rows from those of bags and of sequences."""
    num_sequence = len(index.arrival_L) - index.num_pooled
    num_bags = len(sources_XD) - num_sequence
    in_sequence_L = torch.arange(num_bags, num_bags + num_sequence, device=sources_XD.device)
    source_L = torch.cat([index.bags_L, in_sequence_L])
    if kernel.deduplicated:
        return summed_by_place(index.arrival_L, index.num_rows, source_L, sources_XD)
    source_R = torch.empty_like(source_L)
    source_R[index.arrival_L] = source_L
    return sources_XD[source_R]
