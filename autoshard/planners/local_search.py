"""Local search on the cost model: annealing over exchanges between two ranks, priced in batches of summed codes.

Shape suffixes: N items, R ranks, H width of a code, G items that one rank may give, T items that it may take in return.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autoshard.core.costs import MsArray
from autoshard.planners.placement import PlacementProblem, RankArray

# Settings of the annealing, which runs from the first to the second value of each pair. Temperatures are divided by
# the number of ranks, as is the effect that one rank's time has on the energy. Measured on one core of a shared x86
# machine, 80 tables of MetaSyn / 64 on 8 ranks, four tasks each on three learned models (relative errors of 2%, 7% and
# 22%), five seeds: 6,000 steps take 0.75 s and end at most 0.5% above 400,000 steps, where greedy is up to 2.8% above.
# `pytest -m slow tests/test_planning.py` repeats a part of it.
_EXPONENT = (12.0, 24.0)
_TEMPERATURE = (0.012, 1e-4)
#: How often one of the two ranks is the slowest one.
_FROM_SLOWEST = 0.2

#: Share of the time kept for levelling the ranks at the end.
_LEVELLING_SHARE = 0.08
_MAX_PARTNERS = 12
#: Steps between looks at the clock.
_CLOCK_STEPS = 20
#: How far steps may fall behind the clock before the schedule skips ahead. Below it a run depends on its seed only.
_CLOCK_SLACK = 0.1
_BALANCED = 1e-4
_ROUNDING = 1e-6

Stopped = Literal["bound", "balanced", "steps", "time"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best placement that a search met.

    Attributes:
        ranks_N: The placement.
        max_ms: Kernel time of its slowest rank.
        num_steps: Steps of annealing that were made.
        stopped: Why it ended: `bound` (no rank can be faster than the costliest item), `balanced` (all ranks alike),
            `steps` or `time`.
    """

    ranks_N: RankArray
    max_ms: float
    num_steps: int
    stopped: Stopped


def improve(
    problem: PlacementProblem, ranks_N: RankArray, *, seed: int, num_steps: int, deadline_s: float
) -> SearchResult:
    """Looks for a placement whose slowest rank is faster.

    Each step takes two ranks and prices every way to move one item between them or to swap two, then draws one of
    them, or to stay, from the Boltzmann distribution of the energy: the logarithm of the p-norm of the ranks' times,
    with p rising and the temperature falling. Before and after it, placements are levelled: exchanges that make the
    slower of two ranks faster, until there are none.

    Args:
        problem: The problem.
        ranks_N: A feasible placement to start from; never returned worse.
        seed: The same seed and number of steps give the same placement, unless time runs out.
        num_steps: Steps of annealing.
        deadline_s: On the clock of `time.perf_counter`. When steps fall behind it, the schedule skips ahead.
    """
    best = _Placement(problem, ranks_N)
    if problem.num_ranks == 1 or best.max_ms <= 0:
        return SearchResult(ranks_N=best.ranks_N, max_ms=best.max_ms, num_steps=0, stopped="bound")
    started_s = time.perf_counter()
    levelling_s = deadline_s - _LEVELLING_SHARE * (deadline_s - started_s)
    _level(best, levelling_s)
    annealed, done, stopped = _anneal(best, seed, num_steps, started_s, levelling_s)
    _level(annealed, deadline_s)
    best = min(best, annealed, key=lambda placement: placement.max_ms)
    return SearchResult(ranks_N=best.ranks_N, max_ms=best.max_ms, num_steps=done, stopped=stopped)


