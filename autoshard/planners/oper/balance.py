"""Row groups on ranks without replicas: OPER's two phases, and the baselines that balance one thing only.

Shape suffixes: N row groups, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from autoshard.core.errors import InfeasiblePlanError
from autoshard.planners.oper.cost_matrix import FloatArray
from autoshard.planners.oper.row_group import RowGroup, bytes_of, lookups_of
from autoshard.planners.oper.runs import in_runs

ByteArray = NDArray[np.int64]
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


class Bound(StrEnum):
    """Which limit a row group came up against."""

    ACCESS = "access"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Groups and the rank that holds each.

    Attributes:
        owners: Each group, some of them cut further than they were given, with its rank.
        held_R: Bytes per rank.
        lookup_ms_R: Time of lookups per rank and sample, up to a factor that all ranks share (Eq. 2), without those
            of groups that will be copied to all.
    """

    owners: tuple[tuple[RowGroup, int], ...]
    held_R: ByteArray
    lookup_ms_R: FloatArray


def place(
    groups: Sequence[RowGroup],
    capacity_R: ByteArray,
    lookup_cost_R: FloatArray,
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
        lookup_cost_R: Cost of a lookup on each rank, the diagonal of L.
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
    all_bytes = sum(group.num_bytes for group in groups)
    all_lookups = sum(group.lookup_bytes for group in groups)

    def is_access_bound(group: RowGroup) -> bool:
        return group.lookup_bytes * all_bytes > group.num_bytes * all_lookups

    ranks = _Ranks(capacity_R, lookup_cost_R)
    whole = [group for group in groups if not group.cuttable]
    parts = [group for group in groups if group.cuttable]
    by_access = sorted(parts, key=lambda group: -group.lookup_bytes)
    by_bytes = sorted(parts, key=lambda group: (-group.num_bytes, -group.lookup_bytes))
    ranks.put_all(sorted(whole, key=lambda group: -group.num_bytes), ranks.fewest_bytes)
    if method is Method.MEMORY_GREEDY:
        ranks.put_all(by_bytes, ranks.fewest_bytes)
    elif method is Method.ACCESS_GREEDY:
        ranks.put_all(by_access, ranks.least_time)
    else:
        for chosen in (True, False):
            bound = [group for group in by_access if is_access_bound(group) and (group in copied) is chosen]
            others = [group for group in by_bytes if not is_access_bound(group) and (group in copied) is chosen]
            ranks.put_in_runs(bound, Bound.ACCESS)
            ranks.put_in_runs(others, Bound.MEMORY)
            # Where everybody has a copy, there is nothing to look up for others.
            ranks.leave_out(copied)
    return ranks.placement()


def pack(groups: Sequence[RowGroup], capacity_R: ByteArray, lookup_cost_R: FloatArray) -> Placement:
    """Puts every group where it fits, whatever the balance.

    Those with the least choice of ranks and the widest rows come first, so that narrow ones are left to fill the gaps.

    Raises:
        InfeasiblePlanError: If some rows found no room.
    """
    ranks = _Ranks(capacity_R, lookup_cost_R)

    def order(group: RowGroup) -> tuple[int, bool, float]:
        return int(group.allowed_R.sum()), group.cuttable, -group.num_bytes / group.shards[0].num_embeddings

    ranks.put_all(sorted(groups, key=order), ranks.fewest_bytes)
    return ranks.placement()


class _Ranks:
    """Ranks being filled."""

    def __init__(self, capacity_R: ByteArray, lookup_cost_R: FloatArray) -> None:
        self.capacity_R = capacity_R
        self.held_R: ByteArray = np.zeros(len(capacity_R), dtype=np.int64)
        self.work_R: FloatArray = np.zeros(len(capacity_R))
        # Ranks that look up for nothing would be given all there is, whatever the exchange.
        self.cost_R = lookup_cost_R if (lookup_cost_R > 0).all() else np.ones(len(capacity_R))
        self.owners: list[tuple[RowGroup, int]] = []
        self.left_out: Collection[RowGroup] = ()

    def fewest_bytes(self, _group: RowGroup, _fits_R: NDArray[np.bool_]) -> FloatArray:
        """Scores by bytes held."""
        return self.held_R.astype(np.float64)

    def least_time(self, group: RowGroup, _fits_R: NDArray[np.bool_]) -> FloatArray:
        """Scores by time of lookups, the group's among them."""
        return self.work_R + group.lookup_bytes * self.cost_R

    def level_bytes(self, group: RowGroup, fits_R: NDArray[np.bool_]) -> FloatArray:
        """Scores by time of lookups, where bytes held are within the group's own of the fewest."""
        level_R = self.held_R < self.held_R[fits_R].min() + max(group.num_bytes, 1)
        return np.where(level_R, self.least_time(group, fits_R), np.inf)

    def put_all(self, groups: Iterable[RowGroup], score: Callable[[RowGroup, NDArray[np.bool_]], FloatArray]) -> None:
        """Puts groups on the allowed ranks with the lowest score among those with room; cuts them where none has."""
        waiting = list(groups)[::-1]
        while waiting:
            group = waiting.pop()
            free_R = np.where(group.allowed_R, self.capacity_R - self.held_R, -1)
            fits_R = free_R >= group.num_bytes
            if fits_R.any():
                self._put(group, int(np.where(fits_R, score(group, fits_R), np.inf).argmin()))
                continue
            rank = int(free_R.argmax())
            num_rows = int(free_R[rank]) * group.shards[0].num_embeddings // group.num_bytes
            if not group.cuttable or num_rows < 1:
                raise _no_room(group, rank, int(free_R[rank]))
            hot, cold = group.cut(num_rows)
            self._put(hot, rank)
            waiting.append(cold)

    def leave_out(self, groups: Collection[RowGroup]) -> None:
        """Counts the lookups of some groups no more."""
        self.left_out = groups
        self._replace(self.owners)

    def put_in_runs(self, groups: Sequence[RowGroup], bound: Bound) -> None:
        """Puts groups of one kind: what bounds them by greed, the other by the order of runs."""
        first = len(self.owners)
        if bound is Bound.ACCESS:
            self.put_all(groups, self.least_time)
            load_R = self.held_R.astype(np.float64)
            last = in_runs(self.owners[first:], load_R, alike=lookups_of, tolerance=_HOT_TOLERANCE, varying=bytes_of)
        else:
            self.put_all(groups, self.level_bytes)
            load_R = self.work_R / self.cost_R.mean()
            last = in_runs(self.owners[first:], load_R, alike=bytes_of, tolerance=_COLD_TOLERANCE, varying=lookups_of)
        self._replace(self.owners[:first] + last)

    def placement(self) -> Placement:
        """All that was put."""
        return Placement(owners=tuple(self.owners), held_R=self.held_R, lookup_ms_R=self.work_R)

    def _replace(self, owners: list[tuple[RowGroup, int]]) -> None:
        held_R = np.zeros_like(self.held_R)
        np.add.at(held_R, [rank for _, rank in owners], [group.num_bytes for group, _ in owners])
        # Rows come out uneven by one, which counts where memory is full.
        if (held_R > self.capacity_R).any():
            return
        self.owners, self.held_R = [], np.zeros_like(self.held_R)
        self.work_R = np.zeros_like(self.work_R)
        for group, rank in owners:
            self._put(group, rank)

    def _put(self, group: RowGroup, rank: int) -> None:
        self.owners.append((group, rank))
        self.held_R[rank] += group.num_bytes
        if group not in self.left_out:
            self.work_R[rank] += group.lookup_bytes * self.cost_R[rank]


def _no_room(group: RowGroup, rank: int, free_bytes: int) -> InfeasiblePlanError:
    if free_bytes < 0:
        return InfeasiblePlanError(f"{group.label}: its constraints leave no rank that may hold its rows")
    needed = group.num_bytes // (group.shards[0].num_embeddings if group.cuttable else 1)
    what = "a row" if group.cuttable else "all rows"
    return InfeasiblePlanError(
        f"{group.label} needs {needed:,} bytes for {what}, {needed - free_bytes:,} bytes more than are free on rank "
        f"{rank}, the one with most room left"
    )
