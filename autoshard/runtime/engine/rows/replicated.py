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
from autoshard.runtime.engine.groups import WeakGroup, group_of_ranks
from autoshard.runtime.engine.ids.messages import id_dtype
from autoshard.runtime.engine.rows.averaging import RowStates
from autoshard.runtime.engine.rows.fused import FusedSettings, rounds_at_random
from autoshard.runtime.engine.rows.huge_pages import advise_huge_pages
from autoshard.runtime.releases import all_gather

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

    Attributes:
        weights_ND: The weights.
        moments: (N,) row-wise, (N, D) else; None for SGD.
        marks_N: 1 for rows that were updated, uint8; None where they are not marked.
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
        self._scale, self._eps = settings.scale_of(optimizer), settings.eps
        shape = {Optimizer.ROWWISE_ADAGRAD: (num_rows,), Optimizer.ADAGRAD: (num_rows, dim)}.get(optimizer)
        self.moments = None if shape is None else torch.zeros(shape, dtype=torch.float32, device=device)
        self.marks_N = torch.zeros(num_rows, dtype=torch.uint8, device=device) if settings.marks_rows else None
        # Of one seed, so that all copies, which get the same updates, draw the same.
        self._noise: torch.Generator | None = None
        if rounds_at_random(dtype, device):
            self._noise = torch.Generator(device).manual_seed(settings.seed)

    @property
    def state(self) -> RowStates:
        """Weights, moments and marks."""
        return RowStates(self.weights_ND, self.moments, self.marks_N)

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

    def update(self, gradients: RowGradients, learning_rate: float) -> None:
        """Takes a step of the optimizer for some rows, each with its whole gradient.

        Source:
            FBGEMM's exact optimizers: row-wise AdaGrad adds the mean of the squared gradient over the row, and epsilon
            is added outside the root.
        """
        rows_U, gradients_UD = gradients
        if self.marks_N is not None:
            self.marks_N[rows_U] = 1
        step_UD = gradients_UD
        if self.moments is not None:
            squares = gradients_UD.square()
            if self._optimizer is Optimizer.ROWWISE_ADAGRAD:
                squares = squares.mean(dim=1)
            moments = self.moments[rows_U] + squares
            self.moments[rows_U] = moments
            roots = moments.sqrt() + self._eps * self._scale
            step_UD = gradients_UD / (roots[:, None] if roots.dim() == 1 else roots)
        changed_UD = self.weights_ND[rows_U].float() - learning_rate * self._scale * step_UD
        if self._noise is not None:
            changed_UD = half_at_random(changed_UD, self._noise)
        self.weights_ND[rows_U] = changed_UD.to(self.weights_ND.dtype)