class _Placement:
    """A placement with the sums that prices need; `exchange` edits it.

    Item N stands for none: it weighs nothing and may go anywhere.
    """

    def __init__(self, problem: PlacementProblem, ranks_N: RankArray) -> None:
        self.problem = problem
        self.none = problem.num_items
        self.codes_NH = np.pad(problem.codes_NH, ((0, 1), (0, 0)))
        self.bytes_N = np.pad(problem.bytes_N, (0, 1))
        self.allowed_NR = np.pad(problem.allowed_NR, ((0, 1), (0, 0)), constant_values=True)
        self.ranks_N = ranks_N.copy()
        self.codes_RH = problem.rank_codes(ranks_N)
        self.free_R = problem.capacity_R - problem.rank_bytes(ranks_N)
        self.cost_ms_R = problem.rank_ms(ranks_N)
        self.offers = [self._offer(rank) for rank in range(problem.num_ranks)]
        """For each rank, the items that it may part with: its own, and none."""

    @property
    def max_ms(self) -> float:
        return float(self.cost_ms_R.max())

    def exchange(self, exchanges: _Exchanges, index: int) -> None:
        """Does one of the exchanges; the two sums are made anew, so that no rounding errors pile up."""
        items = exchanges.items(index)
        if items == (self.none, self.none):
            return
        for item, rank in zip(items, reversed(exchanges.ranks), strict=True):
            if item != self.none:
                self.ranks_N[item] = rank
        for side, rank in enumerate(exchanges.ranks):
            offer = self.offers[rank] = self._offer(rank)
            self.codes_RH[rank] = self.codes_NH[offer].sum(axis=0)
            self.free_R[rank] = self.problem.capacity_R[rank] - self.bytes_N[offer].sum()
            self.cost_ms_R[rank] = exchanges.pair_ms[side, index]

    def _offer(self, rank: int) -> NDArray[np.int64]:
        return np.append(np.flatnonzero(self.ranks_N == rank), self.none)


class _Exchanges:
    """All feasible moves and swaps of single items between two ranks, priced; to do nothing is one of them.

    Attributes:
        ranks: The giver and the taker (each may give or take nothing).
        pair_ms: Kernel times of the two after each exchange, shape (2, exchanges).
    """

    def __init__(self, state: _Placement, giver: int, taker: int) -> None:
        self.ranks = (giver, taker)
        give_G, take_T = state.offers[giver], state.offers[taker]
        gained_GT = state.bytes_N[give_G][:, None] - state.bytes_N[take_T]
        fits_GT = (gained_GT <= state.free_R[taker]) & (gained_GT >= -state.free_R[giver])
        fits_GT &= state.allowed_NR[give_G, taker][:, None] & state.allowed_NR[take_T, giver]
        give, take = fits_GT.nonzero()
        self._give, self._take = give_G[give], take_T[take]
        change_H = state.codes_NH[self._give] - state.codes_NH[self._take]
        codes_H = np.concatenate([state.codes_RH[giver] - change_H, state.codes_RH[taker] + change_H])
        self.pair_ms = state.problem.model.price(codes_H).reshape(2, -1)
        # The model is free to price what rounding leaves of an empty rank; nothing at all costs nothing.
        if len(give_G) <= 2:
            self.pair_ms[0, (self._give == give_G[0]) & (self._take == state.none)] = 0.0
        if len(take_T) <= 2:
            self.pair_ms[1, (self._take == take_T[0]) & (self._give == state.none)] = 0.0

    def items(self, index: int) -> tuple[int, int]:
        """The item that an exchange gives and the one that it takes, either of which may be none."""
        return int(self._give[index]), int(self._take[index])


