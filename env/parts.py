"""The parts that items may be split into, and the order in which they come.

Shape suffixes: N items, U shards, M parts, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.core import MemoryBytes, Shard
from autoshard.planners.space.placement import PlacementProblem, RankArray
from env.splits import SplitBy, may_go_on, split

_NONE = -1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """Items, the two parts of each, the parts of these and so on: a binary tree per item.

    Parts come in a fixed order, so that the part that is up says all about where an episode is. A part that is split
    is followed by its two parts, else by what comes after it.

    Attributes:
        problem: All parts as items: the problem itself if nothing may be split, else one whose items overlap.
        root_N: The part that is the whole item.
        halves_M2: The two parts of a part (halves, or hot rows and the rest); -1 if it may not be split.
        after_M: The part that comes after a part is placed; M after the last.
        remaining_M: Share of the items that are not placed yet when a part comes up.
        rest_bytes_M: Bytes of what comes after a part if none of it is split; only of items that may go to any rank.
        largest_M: The largest of these.
    """

    problem: PlacementProblem
    root_N: NDArray[np.int64]
    halves_M2: NDArray[np.int64]
    after_M: NDArray[np.int64]
    remaining_M: NDArray[np.float64]
    rest_bytes_M: NDArray[np.int64]
    largest_M: NDArray[np.int64]

    @classmethod
    def of(cls, problem: PlacementProblem, order_N: RankArray, max_splits: int, by: SplitBy = SplitBy.COLUMNS) -> Parts:
        """The parts of a problem's items, split at most `max_splits` times one within the other."""
        every, root_N, halves_M2 = problem, np.arange(problem.num_items), np.full((problem.num_items, 2), _NONE)
        if max_splits:
            every, root_N, halves_M2 = _cut(problem, max_splits, by)
        walk = _Walk(every, halves_M2)
        for position, item in reversed(list(enumerate(order_N))):
            walk.add(int(root_N[item]), position / problem.num_items, 1 / problem.num_items)
        return cls(
            problem=every,
            root_N=root_N,
            halves_M2=halves_M2,
            after_M=walk.after_M,
            remaining_M=walk.remaining_M,
            rest_bytes_M=walk.rest_bytes_M,
            largest_M=walk.largest_M,
        )

    @property
    def num_parts(self) -> int:
        """M."""
        return self.problem.num_items

    def placed(self, problem: PlacementProblem, choice_M: RankArray) -> tuple[PlacementProblem, RankArray]:
        """The problem of those parts that were placed, and the placement of its items.

        Args:
            problem: The problem that these are the parts of.
            choice_M: Choices of parts, -1 for those that were split and those that never came up.
        """
        if self.problem is problem:
            return problem, choice_M
        parts = np.flatnonzero(choice_M >= 0)
        return self.problem.subset(parts), choice_M[parts]


class _Walk:
    """Goes over the parts from the last to the first, and notes what comes after each."""

    def __init__(self, problem: PlacementProblem, halves_M2: NDArray[np.int64]) -> None:
        num_parts = problem.num_items
        self._bytes_M = np.where(problem.allowed_NR.all(axis=1), problem.bytes_N, 0)
        self._halves_M2 = halves_M2
        self._next, self._rest_bytes, self._largest = num_parts, 0, 0
        self.after_M = np.empty(num_parts, dtype=np.int64)
        self.remaining_M = np.empty(num_parts)
        self.rest_bytes_M = np.empty(num_parts, dtype=np.int64)
        self.largest_M = np.empty(num_parts, dtype=np.int64)

    def add(self, root: int, done: float, share: float) -> None:
        """Adds the item that comes before all that were added.

        Args:
            root: The item's part.
            done: Share of the items that come before.
            share: Share of the items that it is.
        """
        self._add(root, done, share, self._next, self._rest_bytes, self._largest)
        self._next = root
        self._rest_bytes += int(self._bytes_M[root])
        self._largest = max(self._largest, int(self._bytes_M[root]))

    def _add(self, part: int, done: float, share: float, after: int, rest_bytes: int, largest: int) -> None:
        self.after_M[part], self.remaining_M[part] = after, 1 - done
        self.rest_bytes_M[part], self.largest_M[part] = rest_bytes, largest
        first, second = self._halves_M2[part].tolist()
        if first == _NONE:
            return
        of_second = int(self._bytes_M[second])
        self._add(first, done, share / 2, second, rest_bytes + of_second, max(largest, of_second))
        self._add(second, done + share / 2, share / 2, after, rest_bytes, largest)


def _cut(
    problem: PlacementProblem, max_splits: int, by: SplitBy
) -> tuple[PlacementProblem, NDArray[np.int64], NDArray[np.int64]]:
    """A problem of all parts, the part of each item, and the two parts of each part.

    Items of several shards, which must share a rank, are not split.
    """
    shards = list(problem.shards)
    item_of = {group[0]: item for item, group in enumerate(problem.members)}
    halves_of: dict[int, tuple[int, int]] = {}
    level = [group[0] for group in problem.members if len(group) == 1]
    for depth in range(max_splits):
        if not level:
            break
        below: list[int] = []
        for shard in level:
            halves = split(shards[shard], by, depth)
            if halves is not None:
                pair = halves_of[shard] = len(shards), len(shards) + 1
                shards += halves
                below += [part for second, part in enumerate(pair) if may_go_on(by, second=bool(second))]
                item_of |= dict.fromkeys(pair, item_of[shard])
        level = below
    every = _overlapping(problem, shards)
    part_of = {group[0]: part for part, group in enumerate(every.members)}
    halves_M2 = np.full((every.num_items, 2), _NONE)
    for shard, pair in halves_of.items():
        halves_M2[part_of[shard]] = [part_of[half] for half in pair]
    every = replace(every, allowed_NA=problem.allowed_NA[[item_of[group[0]] for group in every.members]])
    return every, np.array([part_of[group[0]] for group in problem.members]), halves_M2


def _overlapping(problem: PlacementProblem, shards: list[Shard]) -> PlacementProblem:
    """A problem of shards that overlap, and together take more memory than there is."""
    roomy = MemoryBytes(hbm=2 * sum(shard.storage_bytes for shard in shards))
    every = PlacementProblem.of(
        problem.tables,
        replace(problem.topology, memory_bytes=roomy, overrides=()),
        problem.model,
        shards,
        problem.tiers,
        problem.payload,
    )
    return replace(every, topology=problem.topology, capacity_R=problem.capacity_R)
