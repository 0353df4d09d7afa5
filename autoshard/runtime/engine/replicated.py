"""Rows that several processes hold: looked up without FBGEMM's optimizer, and updated from gradients that meet.

Shape suffixes: N rows, D embedding dim, L lookups, U distinct rows, X bags or lookups that have a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import embedding_bag

from autoshard.core import DType, GradSync, Optimizer
from autoshard.runtime.engine.fused import FusedSettings
from autoshard.runtime.huge_pages import advise_huge_pages

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

    All three ways give the same sums, but for rounding:

    - dense: an all-reduce of a gradient for every row that is held;
    - sparse: an all-gather of the rows' numbers, their union, gradients aggregated locally and padded with zeros to
      it, and an all-reduce of these (OPER Sec. 5.3);
    - all_gather: an all-gather of rows and gradients, aggregated by every process.

    Args:
        how: Which of them.
        group: The processes that hold the rows; None for this one alone.
        num_rows: Rows that are held.

    Source:
        OPER Sec. 5.3 for the sparse one.
    """

    def __init__(self, how: GradSync, group: dist.ProcessGroup | None, num_rows: int) -> None:
        self._how, self._group, self._num_rows = how, group, num_rows
        self.sent_bytes = 0

    def __call__(self, own: RowGradients) -> RowGradients:
        """Gradients of all rows that any of the processes has one of; every process gets the same."""
        if self._group is None:
            return own
        if self._how is GradSync.DENSE:
            return self._dense(own, self._group)
        rows_U, gathered = self._gathered_rows(own.rows_U, self._group)
        place_U = torch.searchsorted(rows_U, own.rows_U)
        padded_UD = own.gradients_UD.new_zeros(len(rows_U), own.gradients_UD.shape[1])
        padded_UD[place_U] = own.gradients_UD
        dist.all_reduce(padded_UD, group=self._group)
        self.sent_bytes += gathered + padded_UD.nbytes
        return RowGradients(rows_U, padded_UD)

    def _dense(self, own: RowGradients, group: dist.ProcessGroup) -> RowGradients:
        all_ND = own.gradients_UD.new_zeros(self._num_rows, own.gradients_UD.shape[1])
        all_ND[own.rows_U] = own.gradients_UD
        dist.all_reduce(all_ND, group=group)
        self.sent_bytes += all_ND.nbytes
        touched = all_ND.any(dim=1).nonzero().squeeze(1)
        return RowGradients(touched, all_ND[touched])

    def _gathered_rows(self, rows_U: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, int]:
        """Union of all processes' rows, and the bytes that this one put in."""
        counts = rows_U.new_empty(group.size())
        dist.all_gather_single(counts, rows_U.new_tensor([len(rows_U)]), group=group)
        largest = int(counts.max())
        # Padded with the first row, which changes no union; with none, there is nothing to pad.
        padding = rows_U.new_full((largest - len(rows_U),), -1)
        everybody = rows_U.new_empty(group.size() * largest)
        dist.all_gather_single(everybody, torch.cat([rows_U, padding]), group=group)
        union = torch.unique(everybody)
        return (union[1:] if len(union) and int(union[0]) < 0 else union), largest * rows_U.element_size()


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
                made = dist.new_group([ranks[process] for process in processes])
                if isinstance(made, dist.ProcessGroup):
                    found[processes] = made
    return found