def _anneal(
    start: _Placement, seed: int, num_steps: int, started_s: float, deadline_s: float
) -> tuple[_Placement, int, Stopped]:
    """The best placement met, the steps made, and why they ended."""
    problem = start.problem
    rng = np.random.default_rng(seed)
    state = _Placement(problem, start.ranks_N)
    best_ms, best_N = state.max_ms, state.ranks_N.copy()
    unit_ms = best_ms
    bound_ms = _bound_ms(problem)
    skipped, done = 0.0, 0
    stopped = _no_more_to_gain(state, bound_ms)
    while stopped is None and done < num_steps:
        if done % _CLOCK_STEPS == 0:
            elapsed = (time.perf_counter() - started_s) / max(deadline_s - started_s, 1e-9)
            if elapsed > done / num_steps + skipped + _CLOCK_SLACK:
                skipped = elapsed - done / num_steps
            if elapsed >= 1:
                stopped = "time"
                break
        progress = min(done / num_steps + skipped, 1.0)
        temperature = _between(_TEMPERATURE, progress) / problem.num_ranks
        _step(state, rng, unit_ms, _between(_EXPONENT, progress), temperature)
        done += 1
        if state.max_ms < best_ms * (1 - _ROUNDING):
            best_ms, best_N = state.max_ms, state.ranks_N.copy()
            stopped = _no_more_to_gain(state, bound_ms)
    return _Placement(problem, best_N), done, stopped or "steps"


def _step(state: _Placement, rng: np.random.Generator, unit_ms: float, exponent: float, temperature: float) -> None:
    num_ranks = state.problem.num_ranks
    giver = int(state.cost_ms_R.argmax()) if rng.random() < _FROM_SLOWEST else int(rng.integers(num_ranks))
    taker = int(rng.integers(num_ranks - 1))
    taker += taker >= giver
    exchanges = _Exchanges(state, giver, taker)
    powers_R: MsArray = (state.cost_ms_R / unit_ms) ** exponent
    powers_R[[giver, taker]] = 0.0
    powers = powers_R.sum() + ((exchanges.pair_ms / unit_ms) ** exponent).sum(axis=0)
    energy = np.log(np.maximum(powers, 1e-300)) / exponent
    # The minimum of energies with Gumbel noise is a draw from their Boltzmann distribution.
    index = int((energy - temperature * rng.gumbel(size=len(energy))).argmin())
    state.exchange(exchanges, index)


def _level(state: _Placement, deadline_s: float) -> None:
    """Makes the slower of two ranks faster as long as that can be done, in passes from the slowest rank on."""
    levelled = False
    while not levelled:
        levelled = True
        position = 0
        while position < state.problem.num_ranks and time.perf_counter() < deadline_s:
            if _make_faster(state, position):
                levelled = False
            else:
                position += 1


def _make_faster(state: _Placement, position: int) -> bool:
    """Makes the rank that is slower than all but `position` others faster, if an exchange with a fast one can."""
    order = np.argsort(-state.cost_ms_R, kind="stable")
    slow = int(order[position])
    for fast in order[position + 1 :][::-1][:_MAX_PARTNERS]:
        exchanges = _Exchanges(state, slow, int(fast))
        slower_ms = exchanges.pair_ms.max(axis=0)
        index = int(slower_ms.argmin())
        if slower_ms[index] < state.cost_ms_R[slow] * (1 - _ROUNDING):
            state.exchange(exchanges, index)
            return True
    return False


def _bound_ms(problem: PlacementProblem) -> float:
    """Price of the costliest item, if no other item makes it cheaper by joining it; 0 if that says nothing.

    Learned models do not always grow with what is added to a set.
    """
    costliest = int(problem.kernel_ms_N.argmax())
    joined_ms = problem.model.price(problem.codes_NH[costliest] + np.delete(problem.codes_NH, costliest, axis=0))
    alone_ms = float(problem.kernel_ms_N[costliest])
    return alone_ms if (joined_ms >= alone_ms).all() else 0.0


def _no_more_to_gain(state: _Placement, bound_ms: float) -> Stopped | None:
    if state.max_ms <= bound_ms * (1 + _ROUNDING):
        return "bound"
    return "balanced" if state.max_ms <= state.cost_ms_R.mean() * (1 + _BALANCED) else None


def _between(ends: tuple[float, float], progress: float) -> float:
    """Geometric interpolation."""
    start, end = ends
    return float(start * (end / start) ** progress)
