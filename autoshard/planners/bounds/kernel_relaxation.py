"""Lower bounds on the slowest rank's kernels where every item is on one rank.

Shape suffixes: N items, R ranks, G groups of ranks, X variables.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from autoshard.core.costs import MsArray, kernel_floor
from autoshard.planners.space.placement import PlacementProblem, RankArray

#: What bounds are lowered by, as a share: the solver's tolerance, and sums of codes in single precision.
_TOLERANCE = 1e-6


class KernelRelaxation:
    """Bounds the slowest rank of a placement problem: items may be split over ranks.

    The largest of four bounds counts: the costliest item; the mean of all ranks, where they are alike; of k R + 1 items
    on R ranks, the k + 1 cheapest of the costliest, since one rank has as many; and where constraints or memory tell
    ranks apart, a linear programme over groups of ranks that are alike. All hold for prices with a linear floor.

    Args:
        problem: Items and ranks.
    """

    def __init__(self, problem: PlacementProblem) -> None:
        self._problem = problem
        self._floor = kernel_floor(problem.model, problem.codes_NH)
        self._base_ms = self._floor.forward_base_ms + self._floor.backward_base_ms
        self._item_ms_N: MsArray = self._floor.forward_ms_N + self._floor.backward_ms_N

    @property
    def is_proven(self) -> bool:
        """Whether the bound holds for every placement."""
        return self._floor.is_proven

    @property
    def is_exact(self) -> bool:
        """Whether ranks take what the floor says, so that no estimate is sharper than what is proven."""
        return self._floor.is_exact

    def max_ms(self, factor: float = 1.0) -> float:
        """What no placement's slowest rank is below.

        Args:
            factor: What floors are multiplied with. Above 1, the bound is an estimate.
        """
        item_ms_N = self._item_ms_N
        least_ms = max(float(item_ms_N.max()), _of_many(item_ms_N, self._problem.num_ranks), self._least_mean())
        return factor * (self._base_ms + least_ms) * (1 - _TOLERANCE)

    def factor(self, ranks_N: RankArray) -> float:
        """By how much ranks of a placement take longer than their floor, at least."""
        held_R = np.bincount(ranks_N, minlength=self._problem.num_ranks) > 0
        floor_ms_R = np.bincount(ranks_N, weights=self._item_ms_N, minlength=len(held_R)) + self._base_ms
        return float((self._problem.rank_ms(ranks_N)[held_R] / np.maximum(floor_ms_R[held_R], 1e-30)).min())

    def _least_mean(self) -> float:
        """The least time of the slowest group of ranks, if items may be split."""
        problem = self._problem
        fits_NR = problem.allowed_NR & (problem.bytes_N[:, None] <= problem.capacity_R)
        alike = np.concatenate([problem.capacity_R[None], fits_NR.astype(np.int64)])
        _, first_G, group_R = np.unique(alike, axis=1, return_index=True, return_inverse=True)
        size_G = np.bincount(group_R.reshape(-1), minlength=len(first_G))
        if len(size_G) == 1:
            return float(self._item_ms_N.sum()) / problem.num_ranks
        return self._solved(fits_NR[:, first_G], size_G, problem.capacity_R[first_G].astype(np.float64) * size_G)

    def _solved(self, fits_NG: np.ndarray[Any, np.dtype[np.bool_]], size_G: RankArray, room_G: MsArray) -> float:
        from scipy.optimize import linprog
        from scipy.sparse import csr_array, vstack

        item_X, group_X = np.nonzero(fits_NG)
        num_shares, num_items, num_groups = len(item_X), len(fits_NG), len(size_G)
        every, scale = np.arange(num_shares), max(float(self._item_ms_N.max()), 1e-30)

        def by(rows: RankArray, values: MsArray, num_rows: int, slowest: float = 0.0) -> Any:
            """A row of coefficients for each item or group; `slowest` is that of the slowest rank's time."""
            last = np.full(num_rows, slowest)
            columns = np.append(every, np.full(num_rows, num_shares))
            return csr_array((np.append(values, last), (np.append(rows, np.arange(num_rows)), columns)))

        times = by(group_X, self._item_ms_N[item_X] / scale / size_G[group_X], num_groups, -1.0)
        in_rooms = by(group_X, self._problem.bytes_N[item_X] / np.maximum(room_G[group_X], 1.0), num_groups)
        found = linprog(
            np.append(np.zeros(num_shares), 1.0),
            A_ub=vstack([times, in_rooms]).tocsr(),
            b_ub=np.append(np.zeros(num_groups), np.ones(num_groups)),
            A_eq=by(item_X, np.ones(num_shares), num_items),
            b_eq=np.ones(num_items),
            method="highs",
        )
        # A placement exists, so only trouble within the solver leaves nothing; 0 bounds everything.
        return float(found.fun) * scale if found.status == 0 else 0.0


def _of_many(item_ms_N: MsArray, num_ranks: int) -> float:
    """What one rank takes at least since there are more items than ranks."""
    falling_N = np.sort(item_ms_N)[::-1]
    counts = range(1, (len(falling_N) - 1) // num_ranks + 1)
    return max((float(falling_N[k * num_ranks - k : k * num_ranks + 1].sum()) for k in counts), default=0.0)
