"""Row groups on ranks: OPER's two phases, and the baselines that balance one thing only.

Shape suffixes: U shards, N items, M some of them, in falling order of what varies, R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from autoshard.core import Shard, TableSet, Topology
from autoshard.core.access import FloatArray, IntArray
from autoshard.core.errors import InfeasiblePlanError
from autoshard.core.quoting import write_bytes
from autoshard.planners.oper.partition import lookup_bytes, row_range
from autoshard.planners.space.feasibility import Filling
from autoshard.planners.space.placement import Packing, summed_members
from autoshard.planners.space.planner_space import BoolArray

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Owners:
    """Who holds what.

    Attributes:
        shards: Table by table, hottest first; some of those that were given are cut further.
        ranks: The rank of each.
        held_R: Bytes of each rank.
        read_R: Bytes that lookups of a sample read on each rank, without those of rows that all ranks will have.
    """

    shards: tuple[Shard, ...]
    ranks: tuple[int, ...]
    held_R: IntArray
    read_R: FloatArray


def place(
    tables: TableSet,
    topology: Topology,
    shards: Sequence[Shard],
    capacity_R: IntArray,
    method: Method = Method.OPER,
    copied: Mapping[str, int] | None = None,
) -> Owners:
    """Puts every shard on one rank that has room for it, and cuts those that none has room for.

    Tables that must share a rank come first. With `Method.OPER` access-bound groups follow, whose share of all lookups
    is above their share of all bytes, by falling lookups, each on the rank with the fewest; then the memory-bound ones
    by falling bytes, each on the rank with the fewest bytes.

    Args:
        tables: The task's tables.
        topology: The task's topology.
        shards: Row groups of tables, table by table and hottest first.
        capacity_R: Bytes that each rank may hold.
        method: What to balance.
        copied: How many of the hottest rows of each table every rank will have a copy of. With `Method.OPER` their
            groups come before the others, whose lookups are evened out without theirs.

    Raises:
        InfeasiblePlanError: If some rows found no room.

    Source:
        OPER Sec. 4.2. Differs: of the ranks whose bytes are within the group's own of the fewest, a memory-bound group
        goes to that with the fewest lookups, which leaves memory as even and evens out the tail's lookups; at the end
        of each phase, the ranks' groups of a table are dealt anew in runs (`in_runs`), so that a plan has few shards;
        limits of memory hold on every rank.
    """
    if not shards:
        return Owners(shards=(), ranks=(), held_R=0 * capacity_R, read_R=np.zeros(len(capacity_R)))
    packing = Packing.on_single_ranks(tables, topology, shards, capacity_R)
    phases = _Phases(packing, method, copied or {})
    if phases.filling.failure is not None:
        cut, ranks = _packed(packing)
        packing = Packing.on_single_ranks(tables, topology, cut, capacity_R)
        phases = _Phases(packing, method, copied or {})
        if phases.filling.failure is not None:
            held_R, read_R = np.zeros_like(capacity_R), np.zeros(len(capacity_R))
            np.add.at(held_R, ranks, [shard.storage_bytes for shard in cut])
            np.add.at(read_R, ranks, lookup_bytes(cut))
            return Owners(shards=tuple(cut), ranks=tuple(ranks), held_R=held_R, read_R=read_R)
    rank_U = np.empty(len(packing.shards), dtype=np.int64)
    for group, rank in zip(packing.members, phases.filling.ranks_N.tolist(), strict=True):
        rank_U[list(group)] = rank
    return Owners(
        shards=packing.shards, ranks=tuple(rank_U.tolist()), held_R=phases.filling.held_R, read_R=phases.read_R
    )


class _Phases:
    """All items placed by a method; where one found no room, the filling says so."""

    def __init__(self, packing: Packing, method: Method, copied: Mapping[str, int]) -> None:
        self.packing, self.filling = packing, Filling(packing)
        members = [[packing.shards[index] for index in group] for group in packing.members]
        self.table_N = np.array([shards[0].table.name for shards in members])
        self.bytes_N: FloatArray = packing.bytes_N.astype(np.float64)
        self.lookups_N: FloatArray = summed_members(lookup_bytes(packing.shards), packing.members)
        self.read_R: FloatArray = np.zeros(packing.num_ranks)
        is_whole_N = np.array([len(shards) > 1 for shards in members])
        is_copied_N = np.array([shards[0].rows.stop <= copied.get(shards[0].table.name, 0) for shards in members])
        self._put(_falling(self.bytes_N, is_whole_N), by_bytes=True)
        if method is not Method.OPER:
            by_bytes = method is Method.MEMORY_GREEDY
            self._put(_falling(self.bytes_N if by_bytes else self.lookups_N, ~is_whole_N), by_bytes=by_bytes)
            return
        is_hot_N = self.lookups_N * self.bytes_N.sum() > self.bytes_N * self.lookups_N.sum()
        self._put_phases(is_hot_N & is_copied_N, ~is_hot_N & is_copied_N)
        # Where every rank has a copy, none looks up for others.
        self.lookups_N = np.where(is_copied_N, 0.0, self.lookups_N)
        self.read_R = np.zeros(packing.num_ranks)
        np.add.at(self.read_R, self.filling.ranks_N[is_whole_N], self.lookups_N[is_whole_N])
        is_left_N = ~is_copied_N & ~is_whole_N
        self._put_phases(is_hot_N & is_left_N, ~is_hot_N & is_left_N)

    def _put_phases(self, is_access_bound_N: BoolArray, is_memory_bound_N: BoolArray) -> None:
        self._put_access_bound(_falling(self.lookups_N, is_access_bound_N))
        self._put_memory_bound(_falling(self.bytes_N, is_memory_bound_N))

    def _put(self, items_M: IntArray, *, by_bytes: bool) -> None:
        for item in items_M.tolist():
            scores_R = self.filling.held_R.astype(np.float64) if by_bytes else self.read_R
            self.read_R[self.filling.put(item, scores_R)] += self.lookups_N[item]

    def _put_access_bound(self, items_M: IntArray) -> None:
        """Evens out lookups by greed, and bytes by the order of runs."""
        self._put(items_M, by_bytes=False)
        self._deal(items_M, self.filling.held_R.astype(np.float64), self.lookups_N, _HOT_TOLERANCE, self.bytes_N)

    def _put_memory_bound(self, items_M: IntArray) -> None:
        """Evens out bytes by greed, and lookups by the order of runs."""
        for item in items_M.tolist():
            held_R, fits_R = self.filling.held_R, self.filling.has_room(item)
            level = held_R.min(where=fits_R, initial=np.iinfo(np.int64).max // 2) + max(int(self.bytes_N[item]), 1)
            scores_R = np.where(held_R < level, self.read_R, np.inf)
            self.read_R[self.filling.put(item, scores_R)] += self.lookups_N[item]
        self._deal(items_M, self.read_R, self.bytes_N, _COLD_TOLERANCE, self.lookups_N)

    def _deal(
        self, items_M: IntArray, load_R: FloatArray, alike_N: FloatArray, tolerance: float, varying_N: FloatArray
    ) -> None:
        """Deals items that were just put anew in runs, where memory allows that: rows come out uneven by one."""
        items_M, filling = np.sort(items_M), self.filling
        before_M = filling.ranks_N[items_M]
        after_M = in_runs(
            self.table_N[items_M], before_M, load_R, alike_N[items_M], tolerance=tolerance, varying_M=varying_N[items_M]
        )
        held_R = filling.held_R.copy()
        np.subtract.at(held_R, before_M, self.packing.bytes_N[items_M])
        np.add.at(held_R, after_M, self.packing.bytes_N[items_M])
        if (held_R <= self.packing.capacity_R).all():
            filling.ranks_N[items_M], filling.held_R = after_M, held_R
            np.subtract.at(self.read_R, before_M, self.lookups_N[items_M])
            np.add.at(self.read_R, after_M, self.lookups_N[items_M])


def _falling(values_N: FloatArray, is_chosen_N: BoolArray) -> IntArray:
    """The chosen items by falling values; ties keep their order."""
    items_M = np.flatnonzero(is_chosen_N)
    return np.asarray(items_M[np.argsort(-values_N[items_M], kind="stable")])


def in_runs(
    table_M: NDArray[np.str_],
    ranks_M: IntArray,
    load_R: FloatArray,
    alike_M: FloatArray,
    *,
    tolerance: float,
    varying_M: FloatArray,
) -> IntArray:
    """Deals row groups to ranks anew: of each table to each rank one run of neighbours from either end.

    Every rank gets as many groups of a table as it has, so that what is alike about them stays as even as it is. What
    varies along the table then depends on how many of them are from the end that has most of it: as the number rises,
    so does the rank's share, and one number comes nearest to an even one. What a rank leaves is one stretch again,
    for the next rank.

    Args:
        table_M: The table of each group; those of a table are in the order of its rows.
        ranks_M: The rank of each group, so that what is alike is even.
        load_R: What varies, as far as each rank has it, from these groups and all others.
        alike_M: What the groups of a table have the same of.
        tolerance: Groups that have more or less of it than the usual amount, by more than this share, keep their ranks.
        varying_M: What they differ by along the table.

    Returns:
        Ranks of the groups, shape (M,).
    """
    ranks_M, load_R = ranks_M.copy(), load_R.copy()
    runs = []
    for table in dict.fromkeys(table_M.tolist()):
        groups = np.flatnonzero(table_M == table)
        usual = np.median(alike_M[groups])
        groups = groups[np.abs(alike_M[groups] - usual) <= tolerance * usual]
        if len(groups) > 1:
            runs.append(groups if varying_M[groups[0]] >= varying_M[groups[-1]] else groups[::-1])
    # Large tables first: small ones level what these leave uneven.
    for groups in sorted(runs, key=lambda groups: -float(varying_M[groups].sum())):
        np.subtract.at(load_R, ranks_M[groups], varying_M[groups])
        ranks_M[groups] = _dealt(varying_M[groups], np.bincount(ranks_M[groups], minlength=len(load_R)), load_R)
        np.add.at(load_R, ranks_M[groups], varying_M[groups])
    return ranks_M


def _dealt(weight_M: FloatArray, counts_R: IntArray, load_R: FloatArray) -> IntArray:
    """A rank for each group of a table, with as many groups per rank as `counts_R` says."""
    level = (load_R[counts_R > 0].sum() + weight_M.sum()) / np.count_nonzero(counts_R)
    # Who needs a share far from the usual goes first, while both ends are still far from it, too.
    unusual_R = np.abs((level - load_R) / np.maximum(counts_R, 1) - weight_M.mean())
    order = [rank for rank in np.argsort(-unusual_R, kind="stable").tolist() if counts_R[rank]]
    below_M = np.concatenate([[0.0], np.cumsum(weight_M)])
    dealt_M = np.empty(len(weight_M), dtype=np.int64)
    first, last = 0, len(weight_M)
    for place, rank in enumerate(order):
        count = int(counts_R[rank])
        # Groups are whole, so that each rank gets a little more or less than it should: the others share that.
        left = below_M[last] - below_M[first]
        wanted = (load_R[order[place:]].sum() + left) / (len(order) - place) - load_R[rank]
        from_first = np.arange(count + 1)
        gets = below_M[first + from_first] - below_M[first] + below_M[last] - below_M[last - count + from_first]
        taken = int(np.abs(gets - wanted).argmin())
        dealt_M[first : first + taken] = rank
        dealt_M[last - (count - taken) : last] = rank
        first, last = first + taken, last - (count - taken)
    return dealt_M


def _packed(packing: Packing) -> tuple[list[Shard], list[int]]:
    """Shards, cut where no rank has room for all of one, and ranks that have room for them, whatever the balance.

    Those with the least choice of ranks and the widest rows come first, so that narrow ones are left to fill the gaps.

    Raises:
        InfeasiblePlanError: If some rows found no room.
    """
    free_R, found = packing.capacity_R.copy(), []
    members = [[packing.shards[index] for index in group] for group in packing.members]
    row_bytes_N = packing.bytes_N / [shards[0].num_embeddings for shards in members]
    is_single_N = np.array([len(shards) == 1 for shards in members])
    for item in np.lexsort((-row_bytes_N, is_single_N, packing.allowed_NR.sum(axis=1))).tolist():
        shards, needed, row_bytes = members[item], int(packing.bytes_N[item]), int(row_bytes_N[item])
        while True:
            room_R = np.where(packing.allowed_NR[item], free_R, -1)
            rank, num_rows = int(room_R.argmax()), shards[0].num_embeddings
            if needed > room_R[rank]:
                num_rows = int(room_R[rank]) // max(row_bytes, 1)
                if len(shards) > 1 or num_rows < 1:
                    raise _no_room(packing, item, needed if len(shards) > 1 else row_bytes, room_R)
            now, shards = _cut(shards, num_rows)
            found += [(shard, rank) for shard in now]
            free_R[rank] -= sum(shard.storage_bytes for shard in now)
            if not shards:
                break
            needed -= num_rows * row_bytes
    place_of = {shard.table.name: place for place, shard in enumerate(packing.shards)}
    found.sort(key=lambda one: (place_of[one[0].table.name], one[0].rows.start))
    return [shard for shard, _ in found], [rank for _, rank in found]


def _cut(shards: list[Shard], num_rows: int) -> tuple[list[Shard], list[Shard]]:
    """The first rows of a shard, and the others; all of several shards."""
    first, rows = shards[0], shards[0].rows
    if len(shards) > 1 or num_rows >= first.num_embeddings:
        return shards, []
    middle = rows.start + num_rows
    return [row_range(first.table, rows.start, middle)], [row_range(first.table, middle, rows.stop)]


def _no_room(packing: Packing, item: int, needed: int, room_R: IntArray) -> InfeasiblePlanError:
    label, rank = packing.label(item), int(room_R.argmax())
    if room_R[rank] < 0:
        return InfeasiblePlanError(f"{label}: its constraints leave no rank that may hold its rows")
    what = "all rows" if len(packing.members[item]) > 1 else "a row"
    return InfeasiblePlanError(
        f"{label} needs {write_bytes(needed)} for {what}, {write_bytes(needed - int(room_R[rank]))} more than are free "
        f"on rank {rank}, the one with most room left"
    )
