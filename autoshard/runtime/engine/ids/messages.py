"""Lengths and ids on the wire: one message from each process to each.

A message is int32: bag lengths, numbers of rows, a flag, and ids of one number each (two in plans with a table of more
rows than int32 can number), for which it has a set room. Last come the rows of replicas that a batch hits.

Shape suffixes: N jagged rows (a feature's bags for one destination), B samples of a local batch, L lookups, Z numbers
of a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate

import torch

from autoshard.evaluation.traffic import id_width
from autoshard.runtime.engine.staging import staged


def id_dtype(num_rows: Iterable[int]) -> torch.dtype:
    """As what numbers of rows travel, where there are so many rows in each place: int32 if it can hold them."""
    return torch.int32 if id_width(num_rows) == torch.int32.itemsize else torch.int64


class Flag(IntEnum):
    """What a process tells all others of its batch."""

    BAD = 0
    """It cannot be looked up."""
    WHOLE = 1
    """All of its ids found room."""
    MORE = 2
    """More ids follow, of this process or another: all processes take part in a second all-to-all."""


@dataclass(frozen=True, slots=True, eq=False)
class Jagged:
    """Ids of several slots, slot by slot.

    Attributes:
        lengths_NB: Bag lengths of slots whose sums are asked for.
        counts_N: Ids of each slot, on the host.
        ids_L: The ids: places of rows.
    """

    lengths_NB: torch.Tensor
    counts_N: tuple[int, ...]
    ids_L: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What one process asks another for.

    Attributes:
        sums: Of slots whose sums it wants.
        counts: Rows of each holding whose rows it wants.
        ids_L: Their places, holding by holding.
    """

    sums: Jagged
    counts: tuple[int, ...]
    ids_L: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """What one process is asked, and told.

    Attributes:
        lengths_Z: Bag lengths, int32.
        row_counts: Rows of each holding.
        ids: Ids, in pieces, as they travel: int32 or int64.
        hits: Rows of replicas that are hit, kernel by kernel, as ids are.
    """

    lengths_Z: torch.Tensor
    row_counts: tuple[int, ...]
    ids: tuple[torch.Tensor, ...]
    hits: tuple[torch.Tensor, ...] = ()

    @property
    def num_asked(self) -> int:
        """Ids of what is asked for."""
        return sum(len(one) for one in self.ids)

    @property
    def num_ids(self) -> int:
        """All ids."""
        return self.num_asked + sum(len(one) for one in self.hits)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Rows of each holding, and of each kernel of replicas: what follows the lengths."""
        return (*self.row_counts, *map(len, self.hits))

    def pieces(self, room: int) -> list[torch.Tensor]:
        """The ids that find room, and as many zeros as there is room left, each as int32."""
        num_ids, ids = self.num_ids, (*self.ids, *self.hits)
        if num_ids > room:
            return [torch.cat(ids)[:room].view(torch.int32)]
        left = ids[0].new_zeros(room - num_ids)
        return [one.view(torch.int32) for one in (*ids, left)]

    def rest(self, room: int) -> torch.Tensor:
        """The ids that find none."""
        return torch.cat([*self.ids, *self.hits])[room:]


class Received:
    """A message that has come.

    Args:
        lengths_NB: Bag lengths of slots whose sums are asked for.
        counts: Ids of each slot, rows of each holding, and those of each kernel that are hit, on the host.
        flag: Of the batch that it is from.
        room_L: Its ids, and what lies behind them where there is room left.
    """

    def __init__(self, lengths_NB: torch.Tensor, counts: tuple[int, ...], flag: Flag, room_L: torch.Tensor) -> None:
        self.lengths_NB, self.counts, self.flag = lengths_NB, counts, flag
        #: All ids.
        self.num_ids = sum(counts)
        #: Those of them that found room.
        self.ids_L = room_L[: self.num_ids]


class BufferSizes:
    """How many ids messages have room for, between this process and each other one.

    Both ends of a message know how many ids the earlier ones held, and from that alone its room: somewhat more than
    the last one held, and not much less than there was. So lengths and ids of most batches travel together.

    Args:
        num_processes: All processes.
    """

    def __init__(self, num_processes: int) -> None:
        self.sent = [0] * num_processes
        self.received = [0] * num_processes

    def flag(self, messages: Sequence[Message]) -> Flag:
        """Whether all ids of a good batch find room."""
        is_whole = all(one.num_ids <= room for one, room in zip(messages, self.sent, strict=True))
        return Flag.WHOLE if is_whole else Flag.MORE

    def adapt(self, sent: Sequence[int], received: Sequence[int]) -> None:
        """Takes in how many ids a batch had, for the messages of the next one."""
        self.sent = [_next_room(*pair) for pair in zip(self.sent, sent, strict=True)]
        self.received = [_next_room(*pair) for pair in zip(self.received, received, strict=True)]


def _next_room(room: int, num_ids: int) -> int:
    return max(num_ids + num_ids // 8 + 16, room - room // 16)


def header_size(num_numbers: int) -> int:
    """Int32 numbers before the ids of a message: even, since ids are read in place."""
    return (num_numbers + 2) // 2 * 2


def message_size(header: int, room: int, id_dtype: torch.dtype) -> int:
    """Int32 numbers of a message."""
    return header + room * id_dtype.itemsize // torch.int32.itemsize


def packed(messages: Sequence[Message], rooms: Sequence[int], flag: Flag) -> tuple[torch.Tensor, list[int]]:
    """Messages for all processes, one after the other, and the numbers of each."""
    headers = [header_size(len(one.lengths_Z) + len(one.numbers)) for one in messages]
    numbers = [[*one.numbers, flag] for one in messages]
    tails = [
        of + [0] * (header - len(one.lengths_Z) - len(of))
        for one, of, header in zip(messages, numbers, headers, strict=True)
    ]
    lengths_Z = messages[0].lengths_Z
    tails_Z = staged([number for of in tails for number in of], lengths_Z.device, torch.int32)
    pieces: list[torch.Tensor] = []
    for message, tail, room in zip(messages, torch.split(tails_Z, [len(of) for of in tails]), rooms, strict=True):
        pieces += [message.lengths_Z, tail, *message.pieces(room)]
    sizes = [message_size(header, room, messages[0].ids[0].dtype) for header, room in zip(headers, rooms, strict=True)]
    return torch.cat(pieces), sizes


class OrderedRows:
    """Jagged rows in the order in which they travel: owner by owner, sums before rows; and last those read here.

    Args:
        lengths_NB: Bag lengths, int32.
        ids_L: Ids.
        counts_N: Ids of each row, on the host.
        num_slots: For each owner, jagged rows of sums, and those of every holding whose rows are asked for.
    """

    def __init__(
        self,
        lengths_NB: torch.Tensor,
        ids_L: torch.Tensor,
        counts_N: Sequence[int],
        num_slots: Sequence[tuple[int, Sequence[int]]],
    ) -> None:
        self._lengths_NB, self._ids_L, self._num_slots = lengths_NB, ids_L, num_slots
        self._counts_N = counts_N
        self._starts = [0, *accumulate(self._counts_N)]
        self._rows: dict[int, list[torch.Tensor]] = {}
        self._first = [0, *accumulate(sums + sum(rows) for sums, rows in num_slots)]

    def row_counts(self, owner: int) -> tuple[tuple[int, ...], ...]:
        """Lookups of each feature, holding by holding."""
        sums, rows = self._num_slots[owner]
        at, counts = self._first[owner] + sums, []
        for size in rows:
            counts.append(tuple(self._counts_N[at : at + size]))
            at += size
        return tuple(counts)

    def row_ids(self, owner: int) -> list[torch.Tensor]:
        """Ids of each holding whose rows are asked for."""
        sums, rows = self._num_slots[owner]
        at, ids = self._first[owner] + sums, []
        for size in rows:
            ids.append(self._ids_L[self._starts[at] : self._starts[at + size]])
            at += size
        return ids

    def ask_for(self, owner: int, ids: list[torch.Tensor]) -> None:
        """Replaces the ids of rows by others."""
        self._rows[owner] = ids

    def rows(self, owner: int) -> list[torch.Tensor]:
        """Ids of each holding, as they are asked for."""
        return self._rows.get(owner, [])

    def sums(self, owner: int) -> Jagged:
        """The slots whose sums are asked for."""
        first = self._first[owner]
        last = first + self._num_slots[owner][0]
        ids_L = self._ids_L[self._starts[first] : self._starts[last]]
        return Jagged(self._lengths_NB[first:last], tuple(self._counts_N[first:last]), ids_L)

    def request(self, owner: int) -> Request:
        """What an owner is asked for."""
        sums, rows = self.sums(owner), self.rows(owner)
        return Request(sums, tuple(len(one) for one in rows), torch.cat(rows) if rows else sums.ids_L[:0])

    def message(self, owner: int, hits: Sequence[torch.Tensor], id_dtype: torch.dtype) -> Message:
        """What an owner is sent, with ids as they travel."""
        sums, rows = self.sums(owner), self.rows(owner)
        ids, told = (tuple(one.to(id_dtype) for one in of) for of in ((sums.ids_L, *rows), hits))
        return Message(sums.lengths_NB.reshape(-1), tuple(len(one) for one in rows), ids, told)
