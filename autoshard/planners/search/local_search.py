"""Local search in rounds: explore, then level the ranks, and start elsewhere when that has led nowhere for a while.

Shape suffixes: N items, R ranks, G blocks, K ranks of a block, M movable items of a block.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autoshard.core.errors import InfeasiblePlanError
from autoshard.planners.bounds.costliest_item import costliest_item_ms
from autoshard.planners.search.blocks import Blocks, FloatArray, IndexArray, StepSettings
from autoshard.planners.space.feasibility import repair
from autoshard.planners.space.placement import PlacementProblem, RankArray

# Settings, of 80 tables of MetaSyn / 64 on 8 ranks (eight tasks, the learned model of a CPU, November 2026): after 400
# steps from the greedy plan the slowest rank is 0.4% above the best of a minute's search on average.
#: A low exponent finds groups of tables that are cheap together; it leaves ranks unequal by about 1%.
_EXPLORE = StepSettings(exponent=7.0, tenure=4)
#: A high one makes the ranks equal.
_LEVEL = StepSettings(exponent=150.0, tenure=4)
#: Steps of a round for each item of a block: (exploring, levelling) where there is one block, and where there are more,
#: whose ranks are dealt anew after each round. Short rounds deal more often: on four level tasks of 800 tables on 80
#: ranks, 300 steps end 0.05% above 3 s of search in the mean with these, 0.08% with half as many steps more a round
#: (the shipped model of a CPU, a busy Xeon, November 2026).
_STEPS_PER_ITEM = {True: (1.25, 0.4), False: (0.1, 0.2)}
_MIN_STEPS = 4
#: Exponent of the norm by which the best state of a block is chosen where there are several blocks.
_KEEP_EXPONENT = 60.0

#: Up to so many items and ranks are one block. In others, work per step grows with the square of the items.
_MAX_ITEMS_PER_BLOCK, _MAX_RANKS_PER_BLOCK = 128, 32
#: Items that blocks are made for where there are several.
_ITEMS_PER_BLOCK = 40

#: Rounds without a better plan before the search starts elsewhere, and such starts before it ends.
_PATIENCE, _MAX_RESTARTS = 8, 30
#: Share of the items that a restart moves at random.
_KICKED_SHARE = 0.3
_BALANCED = 1e-4
_ADDITIVE = 1e-5
_ROUNDING = 1e-6

Stopped = Literal["bound", "balanced", "settled", "steps", "time"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best placement that a search met.

    Attributes:
        ranks_N: The placement.
        max_ms: Kernel time of its slowest rank.
        num_steps: Steps that were made; in each, every block of ranks made one exchange.
        stopped: Why it ended: `bound` (no rank can be faster than the costliest item), `balanced` (prices add up and
            all ranks are alike), `settled` (nothing better from many starts), `steps` or `time`.
    """

    ranks_N: RankArray
    max_ms: float
    num_steps: int
    stopped: Stopped


def improve(
    problem: PlacementProblem,
    starts: Sequence[RankArray],
    *,
    seed: int,
    deadline_s: float,
    max_steps: int | None = None,
) -> SearchResult:
    """Looks for a placement whose slowest rank is faster.

    Ranks are dealt into blocks of few tables each, small tasks into a single one. In a round, each block makes the
    best exchange in it, again and again: moves of an item, and swaps of two, none of which is undone for some steps
    (tabu search). The exchanges first make a low p-norm of the ranks' times smaller, which finds tables that are
    cheap together, then a high one, which levels the ranks. When some rounds have led nowhere, the search goes on
    from the next start, or from the best placement with a part of its items thrown about. Where the costliest item
    alone makes its rank the slowest, the other ranks are levelled among themselves.

    The same seed and number of steps give the same placement, whatever the clock says, unless time runs out.

    Args:
        problem: The problem; its shared tiers are not used.
        starts: Feasible placements; at least one. The result is never worse than the best of them.
        seed: Seed of all that is left to chance.
        deadline_s: On the clock of `time.perf_counter`.
        max_steps: Most steps to make; None for as many as there is time for.

    Source:
        Glover, Tabu Search, Part I (ORSA Journal on Computing, 1989). Differs: see `Blocks` for how exchanges are
        compared, and the p-norms.
    """
    result = _search(problem, starts, seed, deadline_s, max_steps)
    left = None if max_steps is None else max_steps - result.num_steps
    rest_R = problem.rank_ms(result.ranks_N) < result.max_ms * (1 - _ROUNDING)
    if result.stopped != "bound" or rest_R.sum() < 2 or left == 0 or time.perf_counter() >= deadline_s:
        return result
    # Nothing helps the slowest ranks, but what the others have in hand is a margin against errors of the model.
    rest_N = rest_R[result.ranks_N]
    if not rest_N.any():
        return result
    start_M = (np.cumsum(rest_R) - 1)[result.ranks_N[rest_N]]
    others = improve(_part(problem, rest_N, rest_R), [start_M], seed=seed, deadline_s=deadline_s, max_steps=left)
    ranks_N = result.ranks_N.copy()
    ranks_N[rest_N] = np.flatnonzero(rest_R)[others.ranks_N]
    return replace(result, ranks_N=ranks_N, num_steps=result.num_steps + others.num_steps)


