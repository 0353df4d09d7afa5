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
from autoshard.runtime.engine.rows.torch_rows import one_below_the_other, side_by_side, summed_by_place, weighted
from autoshard.runtime.engine.vectors.reading import ColumnMoves, Reading, RowIndex, RowKernel, SumGroup, row_index


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


@dataclass(frozen=True, slots=True, eq=False)
class TakenApart:
    """Gradients of a batch.

    Attributes:
        sums: Those of sums that each process sent, process by process, of one dimension.
        sums_P: The same for each process, (B, W).
        local_BW: Those of sums that were read from replicas here.
        reduced_BW: Those of sums that were added up on the way.
        rows: Those of the rows of every kernel, in the order in which they came.
    """

    sums: torch.Tensor
    sums_P: Sequence[torch.Tensor]
    local_BW: torch.Tensor
    reduced_BW: torch.Tensor
    rows: Mapping[KernelKey, torch.Tensor]


#: Of a batch that has not been trained on.
_NOTHING = torch.empty(0, dtype=torch.float32)
NOT_TAKEN = TakenApart(_NOTHING, (), _NOTHING, _NOTHING, {})
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
        self._num_processes = P = ownership.num_processes
        groups, num_groups = reading.groups, len(reading.groups)
        widths = [0] * (P + 2)
        for group in groups:
            for block, start in group.starts.items():
                widths[block] = max(widths[block], start + group.width)
        widths += [group.width for group in groups] + [len(one.pooled) * one.dim for one in reading.rows]
        #: Where the columns of a group come from: of a block that is sent, or of the sum of several.
        self._is_summed = [len(group.starts) > 1 for group in groups]
        gathered = []
        for block, start, stop in reading.gathered:
            matrix, first = P + 2 + block, 0
            if block < num_groups and not self._is_summed[block]:
                [(matrix, first)] = groups[block].starts.items()
            gathered.append((matrix, first + start, first + stop))
        used = sorted({matrix for matrix, _, _ in gathered})
        #: Matrices that pooled features are made of: what each process sent, what is read and added up here, groups,
        #: and features that are pooled from rows.
        self._used = used
        self._gather = ColumnMoves(
            [widths[matrix] for matrix in used],
            [[(used.index(matrix), start, stop) for matrix, start, stop in gathered]],
            device,
        )
        sent = [width > 0 for width in widths[:P]]
        #: Whether they are all that came, as it came.
        self._takes_all = not reading.rows and used == [owner for owner, is_sent in enumerate(sent) if is_sent]
        at = [
            sorted((group.starts[block], number) for number, group in enumerate(groups) if block in group.starts)
            for block in range(P + 2)
        ]
        scattered = [[run for _, number in of for run in reading.scattered[number]] for of in at]
        scattered += [list(runs) for runs in reading.scattered[num_groups:]]
        features = [table for table in ownership.tables.tables for _ in table.features]
        dims = [table.embedding_dim for table in features if table.pooling is not Pooling.SEQUENCE]
        self._scatter = ColumnMoves([sum(dims)], [[(0, start, stop) for start, stop in of] for of in scattered], device)
        pooled = [n for n, table in enumerate(features) if table.pooling is not Pooling.SEQUENCE]
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
        sent: torch.Tensor,
    ) -> tuple[list[torch.Tensor], Assembled]:
        """Pooled embeddings of all features, shape (B, C), and those of every sequence, (L, D).

        Args:
            batch: The batch.
            came: What each process sent.
            local: What was read from replicas here.
            reduced_BW: Sums that were added up on the way; None for none.
            sent: All that processes sent, of one dimension.
        """
        indices: list[RowIndex] = []
        sums = [*(one.sums_BW for one in came), local.sums_BW, reduced_BW]
        totals = [
            _total(group, sums) if is_summed else None
            for group, is_summed in zip(self._reading.groups, self._is_summed, strict=True)
        ]
        pooled: list[torch.Tensor] = []
        own_rows = dict(zip((key for key, _ in local.asked), local.rows, strict=True))
        found: dict[int, torch.Tensor] = {}
        for kernel in self._reading.rows:
            index = row_index(kernel, batch)
            indices.append(index)
            of_key = [one.rows[kernel.key] for one in came if kernel.key in one.rows]
            if kernel.key in own_rows:
                of_key.append(own_rows[kernel.key])
            rows_RD = of_key[0] if len(of_key) == 1 else torch.cat(of_key)
            pooled.append(_pooled(kernel, index, rows_RD, batch.batch_size))
            self._place_sequences(kernel, index, rows_RD, batch, found)
        matrices = [*sums, *totals, *pooled]
        pooled_BC = self._pooled_features(matrices, sent, batch.batch_size)
        for at, (block, start, stop) in self._reading.added:
            pooled_BC[:, at : at + stop - start] += self._block(matrices, block)[:, start:stop]
        scale_BC = self._mean_scales(batch) if self._has_means else None
        if scale_BC is not None:
            pooled_BC *= scale_BC
        sequences = [found[feature] for feature in self._reading.sequences]
        return [pooled_BC, *sequences], Assembled(tuple(indices), scale_BC)

    def _pooled_features(self, matrices: Sequence[torch.Tensor | None], sent: torch.Tensor, B: int) -> torch.Tensor:
        """Columns that are no sums of several blocks, or the first of these, of shape (B, C)."""
        if not self._used:
            return torch.empty(B, 0, dtype=torch.float32, device=self._device)
        if not self._takes_all:
            pieces = [one.reshape(-1) for matrix in self._used if (one := matrices[matrix]) is not None]
            sent = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
        return self._gather(sent, B).view(B, -1)

    def _block(self, matrices: Sequence[torch.Tensor | None], block: int) -> torch.Tensor:
        """A group's columns, or those of features that are pooled from rows."""
        groups = self._reading.groups
        if block < len(groups) and not self._is_summed[block]:
            return _total(groups[block], matrices)
        found = matrices[self._num_processes + 2 + block]
        assert found is not None, "it was summed, or pooled"
        return found

    def _mean_scales(self, batch: DistributedBatch) -> torch.Tensor:
        """One over the bag length of features that are averaged, 1 for those that are summed; shape (B, C)."""
        lengths_FB = batch.lengths_FB.index_select(0, self._pooled).clamp(min=1).float()
        ones = torch.ones_like(lengths_FB)
        scale_FB = torch.where(self._is_mean_F[:, None], lengths_FB.reciprocal(), ones)
        scale_CB = torch.repeat_interleave(scale_FB, self._pooled_dims, dim=0, output_size=self._num_columns)
        return scale_CB.T.contiguous()

    def _place_sequences(
        self,
        kernel: RowKernel,
        index: RowIndex,
        rows_RD: torch.Tensor,
        batch: DistributedBatch,
        sequences: dict[int, torch.Tensor],
    ) -> None:
        """Puts a kernel's rows where sequences have them; one that has all of its rows and columns here is they."""
        if not kernel.sequences:
            return
        pieces = torch.split(rows_RD.index_select(0, index.arrival_L[index.num_pooled :]), list(index.num_sequence))
        for one, positions, rows in zip(kernel.sequences, index.positions, pieces, strict=True):
            first, last = self._columns[one.holding]
            dim = self._reading.dim_F[one.feature]
            if positions is None and last - first == dim:
                sequences[one.feature] = rows
                continue
            if one.feature not in sequences:
                sequences[one.feature] = rows.new_empty(batch.counts_F[one.feature], dim)
            if positions is None:
                sequences[one.feature][:, first:last] = rows
            else:
                sequences[one.feature][positions, first:last] = rows

    def take_apart(self, assembled: Assembled, gradients: Sequence[torch.Tensor]) -> TakenApart:
        """Gradients of what each process sent, and of what was read here.

        Args:
            assembled: The batch.
            gradients: Of what `put_together` gave.
        """
        pooled_BC = gradients[0] if assembled.scale_BC is None else gradients[0] * assembled.scale_BC
        B = len(pooled_BC)
        scattered = self._scatter(pooled_BC.reshape(-1), B)
        pieces = self._scatter.split(scattered, B)
        P, sequences = self._num_processes, dict(zip(self._reading.sequences, gradients[1:], strict=True))
        rows = self._row_gradients(assembled.indices, pieces[P + 2 :], sequences)
        sums = scattered[: sum(one.numel() for one in pieces[:P])]
        return TakenApart(sums, pieces[:P], pieces[P], pieces[P + 1], rows)

    def _row_gradients(
        self, indices: Sequence[RowIndex], blocks: Sequence[torch.Tensor], sequences: Mapping[int, torch.Tensor]
    ) -> dict[KernelKey, torch.Tensor]:
        """Gradients of the rows of every kernel, in the order in which they came."""
        found = {}
        for kernel, index, block in zip(self._reading.rows, indices, blocks, strict=True):
            sources = [one_below_the_other(block, len(kernel.pooled))] if kernel.pooled else []
            for one, positions in zip(kernel.sequences, index.positions, strict=True):
                first, last = self._columns[one.holding]
                of_feature = sequences[one.feature]
                if last - first < of_feature.shape[1]:
                    of_feature = of_feature[:, first:last]
                sources.append(of_feature if positions is None else of_feature[positions])
            found[kernel.key] = _by_arrival(kernel, index, torch.cat(sources) if len(sources) > 1 else sources[0])
        return found


def _total(group: SumGroup, sums: Sequence[torch.Tensor | None]) -> torch.Tensor:
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
    weights_L = None if index.weights_L is None else index.weights_L[: index.num_pooled]
    sums_XD = embedding_bag(
        arrival_L, rows_RD, index.offsets, mode="sum", include_last_offset=True, per_sample_weights=weights_L
    )
    return side_by_side(sums_XD, len(kernel.pooled), B)


def _by_arrival(kernel: RowKernel, index: RowIndex, sources_XD: torch.Tensor) -> torch.Tensor:
    """Gradients of rows from those of bags and of sequences."""
    num_sequence = len(index.arrival_L) - index.num_pooled
    num_bags = len(sources_XD) - num_sequence
    in_sequence_L = torch.arange(num_bags, num_bags + num_sequence, device=sources_XD.device)
    source_L = torch.cat([index.bags_L, in_sequence_L])
    if index.weights_L is not None:
        source_L, sources_XD = weighted(source_L, sources_XD, index.weights_L)
    if kernel.deduplicated:
        return summed_by_place(index.arrival_L, index.num_rows, source_L, sources_XD)
    source_R = torch.empty_like(source_L)
    source_R[index.arrival_L] = source_L
    return sources_XD[source_R]
