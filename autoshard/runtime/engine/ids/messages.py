"""Lengths and ids on the wire: one message from each process to each.

A message is int32: bag lengths, numbers, a flag and the batch's size, and ids, for which it has a set room. An id is
one number, or two in plans with a table of more rows than int32 can number, and where lookups are weighted: the upper
half of ids that are summed up is the weight then. Last come the rows of replicas that a batch hits, in a room of their
own. A message is put together on the device: how many ids there are is in the message, and the host need not know it
before.

Shape suffixes: N jagged rows (a feature's bags for one destination), B samples of a local batch, L lookups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from autoshard.evaluation.traffic import id_width


def id_dtype(num_rows: Iterable[int]) -> torch.dtype:
    """As what numbers of rows travel, where there are so many rows in each place: int32 if it can hold them."""
    return torch.int32 if id_width(num_rows) == torch.int32.itemsize else torch.int64


def with_weights(ids_L: torch.Tensor, weights_L: torch.Tensor) -> torch.Tensor:
    """Ids below 2^31 as int64, with the bits of their float32 weights in the upper half."""
    return ids_L | weights_L.view(torch.int32).long() << 32


def without_weights(ids_L: torch.Tensor, *, is_weighted: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Ids and their weights, the reverse of `with_weights`; as they are, and none, where lookups are not weighted."""
    if not is_weighted:
        return ids_L, None
    return ids_L & torch.iinfo(torch.int32).max, (ids_L >> 32).int().view(torch.float32)


class Flag(IntEnum):
    """What a process tells all others of its batch."""

    BAD = 0
    """It cannot be looked up."""
    WHOLE = 1
    """All of it found room."""
    MORE = 2
    """Something found no room: all processes send their batches once more."""


@dataclass(frozen=True, slots=True, eq=False)
class Jagged:
    """Ids of several slots, slot by slot.

    Attributes:
        lengths_NB: Bag lengths of slots whose sums are asked for.
        counts_N: Ids of each slot, on the host.
        ids_L: The ids, places of rows: int32 or int64.
        weights_L: Their weights; None where lookups are not weighted.
    """

    lengths_NB: torch.Tensor
    counts_N: tuple[int, ...]
    ids_L: torch.Tensor
    weights_L: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What one process asks another for.

    Attributes:
        sums: Of slots whose sums it wants.
        counts: Rows of each holding whose rows it wants.
        ids_L: Their places, holding by holding; int32 or int64.
    """

    sums: Jagged
    counts: tuple[int, ...]
    ids_L: torch.Tensor

    @classmethod
    def of(
        cls,
        lengths_NB: torch.Tensor,
        counts_N: tuple[int, ...],
        sums_L: torch.Tensor,
        counts: tuple[int, ...],
        rows_L: torch.Tensor,
        *,
        is_weighted: bool,
    ) -> Request:
        """A request as it travels.

        Args:
            lengths_NB: Bag lengths of slots whose sums are wanted.
            counts_N: Ids of each slot.
            sums_L: The ids.
            counts: Rows of each holding whose rows are wanted.
            rows_L: Their places.
            is_weighted: Whether ids and places are as `with_weights` gives them; rows are wanted as they are.
        """
        sums_L, weights_L = without_weights(sums_L, is_weighted=is_weighted)
        rows_L, _ = without_weights(rows_L, is_weighted=is_weighted)
        return cls(Jagged(lengths_NB, counts_N, sums_L, weights_L), counts, rows_L)


class BufferSizes:
    """How many ids messages have room for, between this process and each other one.

    Both ends of a message know how many ids the earlier ones held, and from that alone its room: somewhat more than
    they held. So lengths and ids of most batches travel together.

    Args:
        num_processes: All processes.
    """

    def __init__(self, num_processes: int) -> None:
        self.sent = (0,) * num_processes
        self.received = (0,) * num_processes

    def adapt(self, sent: Sequence[int], received: Sequence[int]) -> None:
        """Takes in how many ids a batch had, for the messages of the next one."""
        self.sent = tuple(map(_next_room, self.sent, sent))
        self.received = tuple(map(_next_room, self.received, received))


def _next_room(room: int, num_ids: int) -> int:
    """The same while it is a sixteenth more than needed, and no third too large: places in it are made anew else."""
    wanted = num_ids + num_ids // 8 + 16
    return max(wanted, room - room // 16) if num_ids + num_ids // 16 > room or 3 * room > 4 * wanted else room
