"""Sums of bags that are added up over all processes on the way, and their gradients.

Shape suffixes: P processes, B samples of a local batch, G samples of the global batch (P * B), O columns of one
process's fused sums, A those of them that travel by all-to-all, M the others, W columns of all sums that are added up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TypeAlias

import torch
import torch.distributed as dist

from autoshard.runtime.engine.holdings import Ownership

#: Neighbouring columns: a mark, and how many they are.
Run: TypeAlias = tuple[bool, int]


class ReducedSums:
    """Columns of sums that travel by one reduce-scatter, and of their gradients, which come by one all-gather.

    Every process puts in the same columns, zeros where it owns no rows of a table.

    Args:
        ownership: Who holds what.
        group: The processes.

    Attributes:
        width: W; 0 where no sums are added up.
        apart_width: A.
    """

    def __init__(self, ownership: Ownership, group: dist.ProcessGroup) -> None:
        self._num_processes, holdings, process = group.size(), ownership.holdings, group.rank()
        own = [slot for slot in ownership.asked(process, process).sums if not holdings[slot.holding].is_replicated]
        # Runs of columns: those of this process's sums, and those of the buffers.
        self._own = _runs((holdings[one.holding].is_reduced, holdings[one.holding].embedding_dim) for one in own)
        self._buffer = _runs((one in own, holdings[one.holding].embedding_dim) for one in ownership.reduced)
        self.width = sum(width for _, width in self._buffer)
        self.apart_width = sum(width for is_reduced, width in self._own if not is_reduced)

    def split(self, sums_GO: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Columns that travel by all-to-all, (G, A), and those that are added up, (G, M); None for none."""
        if sums_GO is None or not self.width:
            return sums_GO, None
        return _beside(_pieces(sums_GO, self._own, wanted=False)), _beside(_pieces(sums_GO, self._own, wanted=True))

    def joined(self, apart_GA: torch.Tensor | None, mine_GM: torch.Tensor | None) -> torch.Tensor | None:
        """The columns as `split` got them."""
        if apart_GA is None or mine_GM is None:
            return mine_GM if apart_GA is None else apart_GA
        return _woven(self._own, mine_GM, apart_GA)

    def filled(
        self, mine_GM: torch.Tensor | None, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """What this process puts into the reduce-scatter: its sums for all processes, as they travel, shape (G, W)."""
        if mine_GM is not None and mine_GM.shape[1] == self.width:
            return mine_GM.to(dtype)
        sums_GW = torch.zeros(batch_size * self._num_processes, self.width, dtype=dtype, device=device)
        if mine_GM is not None:
            mine = torch.split(mine_GM, [width for is_mine, width in self._buffer if is_mine], dim=1)
            for place, piece in zip(_pieces(sums_GW, self._buffer, wanted=True), mine, strict=True):
                place.copy_(piece)
        return sums_GW

    def mine(self, gathered_GW: torch.Tensor) -> torch.Tensor | None:
        """Of all gathered gradients those of this process's sums, shape (G, M)."""
        return _beside(_pieces(gathered_GW, self._buffer, wanted=True))


def _runs(columns: Iterable[tuple[bool, int]]) -> tuple[Run, ...]:
    """Neighbours with the same mark as one run."""
    return tuple((mark, sum(width for _, width in alike)) for mark, alike in groupby(columns, key=itemgetter(0)))


def _pieces(sums: torch.Tensor, runs: Sequence[Run], *, wanted: bool) -> list[torch.Tensor]:
    """Runs of columns with a mark."""
    pieces = torch.split(sums, [width for _, width in runs], dim=1)
    return [piece for piece, (mark, _) in zip(pieces, runs, strict=True) if mark is wanted]


def _woven(runs: Sequence[Run], marked: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Columns with a mark and without in the order of the runs."""
    sources = {
        mark: iter(torch.split(of, [width for known, width in runs if known is mark], dim=1))
        for mark, of in ((True, marked), (False, others))
    }
    return torch.cat([next(sources[mark]) for mark, _ in runs], dim=1)


def _beside(pieces: Sequence[torch.Tensor]) -> torch.Tensor | None:
    if not pieces:
        return None
    return torch.cat(list(pieces), dim=1) if len(pieces) > 1 else pieces[0].contiguous()
