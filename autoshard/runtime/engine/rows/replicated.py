"""Rows that several processes hold: looked up without FBGEMM's optimizer, and updated from gradients that meet.

Shape suffixes: N rows, D embedding dim, L lookups, U distinct rows, X bags or lookups that have a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import embedding_bag

from autoshard.core import DType, Optimizer
from autoshard.runtime.engine.groups import WeakGroup, group_of_ranks
from autoshard.runtime.engine.ids.hits import HitRows
from autoshard.runtime.engine.rows.averaging import RowStates
from autoshard.runtime.engine.rows.fused import FusedSettings, rounds_at_random
from autoshard.runtime.engine.rows.huge_pages import advise_huge_pages
from autoshard.runtime.engine.staging import TORCH_DTYPES
from autoshard.runtime.releases import all_gather

#: Values of rows that are updated at once where all rows of a table are: 16 MiB.
_VALUES_AT_ONCE = 1 << 22


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
        moments: By name, as `RowStates` has them.
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
        self.moments = {
            one.name: torch.zeros(
                (num_rows,) if one.is_per_row else (num_rows, dim), dtype=torch.float32, device=device
            )
            for one in optimizer.moments
        }
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

    def update(self, rows_U: torch.Tensor | None, gradients_UD: torch.Tensor, learning_rate: float) -> None:
        """Takes a step of the optimizer for some rows, each with its whole gradient.

        Args:
            rows_U: Distinct rows; None for all. Those whose gradient is 0 stay as they are.
            gradients_UD: Their gradients, fp32.
            learning_rate: Of the lookup.

        Source:
            FBGEMM's exact optimizers: row-wise AdaGrad adds the mean of the squared gradient over the row, and epsilon
            is added outside the root.
        """
        if rows_U is not None:
            self._update(rows_U, gradients_UD, learning_rate)
            return
        num_rows, dim = gradients_UD.shape
        size = max(1, _VALUES_AT_ONCE // dim)
        for start in range(0, num_rows, size):
            rows = slice(start, start + size)
            self._update(rows, gradients_UD[rows], learning_rate)

    def _update(self, rows_U: torch.Tensor | slice, gradients_UD: torch.Tensor, learning_rate: float) -> None:
        if self.marks_N is not None:
            self.marks_N[rows_U] |= gradients_UD.any(dim=1)
        step_UD = gradients_UD
        if self._optimizer is not Optimizer.SGD:
            squares = gradients_UD.square()
            if self._optimizer is Optimizer.ROWWISE_ADAGRAD:
                squares = squares.mean(dim=1)
            moments = self.moments["moments"][rows_U] + squares
            self.moments["moments"][rows_U] = moments
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


def places_of(rows_L: torch.Tensor, rows_U: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Where rows are among distinct ones, which have them all, int32 of shape (L,); `num_rows` are there in all."""
    places_N = rows_U.new_empty(num_rows, dtype=torch.int32)
    places_N.scatter_(0, rows_U, torch.arange(len(rows_U), dtype=torch.int32, device=rows_U.device))
    return places_N.gather(0, rows_L)


def summed_by_place(
    places_L: torch.Tensor, num_places: int, source_L: torch.Tensor, gradients_XD: torch.Tensor
) -> torch.Tensor:
    """Sums of gradients for each place, 0 where there are none; shape (num_places, D).

    Args:
        places_L: Place of every lookup.
        num_places: How many places there are.
        source_L: The gradient that the lookup passes on.
        gradients_XD: Gradients of bags or of lookups.
    """
    order_L = places_L.sort(stable=True).indices
    ones_L = torch.ones_like(places_L, dtype=torch.int64)
    counts = ones_L.new_zeros(num_places).scatter_add_(0, places_L.long(), ones_L)
    return embedding_bag(source_L[order_L], gradients_XD, counts.cumsum(0) - counts, mode="sum")


class SyncedRows(NamedTuple):
    """Rows of a kernel that other processes have copies of."""

    num_rows: int
    embedding_dim: int


