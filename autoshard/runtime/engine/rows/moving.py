"""Rows on their way from one layout of their tables to another: in rounds of bounded buffers.

No ids travel: both ends know both layouts, and go through the rows in one order.

Shape suffixes: U ids of a unit, L rows that one process gives another, N rows, K numbers of a row, D embedding dim.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from math import modf
from typing import TypeAlias, TypeVar

import torch
import torch.distributed as dist

from autoshard.runtime.engine.agreement import Agreement
from autoshard.runtime.engine.holdings import HeldRange
from autoshard.runtime.engine.pieces import within
from autoshard.runtime.engine.rows.places import RowBlock, TableLayout, located

#: Most bytes that all processes give each other in a round. A process has room in memory for those that travel and two
#: more, for what it sends and for what comes.
ROUND_BYTES = 1 << 23
#: Rounds that travel at a time: so many that links have something to carry while a process waits for its core. At 200
#: Mbit/s, 2 nodes of 2 processes on 2 cores at a load of 17 to 20, moving whole tables to the other node took 2.0 times
#: what links need with 2 rounds, 1.3 to 1.7 times with 4, and 1.5 to 1.7 times with 3 of half the size.
_TRAVELLING = 4
#: Rows whose places are found at once.
_UNIT_ROWS = 1 << 17
#: Numbers of a message begin at multiples of so many bytes, whatever their dtype.
_ALIGNMENT = 8
#: Rows, or their places, as what tensors are indexed with.
Selection: TypeAlias = slice | torch.Tensor
T = TypeVar("T")
#: Part of the giver, part of the taker, and what finds the rows of both: how many, their numbers in the unit, and their
#: places in the two parts.
_Shared: TypeAlias = tuple[int, int, Callable[[], tuple[int, Selection, Selection, Selection]]]
#: Spreads tables of one unit evenly over the rounds: the golden ratio.
_SPREAD = 0.6180339887498949


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TableMove:
    """A table whose rows are given from one layout to another.

    Attributes:
        source: Where the rows are.
        target: Where they go; what is there is overwritten.
        ids: Which rows.
        dtypes: As what each tensor travels, by its name in both layouts.
    """

    source: TableLayout
    target: TableLayout
    ids: range
    dtypes: Mapping[str, torch.dtype]

    @property
    def sent_row_bytes(self) -> int:
        """Most bytes that one process sends of a row: as many copies as are wanted of each that there is."""
        row_bytes = 0
        for name, dtype in self.dtypes.items():
            bounds = {bound for block in self.source.blocks for bound in block.bounds[name]}
            row_bytes += (len(bounds) - 1) * dtype.itemsize
        given = min((len(block.holders(0)) for block in self.source.blocks), default=1)
        taken = max((len(block.holders(0)) for block in self.target.blocks), default=1)
        return row_bytes * -(-taken // given)

    def is_local(self, num_processes: int) -> bool:
        """Whether each process has all rows already, so that none travel."""
        return all(
            len(block.holders(part)) == num_processes
            for block in self.source.blocks
            for part in range(block.rows.num_parts)
        )


@torch.no_grad()
def move(moves: Sequence[TableMove], group: dist.ProcessGroup, device: torch.device, nodes: Sequence[int]) -> int:
    """Gives the rows of tables to the processes that are to have them; all processes have to call it, with the same.

    A process that has a row already copies its own; others get it from one of those who have it, in turn, from one of
    their node if there is one. Where one
    number is of several columns (a moment of row-wise AdaGrad), and of other columns in the target, it is the mean over
    its columns of what these had; equal values stay as they are. Of whole numbers (marks of rows) it is the largest.

    Args:
        moves: Tables and their layouts.
        group: The processes, whose ranks the layouts have.
        device: Where messages are sent from.
        nodes: Node of each process.

    Returns:
        Bytes that this process has sent.

    Raises:
        AutoshardError: If a process fails: on all of them (`agree`), with the target half written.
    """
    size = group.size()
    buffers = _Buffers(group.rank(), nodes, device)
    if all(one.is_local(size) for one in moves):
        for units in _rounds(moves, 1):
            _Round(units, buffers).write()
        return 0
    journey = _Journey(_rounds(moves, size), buffers, group, device)
    try:
        return journey.make()
    finally:
        journey.settle()


class _Journey:
    """All rounds of a move: some of them travel at a time, while others are packed and written.

    Messages queue at a link, and one that all wait for would come behind the rows that travel. So all processes are
    asked whether they could pack a round a round ahead. For the same reason, takers say that they expect a round before
    the one before it is sent: gloo sends nothing that is not expected.

    Args:
        rounds: The rounds.
        buffers: Memory for them.
        group: The processes.
        device: Where messages are sent from.
    """

    def __init__(
        self, rounds: Iterator[list[_Unit]], buffers: _Buffers, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._rounds, self._buffers, self._group, self._device = rounds, buffers, group, device
        self._error: Exception | None = None
        self._asked: deque[Agreement] = deque()
        self._travelling: deque[_Round] = deque()

    def make(self) -> int:
        """Makes them; the bytes that this process has sent.

        Raises:
            AutoshardError: As `move`.
        """
        sent_bytes, expected, packed = 0, None, self._pack()
        while packed is not None or expected is not None:
            following = None if packed is None else self._pack()
            try:
                if packed is not None:
                    self._asked.popleft().wait()
                    packed.expect(self._group)
            finally:  # the others expect it
                if expected is not None:
                    sent_bytes += expected.send(self._group)
                    self._travelling.append(expected)
            if len(self._travelling) == _TRAVELLING:
                self._write()
            expected, packed = packed, following
        while self._travelling:
            self._write()
        self._ask()
        while self._asked:
            self._asked.popleft().wait()
        return sent_bytes

    def settle(self) -> None:
        """Waits for what is under way after an error."""
        for round_ in self._travelling:
            round_.settle()
        for asked in self._asked:
            asked.settle()

    def _pack(self) -> _Round | None:
        """The next round, of which all are asked whether they have packed it; None after the last one."""
        units = next(self._rounds, None)
        if units is None:
            return None
        packed = self._tried(partial(_Round, units, self._buffers))
        self._ask()
        return packed or _Round((), self._buffers)

    def _write(self) -> None:
        """Writes the first of the rounds that travel, when it has come."""
        arrived = self._travelling[0]
        arrived.settle()
        self._travelling.popleft()
        self._tried(arrived.write)

    def _ask(self) -> None:
        self._asked.append(Agreement(self._error, self._group, self._device))

    def _tried(self, act: Callable[[], T]) -> T | None:
        """What comes of an act, if this process could do all so far; what it could not is heard by all of them."""
        if self._error is None:
            try:
                return act()
            except Exception as error:  # noqa: BLE001 - all processes raise it
                self._error = error
        return None


class _Buffers:
    """Memory for messages, which several rounds use one after the other: new memory costs as much as its copy.

    Args:
        process: This process.
        nodes: Node of each process.
        device: Where messages are.
    """

    def __init__(self, process: int, nodes: Sequence[int], device: torch.device) -> None:
        self.process, self.nodes, self._device = process, nodes, device
        self._free: list[torch.Tensor] = []

    def take(self, num_bytes: int) -> torch.Tensor:
        """Memory for so many bytes, or more."""
        fitting = [number for number, one in enumerate(self._free) if len(one) >= num_bytes]
        if fitting:
            return self._free.pop(fitting[0])
        return torch.empty(max(num_bytes, ROUND_BYTES), dtype=torch.uint8, device=self._device)

    def give_back(self, memory: torch.Tensor) -> None:
        """Lets the next round have it."""
        self._free.append(memory)


@dataclass(frozen=True, slots=True, eq=False)
class _Unit:
    """Rows of a table whose places are found at once, and which travel in one round."""

    move: TableMove
    ids: range
    number: int

    @property
    def num_bytes(self) -> int:
        return len(self.ids) * self.move.sent_row_bytes


def _rounds(moves: Sequence[TableMove], num_stripes: int) -> Iterator[list[_Unit]]:
    """Units of all tables, round by round.

    Rows that lie side by side are often on one process, and a table may be on one alone. So a round has some rows of
    all tables, and some of all stripes of a table: most processes have something to give and to take in most rounds.
    """
    in_order = sorted(_units(moves, num_stripes), key=lambda one: one[0])
    units = [_Unit(table, ids, number) for number, (_, table, ids) in enumerate(in_order)]
    return within(((unit, unit.num_bytes) for unit in units), ROUND_BYTES)


def _units(moves: Sequence[TableMove], num_stripes: int) -> Iterator[tuple[float, TableMove, range]]:
    """How far into its stripe each unit is, from 0 to 1; its table, and its rows."""
    for number, one in enumerate(moves):
        most = max(1, min(_UNIT_ROWS, ROUND_BYTES // (one.sent_row_bytes * num_stripes)))
        if len(one.ids) <= most:
            yield modf(number * _SPREAD)[0], one, one.ids
            continue
        stripe = -(-len(one.ids) // num_stripes)
        for first in range(one.ids.start, one.ids.stop, stripe):
            last = min(first + stripe, one.ids.stop)
            for start in range(first, last, most):
                yield (start - first) / stripe, one, range(start, min(start + most, last))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Leg:
    """Rows that one process gives another, or itself, from one block there to one block here."""

    unit: _Unit
    given: RowBlock
    taken: RowBlock
    giver: int
    taker: int
    num_rows: int
    """L."""
    rows_L: Selection
    """Their numbers in the unit."""
    given_L: Selection
    """Their places on the giver."""
    taken_L: Selection
    """Their places on the taker."""

    @property
    def columns(self) -> tuple[int, int]:
        """Columns that both blocks have."""
        return _common(self.given.columns, self.taken.columns)

    @property
    def num_bytes(self) -> int:
        """Bytes of the message."""
        return sum(_padded(self._shape(name), dtype) for name, dtype in self.unit.move.dtypes.items())

    @property
    def is_in_place(self) -> bool:
        """Whether the rows are where they are to be already: in memory that both layouts have."""
        return (
            self.giver == self.taker
            and all(self.given.tensors[name].data_ptr() == self.taken.tensors[name].data_ptr() for name in self._names)
            and torch.equal(_indices(self.given_L), _indices(self.taken_L))
        )

    @property
    def _names(self) -> Iterable[str]:
        return self.unit.move.dtypes

    def _shape(self, name: str) -> tuple[int, int]:
        numbers = _numbers(self.given.bounds[name], self.columns)
        return self.num_rows, numbers.stop - numbers.start

    def values(self, message: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor's part of the message, (L, K), by name."""
        at = 0
        for name, dtype in self.unit.move.dtypes.items():
            shape = self._shape(name)
            yield name, message[at : at + shape[0] * shape[1] * dtype.itemsize].view(dtype).view(shape)
            at += _padded(shape, dtype)

    def read(self, name: str) -> torch.Tensor:
        """What the giver has of a tensor, (L, K)."""
        tensor_NK = _as_matrix(self.given.tensors[name])[:, _numbers(self.given.bounds[name], self.columns)]
        places = self.given_L
        return tensor_NK[places] if isinstance(places, slice) else tensor_NK[places.to(tensor_NK.device)]

    def write(self, name: str, values_LK: torch.Tensor, means: dict[tuple[_Unit, RowBlock, str], _Means]) -> None:
        """Writes what has come of a tensor; or collects it, where a number is the mean over what comes in pieces."""
        first, last = self.columns
        own = self.taken.bounds[name]
        numbers = _numbers(own, self.columns)
        wanted = own[numbers.start : numbers.stop + 1]
        of = _numbers(self.given.bounds[name], self.columns)
        came = (first, *self.given.bounds[name][of.start + 1 : of.stop], last)
        if came != wanted:
            within = [bisect_right(came, column) - 1 for column in wanted[:-1]]
            is_split = any(came[at + 1] < stop for at, stop in zip(within, wanted[1:], strict=True))
            if is_split or wanted[0] < first or wanted[-1] > last:
                key = (self.unit, self.taken, name)
                if key not in means:
                    means[key] = _Means(*key)
                means[key].add(self, came, values_LK)
                return
            values_LK = values_LK[:, within]
        _write(_as_matrix(self.taken.tensors[name])[:, numbers], self.taken_L, values_LK)


