"""A placement known to be within the memory limits, from which masks start.

Shape suffixes: N items, R ranks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autoshard.core.errors import InfeasiblePlanError
from autoshard.planners.space.feasibility import filled, repair
from autoshard.planners.space.placement import PlacementProblem, RankArray


def feasible_placement(problem: PlacementProblem) -> RankArray:
    """A placement within the memory limits, whatever it costs; shape (N,).

    Items go to ranks. Those that fit on none of them are shared by all ranks, in the tier that takes least memory;
    if the rest does not fit yet, the largest ones follow, one, two, four and so on at a time.

    Raises:
        InfeasiblePlanError: If none was found.
    """
    total = int(problem.bytes_N.sum())
    holds_all_R = problem.allowed_NR.all(axis=0) & (problem.capacity_R >= total)
    if holds_all_R.any():
        return np.full(problem.num_items, holds_all_R.argmax(), dtype=np.int64)
    if not problem.tiers:
        return _on_ranks(problem)
    may_share_NK = problem.allowed_NA[:, problem.num_ranks :]
    bytes_NK = np.where(may_share_NK, problem.bytes_WN[1:].T, np.iinfo(np.int64).max)
    tier_N, least_N, may_share_N = bytes_NK.argmin(axis=1), bytes_NK.min(axis=1), may_share_NK.any(axis=1)
    fits_NR = problem.allowed_NR & (problem.bytes_N[:, None] <= problem.capacity_R)
    is_shared_N = ~np.asarray(fits_NR.any(axis=1))
    first_error: InfeasiblePlanError | None = None
    num_more = 1
    while True:
        ranks_N = problem.num_ranks + tier_N
        try:
            ranks_N[~is_shared_N] = _beside(problem, ~is_shared_N, int(least_N[is_shared_N].sum()))
        except InfeasiblePlanError as error:
            first_error = first_error or error
        else:
            return ranks_N
        left = np.flatnonzero(may_share_N & ~is_shared_N)
        if not len(left):
            raise first_error
        is_shared_N[left[np.argsort(-problem.bytes_N[left], kind="stable")[:num_more]]] = True
        num_more *= 2


def _beside(problem: PlacementProblem, alone_N: NDArray[np.bool_], shared_bytes: int) -> RankArray:
    """Ranks of the items that are not shared, where all others take `shared_bytes` of every rank."""
    capacity_R = problem.capacity_R - shared_bytes
    if (capacity_R < 0).any():
        missing = int(-capacity_R.min())
        raise InfeasiblePlanError(
            f"tables that all ranks share need {shared_bytes:,} bytes of each, {missing:,} bytes more than rank "
            f"{int(capacity_R.argmin())} has"
        )
    if not alone_N.any():
        return np.zeros(0, dtype=np.int64)
    alone = problem.subset(np.flatnonzero(alone_N), with_tiers=False)
    return _on_ranks(replace(alone, capacity_R=capacity_R))


def _on_ranks(problem: PlacementProblem) -> RankArray:
    """By falling bytes, each where most room is left; repaired if that is not enough."""
    return repair(problem, filled(problem, problem.bytes_N, tightly=False).ranks_N, 0)
