"""Row groups on ranks without replicas: OPER's two phases, and the baselines that balance one thing only.

Shape suffixes: R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from enum import StrEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autoshard.core.access import FloatArray, IntArray
from autoshard.core.errors import InfeasiblePlanError
from autoshard.planners.oper.row_group import Owner, RowGroup
from autoshard.planners.oper.runs import Measure, in_runs

_Score: TypeAlias = Callable[[RowGroup, NDArray[np.bool_]], FloatArray]
"""Scores of all ranks for a group, given those that have room for it; the lowest is best."""

#: Bytes are counted in 64-bit integers, and sums of them must not overflow.
MAX_CAPACITY = 2**62
#: Groups of one kind and table change ranks as if they were alike, up to these shares. Those of few hot rows are not,
#: since rows are whole; memory-bound groups make up for it. These are alike, the last of a table aside.
_HOT_TOLERANCE, _COLD_TOLERANCE = 0.3, 0.01


class Method(StrEnum):
    """What placement balances."""

    OPER = "oper"
    """Lookups by the groups that hold most of them, then memory by the others (Sec. 4.2)."""
    MEMORY_GREEDY = "mg"
    """Memory only (Sec. 6.4)."""
    ACCESS_GREEDY = "ag"
    """Lookups only (Sec. 6.4)."""


def place(
    groups: Sequence[RowGroup],
    capacity_R: IntArray,
    own_ms_R: FloatArray,
    method: Method = Method.OPER,
    *,
    copied: Collection[RowGroup] = (),
) -> Placement:
    """Puts every group on one rank that has room for it, and cuts those that none has room for.

    Groups that may not be cut come first. With `Method.OPER` access-bound groups follow, whose share of all lookups
    is above their share of all bytes, by falling lookups, each on the rank with the least lookup time; then the
    memory-bound ones by falling bytes, each on the rank with the fewest bytes.

    Args:
        groups: What to place.
        capacity_R: Bytes that each rank may hold.
        own_ms_R: Time of a lookup on each rank, the diagonal of L.
        method: What to balance.
        copied: Groups that every rank will have a copy of. With `Method.OPER` they come before the others, whose
            lookups are evened out without theirs.

    Raises:
        InfeasiblePlanError: If some rows found no room.

    Source:
        OPER Sec. 4.2. Differs: of the ranks whose bytes are within the group's own of the fewest, a memory-bound group
        goes to that with the least lookup time, which leaves memory as even and evens out the tail's lookups; at the
        end of each phase, the ranks' groups of a table are dealt anew in runs (`in_runs`), so that a plan has few
        shards; limits of memory hold on every rank.
    """
    placement = Placement(capacity_R, own_ms_R)
    whole = [group for group in groups if not group.is_cuttable]
    placement.put_all(sorted(whole, key=lambda group: -group.num_bytes), placement.fewest_bytes)
    by_access = sorted((group for group in groups if group.is_cuttable), key=lambda group: -group.lookup_bytes)
    by_bytes = sorted(by_access, key=lambda group: -group.num_bytes)
    if method is Method.MEMORY_GREEDY:
        placement.put_all(by_bytes, placement.fewest_bytes)
        return placement
    if method is Method.ACCESS_GREEDY:
        placement.put_all(by_access, placement.least_time)
        return placement
    all_bytes = sum(group.num_bytes for group in groups)
    all_lookups = sum(group.lookup_bytes for group in groups)
    bound = {group for group in by_access if group.lookup_bytes * all_bytes > group.num_bytes * all_lookups}
    for chosen in (True, False):
        placement.put_access_bound([group for group in by_access if group in bound and (group in copied) is chosen])
        placement.put_memory_bound([group for group in by_bytes if group not in bound and (group in copied) is chosen])
        placement.leave_out(copied)
    return placement


def pack(groups: Sequence[RowGroup], capacity_R: IntArray, own_ms_R: FloatArray) -> Placement:
    """Puts every group where it fits, whatever the balance.

    Those with the least choice of ranks and the widest rows come first, so that narrow ones are left to fill the gaps.

    Raises:
        InfeasiblePlanError: If some rows found no room.
    """

    def order(group: RowGroup) -> tuple[int, bool, float]:
        return int(group.allowed_R.sum()), group.is_cuttable, -group.num_bytes / group.shards[0].num_embeddings

    placement = Placement(capacity_R, own_ms_R)
    placement.put_all(sorted(groups, key=order), placement.fewest_bytes)
    return placement


class Placement:
    """Groups and the rank that holds each, as they are put.

    Attributes:
        owners: Each group, some of them cut further than they were given, with its rank.
        held_R: Bytes per rank.
        lookup_ms_R: Time of lookups per rank and sample, up to a factor that all ranks share (Eq. 2), without those
            of groups that will be copied to all.
    """

    def __init__(self, capacity_R: IntArray, own_ms_R: FloatArray) -> None:
        self._capacity_R = capacity_R
        # Ranks that look up for nothing would be given all there is, whatever the exchange.
        self._own_ms_R = own_ms_R if (own_ms_R > 0).all() else np.ones(len(capacity_R))
        self._left_out: Collection[RowGroup] = ()
        self._clear()

    def fewest_bytes(self, _group: RowGroup, _fits_R: NDArray[np.bool_]) -> FloatArray:
        """Scores by bytes held."""
        return self.held_R.astype(np.float64)

    def least_time(self, group: RowGroup, _fits_R: NDArray[np.bool_]) -> FloatArray:
        """Scores by time of lookups, the group's among them."""
        return self.lookup_ms_R + group.lookup_bytes * self._own_ms_R

    def level_bytes(self, group: RowGroup, fits_R: NDArray[np.bool_]) -> FloatArray:
        """Scores by time of lookups, where bytes held are within the group's own of the fewest."""
        level_R = self.held_R < self.held_R[fits_R].min() + max(group.num_bytes, 1)
        return np.where(level_R, self.least_time(group, fits_R), np.inf)

    def put_all(self, groups: Iterable[RowGroup], score: _Score) -> None:
        """Puts groups on the allowed ranks with the lowest score among those with room; cuts them where none has."""
        waiting = list(groups)[::-1]
        while waiting:
            group = waiting.pop()
            free_R = np.where(group.allowed_R, self._capacity_R - self.held_R, -1)
            fits_R = free_R >= group.num_bytes
            if fits_R.any():
                self._put(group, int(np.where(fits_R, score(group, fits_R), np.inf).argmin()))
                continue
            rank = int(free_R.argmax())
            num_rows = group.rows_within(int(free_R[rank]))
            if not group.is_cuttable or num_rows < 1:
                raise _no_room(group, rank, int(free_R[rank]))
            hot, cold = group.cut(num_rows)
            self._put(hot, rank)
            waiting.append(cold)

    def put_access_bound(self, groups: Sequence[RowGroup]) -> None:
        """Evens out lookups by greed, and bytes by the order of runs."""
        first = len(self.owners)
        self.put_all(groups, self.least_time)
        self._deal(first, self.held_R.astype(np.float64), "lookup_bytes", _HOT_TOLERANCE, "num_bytes")

    def put_memory_bound(self, groups: Sequence[RowGroup]) -> None:
        """Evens out bytes by greed, and lookups by the order of runs."""
        first = len(self.owners)
        self.put_all(groups, self.level_bytes)
        self._deal(first, self.lookup_ms_R / self._own_ms_R.mean(), "num_bytes", _COLD_TOLERANCE, "lookup_bytes")

    def leave_out(self, groups: Collection[RowGroup]) -> None:
        """Counts the lookups of some groups no more: where every rank has a copy, none looks up for others."""
        self._left_out = groups
        self._put_anew(self.owners)

    def _deal(self, first: int, load_R: FloatArray, alike: Measure, tolerance: float, varying: Measure) -> None:
        dealt = in_runs(self.owners[first:], load_R, alike=alike, tolerance=tolerance, varying=varying)
        owners = self.owners[:first] + dealt
        held_R = np.zeros_like(self.held_R)
        np.add.at(held_R, [rank for _, rank in owners], [group.num_bytes for group, _ in owners])
        # Rows come out uneven by one, which counts where memory is full.
        if (held_R <= self._capacity_R).all():
            self._put_anew(owners)

    def _put_anew(self, owners: Sequence[Owner]) -> None:
        self._clear()
        for group, rank in owners:
            self._put(group, rank)

    def _clear(self) -> None:
        self.owners: list[Owner] = []
        self.held_R: IntArray = np.zeros(len(self._capacity_R), dtype=np.int64)
        self.lookup_ms_R: FloatArray = np.zeros(len(self._capacity_R))

    def _put(self, group: RowGroup, rank: int) -> None:
        self.owners.append((group, rank))
        self.held_R[rank] += group.num_bytes
        if group not in self._left_out:
            self.lookup_ms_R[rank] += group.lookup_bytes * self._own_ms_R[rank]


def _no_room(group: RowGroup, rank: int, free_bytes: int) -> InfeasiblePlanError:
    if not group.allowed_R.any():
        return InfeasiblePlanError(f"{group.label}: its constraints leave no rank that may hold its rows")
    needed = group.num_bytes // (group.shards[0].num_embeddings if group.is_cuttable else 1)
    what = "a row" if group.is_cuttable else "all rows"
    return InfeasiblePlanError(
        f"{group.label} needs {needed:,} bytes for {what}, {needed - free_bytes:,} bytes more than are free on rank "
        f"{rank}, the one with most room left"
    )