class _Means:
    """Numbers of which each is the mean over columns that come in several pieces.

    Args:
        unit: Of the rows.
        block: Where they go; it has one number a row.
        name: Of the tensor.
    """

    def __init__(self, unit: _Unit, block: RowBlock, name: str) -> None:
        assert len(block.bounds[name]) == 2, "blocks of plans have one number for their columns, or one for each"
        self._first, last = block.columns
        self._tensor_NK = _as_matrix(block.tensors[name])
        self._values_UD = torch.empty(len(unit.ids), last - self._first, dtype=torch.float32)
        self._places_U = torch.full((len(unit.ids),), -1)

    def add(self, leg: _Leg, came: tuple[int, ...], values_LK: torch.Tensor) -> None:
        """Takes a piece, whose numbers are of the columns between these bounds."""
        widths_K = torch.tensor([stop - start for start, stop in pairwise(came)])
        columns = slice(came[0] - self._first, came[-1] - self._first)
        self._values_UD[leg.rows_L, columns] = values_LK.cpu().float().repeat_interleave(widths_K, dim=1)
        self._places_U[leg.rows_L] = _indices(leg.taken_L)

    def write(self) -> None:
        """Writes the means when all pieces have come."""
        rows_L = (self._places_U >= 0).nonzero().squeeze(1)
        values_LD = self._values_UD[rows_L]
        means_L = values_LD.amax(dim=1)
        if self._tensor_NK.is_floating_point():
            is_one_L = values_LD.amin(dim=1) == means_L  # a mean would round it
            means_L = torch.where(is_one_L, means_L, values_LD.mean(dim=1))
        _write(self._tensor_NK, self._places_U[rows_L], means_L[:, None])


