"""Which row groups are held more than once: OPER's data parallelism for training and for inference.

Shape suffixes: N row groups, R ranks. Entry [i, j] of a matrix (R, R) is about rank i fetching from rank j.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autoshard.core import Tier, Topology
from autoshard.core.accepted import ABOVE_0
from autoshard.core.access import IntArray
from autoshard.core.costs import MsArray
from autoshard.planners.oper.balance import MAX_CAPACITY
from autoshard.planners.oper.cost_matrix import PathArray, exchange_ms
from autoshard.planners.oper.row_group import Owner, RowGroup

#: What a rank has for copies is filled but for about one in so many; fewer where the ranks have more than
#: `_MAX_PIECES` pieces together, for the time that they take.
_PIECES_PER_BUDGET = 256
_MAX_PIECES = 8192
#: Groups that are looked through at a time.
_STRETCH = 512
#: Tries of other budgets, and the power of a rank's cost over the mean that its budget is multiplied by for the next:
#: on Zipf data an exchange falls about by the square root of the memory for copies.
_MAX_TRIES = 6
_STEP = 2.0


def duplication_frequency(p2p_bytes_per_s: float, all_reduce_bytes_per_s: float, batch_per_rank: float) -> float:
    """Lookups per sample above which a row on every rank travels less than a row on one.

    Args:
        p2p_bytes_per_s: Bandwidth at which ranks fetch rows from each other.
        all_reduce_bytes_per_s: Bandwidth of a ring all-reduce, by the bytes that a rank sends: 2 (R - 1) / R times
            those that are reduced.
        batch_per_rank: Samples per rank and step.

    Raises:
        InvalidOptionError: If an argument is not positive.

    Source:
        OPER Eq. 4 and 5: BW_p2p / (batch * BW_all_reduce), where the batch is that of one rank.
    """
    ABOVE_0.check(p2p_bytes_per_s, "p2p_bytes_per_s")
    ABOVE_0.check(all_reduce_bytes_per_s, "all_reduce_bytes_per_s")
    ABOVE_0.check(batch_per_rank, "batch_per_rank")
    return p2p_bytes_per_s / (batch_per_rank * all_reduce_bytes_per_s)


def topology_frequency(topology: Topology, fetch_ms_RR: MsArray, row_bytes: float, batch_per_rank: float) -> float:
    """`duplication_frequency` of a topology of two or more ranks; infinite where fetching is free.

    Ranks fetch at the mean of L over pairs of ranks; the all-reduce is the outermost level's.
    """
    num_ranks = topology.world_size
    mean_ms = float(fetch_ms_RR[~np.eye(num_ranks, dtype=np.bool_)].mean())
    if mean_ms <= 0:
        return math.inf
    # A level's bandwidth counts the bytes that are reduced, Eq. 5 those that a ring sends for them.
    ring = 2 * (num_ranks - 1) / num_ranks * topology.levels[-1].all_reduce.bytes_per_s
    return duplication_frequency(row_bytes / (mean_ms * 1e-3), ring, batch_per_rank)


def hot_groups(groups: Sequence[RowGroup], min_frequency: float, budget_bytes: int) -> tuple[RowGroup, ...]:
    """The groups that every rank is to hold when training.

    Args:
        groups: All groups.
        min_frequency: Lookups per row and sample that a group has to exceed on average.
        budget_bytes: Bytes that one copy of all of them may take.

    Returns:
        Groups by falling frequency, as far as the bytes reach; none whose table may not be on all ranks or forbids
        to be data parallel.

    Source:
        OPER Sec. 4.3, frequency-aware data parallelism for training.
    """
    chosen = []
    for group in sorted(groups, key=lambda group: -group.frequency):
        if group.frequency <= min_frequency:
            break
        if group.num_bytes <= budget_bytes and group.allowed_R.all() and group.may_be(Tier.DATA_PARALLEL):
            budget_bytes -= group.num_bytes
            chosen.append(group)
    return tuple(chosen)


def finer(owners: Sequence[Owner], budget_bytes: int, num_ranks: int) -> list[Owner]:
    """Cuts the groups that may be copied, so that each is small beside what a rank has for copies.

    Those are the groups with the most lookups per byte, as many as fill all ranks' budgets with different rows. Else
    a group that no longer fits would leave memory unused, and on each rank other rows of it. Neighbours of one owner
    that are smaller than need be become one: there may be more of them than can be copied one by one in good time.
    """
    left_bytes = budget_bytes * num_ranks
    max_bytes = max(1, budget_bytes // _PIECES_PER_BUDGET, left_bytes // _MAX_PIECES)
    result = []
    owners = _merged(owners, max_bytes)
    for group, rank in sorted(owners, key=lambda owner: -owner[0].lookup_bytes / owner[0].num_bytes):
        while left_bytes > 0 and group.is_cuttable and group.num_bytes > max_bytes:
            num_rows = max(1, group.rows_within(max_bytes))
            if num_rows >= group.shards[0].num_embeddings:
                break
            piece, group = group.cut(num_rows)
            result.append((piece, rank))
            left_bytes -= piece.num_bytes
        result.append((group, rank))
        left_bytes -= group.num_bytes
    return result


def _merged(owners: Sequence[Owner], max_bytes: int) -> list[Owner]:
    """Neighbours with one owner as one group each, up to a size."""
    merged: list[Owner] = []
    for group, rank in sorted(owners, key=lambda owner: (owner[0].label, owner[0].start)):
        last, last_rank = merged[-1] if merged else (group, -1)
        together = group.is_cuttable and last_rank == rank and last.precedes(group)
        if together and last.num_bytes + group.num_bytes <= max_bytes:
            merged[-1] = (last.joined(group), rank)
        else:
            merged.append((group, rank))
    return merged


def replicate_evenly(
    owners: Sequence[Owner], room_R: IntArray, budget_bytes: int, fetch_ms_RR: MsArray, balance: float
) -> PathArray:
    """Copies by Algorithm 1, with a budget that goes to the ranks whose exchange costs most.

    Args:
        owners: All groups, each with the rank that holds it.
        room_R: Bytes that each rank has free.
        budget_bytes: Bytes for copies per rank, on average over ranks.
        fetch_ms_RR: L.
        balance: Cost of the exchange, least over most loaded rank, that is good enough.

    Returns:
        The rank from which each rank reads each group, shape (N, R); who is read from holds a copy. Of a few tries,
        the first of which gives all ranks as much, the most even.

    Source:
        OPER gives all GPUs as much (Sec. 5.1). A few percent of a rank's copies, some thousandths of its memory, are
        enough to level what Algorithm 1 leaves uneven.
    """
    lookups_N = np.array([group.lookup_bytes for group, _ in owners])
    others_ms_RR = np.where(np.eye(len(room_R), dtype=np.bool_), 0.0, fetch_ms_RR)
    share_R = np.ones(len(room_R))
    best, best_NR = -1.0, np.empty((0, 0), dtype=np.int64)
    for _ in range(_MAX_TRIES):
        # Rounded down, so that the ranks' budgets never add up to more than all of it.
        budget_R = np.minimum(budget_bytes * share_R * (1 - 1e-9), MAX_CAPACITY).astype(np.int64)
        paths_NR = _Copies(owners, np.minimum(room_R, budget_R), fetch_ms_RR).fill()
        links_ms_RR = exchange_ms(paths_NR, lookups_N, others_ms_RR)
        fetched_ms_R = links_ms_RR.sum(axis=1)
        most_ms_R = np.maximum(links_ms_RR.sum(axis=0), fetched_ms_R)
        reached = float(most_ms_R.min() / most_ms_R.max()) if most_ms_R.any() else 1.0
        if reached > best:
            best, best_NR = reached, paths_NR
        if reached >= balance or not (fetched_ms_R > 0).all():
            break
        share_R *= (fetched_ms_R / fetched_ms_R.mean()) ** _STEP
        share_R /= share_R.mean()
    return best_NR


class _Copies:
    """Algorithm 1: copies of groups on ranks that fetch them over their slowest links, as far as memory reaches.

    In turn, each rank copies the group with the most lookups per byte among those that it fetches over the link with
    the highest cost. Whoever now reaches a copy at a lower cost than before fetches it there. Groups are numbered by
    falling lookups per byte.

    Args:
        owners: All groups, each with the rank that holds it.
        free_R: Bytes that each rank may use for copies.
        fetch_ms_RR: L.

    Source:
        OPER Algorithm 1, with its argmax over the other ranks only. Differs: a rank goes on with its other links
        when nothing that fits is left on the slowest.
    """

    def __init__(self, owners: Sequence[Owner], free_R: IntArray, fetch_ms_RR: MsArray) -> None:
        num_ranks = len(free_R)
        lookups_N = np.array([group.lookup_bytes for group, _ in owners])
        bytes_N = np.array([group.num_bytes for group, _ in owners], dtype=np.int64)
        self.order_N = np.argsort(-lookups_N / np.maximum(bytes_N, 1), kind="stable")
        self.fetch_ms_RR, self.free_R = fetch_ms_RR, free_R.copy()
        self.lookups_N, self.bytes_N = lookups_N[self.order_N], bytes_N[self.order_N]
        ordered = [owners[index] for index in self.order_N]
        self.paths_RN: PathArray = np.tile([rank for _, rank in ordered], (num_ranks, 1))
        self.links_ms_RR = exchange_ms(self.paths_RN.T, self.lookups_N, fetch_ms_RR)
        #: A link is closed when no group on it can be copied any more; those that cost no more than memory are closed.
        self.open_RR = fetch_ms_RR > fetch_ms_RR.diagonal()[:, None]
        #: Before this one, each rank has or cannot have all groups.
        self.first_R = np.zeros(num_ranks, dtype=np.int64)
        may = [group.allowed_R & (group.is_cuttable and group.may_be(Tier.REPLICATED)) for group, _ in ordered]
        self.may_RN = np.ascontiguousarray(np.array(may).T & (self.lookups_N > 0))

    def fill(self) -> PathArray:
        """Copies one group to each rank in turn until no rank finds one; the paths, shape (N, R)."""
        active = [rank for rank in range(len(self.free_R)) if self.free_R[rank] > 0]
        while active:
            active = [rank for rank in active if self._copy_to(rank)]
        paths_NR = np.empty_like(self.paths_RN.T)
        paths_NR[self.order_N] = self.paths_RN.T
        return paths_NR

    def _copy_to(self, rank: int) -> bool:
        """Copies a group to a rank; False if there is none left to copy."""
        while self.open_RR[rank].any():
            source = int(np.where(self.open_RR[rank], self.links_ms_RR[rank], -np.inf).argmax())
            group = self._first(rank, source)
            if group is not None:
                self._read_from(group, rank)
                self.free_R[rank] -= self.bytes_N[group]
                return True
            self.open_RR[rank, source] = False
        return False

    def _first(self, rank: int, source: int) -> int | None:
        """The group with the most lookups per byte among those that fit a rank and are read from a source."""
        for start in range(int(self.first_R[rank]), len(self.bytes_N), _STRETCH):
            stretch = slice(start, start + _STRETCH)
            paths = self.paths_RN[rank, stretch]
            fits = self.may_RN[rank, stretch] & (self.bytes_N[stretch] <= self.free_R[rank]) & (paths != rank)
            if start == self.first_R[rank] and not fits.any():
                # Memory only becomes less: what does not fit now never will.
                self.first_R[rank] += _STRETCH
                continue
            found = fits & (paths == source)
            if found.any():
                return start + int(found.argmax())
        return None

    def _read_from(self, group: int, holder: int) -> None:
        """Sends the new holder of a copy, and everyone who reaches it at a lower cost than before, to it."""
        ranks_R = np.arange(len(self.free_R))
        before_R = self.paths_RN[:, group]
        nearer_R = self.fetch_ms_RR[:, holder] < self.fetch_ms_RR[ranks_R, before_R]
        movers = np.flatnonzero(nearer_R | (ranks_R == holder))
        lookups = self.lookups_N[group]
        self.links_ms_RR[movers, before_R[movers]] -= lookups * self.fetch_ms_RR[movers, before_R[movers]]
        self.links_ms_RR[movers, holder] += lookups * self.fetch_ms_RR[movers, holder]
        self.paths_RN[movers, group] = holder
