"""Rows of replicas that a batch hits: each process tells all processes that hold them, beside the ids that it asks for.

So all holders know which gradients meet before there are any, and a backward pass does not wait for sizes.

Shape suffixes: S slots or holdings of a request, L lookups, U distinct rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from autoshard.core import GradSync
from autoshard.runtime.engine.holdings import KernelKey, OwnerRequest, Ownership
from autoshard.runtime.engine.ids.distinct import Distinct, DistinctRows
from autoshard.runtime.engine.ids.jagged import JaggedOrder, Runs
from autoshard.runtime.engine.ids.messages import Request
from autoshard.runtime.engine.staging import room_for, staged


@dataclass(frozen=True, slots=True, eq=False)
class KernelSlots:
    """What one process asks another's kernel of replicas for.

    Attributes:
        key: The kernel.
        slots: Of the request's sums or, if the kernel gives out rows, of its holdings of rows; they lie side by side.
        is_pooled: Whether the kernel gives out sums.
        bases_S: First row in the kernel of each one's holding.
    """

    key: KernelKey
    slots: range
    is_pooled: bool
    bases_S: torch.Tensor

    def rows(self, request: Request) -> torch.Tensor:
        """Rows of the kernel that a request looks up, shape (L,)."""
        ids_L, counts = request.ids_L, request.counts
        if self.is_pooled:
            ids_L, counts = request.sums.ids_L, request.sums.counts_N
        own = self._lookups(counts)
        of = staged(counts[self.slots.start : self.slots.stop], self.bases_S.device)
        return ids_L[own] + torch.repeat_interleave(self.bases_S, of, output_size=own.stop - own.start)

    def weights(self, request: Request) -> torch.Tensor | None:
        """Weights of the rows, if lookups are weighted, of a kernel that gives out sums."""
        sums = request.sums
        return None if sums.weights_L is None else sums.weights_L[self._lookups(sums.counts_N)]

    def _lookups(self, counts: Sequence[int]) -> slice:
        """Those of the slots among all of a request."""
        at = sum(counts[: self.slots.start])
        return slice(at, at + sum(counts[self.slots.start : self.slots.stop]))


def replica_slots(
    asked: OwnerRequest, ownership: Ownership, owner: int, device: torch.device
) -> tuple[KernelSlots, ...]:
    """The part of a request that replicas of a process answer, kernel by kernel."""
    found = []
    for is_pooled, indices in ((True, [slot.holding for slot in asked.sums]), (False, asked.rows)):
        holdings = [ownership.holdings[index] for index in indices]
        for key in dict.fromkeys(one.kernel_key for one in holdings if one.is_replicated):
            slots = [slot for slot, one in enumerate(holdings) if one.kernel_key == key]
            first_rows = ownership.first_rows(key, owner)
            bases_S = torch.tensor([first_rows[indices[slot]] for slot in slots], device=device)
            found.append(KernelSlots(key, range(slots[0], slots[-1] + 1), is_pooled, bases_S))
    return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class HitRows:
    """Rows of a kernel of replicas whose gradients a step sums over processes.

    Attributes:
        key: The kernel.
        all_U: Rows that any process hits, rising.
        by_holder: Those that are looked up in the copy of each process that holds them; none but where gradients of
            these travel (`GradSync.ALL_GATHER`).
    """

    key: KernelKey
    all_U: torch.Tensor
    by_holder: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ToldRows:
    """Rows of replicas that a batch hits, for those that hold them.

    Attributes:
        distinct: The rows, kernel by kernel that is read.
        counts_P: For each process, how many it is told of.
        ends_S: As `Runs.sizes` gives them.
        sizes_X: For each process and kernel that it is told of, how many rows these are.
    """

    distinct: DistinctRows
    counts_P: torch.Tensor
    ends_S: torch.Tensor
    sizes_X: torch.Tensor


class HitExchange:
    """What a process tells the holders of replicas of their rows that its batch hits, and what it is told.

    Args:
        ownership: Who holds what.
        reader: This process.
        slots: For each process, and last for this one's own replicas, the jagged rows that ask for each sum, and those
            that ask for rows of each holding.
        num_rows: All jagged rows of a batch.
        device: Where batches are.

    Attributes:
        told: For each process the kernels whose rows it is told of, each with the process whose copy is looked up.
        heard: The same of what each process tells this one.
        runs: The rows that each process is told of, among all.
    """

    def __init__(
        self,
        ownership: Ownership,
        reader: int,
        slots: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]],
        num_rows: int,
        device: torch.device,
    ) -> None:
        processes = range(ownership.num_processes)
        self.told = [ownership.hits(reader, holder) for holder in processes]
        self.heard = [ownership.hits(other, reader) for other in processes]
        self._read = tuple(dict.fromkeys(one for of in self.told for one in of))
        place_of = {one: place for place, one in enumerate(self._read)}
        asked = [*((ownership.asked(reader, owner), owner) for owner in processes), (ownership.local(reader), reader)]
        jagged: list[tuple[int, int, int]] = []
        for (of, owner), (of_sums, of_holdings) in zip(asked, slots, strict=True):
            wanted = [(one.holding, [row]) for one, row in zip(of.sums, of_sums, strict=True)]
            for index, rows in [*wanted, *zip(of.rows, of_holdings, strict=True)]:
                key = ownership.holdings[index].kernel_key
                if (key, owner) in place_of:
                    base = ownership.first_rows(key, owner)[index]
                    jagged += [(place_of[key, owner], row, base) for row in rows]
        jagged.sort()
        self._read_order = JaggedOrder([row for _, row, _ in jagged], num_rows, device)
        read_rows = [ownership.kernel_rows(*one) for one in self._read]
        self._distinct_read = Distinct(read_rows, [(place, base) for place, _, base in jagged], device)
        told = [[place_of[one] for one in of] for of in self.told]
        self.runs = Runs([[(place, place + 1) for place in of] for of in told], device)
        self._told_X = torch.tensor([place for of in told for place in of], dtype=torch.int64, device=device)
        heard = [one for of in self.heard for one in of]
        self._holders = {key: ownership.holders(key, reader) for key, _ in heard}
        #: Kernels here, with the process whose copy is looked up, or None for that of any.
        self._met: list[tuple[KernelKey, int | None]] = []
        for key, holders in self._holders.items():
            way = ownership.holdings[ownership.of_kernel(key, reader)[0]].grad_sync
            self._met += [(key, None), *((key, one) for one in holders if way is GradSync.ALL_GATHER)]
        pieces = [
            (place, number)
            for place, (key, owner) in enumerate(self._met)
            for number, one in enumerate(heard)
            if one[0] == key and owner in (None, one[1])
        ]
        first_X = [first for first, of in zip(_firsts(self.heard), self.heard, strict=True) for _ in of]
        process_X = [process for process, of in enumerate(self.heard) for _ in of]
        self._first_X, self._process_X, self._heard_J = (
            torch.tensor(numbers, dtype=torch.int64, device=device)
            for numbers in (first_X, process_X, [number for _, number in pieces])
        )
        self._heard_runs = Runs([[(2 * piece, 2 * piece + 1) for piece in range(len(pieces))]], device)
        met_rows = [ownership.kernel_rows(key, reader) for key, _ in self._met]
        self._distinct_met = Distinct(met_rows, [(place, 0) for place, _ in pieces], device)

    def anew(self) -> HitExchange:
        """The same, to be used beside this one."""
        twin = copy(self)
        twin.runs, twin._heard_runs = self.runs.anew(), self._heard_runs.anew()
        return twin

    @property
    def is_deaf(self) -> bool:
        """Whether no gradients meet here by the numbers of their rows."""
        return not self._met

    def of(self, lengths_NB: torch.Tensor, ids_L: torch.Tensor, counts_N: torch.Tensor) -> ToldRows | None:
        """The rows that processes are told of, each once; None where none is told of any.

        Args:
            lengths_NB: Bag lengths of all jagged rows of a batch.
            ids_L: Their ids.
            counts_N: Ids of each.
        """
        if not self._read:
            return None
        distinct = self._distinct_read(self._read_order(lengths_NB, ids_L)[1], self._read_order.of(counts_N))
        counts_P, ends_S = self.runs.sizes(distinct.ends_K)
        return ToldRows(distinct, counts_P, ends_S, distinct.ends_K.diff().index_select(0, self._told_X))

    def num_told(self, sizes: Sequence[int]) -> int:
        """Rows that processes are told of, those that several are told of once.

        Args:
            sizes: How many rows each process is told of each kernel, on the host.
        """
        return sum(dict(zip((one for of in self.told for one in of), sizes, strict=True)).values())

    def meeting(self, heard_R: torch.Tensor, rooms_P: tuple[int, ...], sizes_X: torch.Tensor) -> DistinctRows:
        """Rows whose gradients meet here, each once.

        Args:
            heard_R: What each process tells this one, in rooms.
            rooms_P: Rooms of the processes.
            sizes_X: How many rows it tells of each kernel, process by process.
        """
        starts_P = staged(_starts(rooms_P), heard_R.device)
        ends_X = torch.ops.fbgemm.asynchronous_complete_cumsum(sizes_X)
        first_X = starts_P.index_select(0, self._process_X) + ends_X[:-1] - ends_X.index_select(0, self._first_X)
        bounds_J = torch.stack([first_X, first_X + sizes_X], dim=1).index_select(0, self._heard_J).view(-1)
        _, ends_S = self._heard_runs.sizes(bounds_J)
        # A row counts for all that read it, and for those of one copy.
        sizes_J = sizes_X.index_select(0, self._heard_J)
        room = room_for(sizes_J, 2 * sum(rooms_P))
        rows_L = self._heard_runs.laid_out(heard_R, bounds_J, ends_S, (room,), heard_R.dtype)
        return self._distinct_met(rows_L, sizes_J)

    def met(self, distinct: DistinctRows | None, ends: Sequence[int]) -> tuple[HitRows, ...]:
        """Rows whose gradients meet here, kernel by kernel.

        Args:
            distinct: As `meeting` gives them.
            ends: Their ends, on the host.
        """
        if distinct is None:
            return ()
        found = {one: distinct.rows_U[slice(*of)] for one, of in zip(self._met, pairwise(ends), strict=True)}
        return tuple(
            HitRows(key, found[key, None], tuple(found[key, one] for one in holders if (key, one) in found))
            for key, holders in self._holders.items()
        )


def _firsts(several: Sequence[Sequence[object]]) -> list[int]:
    """The first of each one's items among those of all."""
    return _starts([len(of) for of in several])


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes)][:-1]