def _legs(unit: _Unit, process: int, nodes: Sequence[int]) -> Iterator[_Leg]:
    """What a process gives and takes of a unit, in an order that is the same on both ends."""
    source, target, ids = unit.move.source, unit.move.target, unit.ids
    positions_U = cache(lambda layout: layout.positions(ids))
    located_U = cache(lambda layout, block: located(block.rows, positions_U(layout)))
    for given in source.blocks:
        for taken in target.blocks:
            first, last = _common(given.columns, taken.columns)
            if first >= last or not (given.is_of(process) or taken.is_of(process)):
                continue
            if source.is_in_blocks(given) and target.is_in_blocks(taken):
                shared = _shared_blocks(given.rows, taken.rows, ids)
            else:
                shared = _shared_rows(located_U(source, given), located_U(target, taken), taken.rows.num_parts)
            for part, to_part, find in shared:
                holders, takers = given.holders(part), taken.holders(to_part)
                if process not in (*holders, *takers):
                    continue
                num_rows, rows_L, given_L, taken_L = find()
                for taker in takers:
                    near = [holder for holder in holders if nodes[holder] == nodes[taker]] or holders
                    giver = taker if taker in holders else near[(unit.number + taker) % len(near)]
                    if process in (giver, taker):
                        yield _Leg(
                            unit=unit,
                            given=given,
                            taken=taken,
                            giver=giver,
                            taker=taker,
                            num_rows=num_rows,
                            rows_L=rows_L,
                            given_L=_shifted(given_L, given.first[part, giver]),
                            taken_L=_shifted(taken_L, taken.first[to_part, taker]),
                        )


