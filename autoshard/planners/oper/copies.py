"""Which rows are held more than once: OPER's data parallelism for training and for inference.

Shape suffixes: K stretches of rows of all tables, B sets of hot rows, T tables, N shards, R ranks, L levels. Entry
[i, j] of a matrix (R, R) is about rank i fetching from rank j.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from autoshard.core import EmbeddingTable, PlacedShard, Shard, TableSet, Tier, Topology
from autoshard.core.access import FloatArray, IntArray
from autoshard.core.costs import CommModel, LinkBytes, MsArray
from autoshard.core.shard import fused_kernel
from autoshard.evaluation import stages
from autoshard.evaluation.communication import link_levels
from autoshard.planners.oper.partition import lookup_bytes, row_range
from autoshard.planners.planner import PlanRequest
from autoshard.planners.space.constraints import allowed_sites, colocated
from autoshard.planners.space.options import locals_of, placed_shard
from autoshard.planners.space.planner_space import BoolArray
from autoshard.planners.space.step_cost import StepPrices, StepSums

#: Bytes are counted in 64-bit integers, and sums of them must not overflow.
MAX_BYTES = 2**62
#: Limits of frequency that are priced, in lookups of a row by a rank and step: powers of two, and then those next to
#: the best of them.
_COARSE, _FINE = (-4, -2, 0, 2, 4), (-1, 1)
#: Pieces that fill what a rank has for copies, and that all ranks fill together, at most: the fewer, the fewer shards
#: has a plan. With four times as many, forward parts of steps are 0 to 85% longer (12 tasks of tests/golden, November
#: 2026), and links of a cluster more even (Fig. 8).
FEW_PIECES, MANY_PIECES = (64, 1024), (256, 8192)
#: Shards that are looked through at a time.
_STRETCH = 512
#: Tries of other budgets, and the power of a rank's cost over the mean that its budget is multiplied by for the next:
#: on Zipf data an exchange falls about by the square root of the memory for copies.
_MAX_TRIES = 6
_STEP = 2.0
#: A message in which a byte more takes what it takes in any large one.
_LARGE_BYTES = 1e9

HotRows: TypeAlias = Mapping[str, int]
"""How many of a table's most accessed rows are hot, by its name; tables that have none are left out."""
AsAsked: TypeAlias = Callable[[Sequence[PlacedShard]], Sequence[PlacedShard]]
"""Gives shards the exchange and the synchronisation that was asked for."""


