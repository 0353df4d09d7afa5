"""How the gradients of rows that several processes hold meet.

Shape suffixes: N rows, D embedding dim, L lookups, U distinct rows, X bags or lookups that have a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from autoshard.runtime.engine.groups import WeakGroup, group_of_ranks
from autoshard.runtime.engine.ids.hits import HitRows
from autoshard.runtime.engine.rows.torch_rows import summed_by_place
from autoshard.runtime.releases import all_gather


def places_of(rows_L: torch.Tensor, rows_U: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Where rows are among distinct ones, which have them all, int32 of shape (L,); `num_rows` are there in all."""
    places_N = rows_U.new_empty(num_rows, dtype=torch.int32)
    places_N.scatter_(0, rows_U, torch.arange(len(rows_U), dtype=torch.int32, device=rows_U.device))
    return places_N.gather(0, rows_L)


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
