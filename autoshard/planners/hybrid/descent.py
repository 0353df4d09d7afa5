"""Improves a layout step by step: many changes are priced at a time, the best of them are made together.

Shape suffixes: B changes.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from autoshard.core import Tier
from autoshard.core.costs import MsArray
from autoshard.planners.hybrid.compiled.linear import LinearSearch
from autoshard.planners.hybrid.neighbours import Neighbourhood
from autoshard.planners.hybrid.option_offers import OfferedOptions
from autoshard.planners.space.cost_gradient import FlatOptions
from autoshard.planners.space.layout import Change, Choice, Layout, Limits
from autoshard.planners.space.options import ShardingType
from autoshard.planners.space.planner_space import BoolArray, PlannerSpace

_log = logging.getLogger(__name__)

#: p of the p-norm that stands for the slowest rank: from even towards sharp.
EXPONENTS = (8, 32, 128)
#: Stage that follows the sharpest norm.
_AGAIN = 1
#: Changes that a step makes together, if they go together.
_MAX_TOGETHER = 16
#: What counts as a gain, as a share of the step.
LEAST_GAIN = 1e-6
#: Steps after which rates are made linear anew.
_RATES_STEPS = 25
#: Steps after which options are added around the best layout, and over how many times as many that is done again.
_GROWN_AFTER, _GROWN_FACTOR = 8, 3
#: Steps after which the best layout is kept: 1, and each time so many times as many.
_TRAIL_FACTOR = 10
#: Chances that a burst may take all options, those that were the best of their items before, or those of the sharding
#: types there are; and that a type is drawn.
_ALL_CHANCE, _WON_CHANCE, _LIKE_CHANCE, _DRAWN = 0.15, 0.5, 0.2, 0.5
#: Seconds between two lines of the log about the best layout.
_TELL_S = 0.4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Start:
    """Where a descent begins.

    Attributes:
        layout: The layout.
        tiers: Tiers that the descent keeps to until nothing there helps; None for all.
        name: What made it.
    """

    layout: Layout
    tiers: tuple[Tier, ...] | None = None
    name: str = "balanced"


class SearchContext:
    """What all descents in a space share: its options, and what shards add to ranks.

    Args:
        space: The space.
        limits: Memory.
        around: The layout that the rates are linear around at first.
        seed: Source of all chance.
        deadline_s: When to end, by `time.perf_counter`.
        offers: Adds options on the way; None for none.

    Attributes:
        num_steps: Steps made by all descents.
        best_ms: Least step that any descent met.
        trail: Choices of the best layouts after 1, 10, 100, ... steps, where another step follows.
    """

    def __init__(
        self,
        space: PlannerSpace,
        limits: Limits,
        around: Layout,
        seed: int,
        deadline_s: float = math.inf,
        offers: OfferedOptions | None = None,
    ) -> None:
        self._offers = offers
        self.space, self.limits, self.deadline_s = space, limits, deadline_s
        self.rng = np.random.default_rng(seed)
        self.read_options(around)
        self.num_steps, self._grown_at = 0, _GROWN_AFTER
        self.trail: list[list[Choice | None]] = []
        self._best: list[Choice | None] = []
        self.best_ms, self._told_s = math.inf, 0.0

    def count_step(self, layout: Layout) -> None:
        """Counts a step of any descent; from time to time rates are made linear anew, and options are added."""
        if self.num_steps == _TRAIL_FACTOR ** len(self.trail):
            self.trail.append(self._best)
        self.num_steps += 1
        if self.num_steps == self._grown_at:
            self._grown_at *= _GROWN_FACTOR
            self._grow()
        elif self.num_steps % _RATES_STEPS == 0:
            self.linear.relinearise(layout)

    def _grow(self) -> None:
        """Adds options that pay by what shards add around the best layout."""
        around = Layout(self.space, self.limits, self._best)
        if self._offers is not None and self._offers.grow(self.flat, around, self.num_steps, self.deadline_s):
            self.read_options(around)

    def read_options(self, around: Layout) -> None:
        """Takes the options that the space has now; what shards add is taken as linear around a layout."""
        self.flat, self._around = FlatOptions.of(self.space), around
        self._linear: LinearSearch | None = None

    @property
    def linear(self) -> LinearSearch:
        """The compiled search; made when it is first asked for, which takes a tenth of a second in large tasks."""
        if self._linear is None:
            self._linear = LinearSearch(self.space, self.limits, self.flat, self._around)
        return self._linear

    def meet(self, step_ms: float, chosen: Sequence[Choice | None]) -> None:
        """Takes note of the step and the choices of a layout; the best is told in the log (at DEBUG) now and then."""
        if step_ms < self.best_ms:
            self.best_ms, self._best = step_ms, list(chosen)
            now_s = time.perf_counter()
            if now_s >= self._told_s + _TELL_S and _log.isEnabledFor(logging.DEBUG):
                self._told_s = now_s
                best = Layout(self.space, self.limits, self._best)
                _log.debug("best %.6g ms after %d steps; %s", step_ms, self.num_steps, best.summary())

    def near(self, layout: Layout, exponent: int) -> Neighbourhood:
        """Changes of a layout."""
        return Neighbourhood(layout, self.flat, self.linear.rates, exponent)

    def open_options(self, tiers: tuple[Tier, ...] | None = None) -> BoolArray:
        """Which options are within some tiers, or all of an item that has none there; None for all. Shape (O,)."""
        if tiers is None:
            return np.ones(len(self.flat.item_O), dtype=np.bool_)
        return self._or_all(self.flat.are_within(tiers))

    def options_of(self, names: Collection[ShardingType]) -> BoolArray:
        """Options of some sharding types, or all of an item that has none there; shape (O,)."""
        return self._or_all(np.array([name in names for name in self.flat.types])[self.flat.type_O])

    def some_types(self) -> frozenset[ShardingType]:
        """Sharding types that are drawn, half of them in the mean."""
        drawn = self.rng.random(len(self.flat.types)) < _DRAWN
        return frozenset(name for name, is_drawn in zip(self.flat.types, drawn.tolist(), strict=True) if is_drawn)

    def options_beside(self, layout: Layout) -> BoolArray:
        """Options that the next burst from a layout may take, shape (O,).

        All of them, or fewer, which takes a burst less time: those that were an item's best at some time (about one in
        six), of the layout's sharding types, or of types that are drawn, besides what the layout has.
        """
        all_to, won_to, like_to = accumulate((_ALL_CHANCE, _WON_CHANCE, _LIKE_CHANCE))
        draw = self.rng.random()
        if draw < all_to:
            return self.open_options()
        now_I = self.flat.first_I + layout.numbers_I
        if won_to <= draw < like_to:
            return self._or_all(np.isin(self.flat.type_O, np.unique(self.flat.type_O[now_I])))
        may_O = self.linear.won_O > 0 if draw < won_to else self.options_of(self.some_types())
        may_O[now_I] = True
        return may_O

    def _or_all(self, within_O: BoolArray) -> BoolArray:
        has_any_I = np.logical_or.reduceat(within_O, self.flat.first_I)
        return np.asarray(within_O | ~np.repeat(has_any_I, self.flat.options_I))


class Descent:
    """A layout on its way down, and the best one met.

    Args:
        context: What descents share.
        layout: Where it begins; left as it is.

    Attributes:
        layout: The layout as it is now.
        best: Choices of the best one met that fits the memory.
        best_ms: Its step.
        is_done: Whether no change was found that helps, by any norm.
    """

    def __init__(self, context: SearchContext, layout: Layout) -> None:
        self.context, self.layout, self.stage = context, layout.copy(), 0
        self.best: list[Choice | None] = list(layout.chosen)
        self.best_ms = layout.step_ms()
        context.meet(self.best_ms, self.best)
        self._last_ms = self.best_ms
        self.is_done = False
        self.energy_ms = self.layout.energy_ms(self.exponent)

    @property
    def exponent(self) -> int:
        """The norm's p."""
        return EXPONENTS[self.stage]

    def best_layout(self) -> Layout:
        """The best layout met."""
        return Layout(self.context.space, self.context.limits, self.best)

    def step(self) -> None:
        """Makes the changes that shorten the step most; where none does, the norm is sharpened."""
        self.context.count_step(self.layout)
        changes = self.context.near(self.layout, self.exponent).changes(self.context.rng)
        good = self._good(changes) if changes else []
        if good:
            self._make(_compatible(good))
        else:
            self._sharpen()

    def _sharpen(self) -> None:
        """Takes the next norm; after the sharpest, a flatter one if the step is shorter than when it last did so."""
        if self.stage + 1 < len(EXPONENTS):
            self.stage += 1
        elif self.best_ms < self._last_ms * (1 - LEAST_GAIN):
            self.stage, self._last_ms = _AGAIN, self.best_ms
        else:
            self.is_done = True
        self.energy_ms = self.layout.energy_ms(self.exponent)

    def _good(self, changes: Sequence[Change]) -> list[Change]:
        """Changes that shorten the step, the best first."""
        priced = self.layout.price(changes, self.exponent)
        self._note(changes, priced.step_ms_B, priced.energy_ms_B)
        limit_ms = self.energy_ms * (1 - LEAST_GAIN)
        order = np.argsort(priced.energy_ms_B, kind="stable")
        return [changes[index] for index in order.tolist() if priced.energy_ms_B[index] < limit_ms]

    def _make(self, good: Sequence[Change]) -> None:
        """Applies the first of the changes, and as many of the next as shorten the step further."""
        prefixes = [tuple(one for change in good[: count + 1] for one in change) for count in range(len(good))]
        priced = self.layout.price(prefixes, self.exponent)
        self._note(prefixes, priced.step_ms_B, priced.energy_ms_B)
        best = int(priced.energy_ms_B.argmin())
        self.layout.apply(prefixes[best])
        self.energy_ms = float(priced.energy_ms_B[best])

    def _note(self, changes: Sequence[Change], step_ms_B: MsArray, energy_ms_B: MsArray) -> None:
        """Remembers the best step seen that fits the memory."""
        fitting_ms_B = np.where(np.isfinite(energy_ms_B), step_ms_B, np.inf)
        index = int(fitting_ms_B.argmin())
        if fitting_ms_B[index] < self.best_ms * (1 - LEAST_GAIN):
            self.best_ms = float(fitting_ms_B[index])
            self.best = list(self.layout.chosen)
            for item, option, sites in changes[index]:
                self.best[item] = (option, sites)
            self.context.meet(self.best_ms, self.best)


def _compatible(changes: Sequence[Change]) -> list[Change]:
    """The first changes of items that no change before them has."""
    seen: set[int] = set()
    found = []
    for change in changes:
        items = {item for item, _, _ in change}
        if not items & seen:
            seen |= items
            found.append(change)
        if len(found) == _MAX_TOGETHER:
            break
    return found
