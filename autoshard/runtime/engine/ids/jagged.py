"""Jagged rows, a feature's bags for one destination each, whose sizes are on the device: the host waits for none.

Tensors of ids may be longer than the ids that there are: what lies behind these is never looked at.

Shape suffixes: N jagged rows, B samples of a local batch, L lookups, P rooms, S runs of ids, X bounds of runs, R places
in all rooms.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import copy
from itertools import accumulate

import fbgemm_gpu  # noqa: F401 - registers the operators of torch.ops.fbgemm
import torch

from autoshard.runtime.engine.pieces import merged
from autoshard.runtime.engine.staging import staged, waits


class JaggedOrder:
    """Puts jagged rows in an order, in which some may be missing and others be there twice.

    Args:
        order: Their numbers.
        num_rows: How many there are to choose from.
        device: Where they are.
    """

    def __init__(self, order: Sequence[int], num_rows: int, device: torch.device) -> None:
        self._changes = tuple(order) != tuple(range(num_rows))
        self._order_N = torch.tensor(order, dtype=torch.int32, device=device)
        #: How often a row is there at most.
        self._most = max(Counter(order).values(), default=0)
        self._waits = waits(device)

    def __call__(
        self, lengths_NB: torch.Tensor, ids_L: torch.Tensor, num_ids: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows in their order: bag lengths and ids.

        Args:
            lengths_NB: Bag lengths, int32.
            ids_L: Ids.
            num_ids: How many ids there are in the order; None where the host does not know.
        """
        if not self._changes:
            return lengths_NB, ids_L
        if num_ids is None and self._waits:
            num_ids = self._most * len(ids_L)
        lengths, ids, _ = torch.ops.fbgemm.permute_2D_sparse_data(self._order_N, lengths_NB, ids_L, None, num_ids)
        return lengths, ids

    def of(self, numbers_N: torch.Tensor) -> torch.Tensor:
        """Numbers of the rows in their order."""
        return numbers_N.index_select(0, self._order_N) if self._changes else numbers_N


class Runs:
    """Lays runs of ids out in the rooms of those that they go to, without the host knowing how long a run is.

    Args:
        runs_P: For each room, the runs that go there: numbers of the bounds where each begins and ends.
        device: Where ids are.
    """

    def __init__(self, runs_P: Sequence[Sequence[tuple[int, int]]], device: torch.device) -> None:
        #: Runs that follow each other as one; an empty one where there is none.
        self._runs_P = [
            [(first, last) for _, first, last in merged((None, *run) for run in runs)] or [(0, 0)] for runs in runs_P
        ]
        self.num_rooms, self._device, self._waits = len(runs_P), device, waits(device)
        self._is_single = all(len(runs) == 1 for runs in self._runs_P)
        flat = [run for runs in self._runs_P for run in runs]
        starts = [0, *accumulate(map(len, self._runs_P))]
        self._first_S, self._last_S, self._first_P, self._end_P = (
            torch.tensor(numbers, dtype=torch.int64, device=device)
            for numbers in ([one for one, _ in flat], [one for _, one in flat], starts[:-1], starts[1:])
        )
        self._rooms: tuple[tuple[int, ...], torch.Tensor] | None = None
        self._places: tuple[tuple[int, ...], torch.Tensor, torch.Tensor] | None = None

    def anew(self) -> Runs:
        """The same, to be used beside this one."""
        twin = copy(self)
        twin._rooms = twin._places = None
        return twin

    def sizes(self, bounds_X: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids for each room, shape (P,), and where runs end if they lie one behind the other, with 0 before; (S + 1,).

        Args:
            bounds_X: Bounds of runs, int64.
        """
        sizes_S = bounds_X.index_select(0, self._last_S) - bounds_X.index_select(0, self._first_S)
        if self._is_single:
            return sizes_S, sizes_S
        ends_S = torch.ops.fbgemm.asynchronous_complete_cumsum(sizes_S)
        return ends_S.index_select(0, self._end_P) - ends_S.index_select(0, self._first_P), ends_S

    def rooms(self, rooms_P: tuple[int, ...]) -> torch.Tensor:
        """The rooms, on the device, int64 of shape (P,)."""
        if self._rooms is None or self._rooms[0] != rooms_P:
            self._rooms = (rooms_P, staged(rooms_P, self._device))
        return self._rooms[1]

    def laid_out(
        self,
        ids_L: torch.Tensor,
        bounds_X: torch.Tensor,
        ends_S: torch.Tensor,
        rooms_P: tuple[int, ...],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """The ids in their rooms, one behind the other, shape (R,), and whatever lies behind them where room is left.

        Args:
            ids_L: Ids, of which runs are parts.
            bounds_X: Bounds of runs among them.
            ends_S: As `sizes` gives them.
            rooms_P: Rooms.
            dtype: As what they are laid out.
        """
        if not self._waits:
            return self._copied(ids_L, bounds_X.tolist(), rooms_P, dtype)
        room_R, place_R = self._places_of(rooms_P)
        if not len(ids_L) or not len(place_R):
            return ids_L.new_zeros(len(place_R), dtype=dtype)
        first_S = bounds_X.index_select(0, self._first_S)
        if self._is_single:
            index_R = first_S.index_select(0, room_R) + place_R
        else:
            place_R = ends_S.index_select(0, self._first_P).index_select(0, room_R) + place_R
            run_R = torch.searchsorted(ends_S[1:], place_R, right=True).clamp_(max=len(first_S) - 1)
            index_R = (first_S - ends_S[:-1]).index_select(0, run_R) + place_R
        return ids_L.index_select(0, index_R.clamp_(0, len(ids_L) - 1)).to(dtype)

    def _copied(
        self, ids_L: torch.Tensor, bounds_X: Sequence[int], rooms_P: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """The same, run by run, where the host knows how long each is: a tenth of the time on a CPU."""
        ids_R, first = ids_L.new_empty(sum(rooms_P), dtype=dtype), 0
        for runs, room in zip(self._runs_P, rooms_P, strict=True):
            place, first = first, first + room
            for start, stop in runs:
                run_L = ids_L[bounds_X[start] : min(bounds_X[stop], bounds_X[start] + first - place)]
                ids_R[place : place + len(run_L)] = run_L
                place += len(run_L)
        return ids_R

    def _places_of(self, rooms_P: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """For each place in one of the rooms, the room and the number of the place."""
        if self._places is None or self._places[0] != rooms_P:
            starts_P = staged([0, *accumulate(rooms_P)][:-1], self._device)
            numbers = torch.arange(self.num_rooms, device=self._device)
            room_R = torch.repeat_interleave(numbers, self.rooms(rooms_P), output_size=sum(rooms_P))
            place_R = torch.arange(sum(rooms_P), device=self._device) - starts_P.index_select(0, room_R)
            self._places = (rooms_P, room_R, place_R)
        return self._places[1:]
