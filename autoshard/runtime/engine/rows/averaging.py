"""Averages of weights and moments over replica groups: of all rows, or of those that were updated.

Shape suffixes: N rows, D embedding dim, U distinct rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from autoshard.runtime.engine.pieces import within
from autoshard.runtime.releases import all_gather

#: Marks of rows that were updated since the last average of replica groups, and since they were last saved.
UNAVERAGED, UNSAVED = 1, 2
UPDATED = UNAVERAGED | UNSAVED


class RowStates(NamedTuple):
    """State of the rows that a process has of a holding, one per place: views, which training changes."""

    weights_ND: torch.Tensor
    """Weights."""
    moments: Mapping[str, torch.Tensor]
    """The optimizer's moments by name (`Optimizer.moments`): (N,) for one a row, (N, D) for one for each weight."""
    marks_N: torch.Tensor | None
    """Bits of rows that were updated, uint8: `UNAVERAGED` and `UNSAVED`; None where rows are not marked."""

    def of(self, start: int, stop: int) -> RowStates:
        """State of the rows [start, stop)."""
        rows = slice(start, stop)
        moments = {name: one[rows] for name, one in self.moments.items()}
        return RowStates(self.weights_ND[rows], moments, None if self.marks_N is None else self.marks_N[rows])

    def tensors(self) -> list[torch.Tensor]:
        """What is averaged of a row."""
        return [self.weights_ND, *self.moments.values()]


def average(states: Sequence[RowStates], peers: dist.ProcessGroup, *, piece_bytes: int = 1 << 26) -> int:
    """Makes weights and moments the means over the peers', which are bit-identical then; clears the marks.

    Rows that no peer has marked are equal already, and stay as they are. Values travel as they are held; sums are fp32.

    Args:
        states: Of all that a process holds, in the same order on all peers.
        peers: The processes that hold copies of the same rows.
        piece_bytes: Most bytes that are averaged at once: a copy of them is all that it takes beside the tables.

    Returns:
        Bytes that each of them puts into collectives.

    Source:
        2D Eq. 1: weights and moments alike. Differs where rows are marked: it averages all of them.
    """
    marked = [one for one in states if one.marks_N is not None]
    unmarked = [tensor for one in states if one.marks_N is None for tensor in one.tensors()]
    sent = _average_all(unmarked, peers, piece_bytes)
    return sent + (_average_marked(marked, peers, piece_bytes) if marked else 0)


def _average_all(tensors: Sequence[torch.Tensor], peers: dist.ProcessGroup, piece_bytes: int) -> int:
    """Averages all numbers of tensors; the bytes of them.

    Small tensors travel together: there are several for each table, and a collective of each takes most of its time
    before its first byte.
    """
    sent = 0
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        values = [tensor.view(-1) for tensor in tensors if tensor.dtype is dtype]
        pieces = [piece for one in values for piece in torch.split(one, piece_bytes // one.element_size())]
        for batch in within(((piece, piece.nbytes) for piece in pieces), piece_bytes):
            flat = torch.cat(batch) if len(batch) > 1 else batch[0]
            sent += _average_values(flat, peers)
            if len(batch) > 1:
                for one, means in zip(batch, torch.split(flat, [len(one) for one in batch]), strict=True):
                    one.copy_(means)
    return sent


def _average_values(values: torch.Tensor, peers: dist.ProcessGroup) -> int:
    """Averages a row of numbers in place; the bytes of it.

    Half precision would lose bits in an all-reduce of its own: each peer sums a share of the values in fp32 and rounds
    the mean once, for the same bytes.
    """
    if values.dtype is torch.float32:
        dist.all_reduce(values, group=peers)
        values /= peers.size()
        return values.nbytes
    share = -(-len(values) // peers.size())
    all_shares = values.new_zeros(peers.size() * share)
    all_shares[: len(values)] = values
    own = torch.empty_like(all_shares)
    dist.all_to_all_single(own, all_shares, group=peers)
    mean = own.view(peers.size(), share).sum(dim=0, dtype=torch.float32) / peers.size()
    all_gather(all_shares, mean.to(values.dtype), group=peers)
    values.copy_(all_shares[: len(values)])
    return all_shares.nbytes


def _average_marked(states: Sequence[RowStates], peers: dist.ProcessGroup, piece_bytes: int) -> int:
    """Averages rows that any peer has marked: one all-reduce of marks, then what belongs to these rows, by dtype."""
    marks = [one.marks_N for one in states if one.marks_N is not None]
    union = torch.cat(marks) & UNAVERAGED
    dist.all_reduce(union, op=dist.ReduceOp.MAX, group=peers)
    rows = [piece.nonzero().squeeze(1) for piece in torch.split(union, [len(one) for one in marks])]
    places = [(tensor, rows_U) for one, rows_U in zip(states, rows, strict=True) for tensor in one.tensors()]
    for marks_N, rows_U in zip(marks, rows, strict=True):
        marks_N &= UNSAVED
        marks_N[rows_U] = UNSAVED
    sent = union.nbytes
    for dtype in dict.fromkeys(tensor.dtype for tensor, _ in places):
        of_dtype = [place for place in places if place[0].dtype is dtype]
        for batch in within(_rows_of(of_dtype, piece_bytes), piece_bytes):
            gathered = [tensor.index_select(0, rows_U) for tensor, rows_U in batch]
            flat = torch.cat([one.view(-1) for one in gathered])
            sent += _average_values(flat, peers)
            pieces = torch.split(flat, [one.numel() for one in gathered])
            for (tensor, rows_U), one, piece in zip(batch, gathered, pieces, strict=True):
                tensor.index_copy_(0, rows_U, piece.view(one.shape))
    return sent


def _rows_of(
    places: Sequence[tuple[torch.Tensor, torch.Tensor]], piece_bytes: int
) -> Iterator[tuple[tuple[torch.Tensor, torch.Tensor], int]]:
    """Rows of tensors, in pieces that take `piece_bytes` at most, or are one row, each with its bytes."""
    for tensor, rows_U in places:
        row_bytes = tensor.stride(0) * tensor.element_size()
        for piece_U in torch.split(rows_U, max(1, piece_bytes // row_bytes)):
            if len(piece_U):
                yield (tensor, piece_U), len(piece_U) * row_bytes