class GradientSync:
    """Sums gradients of the same rows over the processes that hold them.

    All ways give the same sums, but for rounding:

    - dense: an all-reduce of a gradient for every row that is held;
    - sparse: one of those rows that any process hits, with zeros for what a process does not hit (OPER Sec. 5.3);
    - all-gather: one of the gradients of rows that each process hits, which every process sums by itself, in the same
      order.

    Which rows they are came with the batch's ids. Rows of several kernels travel together, however wide they are and
    whichever way they go: a step has at most one all-gather and one all-reduce for each group of processes.

    Args:
        group: The processes that hold the rows; None for this one alone.
        kernels: Their rows, kernel by kernel.

    Attributes:
        sent_bytes: Bytes that this process has put into collectives of gradients.

    Source:
        OPER Sec. 5.3 for the sparse one, and for the all-gather that it is compared with.
    """

    _group = WeakGroup[dist.ProcessGroup | None]()

    def __init__(self, group: dist.ProcessGroup | None, kernels: Sequence[SyncedRows]) -> None:
        self._group, self._kernels = group, tuple(kernels)
        self._place = 0 if group is None else group.rank()
        self.sent_bytes = 0

    def own_rows(self, hits: Sequence[HitRows | None]) -> list[torch.Tensor | None]:
        """For each kernel, the rows over which this process sums gradients of its lookups; None for all.

        Args:
            hits: Rows whose gradients meet; None for all.
        """
        found = [None if hit is None else (hit.by_holder or (hit.all_U,)) for hit in hits]
        return [of if of is None else of[self._place if len(of) > 1 else 0] for of in found]

    def __call__(self, own: Sequence[torch.Tensor], hits: Sequence[HitRows | None]) -> list[torch.Tensor]:
        """For each kernel, the gradients of all rows that meet; all processes get the same.

        Args:
            own: Gradients of the rows that `own_rows` gives.
            hits: Rows whose gradients meet; None for all.
        """
        group = self._group
        if group is None:
            return list(own)
        gathered = {n: hit for n, hit in enumerate(hits) if hit is not None and hit.by_holder}
        reduced = [n for n in range(len(own)) if n not in gathered]
        found = dict(zip(reduced, self._reduced([own[n] for n in reduced], group), strict=True))
        found |= self._gathered([own[n] for n in gathered], gathered, group)
        return [found[n] for n in range(len(own))]

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

    def _gathered(
        self, gradients: Sequence[torch.Tensor], hits: Mapping[int, HitRows], group: dist.ProcessGroup
    ) -> dict[int, torch.Tensor]:
        """Sums of what all processes have, in one all-gather, padded to the longest: gloo has no uneven one."""
        if not hits:
            return {}
        sizes_PN = [
            [len(hit.by_holder[place]) * self._kernels[n].embedding_dim for n, hit in hits.items()]
            for place in range(group.size())
        ]
        flat = torch.cat([one.reshape(-1) for one in gradients])
        sent = torch.nn.functional.pad(flat, (0, max(map(sum, sizes_PN)) - len(flat)))
        came_PV = sent.new_empty(group.size(), len(sent))
        all_gather(came_PV.view(-1), sent, group=group)
        self.sent_bytes += sent.nbytes
        pieces_PN = [torch.split(of[: sum(sizes)], sizes) for of, sizes in zip(came_PV, sizes_PN, strict=True)]
        found = {}
        for (n, hit), pieces in zip(hits.items(), zip(*pieces_PN, strict=True), strict=True):
            rows_X = torch.cat(hit.by_holder)
            each_X = torch.arange(len(rows_X), device=rows_X.device)
            gradients_XD = torch.cat(pieces).view(len(rows_X), self._kernels[n].embedding_dim)
            places_X = places_of(rows_X, hit.all_U, self._kernels[n].num_rows)
            found[n] = summed_by_place(places_X, len(hit.all_U), each_X, gradients_XD)
        return found


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
