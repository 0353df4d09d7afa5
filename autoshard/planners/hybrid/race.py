"""The search: a race of descents from all starts, then ruin and recreate from where the best of them ended."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autoshard.planners.hybrid.descent import Descent, Ground, Start
from autoshard.planners.hybrid.layout import Layout
from autoshard.planners.hybrid.ruin import Rebuilding

#: Steps of every start; those that go on get twice as many again, each time.
_FIRST_STEPS = 4
#: One of so many goes on.
_REDUCTION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Improved:
    """What the search found.

    Attributes:
        layout: The best one that fits the memory.
        step_ms: Its step.
        num_steps: Steps made.
        stopped: Why it ended: `time` or `steps`.
    """

    layout: Layout
    step_ms: float
    num_steps: int
    stopped: str


def improve(starts: Sequence[Start], *, seed: int, deadline_s: float, max_steps: int | None = None) -> Improved:
    """Makes the step of the best of some starts shorter until the time or the steps are over.

    The first steps are the same however many there are, so that more of them never end with a longer step.

    Args:
        starts: They fit the memory; left as they are. The most promising come first.
        seed: Source of all chance.
        deadline_s: When to end, by `time.perf_counter`.
        max_steps: Most steps; None for as many as there is time for.
    """
    ground = Ground(starts[0].layout.space, starts[0].layout.limits, starts[0].layout, seed)
    most = math.inf if max_steps is None else max_steps

    def is_over() -> bool:
        return ground.num_steps >= most or time.perf_counter() >= deadline_s

    found = _raced(ground, starts, is_over)
    best, best_ms = found.best_layout(), found.best_ms
    if not is_over():
        rebuilding = Rebuilding(ground, best)
        while not is_over():
            rebuilding.round(is_over)
        best, best_ms = rebuilding.best, rebuilding.best_ms
    stopped = "steps" if ground.num_steps >= most else "time"
    return Improved(layout=best, step_ms=best_ms, num_steps=ground.num_steps, stopped=stopped)


def _raced(ground: Ground, starts: Sequence[Start], is_over: Callable[[], bool]) -> Descent:
    """The best of descents from some starts, of which the better half goes on each time, twice as far.

    Source:
        Li et al., A System for Massively Parallel Hyperparameter Tuning (MLSys 2020), Sec. 3.2: a descent goes on as
        soon as it is among the better half of those that came as far, so that no step depends on the time there is.
    """
    waiting = iter(starts)
    descents: list[Descent] = []
    rungs: list[list[Descent]] = []
    while not is_over():
        rung, descent = _next(ground, rungs, waiting)
        if descent is None:
            break
        if rung == 0:
            descents.append(descent)
        for _ in range(_FIRST_STEPS * _REDUCTION**rung):
            if descent.is_done or is_over():
                break
            descent.step()
        if rung == len(rungs):
            rungs.append([])
        rungs[rung].append(descent)
    if not descents:
        return Descent(ground, starts[0].layout)
    return min(descents, key=lambda one: one.best_ms)


def _next(ground: Ground, rungs: Sequence[Sequence[Descent]], waiting: Iterator[Start]) -> tuple[int, Descent | None]:
    """The descent that goes on to the highest rung, else the next start; None at the end of the race."""
    for rung in reversed(range(len(rungs))):
        better = sorted(rungs[rung], key=lambda one: one.best_ms)[: len(rungs[rung]) // _REDUCTION]
        passed = rungs[rung + 1] if rung + 1 < len(rungs) else ()
        for descent in better:
            if descent not in passed:
                return rung + 1, descent
    start = next(waiting, None)
    return 0, None if start is None else Descent(ground, start.layout, tiers=start.tiers)