def _search(
    problem: PlacementProblem,
    starts: Sequence[RankArray],
    seed: int,
    deadline_s: float,
    max_steps: int | None,
) -> SearchResult:
    search = _Search(problem, starts, seed, deadline_s, max_steps)
    while search.stopped is None:
        search.round()
    return search.result()


def _part(problem: PlacementProblem, of_N: NDArray[np.bool_], of_R: NDArray[np.bool_]) -> PlacementProblem:
    """Some of the items on some of the ranks."""
    part = problem.subset(np.flatnonzero(of_N), with_tiers=False)
    return replace(part, capacity_R=problem.capacity_R[of_R], allowed_NA=part.allowed_NR[:, of_R])


class _Search:
    """What a search knows between two rounds."""

    def __init__(
        self,
        problem: PlacementProblem,
        starts: Sequence[RankArray],
        seed: int,
        deadline_s: float,
        max_steps: int | None,
    ) -> None:
        self.problem = problem
        self.rng = np.random.default_rng(seed)
        self.deadline_s = deadline_s
        self.max_steps = max_steps
        costs_ms = [problem.rank_ms(ranks_N) for ranks_N in starts]
        order = np.argsort([cost_ms_R.max() for cost_ms_R in costs_ms], kind="stable")
        self.starts = [starts[index] for index in order[1:]]
        self.best_N = self.current_N = starts[order[0]]
        self.best_ms = float(costs_ms[order[0]].max())
        self.floor_ms = costliest_item_ms(problem)
        self.adds_up = False
        self.num_steps = self.failures = self.restarts = 0
        self.stopped: Stopped | None = None
        if problem.num_ranks == 1:
            self.stopped, self.floor_ms = "bound", self.best_ms
        elif max_steps == 0:
            self.stopped = "steps"
        self._look_at_bounds(float(costs_ms[order[0]].mean()))

    def result(self) -> SearchResult:
        assert self.stopped is not None, "the search goes on"
        return SearchResult(
            ranks_N=self.best_N,
            max_ms=self.best_ms,
            num_steps=self.num_steps,
            stopped=self.stopped,
        )

    def round(self) -> None:
        """One round from the current placement, which becomes what the round led to."""
        blocks = self._blocks()
        kept = _Kept(blocks)
        num_blocks, num_items = blocks.slots_GM.shape
        for settings, per_item in zip((_EXPLORE, _LEVEL), _STEPS_PER_ITEM[num_blocks == 1], strict=True):
            for _ in range(max(_MIN_STEPS, round(per_item * num_items))):
                if self._is_over():
                    break
                blocks.step(self.num_steps, settings, self.rng)
                self.num_steps += 1
                kept.look()
        self.adds_up = blocks.adds_up(_ADDITIVE)
        self._accept(blocks.place(self.current_N, kept.slots_GM))

    def _accept(self, ranks_N: RankArray) -> None:
        cost_ms_R = self.problem.rank_ms(ranks_N)
        self.current_N = ranks_N
        slowest_ms, mean_ms = float(cost_ms_R.max()), float(cost_ms_R.mean())
        self.failures += 1
        if slowest_ms < self.best_ms * (1 - _ROUNDING):
            self.best_ms, self.best_N = slowest_ms, ranks_N
            self.failures = self.restarts = 0
            self._look_at_bounds(mean_ms)
        elif self.failures >= _PATIENCE:
            self.failures = 0
            self.restarts += 1
            if self.restarts > _MAX_RESTARTS:
                self.stopped = self.stopped or "settled"
            self.current_N = self.starts.pop(0) if self.starts else self._kicked()

    def _look_at_bounds(self, mean_ms: float) -> None:
        if self.best_ms <= self.floor_ms * (1 + _ROUNDING):
            self.stopped = "bound"
        elif self.adds_up and self.best_ms <= mean_ms * (1 + _BALANCED):
            self.stopped = "balanced"

    def _is_over(self) -> bool:
        if self.stopped is None:
            if self.max_steps is not None and self.num_steps >= self.max_steps:
                self.stopped = "steps"
            elif time.perf_counter() >= self.deadline_s:
                self.stopped = "time"
        return self.stopped is not None

    def _kicked(self) -> RankArray:
        """The best placement with a part of its items on random ranks."""
        ranks_N: RankArray = self.best_N.copy()
        for item in np.flatnonzero(self.rng.random(len(ranks_N)) < _KICKED_SHARE):
            ranks_N[item] = self.rng.choice(np.flatnonzero(self.problem.allowed_NR[item]))
        try:
            ranks_N = repair(self.problem, ranks_N, int(self.rng.integers(1 << 32)))
        except InfeasiblePlanError:
            ranks_N = self.best_N
        return ranks_N

    def _blocks(self) -> Blocks:
        """Ranks dealt by falling time, so that each block has slow ones and fast ones, and items to move of each."""
        problem = self.problem
        num_ranks, num_items = problem.num_ranks, problem.num_items
        if num_items <= _MAX_ITEMS_PER_BLOCK and num_ranks <= _MAX_RANKS_PER_BLOCK:
            width = num_ranks
        else:
            width = min(max(-(-_ITEMS_PER_BLOCK * num_ranks // num_items), 2), _MAX_RANKS_PER_BLOCK, num_ranks)
        num_blocks = num_ranks // width
        order_R = np.argsort(-problem.rank_ms(self.current_N), kind="stable")
        # The slowest ranks lead the blocks, the others follow at random.
        order_R[num_blocks:] = self.rng.permutation(order_R[num_blocks:])
        blocks_GK = order_R[: num_blocks * width].reshape(width, num_blocks).T
        block_R = np.full(num_ranks, num_blocks)
        block_R[blocks_GK] = np.arange(num_blocks)[:, None]
        block_N = block_R[self.current_N]
        items = [np.flatnonzero(block_N == block) for block in range(num_blocks)]
        items = [
            np.sort(self.rng.choice(of_block, _MAX_ITEMS_PER_BLOCK, replace=False))
            if len(of_block) > _MAX_ITEMS_PER_BLOCK
            else of_block
            for of_block in items
        ]
        items_GM = np.full((num_blocks, max(1, *map(len, items)) if items else 1), problem.num_items)
        for block, of_block in enumerate(items):
            items_GM[block, : len(of_block)] = of_block
        return Blocks(problem, self.current_N, blocks_GK, items_GM)


class _Kept:
    """The best state of each block: of a single one that with the fastest slowest rank, of several by a norm."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._unit_ms = max(float(blocks.cost_ms_GK.max()), 1e-30)
        self._value_G = self._values()
        self.slots_GM: IndexArray = blocks.slots_GM

    def look(self) -> None:
        """Compares the blocks as they are now."""
        value_G = self._values()
        better_G = value_G < self._value_G
        if better_G.any():
            self._value_G = np.where(better_G, value_G, self._value_G)
            self.slots_GM[better_G] = self._blocks.slots_GM[better_G]

    def _values(self) -> FloatArray:
        cost_ms_GK = self._blocks.cost_ms_GK
        slowest_ms_G: FloatArray = cost_ms_GK.max(axis=1)
        if len(cost_ms_GK) == 1:
            return slowest_ms_G
        norms_G: FloatArray = np.exp(_KEEP_EXPONENT * (cost_ms_GK / self._unit_ms - 1)).sum(axis=1)
        return norms_G
