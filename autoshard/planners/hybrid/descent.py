"""Improves a layout: the best of many changes at a time, and small disturbances where no change helps.

Shape suffixes: B changes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.planners.hybrid.layout import Change, Layout
from autoshard.planners.hybrid.neighbours import Neighbourhood
from autoshard.planners.hybrid.rates import FlatOptions, Rates

#: p of the p-norm that stands for the slowest rank: from even towards sharp.
_EXPONENTS = (8, 32, 128)
#: Changes that a step makes together, if they go together.
_MAX_TOGETHER = 16
#: What counts as a gain, as a share of the step.
_LEAST_GAIN = 1e-6
#: Items that a disturbance changes.
_NUM_DISTURBED = 3
#: Steps after which rates are made linear anew.
_RATES_STEPS = 25
#: Steps after a disturbance without a better step, after which the search goes back to the best layout.
_PATIENCE = 30


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


def improve(layout: Layout, *, seed: int, deadline_s: float, max_steps: int | None = None) -> Improved:
    """Makes a layout's step shorter until the time or the steps are over.

    Args:
        layout: One that fits the memory; left as it is.
        seed: Source of all chance.
        deadline_s: When to end, by `time.perf_counter`.
        max_steps: Most steps; None for as many as there is time for.
    """
    return _Descent(layout.copy(), seed).run(deadline_s, math.inf if max_steps is None else max_steps)


class _Descent:
    def __init__(self, layout: Layout, seed: int) -> None:
        self.layout = layout
        self.rng = np.random.default_rng(seed)
        self.flat = FlatOptions.of(layout.space)
        self.best, self.best_ms = list(layout.chosen), layout.step_ms()
        self.stage, self.num_steps, self.since_best = 0, 0, 0
        self.rates = Rates.of(layout.space, layout)
        self.energy_ms = layout.energy_ms(self.exponent)

    @property
    def exponent(self) -> int:
        return _EXPONENTS[self.stage]

    def run(self, deadline_s: float, max_steps: float) -> Improved:
        stopped = "time"
        while time.perf_counter() < deadline_s:
            if self.num_steps >= max_steps:
                stopped = "steps"
                break
            if self.num_steps % _RATES_STEPS == _RATES_STEPS - 1:
                self.rates = Rates.of(self.layout.space, self.layout)
            if not self._step():
                self._escape()
            self.num_steps += 1
        layout = Layout(self.layout.space, self.layout.limits, self.best)
        return Improved(layout=layout, step_ms=self.best_ms, num_steps=self.num_steps, stopped=stopped)

    def _step(self) -> bool:
        """Makes the changes that shorten the step most; whether there were any."""
        near = Neighbourhood(self.layout, self.flat, self.rates, self.exponent)
        changes = near.changes(self.rng)
        if not changes:
            return False
        priced = self.layout.price(changes, self.exponent)
        self._note(changes, priced.step_ms_B, priced.energy_ms_B)
        limit_ms = self.energy_ms * (1 - _LEAST_GAIN)
        order = np.argsort(priced.energy_ms_B, kind="stable")
        good = [changes[index] for index in order.tolist() if priced.energy_ms_B[index] < limit_ms]
        self.since_best += 1
        if not good:
            return False
        self._make(_compatible(good))
        return True

    def _make(self, good: Sequence[Change]) -> None:
        """Applies the first of the changes, and as many of the next as shorten the step further."""
        prefixes = [tuple(one for change in good[: count + 1] for one in change) for count in range(len(good))]
        priced = self.layout.price(prefixes, self.exponent)
        self._note(prefixes, priced.step_ms_B, priced.energy_ms_B)
        best = int(priced.energy_ms_B.argmin())
        self.layout.apply(prefixes[best])
        self.energy_ms = float(priced.energy_ms_B[best])

    def _note(self, changes: Sequence[Change], step_ms_B: np.ndarray, energy_ms_B: np.ndarray) -> None:
        """Remembers the best step seen that fits the memory."""
        fitting_ms_B = np.where(np.isfinite(energy_ms_B), step_ms_B, np.inf)
        index = int(fitting_ms_B.argmin())
        if fitting_ms_B[index] < self.best_ms * (1 - _LEAST_GAIN):
            self.best_ms = float(fitting_ms_B[index])
            self.best = list(self.layout.chosen)
            for item, option, sites in changes[index]:
                self.best[item] = (option, sites)
            self.since_best = 0

    def _escape(self) -> None:
        """No change helps: sharpens the norm, and then disturbs the layout, or the best one after many steps."""
        if self.stage + 1 < len(_EXPONENTS):
            self.stage += 1
        else:
            if self.since_best > _PATIENCE:
                self.layout = Layout(self.layout.space, self.layout.limits, self.best)
                self.since_best = 0
            self.stage = 1
            self._disturb()
        self.energy_ms = self.layout.energy_ms(self.exponent)

    def _disturb(self) -> None:
        """Gives some items options at random, at their cheapest sites; half of them from the slowest ranks."""
        near = Neighbourhood(self.layout, self.flat, self.rates, self.exponent)
        space = self.layout.space
        slow = [item for rank in near.slowest for item, _ in near.on_rank[rank]]
        items = [int(self.rng.integers(len(space.items))) for _ in range(_NUM_DISTURBED)]
        items += [slow[int(self.rng.integers(len(slow)))] for _ in range(_NUM_DISTURBED) if slow]
        for item in dict.fromkeys(items):
            options = space.items[item].options
            number = int(self.rng.integers(len(options)))
            sites: tuple[int, ...] | None
            if self.rng.random() < 0.5:
                number = self.layout.choice(item)[0]
                allowed = [np.flatnonzero(shard.allowed_S) for shard in options[number].shards]
                sites = tuple(int(self.rng.choice(of_shard)) for of_shard in allowed)
                if options[number].shards[0].in_one_node:
                    continue
            else:
                sites = near.sites_of(item, options[number])
            if sites is None:
                continue
            change: Change = ((item, number, sites),)
            if math.isfinite(self.layout.price([change], self.exponent).energy_ms_B[0]):
                self.layout.apply(change)


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