def _shared_blocks(given: HeldRange, taken: HeldRange, ids: range) -> Iterator[_Shared]:
    """Rows that two ranges in blocks share, by the parts that have them; positions are ids."""
    first = max(given.start, taken.start, ids.start)
    last = min(given.stop, taken.stop, ids.stop)
    while first < last:
        (part, at), (to_part, to_at) = (divmod(first - one.start, one.block_rows) for one in (given, taken))
        num_rows = min(last - first, given.block_rows - at, taken.block_rows - to_at)
        starts = (first - ids.start, at, to_at)
        yield part, to_part, partial(_slices, num_rows, starts)
        first += num_rows


def _slices(num_rows: int, starts: tuple[int, int, int]) -> tuple[int, Selection, Selection, Selection]:
    rows, places, to_places = (slice(start, start + num_rows) for start in starts)
    return num_rows, rows, places, to_places


def _shared_rows(
    given: tuple[torch.Tensor, torch.Tensor], taken: tuple[torch.Tensor, torch.Tensor], num_parts: int
) -> Iterator[_Shared]:
    """Rows that two ranges share, by the parts that have them.

    Args:
        given: Parts of rows, -1 for others, and their places there, both (U,).
        taken: The same of the other range.
        num_parts: Parts of that.
    """
    (part_U, place_U), (to_part_U, to_place_U) = given, taken
    pair_U = torch.where((part_U < 0) | (to_part_U < 0), -1, part_U * num_parts + to_part_U)

    def find(pair: int) -> tuple[int, Selection, Selection, Selection]:
        rows_L = (pair_U == pair).nonzero().squeeze(1)
        return len(rows_L), rows_L, place_U[rows_L], to_place_U[rows_L]

    for pair in torch.bincount(pair_U + 1)[1:].nonzero().flatten().tolist():
        yield *divmod(pair, num_parts), partial(find, pair)


