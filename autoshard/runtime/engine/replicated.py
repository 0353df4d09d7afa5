"""Rows that several processes hold: looked up without FBGEMM's optimizer, and updated from gradients that meet.

Shape suffixes: N rows, D embedding dim, L lookups, U distinct rows, X bags or lookups that have a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import embedding_bag

from autoshard.core import DType, GradSync, Optimizer
from autoshard.runtime.engine.fused import FusedSettings
from autoshard.runtime.engine.groups import group_of_ranks
from autoshard.runtime.engine.huge_pages import advise_huge_pages

TORCH_DTYPES = {DType.FP32: torch.float32, DType.FP16: torch.float16}


class RowGradients(NamedTuple):
    """Gradients of distinct rows."""

    rows_U: torch.Tensor
    """Rows, rising."""
    gradients_UD: torch.Tensor


class ReplicatedRows:
    """Rows that other processes have copies of, and the optimizer's moments.

    All copies start alike and get the same updates, so that they stay alike.

    Args:
        num_rows: N.
        dim: D.
        dtype: Of the weights.
        optimizer: SGD, row-wise AdaGrad or AdaGrad, by FBGEMM's rules.
        settings: Learning rate and epsilon.
        device: Where to hold them.
    """

    def __init__(
        self,
        num_rows: int,
        dim: int,
        dtype: DType,
        optimizer: Optimizer,
        settings: FusedSettings,
        device: torch.device,
    ) -> None:
        self.weights_ND = advise_huge_pages(
            torch.empty(num_rows, dim, dtype=TORCH_DTYPES[dtype], device=device)
        ).zero_()
        self._optimizer = optimizer
        self._rate, self._eps = settings.of(optimizer)
        shape = {Optimizer.ROWWISE_ADAGRAD: (num_rows,), Optimizer.ADAGRAD: (num_rows, dim)}.get(optimizer)
        self.moments = None if shape is None else torch.zeros(shape, device=device)

    def sums(self, rows_L: torch.Tensor, lengths_X: torch.Tensor) -> torch.Tensor:
        """Sums over bags, fp32 of shape (X, D)."""
        offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths_X.long())
        if self.weights_ND.dtype is torch.float32:
            return embedding_bag(rows_L, self.weights_ND, offsets, mode="sum", include_last_offset=True)
        return embedding_bag(
            torch.arange(len(rows_L), device=rows_L.device),
            self.rows(rows_L),
            offsets,
            mode="sum",
            include_last_offset=True,
        )

    def rows(self, rows_L: torch.Tensor) -> torch.Tensor:
        """Rows, fp32 of shape (L, D)."""
        return self.weights_ND.index_select(0, rows_L).float()

    def update(self, gradients: RowGradients) -> None:
        """Takes a step of the optimizer for some rows, each with its whole gradient.

        Source:
            FBGEMM's exact optimizers: row-wise AdaGrad adds the mean of the squared gradient over the row, and epsilon
            is added outside the root.
        """
        rows_U, gradients_UD = gradients
        step_UD = gradients_UD
        if self.moments is not None:
            squares = gradients_UD.square()
            if self._optimizer is Optimizer.ROWWISE_ADAGRAD:
                squares = squares.mean(dim=1)
            moments = self.moments[rows_U] + squares
            self.moments[rows_U] = moments
            roots = moments.sqrt() + self._eps
            step_UD = gradients_UD / (roots[:, None] if roots.dim() == 1 else roots)
        changed_UD = self.weights_ND[rows_U].float() - self._rate * step_UD
        self.weights_ND[rows_U] = changed_UD.to(self.weights_ND.dtype)


def summed_by_row(rows_L: torch.Tensor, source_L: torch.Tensor, gradients_XD: torch.Tensor) -> RowGradients:
    """Gradients of distinct rows.

    Args:
        rows_L: Row of every lookup.
        source_L: The gradient that the lookup passes on.
        gradients_XD: Gradients of bags or of lookups.
    """
    sorted_L, order_L = rows_L.sort(stable=True)
    rows_U, counts_U = torch.unique_consecutive(sorted_L, return_counts=True)
    offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(counts_U)
    summed_UD = embedding_bag(source_L[order_L], gradients_XD, offsets, mode="sum", include_last_offset=True)
    return RowGradients(rows_U, summed_UD)


class GradientSync:
    """Sums gradients of the same rows over the processes that hold them.

    Both ways give the same sums, but for rounding:

    - dense: an all-reduce of a gradient for every row that is held;
    - sparse: an all-gather of the rows' numbers, their union, gradients aggregated locally and padded with zeros to
      it, and an all-reduce of these (OPER Sec. 5.3).

    Rows of several kernels travel together, however wide they are: the collectives of a step are as many as there are
    ways and groups of processes.

    Args:
        how: Which of them.
        group: The processes that hold the rows; None for this one alone.
        num_rows: Rows that are held, kernel by kernel.

    Source:
        OPER Sec. 5.3 for the sparse one.
    """

    def __init__(self, how: GradSync, group: dist.ProcessGroup | None, num_rows: Sequence[int]) -> None:
        self._how, self._group, self._num_rows = how, group, tuple(num_rows)
        self.sent_bytes = 0

    def __call__(self, own: Sequence[RowGradients]) -> list[RowGradients]:
        """For each kernel, gradients of all rows that any of the processes has one of; all processes get the same."""
        if self._group is None:
            return list(own)
        if self._how is GradSync.DENSE:
            summed = self._reduced([_dense(one, rows) for one, rows in zip(own, self._num_rows, strict=True)])
            return [_touched(one_ND) for one_ND in summed]
        rows = self._union([one.rows_U for one in own])
        summed = self._reduced([_padded(one, rows_U) for one, rows_U in zip(own, rows, strict=True)])
        return [RowGradients(rows_U, one_UD) for rows_U, one_UD in zip(rows, summed, strict=True)]

    def _reduced(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sums over the processes, in one all-reduce."""
        flat = torch.cat([one.reshape(-1) for one in gradients])
        dist.all_reduce(flat, group=self._group)
        self.sent_bytes += flat.nbytes
        pieces = torch.split(flat, [one.numel() for one in gradients])
        return [piece.view(one.shape) for piece, one in zip(pieces, gradients, strict=True)]

    def _union(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """For each kernel, all rows that any of the processes names, rising."""
        assert self._group is not None, "there are other processes"
        starts = [0, *accumulate(self._num_rows)]
        own = torch.cat([rows_U + start for rows_U, start in zip(rows, starts, strict=False)])
        counts = own.new_empty(self._group.size())
        dist.all_gather_single(counts, own.new_tensor([len(own)]), group=self._group)
        largest = int(counts.max())
        everybody = own.new_empty(self._group.size() * largest)
        padding = own.new_full((largest - len(own),), -1)
        dist.all_gather_single(everybody, torch.cat([own, padding]), group=self._group)
        self.sent_bytes += largest * own.element_size()
        union = torch.unique(everybody)
        ends = torch.searchsorted(union, union.new_tensor(starts)).tolist()
        return [union[first:last] - start for first, last, start in zip(ends, ends[1:], starts, strict=False)]


def _dense(own: RowGradients, num_rows: int) -> torch.Tensor:
    all_ND = own.gradients_UD.new_zeros(num_rows, own.gradients_UD.shape[1])
    all_ND[own.rows_U] = own.gradients_UD
    return all_ND


def _touched(all_ND: torch.Tensor) -> RowGradients:
    rows_U = all_ND.any(dim=1).nonzero().squeeze(1)
    return RowGradients(rows_U, all_ND[rows_U])


def _padded(own: RowGradients, rows_U: torch.Tensor) -> torch.Tensor:
    padded_UD = own.gradients_UD.new_zeros(len(rows_U), own.gradients_UD.shape[1])
    padded_UD[torch.searchsorted(rows_U, own.rows_U)] = own.gradients_UD
    return padded_UD


def holder_groups(
    holders: Sequence[tuple[int, ...]], group: dist.ProcessGroup, all_groups: Sequence[Sequence[int]]
) -> dict[tuple[int, ...], dist.ProcessGroup | None]:
    """The process groups of processes that hold the same rows; None for those of one process.

    Every process makes all of them, in the same order, its own and those of others: torch asks for it.

    Args:
        holders: Ranks in `group`, each set once; of all processes.
        group: The processes of this engine.
        all_groups: Ranks in the world of each group of processes that makes an engine of the same plan now.
    """
    found: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    for processes in holders:
        if len(processes) == 1:
            found[processes] = None
        elif len(processes) == group.size():
            found[processes] = group
        else:
            for ranks in all_groups:
                made = group_of_ranks([ranks[process] for process in processes])
                if made is not None:
                    found[processes] = made
    return found
