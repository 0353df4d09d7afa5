"""Karmarkar and Karp's largest differencing method on predicted costs.

Shape suffixes: N items, R ranks, S subsets, M items of a partial solution.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from autoshard.planners.heuristics.greedy import PlacementPlanner
from autoshard.planners.space.placement import PlacementProblem, RankArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Partial:
    """Some of the items, in as many subsets as there are ranks.

    Attributes:
        sums_S: Sums of the subsets, falling, less the smallest.
        items_M: Which items.
        subsets_M: The subset of each.
    """

    sums_S: NDArray[np.float64]
    items_M: NDArray[np.int64]
    subsets_M: NDArray[np.int64]

    @property
    def spread(self) -> float:
        """Difference between the largest and the smallest sum."""
        return float(self.sums_S[0])

    def merged(self, other: _Partial) -> _Partial:
        """Both together: the largest subset of one joined to the smallest of the other, and so on."""
        num_subsets = len(self.sums_S)
        sums_S = self.sums_S + other.sums_S[::-1]
        # What all subsets have in common makes no difference.
        sums_S -= sums_S.min()
        order_S = np.argsort(-sums_S, kind="stable")
        place_S = np.empty(num_subsets, dtype=np.int64)
        place_S[order_S] = np.arange(num_subsets)
        subsets_M = np.concatenate([place_S[self.subsets_M], place_S[num_subsets - 1 - other.subsets_M]])
        items_M = np.concatenate([self.items_M, other.items_M])
        return _Partial(sums_S=sums_S[order_S], items_M=items_M, subsets_M=subsets_M)


def partition(costs_N: NDArray[np.float64], num_subsets: int) -> NDArray[np.int64]:
    """Splits numbers into subsets of nearly equal sums.

    Args:
        costs_N: The numbers, not negative.
        num_subsets: How many subsets, at least 1.

    Returns:
        The subset of each number, shape (N,); subset 0 has the largest sum.

    Source:
        Karmarkar and Karp, The differencing method of set partitioning (UCB/CSD 82/113, 1982), for several subsets as
        in Korf, Multi-way number partitioning (IJCAI 2009): the two partial solutions with the largest spreads are
        merged until one is left.
    """
    heap: list[tuple[float, int, _Partial]] = []
    for item, cost in enumerate(costs_N):
        sums_S = np.zeros(num_subsets)
        sums_S[0] = cost if num_subsets > 1 else 0.0
        single = _Partial(sums_S=sums_S, items_M=np.array([item]), subsets_M=np.array([0]))
        heap.append((-single.spread, item, single))
    heapq.heapify(heap)
    serial = len(heap)
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        both = one.merged(other)
        heapq.heappush(heap, (-both.spread, serial, both))
        serial += 1
    subsets_N = np.zeros(len(costs_N), dtype=np.int64)
    if heap:
        last = heap[0][2]
        subsets_N[last.items_M] = last.subsets_M
    return subsets_N


class KarmarkarKarpPlanner(PlacementPlanner):
    """Splits the tables' predicted costs into one subset per rank, then moves what must be elsewhere.

    Subsets with most bytes go to the ranks with most memory. Tables whose constraints leave them no choice of that
    rank go to the allowed one with the lowest sum, the costliest table first; memory limits are seen to at last.

    Source:
        See `partition`. Differs: costs are those of the tables alone, while in a fused kernel they do not add up.
    """

    name: ClassVar[str] = "karmarkar-karp"
    summary: ClassVar[str] = "Largest differencing on the tables' predicted costs."
    when: ClassVar[str] = "milliseconds of planning; costs that nearly add up"

    @override
    def place(self, problem: PlacementProblem, seed: int) -> RankArray:
        """Ranks by largest differencing; ties are broken by the order of the tables, whatever the seed."""
        costs_N = problem.kernel_ms_N
        subsets_N = partition(costs_N, problem.num_ranks)
        bytes_S = np.bincount(subsets_N, weights=problem.bytes_N, minlength=problem.num_ranks)
        rank_of_S = np.empty(problem.num_ranks, dtype=np.int64)
        by_room = np.argsort(-problem.capacity_R, kind="stable")
        rank_of_S[np.argsort(-bytes_S, kind="stable")] = by_room
        ranks_N: RankArray = rank_of_S[subsets_N]
        barred_N = ~problem.allowed_NR[np.arange(problem.num_items), ranks_N]
        sums_R = np.bincount(ranks_N[~barred_N], weights=costs_N[~barred_N], minlength=problem.num_ranks)
        for item in sorted(np.flatnonzero(barred_N).tolist(), key=lambda item: (-costs_N[item], item)):
            ranks_N[item] = np.where(problem.allowed_NR[item], sums_R, np.inf).argmin()
            sums_R[ranks_N[item]] += costs_N[item]
        return ranks_N
