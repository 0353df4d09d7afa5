"""The search: a race of bursts of the compiled search from all starts, then more of them from where the best one ended.

Bursts take what shards add as linear; between some of them, a step prices changes as they are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from autoshard.planners.hybrid.compiled.library import Mode
from autoshard.planners.hybrid.compiled.linear import LinearEffort
from autoshard.planners.hybrid.descent import LEAST_GAIN, Descent, SearchContext, Start
from autoshard.planners.hybrid.option_offers import LARGE_TASK, OfferedOptions
from autoshard.planners.hybrid.starts import FEW_TIERS
from autoshard.planners.space.layout import Choice, Layout
from autoshard.planners.space.options import ShardingType
from autoshard.planners.space.planner_space import BoolArray

#: Bursts of every racer at first; one of so many racers goes on, so many times as far.
_FIRST_BURSTS, _REDUCTION = 2, 3
#: Bursts of the best start before any other, in tasks of more tables times ranks, where short limits leave no time for
#: a race: with them, plans of 160 tables on 32 A100 were 1.2 points of the step shorter at 0.2 s, 1.7 at 0.5 s and 1.0
#: at 1 s (CPU time, four draws, errors of 0.3 to 0.5), those of 80 on 8 0.1 longer at 0.5 s (twelve draws; November
#: 2026).
_HEAD_START, QUICK_TASK = 8, 2_000
#: What the first bursts do, and what each of the next does.
_FIRST, _NEXT = (LinearEffort(mode=Mode.DESCEND), LinearEffort(mode=Mode.LAUNCH_BY_LAUNCH)), LinearEffort()
#: First bursts that keep to some options; and of those that come first in the race, which take a tenth of the time.
_WITHIN, _LONG_WITHIN = 2, 6
#: Sharding types that bursts from the first few starts keep to before any others are made, and these starts.
_FEW_TYPES = (
    frozenset({ShardingType.TABLE_WISE}),
    frozenset({ShardingType.TABLE_WISE, ShardingType.ROW_GROUPS}),
    frozenset({ShardingType.TABLE_WISE, ShardingType.DATA_PARALLEL}),
)
_NUM_WITHIN_TYPES = 3
#: Excess over the layout before, as a share, up to which a burst's layout may be gone on from.
_HEAT = 0.002
#: Starts that bursts are made from also within fewer tiers, and these tiers.
_NUM_WITHIN_TIERS = 4
#: Bursts of moves between two steps that price every change.
_BETWEEN_EXACT = 8
#: Bursts without a better layout before the first detour, most before a later one, and those of a detour over them.
_PATIENCE, _MOST_PATIENCE, _DETOUR = 32, 256, 2


class LinearizedSearch:
    """A layout that the compiled search improves, and the best one met.

    A burst takes what shards add as linear; its layout is priced as it is before the next begins there.

    Args:
        context: What descents share; it has a compiled search.
        layout: Where it begins; left as it is.
        within: Options that the first bursts may take.
        num_within: These bursts.
        is_fresh: Whether it begins with a descent of all items.

    Attributes:
        best: The best layout met that fits the memory.
        best_ms: Its step.
    """

    def __init__(
        self,
        context: SearchContext,
        layout: Layout,
        within: Callable[[], BoolArray],
        *,
        num_within: int = _WITHIN,
        is_fresh: bool = True,
    ) -> None:
        self.context, self.layout = context, layout
        self._within, self._num_within = within, num_within
        self.best, self.best_ms = layout, layout.step_ms()
        self._layout_ms, self._num_bursts = self.best_ms, 0 if is_fresh else len(_FIRST)
        context.meet(self.best_ms, layout.chosen)

    def step(self) -> None:
        """One burst, from the layout where the last one ended that was good enough."""
        context = self.context
        context.count_step(self.layout)
        found = context.linear.improved(
            self.layout,
            _FIRST[self._num_bursts] if self._num_bursts < len(_FIRST) else _NEXT,
            may_O=self._within() if self._num_bursts < self._num_within else context.options_beside(self.layout),
            seed=int(context.rng.integers(2**62)),
            deadline_s=context.deadline_s,
        )
        heat = _HEAT * context.rng.random() if self._num_bursts >= len(_FIRST) else 0.0
        self._num_bursts += 1
        found_ms = found.step_ms()
        if found.fits() and found_ms < self._layout_ms * (1 + heat):
            self._go_on(found, found_ms)

    def meet(self, layout: Layout, step_ms: float) -> None:
        """Goes on from the best layout of another descent, if it is better."""
        if step_ms < self.best_ms * (1 - LEAST_GAIN):
            self._go_on(layout, step_ms)

    def _go_on(self, layout: Layout, step_ms: float) -> None:
        self.layout, self._layout_ms = layout, step_ms
        if step_ms < self.best_ms * (1 - LEAST_GAIN):
            self.best, self.best_ms = layout, step_ms
            self.context.meet(step_ms, layout.chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOutcome:
    """What the search found.

    Attributes:
        layout: The best one that fits the memory.
        step_ms: Its step.
        num_steps: Steps made.
        stopped: Why it ended: `time`, `steps`, `request`, or `bound`: no layout takes less.
        trail: Choices of the best layouts met on the way, after 1, 10, 100, ... steps.
    """

    layout: Layout
    step_ms: float
    num_steps: int
    stopped: str
    trail: tuple[Sequence[Choice | None], ...]


def improve(
    starts: Sequence[Start],
    *,
    seed: int,
    deadline_s: float,
    max_steps: int | None = None,
    floor_ms: float = 0.0,
    offers: OfferedOptions | None = None,
    more_starts: Callable[[], Sequence[Start]] = tuple,
    is_stopped: Callable[[], bool] = lambda: False,
) -> SearchOutcome:
    """Makes the step of the best of some starts shorter until the time or the steps are over.

    The first steps are the same however many there are, so that more of them never end with a longer step.

    Args:
        starts: They fit the memory; left as they are. The most promising come first.
        seed: Source of all chance.
        deadline_s: When to end, by `time.perf_counter`.
        max_steps: Most steps; None for as many as there is time for.
        floor_ms: What no layout takes less than: one that takes as much ends the search.
        offers: Adds options on the way; None for none.
        more_starts: Asked for starts now and then; they may add options, too.
        is_stopped: Whether to end now.
    """
    first = starts[0].layout
    context = SearchContext(first.space, first.limits, first, seed, deadline_s, offers)
    most = math.inf if max_steps is None else max_steps

    def is_over() -> bool:
        return context.num_steps >= most or time.perf_counter() >= deadline_s or is_stopped() or is_least()

    def is_least() -> bool:
        return context.best_ms <= floor_ms * (1 + LEAST_GAIN)

    def arriving() -> list[LinearizedSearch]:
        if arrived := more_starts():
            context.read_options(arrived[0].layout)
        return [LinearizedSearch(context, start.layout, context.open_options) for start in arrived]

    raced = _raced(_bursts(context, starts), arriving, is_over)
    best, best_ms = raced.best, raced.best_ms
    if not is_over():
        best, best_ms = _burst(starts, context, best, arriving, is_over)
    stopped = "bound" if is_least() else "steps" if context.num_steps >= most else "request" if is_stopped() else "time"
    return SearchOutcome(
        layout=best, step_ms=best_ms, num_steps=context.num_steps, stopped=stopped, trail=tuple(context.trail)
    )


def _bursts(context: SearchContext, starts: Sequence[Start]) -> Iterator[LinearizedSearch]:
    """Racers of all starts, and before and after them some of the first few within fewer types or tiers for a while.

    Where one gets a head start, it is the best start's.
    """
    # A burst takes so long there that these would leave no time for others.
    is_large = context.space.size > LARGE_TASK
    if context.space.size > QUICK_TASK:
        yield LinearizedSearch(context, starts[0].layout, context.open_options)
    for names in () if is_large else _FEW_TYPES:
        for start in starts[:_NUM_WITHIN_TYPES]:
            within = partial(context.options_of, names)
            yield LinearizedSearch(context, start.layout, within, num_within=_LONG_WITHIN)
    for start in starts:
        yield LinearizedSearch(context, start.layout, partial(context.open_options, start.tiers))
    for tiers in FEW_TIERS:
        for start in starts[:_NUM_WITHIN_TIERS]:
            if start.tiers is None:
                yield LinearizedSearch(context, start.layout, partial(context.open_options, tiers))


def _burst(
    starts: Sequence[Start],
    context: SearchContext,
    layout: Layout,
    arriving: Callable[[], list[LinearizedSearch]],
    is_over: Callable[[], bool],
) -> tuple[Layout, float]:
    """Goes on with bursts from a layout until the end, and with steps that price every change from the best one.

    Where they find nothing better for a while, they make a detour: from any start, at first with some sharding types
    alone. Searches of fewer types end in other places, from which some go on to a shorter step.
    """
    bursts = LinearizedSearch(context, layout, context.open_options, is_fresh=False)
    exact = Descent(context, layout)
    num_idle, patience = 0, _PATIENCE
    while not is_over():
        before_ms = bursts.best_ms
        _go(bursts, _BETWEEN_EXACT, is_over)
        if bursts.best_ms < exact.best_ms:
            exact = Descent(context, bursts.best)
        if not exact.is_done and not is_over():
            exact.step()
            bursts.meet(exact.best_layout(), exact.best_ms)
        for other in arriving():
            _go(other, _BETWEEN_EXACT, is_over)
            bursts.meet(other.best, other.best_ms)
        num_idle = 0 if bursts.best_ms < before_ms else num_idle + _BETWEEN_EXACT
        if num_idle >= patience:
            start = starts[int(context.rng.integers(len(starts)))]
            within = partial(context.options_of, context.some_types())
            detour = LinearizedSearch(context, start.layout, within, num_within=patience)
            _go(detour, _DETOUR * patience, is_over)
            bursts.meet(detour.best, detour.best_ms)
            num_idle, patience = 0, min(2 * patience, _MOST_PATIENCE)
    return bursts.best, bursts.best_ms


def _go(bursts: LinearizedSearch, num: int, is_over: Callable[[], bool]) -> None:
    """Makes some bursts."""
    for _ in range(num):
        if is_over():
            return
        bursts.step()


def _raced(
    racers: Iterator[LinearizedSearch], arriving: Callable[[], list[LinearizedSearch]], is_over: Callable[[], bool]
) -> LinearizedSearch:
    """The best of some racers, of which the better ones go on each time, further than before; arriving ones are next.

    In tasks that are not small, the first one gets a head start.

    Source:
        Li et al., A System for Massively Parallel Hyperparameter Tuning (MLSys 2020), Sec. 3.2: a racer goes on as
        soon as it is among the better ones of those that came as far, so that no step depends on the time there is.
    """
    rungs: list[list[LinearizedSearch]] = []
    first = next(racers)
    waiting: Iterator[LinearizedSearch] = chain([first], racers)
    if first.context.space.size > QUICK_TASK:
        _go(first, _HEAD_START, is_over)
        rungs, waiting = [[first]], racers
    while not is_over():
        waiting = chain(arriving(), waiting)
        rung, racer = _next(rungs, waiting)
        if racer is None:
            break
        _go(racer, _FIRST_BURSTS * _REDUCTION**rung, is_over)
        if rung == len(rungs):
            rungs.append([])
        rungs[rung].append(racer)
    return min(rungs[0], key=lambda one: one.best_ms) if rungs else first


def _next(
    rungs: Sequence[Sequence[LinearizedSearch]], waiting: Iterator[LinearizedSearch]
) -> tuple[int, LinearizedSearch | None]:
    """The racer that goes on to the highest rung, else the next one; None at the end of the race."""
    for rung in reversed(range(len(rungs))):
        better = sorted(rungs[rung], key=lambda one: one.best_ms)[: len(rungs[rung]) // _REDUCTION]
        passed = rungs[rung + 1] if rung + 1 < len(rungs) else ()
        for racer in better:
            if racer not in passed:
                return rung + 1, racer
    return 0, next(waiting, None)