class RowFrequencies:
    """Rows of all tables by falling frequency, as far as all ranks may have copies of them.

    Left out are tables that may not be on all ranks, that forbid to be data parallel, or that must share a rank.

    Args:
        tables: The task's tables.
        topology: The task's topology.
    """

    def __init__(self, tables: TableSet, topology: Topology) -> None:
        alone = [unit[0] for unit in colocated(tables) if len(unit) == 1]
        self._tables = [table for table in alone if allowed_sites(table, Tier.DATA_PARALLEL, topology).all()]
        stretches = [_stretches(table) for table in self._tables]
        rows_K, frequency_K, row_bytes_K = np.concatenate([np.zeros((3, 0)), *stretches], axis=1)
        order_K = np.argsort(-frequency_K, kind="stable")
        table_K = np.repeat(np.arange(len(stretches)), [of_table.shape[1] for of_table in stretches])
        self._table_K, self._rows_K = table_K[order_K], rows_K[order_K]
        self._frequency_K, self._row_bytes_K = frequency_K[order_K], row_bytes_K[order_K]
        self._bytes_K = np.cumsum(self._rows_K * self._row_bytes_K)

    def above(self, min_frequency: float, budget_bytes: int) -> HotRows:
        """The rows that every rank is to hold: by falling frequency, as far as the bytes reach.

        Args:
            min_frequency: Lookups per sample that a row has to exceed.
            budget_bytes: Bytes that one copy of all of them may take.

        Source:
            OPER Sec. 4.3, frequency-aware data parallelism for training.
        """
        rows_K = np.where(self._frequency_K > min_frequency, self._rows_K, 0.0)
        left_K = budget_bytes - (self._bytes_K - self._rows_K * self._row_bytes_K)
        rows_K = np.clip(left_K // np.maximum(self._row_bytes_K, 1.0), 0.0, rows_K)
        rows_T = np.bincount(self._table_K, rows_K, minlength=len(self._tables))
        return {table.name: int(rows) for table, rows in zip(self._tables, rows_T.tolist(), strict=True) if rows}


def _stretches(table: EmbeddingTable) -> FloatArray:
    """Rows, lookups per row and sample, and bytes per row between the knots of a table's profile, shape (3, K)."""
    ranks_K, cumulative_K = table.access.ranks_K, table.access.cumulative_K
    if table.row_order is None:
        ranks_K, cumulative_K = ranks_K[[0, -1]], cumulative_K[[0, -1]]
    rows_K = np.diff(np.rint(ranks_K))
    frequency_K = table.pooling_factor * np.diff(cumulative_K) / np.maximum(rows_K, 1.0)
    return np.stack([rows_K, frequency_K, np.full(len(rows_K), table.storage_bytes // table.num_embeddings)])


def worthwhile(request: PlanRequest, budget_bytes: int, as_asked: AsAsked) -> list[HotRows]:
    """The rows that every rank is to hold for the least predicted step, and none: the likelier first.

    Steps are those in which the other rows lie level on all ranks.

    Args:
        request: The task.
        budget_bytes: Bytes that one copy of the rows may take.
        as_asked: Applied to the shards that are priced, all together.

    Source:
        OPER Sec. 4.3. Differs: rows are copied above the frequency of least predicted step, in place of Eq. 4 and 5.
    """
    frequencies = RowFrequencies(request.tables, request.topology)
    once = request.topology.world_size / request.tables.batch_size
    steps_ms: dict[tuple[tuple[str, int], ...], float] = {}
    of_limit: dict[float, tuple[tuple[str, int], ...]] = {}

    def best(limits: Sequence[float]) -> float:
        of_limit.update({limit: tuple(frequencies.above(limit, budget_bytes).items()) for limit in limits})
        if new := [rows for rows in dict.fromkeys(of_limit.values()) if rows not in steps_ms]:
            new_ms_B = _level_steps_ms(request, [dict(rows) for rows in new], as_asked)
            steps_ms.update(zip(new, new_ms_B.tolist(), strict=True))
        return min(
            (limit for limit in of_limit if of_limit[limit]), key=lambda limit: steps_ms[of_limit[limit]], default=0.0
        )

    limit = best([math.inf, *(2.0**power * once for power in _COARSE)])
    limit = best([limit * 2.0**power for power in _FINE])
    found = dict.fromkeys((of_limit.get(limit, ()), ()))
    return [dict(rows) for rows in sorted(found, key=lambda rows: steps_ms[rows])]


def _level_steps_ms(request: PlanRequest, candidates: Sequence[HotRows], as_asked: AsAsked) -> MsArray:
    """Steps with hot rows on every rank, and the rows of all tables beside them spread over all ranks; shape (B,)."""
    tables, topology = request.tables, request.topology
    placed: list[PlacedShard] = []
    is_held: list[list[bool]] = []
    for table in tables.tables:
        counts = [rows.get(table.name, 0) for rows in candidates]
        for count in dict.fromkeys(counts):
            for tier, start, stop in ((Tier.DATA_PARALLEL, 0, count), (Tier.ROW_WISE, count, table.num_embeddings)):
                if start < stop:
                    placed.append(placed_shard(row_range(table, start, stop), tier, topology))
                    is_held.append([one == count for one in counts])
    placed = [one.as_run(topology.world_size) for one in as_asked(placed)]
    kernels = {fused_kernel(one.shard.table, one.update) for one in placed}
    prices = StepPrices(tables, topology, request.costs, kernels, request.payload)
    held_BN = np.array(is_held, dtype=np.float64).T
    codes_BH = held_BN @ request.costs.kernel.encode(locals_of(placed, tables.batch_size))
    moved_BC = held_BN @ prices.moved(placed)
    # One rank stands for all, since they are alike.
    return prices.step_ms(StepSums(codes_BRH=codes_BH[:, None].astype(np.float32), moved_BRC=moved_BC[:, None]))


def cut_to_copy(
    owned: Iterable[tuple[Shard, int]], budget_bytes: int, num_ranks: int, pieces: tuple[int, int]
) -> list[tuple[Shard, int]]:
    """Cuts shards that may be copied, so that each is small beside what a rank has for copies.

    Those are the rows with the most lookups per byte, as many as fill all ranks' budgets with different rows. Else a
    shard that no longer fits would leave memory unused, and on each rank other rows of it.

    Args:
        owned: Shards, each with the rank that holds it.
        budget_bytes: What a rank has for copies.
        num_ranks: R.
        pieces: How many fill what a rank has, and what all have, at most.
    """
    left_bytes = budget_bytes * num_ranks
    max_bytes = max(1, budget_bytes // pieces[0], left_bytes // pieces[1])
    waiting: list[tuple[float, int, Shard, int]] = []

    def wait(shard: Shard, rank: int) -> None:
        # By falling lookups per byte; the number tells equal ones apart.
        heapq.heappush(waiting, (-float(lookup_bytes([shard])[0]) / shard.storage_bytes, next(number), shard, rank))

    number, found = itertools.count(), []
    for shard, rank in owned:
        wait(shard, rank)
    while waiting and left_bytes > 0:
        _, _, shard, rank = heapq.heappop(waiting)
        start, stop = shard.rows.start, shard.rows.stop
        middle = min(start + max(1, max_bytes * shard.num_embeddings // shard.storage_bytes), stop)
        found.append((row_range(shard.table, start, middle), rank))
        left_bytes -= found[-1][0].storage_bytes
        if middle < stop:
            wait(row_range(shard.table, middle, stop), rank)
    return found + [(shard, rank) for _, _, shard, rank in waiting]


def fetch_ms(topology: Topology, comm: CommModel) -> MsArray:
    """L: milliseconds in which one rank fetches a row, or a byte, from another, and reads one of its own.

    Args:
        topology: Its `fetch_ms` is the answer if it has one. Else it is what a byte more takes in an all-to-all over
            the innermost level that holds both ranks; nothing for a rank's own, which all rows take alike.
        comm: Prices collectives.

    Source:
        OPER Sec. 3.2, where L is profiled.
    """
    if topology.fetch_ms is not None:
        return np.array(topology.fetch_ms, dtype=np.float64)
    levels = np.eye(len(topology.levels))
    bytes_LBR = np.repeat(_LARGE_BYTES * np.hstack([levels, 2 * levels])[..., None], topology.world_size, axis=2)
    once_LR, twice_LR = np.split(
        stages.all_to_alls_ms(LinkBytes(leaving_LR=bytes_LBR, arriving_LR=bytes_LBR), comm, topology), 2
    )
    # link_levels has -1 on the diagonal, which is the last entry here.
    return np.asarray(np.append((twice_LR - once_LR).max(axis=1) / _LARGE_BYTES, 0.0)[link_levels(topology)])


def copy_nearby(
    owned: Sequence[tuple[Shard, int]],
    may_NR: BoolArray,
    room_R: IntArray,
    budget_bytes: int,
    fetch_ms_RR: MsArray,
    balance: float,
) -> IntArray:
    """Copies by Algorithm 1, with a budget that goes to the ranks whose exchange costs most.

    Args:
        owned: Shards, each with the rank that holds it.
        may_NR: Ranks that may have a copy of each.
        room_R: Bytes that each rank has free.
        budget_bytes: Bytes for copies per rank, on average over ranks.
        fetch_ms_RR: L.
        balance: Cost of the exchange, least over most loaded rank, that is good enough.

    Returns:
        The rank from which each rank reads each shard, shape (N, R); who is read from holds a copy. Of a few tries, the
        first of which gives all ranks as much, that whose most loaded rank has the least exchange.

    Source:
        OPER Algorithm 1, which gives all GPUs as much (Sec. 5.1). A few percent of a rank's copies, some thousandths of
        its memory, are enough to level what that leaves uneven.
    """
    share_R = np.ones(len(room_R))
    best_ms, best_NR = math.inf, np.empty((0, 0), dtype=np.int64)
    for _ in range(_MAX_TRIES):
        # Rounded down, so that the ranks' budgets never add up to more than all of it.
        budget_R = np.minimum(budget_bytes * share_R * (1 - 1e-9), MAX_BYTES).astype(np.int64)
        copies = _Copies(owned, may_NR, np.minimum(room_R, budget_R), fetch_ms_RR)
        paths_NR = copies.fill()
        links_ms_RR = copies.links_ms_RR - np.diag(copies.links_ms_RR.diagonal())
        fetched_ms_R = links_ms_RR.sum(axis=1)
        most_ms_R = np.maximum(links_ms_RR.sum(axis=0), fetched_ms_R)
        if most_ms_R.max() < best_ms:
            best_ms, best_NR = float(most_ms_R.max()), paths_NR
        if most_ms_R.min() >= balance * most_ms_R.max() or not (fetched_ms_R > 0).all():
            break
        share_R *= (fetched_ms_R / fetched_ms_R.mean()) ** _STEP
        share_R /= share_R.mean()
    return best_NR


class _Copies:
    """Algorithm 1: copies on ranks that fetch over their slowest links, as far as memory reaches.

    In turn, each rank copies the shard with the most lookups per byte among those that it fetches over the link with
    the highest cost. Whoever now reaches a copy at a lower cost than before fetches it there. Shards are numbered by
    falling lookups per byte.

    Args:
        owned: Shards, each with the rank that holds it.
        may_NR: Ranks that may have a copy of each.
        free_R: Bytes that each rank may use for copies.
        fetch_ms_RR: L.

    Source:
        OPER Algorithm 1, with its argmax over the other ranks only. Differs: a rank goes on with its other links
        when nothing that fits is left on the slowest.
    """

    def __init__(
        self, owned: Sequence[tuple[Shard, int]], may_NR: BoolArray, free_R: IntArray, fetch_ms_RR: MsArray
    ) -> None:
        num_ranks = len(free_R)
        lookups_N = lookup_bytes([shard for shard, _ in owned])
        bytes_N = np.array([shard.storage_bytes for shard, _ in owned], dtype=np.int64)
        owner_N = np.array([rank for _, rank in owned], dtype=np.int64)
        self.order_N = np.argsort(-lookups_N / np.maximum(bytes_N, 1), kind="stable")
        self.fetch_ms_RR, self.free_R = fetch_ms_RR, free_R.copy()
        self.lookups_N, self.bytes_N = lookups_N[self.order_N], bytes_N[self.order_N]
        self.paths_RN: IntArray = np.tile(owner_N[self.order_N], (num_ranks, 1))
        self.links_ms_RR: MsArray = np.bincount(owner_N, lookups_N, minlength=num_ranks) * fetch_ms_RR
        #: A link is closed when no shard on it can be copied any more; those that cost no more than memory are closed.
        self.open_RR = fetch_ms_RR > fetch_ms_RR.diagonal()[:, None]
        #: Before this one, each rank has or cannot have all shards.
        self.first_R = np.zeros(num_ranks, dtype=np.int64)
        self.may_RN = np.ascontiguousarray((may_NR[self.order_N] & (self.lookups_N > 0)[:, None]).T)

    def fill(self) -> IntArray:
        """Copies one shard to each rank in turn until no rank finds one; the paths, shape (N, R)."""
        active = [rank for rank in range(len(self.free_R)) if self.free_R[rank] > 0]
        while active:
            active = [rank for rank in active if self._copy_to(rank)]
        paths_NR = np.empty_like(self.paths_RN.T)
        paths_NR[self.order_N] = self.paths_RN.T
        return paths_NR

    def _copy_to(self, rank: int) -> bool:
        """Copies a shard to a rank; False if there is none left to copy."""
        while self.open_RR[rank].any():
            source = int(np.where(self.open_RR[rank], self.links_ms_RR[rank], -np.inf).argmax())
            shard = self._first(rank, source)
            if shard is not None:
                self._read_from(shard, rank)
                self.free_R[rank] -= self.bytes_N[shard]
                return True
            self.open_RR[rank, source] = False
        return False

    def _first(self, rank: int, source: int) -> int | None:
        """The shard with the most lookups per byte among those that fit a rank and are read from a source."""
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

    def _read_from(self, shard: int, holder: int) -> None:
        """Sends the new holder of a copy, and everyone who reaches it at a lower cost than before, to it."""
        ranks_R = np.arange(len(self.free_R))
        before_R = self.paths_RN[:, shard]
        nearer_R = self.fetch_ms_RR[:, holder] < self.fetch_ms_RR[ranks_R, before_R]
        movers = np.flatnonzero(nearer_R | (ranks_R == holder))
        lookups = self.lookups_N[shard]
        self.links_ms_RR[movers, before_R[movers]] -= lookups * self.fetch_ms_RR[movers, before_R[movers]]
        self.links_ms_RR[movers, holder] += lookups * self.fetch_ms_RR[movers, holder]
        self.paths_RN[movers, shard] = holder