class _Round:
    """Rows of some units on their way, those of all pairs of processes at once.

    Args:
        units: The units.
        buffers: Memory for it, of this process.
    """

    def __init__(self, units: Sequence[_Unit], buffers: _Buffers) -> None:
        self._buffers, process = buffers, buffers.process
        legs = [leg for unit in units for leg in _legs(unit, process, buffers.nodes) if not leg.is_in_place]
        self._own = [leg for leg in legs if leg.giver == leg.taker]
        sent = sorted((leg for leg in legs if leg.taker != process), key=lambda leg: leg.taker)
        self._received = sorted((leg for leg in legs if leg.giver != process), key=lambda leg: leg.giver)
        self._sent_bytes, self._received_bytes = [0] * len(buffers.nodes), [0] * len(buffers.nodes)
        for leg in sent:
            self._sent_bytes[leg.taker] += leg.num_bytes
        for leg in self._received:
            self._received_bytes[leg.giver] += leg.num_bytes
        self._outgoing, self._incoming = (buffers.take(sum(of)) for of in (self._sent_bytes, self._received_bytes))
        for leg, message in _messages(sent, self._outgoing):
            for name, values_LK in leg.values(message):
                values_LK.copy_(leg.read(name))
        self._work: list[dist.Work] = []

    def expect(self, group: dist.ProcessGroup) -> None:
        """Tells the givers that there is room for what they send."""
        if _is_point_to_point(group):
            for giver, part in _parts(self._incoming, self._received_bytes):
                work = dist.irecv(part, group=group, group_src=giver)
                assert work is not None, "this process is of the group"
                self._work.append(work)

    def send(self, group: dist.ProcessGroup) -> int:
        """Sends it on its way, after `expect`; the bytes that this process sends."""
        num_sent, num_received = sum(self._sent_bytes), sum(self._received_bytes)
        if _is_point_to_point(group):
            for taker, part in _parts(self._outgoing, self._sent_bytes):
                sent = dist.isend(part, group=group, group_dst=taker)
                assert sent is not None, "this process is of the group"
                self._work.append(sent)
            return num_sent
        work = dist.all_to_all_single(
            self._incoming[:num_received],
            self._outgoing[:num_sent],
            self._received_bytes,
            self._sent_bytes,
            group=group,
            async_op=True,
        )
        self._work.append(work)
        return num_sent

    def settle(self) -> None:
        """Returns when all of it has come."""
        for work in self._work:
            work.wait()

    def write(self) -> None:
        """Writes what has come, and what this process gives itself."""
        self._buffers.give_back(self._outgoing)
        means: dict[tuple[_Unit, RowBlock, str], _Means] = {}
        for leg in self._own:
            for name in leg.unit.move.dtypes:
                leg.write(name, leg.read(name), means)
        for leg, message in _messages(self._received, self._incoming):
            for name, values_LK in leg.values(message):
                leg.write(name, values_LK, means)
        for one in means.values():
            one.write()
        self._buffers.give_back(self._incoming)


def _is_point_to_point(group: dist.ProcessGroup) -> bool:
    """Whether messages go one by one. NCCL would wait for one that it is told of before it is sent."""
    return dist.get_backend(group) == "gloo"


def _parts(memory: torch.Tensor, sizes: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
    """Each process's part of the memory, of those that have one."""
    at = 0
    for process, size in enumerate(sizes):
        if size:
            yield process, memory[at : at + size]
        at += size


def _messages(legs: Sequence[_Leg], memory: torch.Tensor) -> Iterator[tuple[_Leg, torch.Tensor]]:
    """Each leg's part of the memory, one after the other."""
    at = 0
    for leg in legs:
        yield leg, memory[at : at + leg.num_bytes]
        at += leg.num_bytes


def _common(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), min(one[1], other[1])


def _numbers(bounds: tuple[int, ...], columns: tuple[int, int]) -> slice:
    """Numbers of a row that are of some of these columns."""
    return slice(bisect_right(bounds, columns[0]) - 1, bisect_left(bounds, columns[1]))


def _padded(shape: tuple[int, int], dtype: torch.dtype) -> int:
    return -(-shape[0] * shape[1] * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 2 else tensor[:, None]


def _indices(selection: Selection) -> torch.Tensor:
    return torch.arange(selection.start, selection.stop) if isinstance(selection, slice) else selection


def _shifted(selection: Selection, offset: int) -> Selection:
    """The same so many places further; as a slice where each is the one after that before, as they mostly are."""
    if isinstance(selection, slice):
        return slice(selection.start + offset, selection.stop + offset)
    places_L = selection + offset
    first, last = int(places_L[0]), int(places_L[-1])
    if last - first == len(places_L) - 1 and bool((places_L.diff() == 1).all()):
        return slice(first, last + 1)
    return places_L


def _write(tensor_NK: torch.Tensor, places: Selection, values_LK: torch.Tensor) -> None:
    values_LK = values_LK.to(tensor_NK)
    if isinstance(places, slice):
        tensor_NK[places] = values_LK
    else:
        tensor_NK.index_copy_(0, places.to(tensor_NK.device), values_LK)
