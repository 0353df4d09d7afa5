"""Finds placements within the memory limits when a planner's own order leads into a dead end.

Shape suffixes: N items, M items of one rank, R ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autoshard.core.errors import InfeasiblePlanError
from autoshard.core.quoting import write_bytes
from autoshard.planners.space.placement import Packing, RankArray

ByteArray = NDArray[np.int64]

_MAX_RESTARTS = 40
#: Restarts cost about the square of the items: 4,000 of them in all keep 800 tables within seconds.
_RESTART_ITEMS = 4000
_EXACT_MAX_ITEMS = 40
_EXACT_MAX_NODES = 20_000


class Filling:
    """Ranks being filled item by item.

    An item that no rank has room for goes to the allowed rank with most room left, for `repair` to sort out.
    """

    def __init__(self, problem: Packing) -> None:
        self.problem = problem
        self.ranks_N: RankArray = np.zeros(problem.num_items, dtype=np.int64)
        self.held_R: ByteArray = np.zeros(problem.num_ranks, dtype=np.int64)
        self.failure: InfeasiblePlanError | None = None
        """Of the first item that did not fit."""

    def free_bytes(self) -> ByteArray:
        """Bytes left on each rank, shape (R,); negative where it is overfull."""
        return self.problem.capacity_R - self.held_R

    def has_room(self, item: int) -> NDArray[np.bool_]:
        """Ranks that an item may go to and fits on, shape (R,)."""
        fits_R: NDArray[np.bool_] = self.problem.allowed_NR[item] & (self.problem.bytes_N[item] <= self.free_bytes())
        return fits_R

    def put(self, item: int, scores_R: NDArray[np.float64]) -> int:
        """Puts an item on the allowed rank with the lowest score among those with room, and returns that rank."""
        fits_R = self.has_room(item)
        if fits_R.any():
            rank = int(np.where(fits_R, scores_R, np.inf).argmin())
        else:
            self.failure = self.failure or _does_not_fit(self.problem, item, self.free_bytes())
            may_R = self.problem.allowed_NR[item]
            rank = int(np.where(may_R, self.free_bytes(), np.iinfo(np.int64).min).argmax())
        self.ranks_N[item] = rank
        self.held_R[rank] += self.problem.bytes_N[item]
        return rank


def _does_not_fit(problem: Packing, item: int, free_R: ByteArray) -> InfeasiblePlanError:
    """The error for an item that no rank has room for, given the bytes that are left."""
    free_R = np.where(problem.allowed_NR[item], free_R, -1)
    missing = int(problem.bytes_N[item] - free_R.max())
    return InfeasiblePlanError(
        f"{problem.label(item)} needs {write_bytes(problem.bytes_N[item])}, {write_bytes(missing)} more than are free "
        f"on rank {int(free_R.argmax())}, the one with most room left"
    )


def repair(problem: Packing, ranks_N: RankArray, seed: int) -> RankArray:
    """A placement within the memory limits, as near to the given one as moves and swaps of single items lead.

    If these get stuck, all items are placed anew by falling bytes, each on the rank that it fills best, first as
    they are and then in slightly shuffled orders; small problems are searched exhaustively at last.

    Args:
        problem: The problem.
        ranks_N: A placement on allowed ranks that may exceed memory; returned as it is if it does not.
        seed: Source of the shuffles.

    Raises:
        InfeasiblePlanError: If no placement was found; the text names an item and the bytes that are missing.
    """
    ranks_N = _reduce_overflow(problem, ranks_N)
    if problem.is_feasible(ranks_N):
        return ranks_N
    rng = np.random.default_rng(seed)
    first_failure: InfeasiblePlanError | None = None
    num_restarts = max(3, min(_MAX_RESTARTS, _RESTART_ITEMS // problem.num_items))
    for attempt in range(num_restarts):
        noise_N = rng.uniform(1.0, 1.0 + attempt / num_restarts, problem.num_items)
        filling = _filled(problem, problem.bytes_N * noise_N)
        first_failure = first_failure or filling.failure
        ranks_N = _reduce_overflow(problem, filling.ranks_N)
        if problem.is_feasible(ranks_N):
            return ranks_N
    found = _search_exactly(problem) if problem.num_items <= _EXACT_MAX_ITEMS else None
    if found is not None:
        return found
    assert first_failure is not None, "a placement without dead ends is feasible"
    raise first_failure


def _filled(problem: Packing, keys_N: NDArray[np.float64]) -> Filling:
    """Places items by falling key, those with least choice of ranks first, each where least room is left."""
    filling = Filling(problem)
    for item in np.lexsort((-keys_N, problem.allowed_NR.sum(axis=1))):
        filling.put(int(item), filling.free_bytes().astype(np.float64))
    return filling


def _reduce_overflow(problem: Packing, ranks_N: RankArray) -> RankArray:
    """Moves and swaps items out of overfull ranks as long as fewer bytes are over the limits for it."""
    ranks_N = ranks_N.copy()
    held_R = problem.rank_bytes(ranks_N)
    while True:
        over_R = np.maximum(held_R - problem.capacity_R, 0)
        best: tuple[int, int, int, int] | None = None
        for overfull in np.flatnonzero(over_R):
            step = _best_step(problem, ranks_N, held_R, int(overfull))
            if step is not None and (best is None or step[0] < best[0]):
                best = step
        if best is None:
            return ranks_N
        _, item, rank, swapped = best
        source = int(ranks_N[item])
        ranks_N[item] = rank
        if swapped >= 0:
            ranks_N[swapped] = source
        held_R = problem.rank_bytes(ranks_N)


def _best_step(
    problem: Packing, ranks_N: RankArray, held_R: ByteArray, source: int
) -> tuple[int, int, int, int] | None:
    """Largest cut of overflow by one move or swap out of a rank: (change, item, new rank, swapped item or -1)."""
    mine_M = np.flatnonzero(ranks_N == source)
    give_M = problem.bytes_N[mine_M][:, None]
    free_R = problem.capacity_R - held_R
    over_R = np.maximum(-free_R, 0)

    def change(gained: ByteArray, target_R: NDArray[np.int64]) -> ByteArray:
        """Change of overflow if `gained` bytes go from the source to each target."""
        at_source = np.maximum(over_R[source] - gained, 0) - over_R[source]
        at_target = np.maximum(gained - free_R[target_R], 0) - over_R[target_R]
        return np.asarray(at_source + at_target)

    ranks_R = np.arange(problem.num_ranks)
    moves_MR = change(give_M, ranks_R)
    moves_MR[~problem.allowed_NR[mine_M] | (ranks_R == source)] = 0
    swaps_MN = change(give_M - problem.bytes_N[None, :], ranks_N)
    swaps_MN[~problem.allowed_NR[mine_M][:, ranks_N] | ~problem.allowed_NR[:, source] | (ranks_N == source)] = 0
    move, swap = int(moves_MR.argmin()), int(swaps_MN.argmin())
    if moves_MR.flat[move] <= swaps_MN.flat[swap] and moves_MR.flat[move] < 0:
        row, rank = divmod(move, problem.num_ranks)
        return int(moves_MR.flat[move]), int(mine_M[row]), rank, -1
    if swaps_MN.flat[swap] < 0:
        row, other = divmod(swap, problem.num_items)
        return int(swaps_MN.flat[swap]), int(mine_M[row]), int(ranks_N[other]), other
    return None


def _search_exactly(problem: Packing) -> RankArray | None:
    """Depth-first search by falling bytes within a budget of nodes; None if that found nothing."""
    order = np.lexsort((-problem.bytes_N, problem.allowed_NR.sum(axis=1)))
    bytes_N = problem.bytes_N[order].tolist()
    smallest_N = np.minimum.accumulate(problem.bytes_N[order][::-1])[::-1].tolist()
    allowed = [np.flatnonzero(problem.allowed_NR[item]).tolist() for item in order]
    free_R = problem.capacity_R.tolist()
    spare = sum(free_R) - sum(bytes_N)
    alike = bool(problem.allowed_NR.all())
    chosen: list[int] = []
    nodes = 0

    def place(depth: int) -> bool:
        nonlocal nodes
        if depth == len(bytes_N):
            return True
        nodes += 1
        # Room that not even the smallest item left can use is lost.
        lost = sum(free for free in free_R if free < smallest_N[depth])
        if nodes > _EXACT_MAX_NODES or lost > spare:
            return False
        tried: set[int] = set()
        for rank in allowed[depth]:
            if free_R[rank] < bytes_N[depth] or (alike and free_R[rank] in tried):
                continue
            tried.add(free_R[rank])
            free_R[rank] -= bytes_N[depth]
            chosen.append(rank)
            if place(depth + 1):
                return True
            chosen.pop()
            free_R[rank] += bytes_N[depth]
        return False

    if not place(0):
        return None
    ranks_N = np.empty(len(chosen), dtype=np.int64)
    ranks_N[order] = chosen
    return ranks_N