def half_at_random(values: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
    """fp32 values in fp16, each one of its two neighbours there, with the value as the mean.

    fp16 keeps 10 of the 23 bits of an fp32 fraction: a random number of the 13 others is added before they are cut off.
    Below 6e-5, where fp16 keeps fewer, the last bits are rounded to the nearest.
    """
    cut = 1 << 13
    bits = values.view(torch.int32)
    drawn = torch.randint(cut, bits.shape, generator=noise, dtype=torch.int32, device=bits.device)
    return (bits + drawn).bitwise_and_(-cut).view(torch.float32).half()


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


class SyncedRows(NamedTuple):
    """Rows of a kernel that other processes have copies of."""

    how: GradSync
    """How their gradients meet."""
    num_rows: int
    embedding_dim: int


class GradientSync:
    """Sums gradients of the same rows over the processes that hold them.

    All ways give the same sums, but for rounding:

    - dense: an all-reduce of a gradient for every row that is held;
    - sparse: an all-gather of the rows' numbers, their union, gradients aggregated locally and padded with zeros to
      it, and an all-reduce of these (OPER Sec. 5.3);
    - all-gather: one of the rows' numbers and gradients, which every process sums by itself, in the same order.

    Rows of several kernels travel together, however wide they are and whichever way they go: a step has at most one
    all-gather of numbers of rows, one of rows and gradients, and one all-reduce for each group of processes.

    Args:
        group: The processes that hold the rows; None for this one alone.
        kernels: Their rows, kernel by kernel.

    Attributes:
        sent_bytes: Bytes that this process has put into collectives of rows and gradients.

    Source:
        OPER Sec. 5.3 for the sparse one, and for the all-gather that it is compared with.
    """

    _group = WeakGroup[dist.ProcessGroup | None]()

    def __init__(self, group: dist.ProcessGroup | None, kernels: Sequence[SyncedRows]) -> None:
        self._group, self._kernels = group, tuple(kernels)
        self._id_dtype = id_dtype(one.num_rows for one in kernels)
        # Of four bytes, as a message's.
        self._id_words = self._id_dtype.itemsize // torch.int32.itemsize
        self._named = [n for n, one in enumerate(kernels) if one.how is not GradSync.DENSE]
        self.sent_bytes = 0

    def __call__(self, own: Sequence[RowGradients]) -> list[RowGradients]:
        """For each kernel, gradients of all rows that any of the processes has one of; all processes get the same."""
        group = self._group
        if group is None:
            return list(own)
        everybody = self._gathered(own, group) if self._named else {}
        found = {n: _summed(one) for n, one in everybody.items() if self._travels(n)}
        union = {n: torch.unique(one.rows_U) for n, one in everybody.items() if n not in found}
        left = [n for n in range(len(own)) if n not in found]
        blocks = [_padded(own[n], union[n]) if n in union else _dense(own[n], self._kernels[n].num_rows) for n in left]
        for n, sums in zip(left, self._reduced(blocks, group), strict=True):
            found[n] = RowGradients(union[n], sums) if n in union else _touched(sums)
        return [found[n] for n in range(len(own))]

    def _travels(self, kernel: int) -> bool:
        """Whether a kernel's gradients travel with the numbers of their rows."""
        return self._kernels[kernel].how is GradSync.ALL_GATHER

    def _reduced(self, gradients: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
        """Sums over the processes, in one all-reduce."""
        if not gradients:
            return []
        # One kernel's may be as large as its table, and needs no copy.
        flat = torch.cat([one.reshape(-1) for one in gradients]) if len(gradients) > 1 else gradients[0].reshape(-1)
        dist.all_reduce(flat, group=group)
        self.sent_bytes += flat.nbytes
        pieces = torch.split(flat, [one.numel() for one in gradients])
        return [piece.view(one.shape) for piece, one in zip(pieces, gradients, strict=True)]

    def _gathered(self, own: Sequence[RowGradients], group: dist.ProcessGroup) -> dict[int, RowGradients]:
        """For each kernel whose rows are named, those of all processes one after the other.

        Gradients are empty where they do not travel. Messages are padded to the longest: gloo has no uneven all-gather.
        """
        ids = [own[n].rows_U.to(self._id_dtype) for n in self._named]
        values = [own[n].gradients_UD.reshape(-1) for n in self._named if self._travels(n)]
        message = torch.cat([torch.cat(ids).view(torch.int32), *(one.view(torch.int32) for one in values)])
        counts = torch.tensor([len(one) for one in ids], device=message.device)
        counts_PN = counts.new_empty(group.size(), len(counts))
        all_gather(counts_PN.view(-1), counts, group=group)
        sizes_PN = [self._message_sizes(counts_N) for counts_N in counts_PN.tolist()]
        longest = max(map(sum, sizes_PN))
        longest += longest % self._id_words  # every process's ids start at a whole one
        messages = message.new_empty(group.size() * longest)
        padded = torch.cat([message, message.new_zeros(longest - len(message))])
        all_gather(messages, padded, group=group)
        self.sent_bytes += padded.nbytes
        parts_PN = [
            torch.split(messages[process * longest :][: sum(sizes_N)], sizes_N)
            for process, sizes_N in enumerate(sizes_PN)
        ]
        return self._by_kernel(parts_PN)

    def _message_sizes(self, counts_N: Sequence[int]) -> list[int]:
        """Words of the parts of a process's message: ids of each kernel, then gradients of those that travel."""
        dims = [self._kernels[n].embedding_dim if self._travels(n) else 0 for n in self._named]
        values = [count * dim for count, dim in zip(counts_N, dims, strict=True)]
        return [self._id_words * count for count in counts_N] + values

    def _by_kernel(self, parts_PN: Sequence[Sequence[torch.Tensor]]) -> dict[int, RowGradients]:
        found = {}
        for place, n in enumerate(self._named):
            rows = torch.cat([parts[place].view(self._id_dtype) for parts in parts_PN]).long()
            gradients = torch.cat([parts[len(self._named) + place].view(torch.float32) for parts in parts_PN])
            found[n] = RowGradients(rows, gradients.view(-1, self._kernels[n].embedding_dim))
        return found


def _summed(everybody: RowGradients) -> RowGradients:
    """Gradients of distinct rows, of all processes' gradients one after the other."""
    rows_X, gradients_XD = everybody
    return summed_by_row(rows_X, torch.arange(len(rows_X), device=rows_X.device), gradients_XD)


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
