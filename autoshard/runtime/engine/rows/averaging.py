"""Averages of weights and moments over replica groups: of all rows, or of those that were updated.

Shape suffixes: N rows, D embedding dim, U distinct rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist


class RowStates(NamedTuple):
    """State of the rows that a process has of a holding, one per place: views, which training changes."""

    weights_ND: torch.Tensor
    """Weights."""
    moments: torch.Tensor | None
    """Moments: (N,) row-wise, (N, D) else; None for SGD."""
    marks_N: torch.Tensor | None
    """1 for rows that were updated since the last average, uint8; None where rows are not marked."""

    def of(self, start: int, stop: int) -> RowStates:
        """State of the rows [start, stop)."""
        moments, marks_N = (None if one is None else one[start:stop] for one in (self.moments, self.marks_N))
        return RowStates(self.weights_ND[start:stop], moments, marks_N)

    def tensors(self) -> list[torch.Tensor]:
        """What is averaged of a row."""
        return [self.weights_ND] if self.moments is None else [self.weights_ND, self.moments]


def average(states: Sequence[RowStates], peers: dist.ProcessGroup) -> int:
    """Makes weights and moments the means over the peers', which are bit-identical then; clears the marks.

    Rows that no peer has marked are equal already, and stay as they are. Sums are fp32, whatever the dtype.

    Args:
        states: Of all that a process holds, in the same order on all peers.
        peers: The processes that hold copies of the same rows.

    Returns:
        Bytes that each of them puts into collectives.

    Source:
        2D Eq. 1: weights and moments alike. Differs where rows are marked: it averages all of them.
    """
    marks = [one.marks_N for one in states if one.marks_N is not None]
    unmarked = [tensor for one in states if one.marks_N is None for tensor in one.tensors()]
    sent = sum(_average_all(tensor, peers) for tensor in unmarked)
    if marks:
        marked = [one.tensors() for one in states if one.marks_N is not None]
        sent += _average_marked(marks, marked, peers)
    return sent


def _average_all(tensor: torch.Tensor, peers: dist.ProcessGroup) -> int:
    summed = tensor.float() if tensor.dtype is not torch.float32 else tensor
    dist.all_reduce(summed, group=peers)
    tensor.copy_(summed / peers.size())
    return summed.nbytes


def _average_marked(
    marks: Sequence[torch.Tensor], tensors: Sequence[Sequence[torch.Tensor]], peers: dist.ProcessGroup
) -> int:
    """Averages rows that any peer has marked: one all-reduce of marks, one of all that belongs to these rows."""
    union = torch.cat(list(marks))
    dist.all_reduce(union, op=dist.ReduceOp.MAX, group=peers)
    rows = [piece.nonzero().squeeze(1) for piece in torch.split(union, [len(one) for one in marks])]
    places = [(tensor, rows_U) for of, rows_U in zip(tensors, rows, strict=True) for tensor in of if len(rows_U)]
    for marks_N in marks:
        marks_N.zero_()
    if not places:
        return union.nbytes
    gathered = [tensor.index_select(0, rows_U).float() for tensor, rows_U in places]
    flat = torch.cat([one.reshape(-1) for one in gathered])
    dist.all_reduce(flat, group=peers)
    flat /= peers.size()
    pieces = torch.split(flat, [one.numel() for one in gathered])
    for (tensor, rows_U), one, piece in zip(places, gathered, pieces, strict=True):
        tensor.index_copy_(0, rows_U, piece.view(one.shape).to(tensor.dtype))
    return union.nbytes + flat.nbytes
