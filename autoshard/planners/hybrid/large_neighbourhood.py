"""DestroyStep and recreate (large neighbourhood search): takes some items off the ranks and holds them anew.

Shape suffixes: B changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from autoshard.planners.hybrid.descent import EXPONENTS, LEAST_GAIN, Descent, SearchContext
from autoshard.planners.hybrid.held import HeldShards
from autoshard.planners.hybrid.layout import NOTHING, Change, Layout
from autoshard.planners.hybrid.neighbours import Neighbourhood
from autoshard.planners.space.options import ShardingType

#: Items that are ruined: at least, and at most as a number and as a share of all.
_FEWEST, _MOST, _MOST_SHARE = 2, 10, 0.02
#: Options of an item that are priced with nothing else of the ruin held, and those of them that are priced again when
#: its turn comes.
_MOST_OPTIONS, _NUM_KEPT = 24, 4
#: Chance that a sharding type which was ruined may not come back at once.
_BAN_CHANCE = 0.6
#: Prices of options are raised by up to this share at random, so that a ruin is not always rebuilt alike.
_NOISE = 0.01
#: Steps of the descent after a ruin, and the excess over the layout before it, as a share, that ends it after two.
_DESCENT_STEPS, _HOPELESS = 12, 0.02
#: Excess over the layout before, as a share, that is accepted at the start of a cycle; it falls to 0 until its end.
_HEAT = 0.003
#: Ruins of the first cycle; each next one is twice as long.
_FIRST_CYCLE = 32
#: Ruins without a better step after which the search goes back to the best layout.
_PATIENCE = 60
#: What an operator earns by a new best step, by a better one than before, and by one that is accepted; the share of
#: what it earned before that is forgotten each time; and the least weight of an operator.
_REWARDS, _FORGET, _LEAST_WEIGHT = (3.0, 1.0, 0.3), 0.1, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class DestroyStep:
    """What is taken off.

    Attributes:
        items: The items.
        banned: Sharding type that they may not get at once; None for none.
    """

    items: tuple[int, ...]
    banned: ShardingType | None = None


class LargeNeighbourhoodSearch:
    """Ruins and recreates a layout, descends from there, and accepts what it finds as annealing does.

    Operators, pairs of what is ruined and of the order in which it is recreated, are drawn by what they earned. Steps
    do not depend on how many there will be, so that more of them never end with a longer step.

    Args:
        context: What descents share.
        layout: Where it begins; left as it is.

    Attributes:
        best: The best layout met.
        best_ms: Its step.

    Source:
        Ropke and Pisinger, An Adaptive Large Neighborhood Search Heuristic (Transportation Science, 2006).
    """

    def __init__(self, context: SearchContext, layout: Layout) -> None:
        self.context, self.rng = context, context.rng
        self.best = self.current = layout
        self.best_ms = self.current_ms = layout.step_ms()
        ruins: tuple[Callable[[Layout], DestroyStep], ...] = (self._of_a_type, self._of_slow_ranks, self._at_random)
        self._operators = list(product(ruins, (_by_regret, _by_size)))
        self._weights = np.ones(len(self._operators))
        self._num_ruins, self._cycle_end, self._cycle = 0, _FIRST_CYCLE, _FIRST_CYCLE
        self._since_best = 0

    def round(self, is_over: Callable[[], bool]) -> None:
        """One ruin with what follows it.

        Args:
            is_over: Asked before each step of the descent.
        """
        number = int(self.rng.choice(len(self._operators), p=self._weights / self._weights.sum()))
        ruin_of, order_of = self._operators[number]
        layout = self.current.copy()
        ruin = ruin_of(layout)
        found = self._descended(layout, is_over) if ruin.items and self._recreate(layout, ruin, order_of) else None
        earned = self._accept(found) if found is not None else 0.0
        weight = (1 - _FORGET) * self._weights[number] + _FORGET * earned
        self._weights[number] = max(_LEAST_WEIGHT, weight)
        self._cool()

    def _accept(self, found: Descent) -> float:
        """Goes on from what was found if it is good enough; what that earns."""
        self._since_best += 1
        heat = _HEAT * self.rng.random() * (self._cycle_end - self._num_ruins) / self._cycle
        if found.best_ms >= self.current_ms * (1 + heat):
            return 0.0
        is_better = found.best_ms < self.current_ms * (1 - LEAST_GAIN)
        self.current, self.current_ms = found.best_layout(), found.best_ms
        if self.current_ms < self.best_ms * (1 - LEAST_GAIN):
            self.best, self.best_ms, self._since_best = self.current, self.current_ms, 0
            return _REWARDS[0]
        return _REWARDS[1] if is_better else _REWARDS[2]

    def _cool(self) -> None:
        """Counts the ruin, begins the next cycle after the last of one, and goes back to the best layout."""
        self._num_ruins += 1
        if self._num_ruins == self._cycle_end:
            self._cycle *= 2
            self._cycle_end += self._cycle
        if self._since_best > _PATIENCE:
            self.current, self.current_ms, self._since_best = self.best, self.best_ms, 0

    def _descended(self, layout: Layout, is_over: Callable[[], bool]) -> Descent:
        descent = Descent(self.context, layout, stage=1)
        for step in range(_DESCENT_STEPS):
            is_hopeless = step == 2 and descent.best_ms > self.current_ms * (1 + _HOPELESS)
            if descent.is_done or is_hopeless or is_over():
                break
            descent.step()
        return descent

    def _recreate(self, layout: Layout, ruin: DestroyStep, order_of: Callable[[list[float]], float]) -> bool:
        """Holds the items of a ruin again, each at its cheapest option and sites; whether there was room for all."""
        exponent = EXPONENTS[1]
        layout.apply(tuple((item, NOTHING, ()) for item in ruin.items))
        before_ms = layout.energy_ms(exponent)
        near = self.context.near(layout, exponent)
        kept, keys = {}, {}
        for item in ruin.items:
            priced = self._priced(layout, near, item, self._numbers(item, ruin.banned), exponent)
            kept[item] = [number for _, ((_, number, _),) in priced[:_NUM_KEPT]]
            keys[item] = order_of([energy_ms - before_ms for energy_ms, _ in priced])
        for item in sorted(ruin.items, key=lambda item: -keys[item]):
            near = self.context.near(layout, exponent)
            priced = self._priced(layout, near, item, kept[item], exponent)
            if not priced:
                return False
            layout.apply(priced[0][1])
        self.context.count_step(layout)
        return True

    def _priced(
        self, layout: Layout, near: Neighbourhood, item: int, numbers: Sequence[int], exponent: int
    ) -> list[tuple[float, Change]]:
        """Options of an item at their cheapest sites with their energies, the lowest first; only those that fit."""
        options = self.context.space.items[item].options
        placed = [(number, near.sites_of(item, options[number])) for number in numbers]
        changes: list[Change] = [((item, number, sites),) for number, sites in placed if sites is not None]
        if not changes:
            return []
        energy_ms_B = layout.price(changes, exponent).energy_ms_B
        noisy_ms_B = energy_ms_B * (1 + _NOISE * self.rng.random(len(changes)))
        order = np.argsort(noisy_ms_B, kind="stable").tolist()
        return [(float(noisy_ms_B[index]), changes[index]) for index in order if np.isfinite(noisy_ms_B[index])]

    def _numbers(self, item: int, banned: ShardingType | None) -> list[int]:
        """Options of an item but those of a type, unless it has no others; some of them at random if there are many."""
        options = self.context.space.items[item].options
        numbers = [number for number, option in enumerate(options) if option.of_tables[0].name is not banned]
        numbers = numbers or list(range(len(options)))
        if len(numbers) > _MOST_OPTIONS:
            numbers = sorted(self.rng.choice(numbers, _MOST_OPTIONS, replace=False).tolist())
        return numbers

    def _some(self, items: Sequence[int]) -> tuple[int, ...]:
        """A random number of some items."""
        most = max(_MOST, int(_MOST_SHARE * len(self.context.space.items)))
        count = int(self.rng.integers(_FEWEST, most + 1))
        return tuple(self.rng.permutation(np.array(items, dtype=np.int64))[:count].tolist())

    def _types(self, layout: Layout) -> list[ShardingType]:
        """The sharding type of each item."""
        items = self.context.space.items
        return [items[item].options[layout.choice(item)[0]].of_tables[0].name for item in range(len(items))]

    def _of_a_type(self, layout: Layout) -> DestroyStep:
        """Items of one sharding type, which they often may not get again."""
        types = self._types(layout)
        there = sorted(set(types))
        chosen = there[int(self.rng.integers(len(there)))]
        items = self._some([item for item, one in enumerate(types) if one is chosen])
        return DestroyStep(items=items, banned=chosen if self.rng.random() < _BAN_CHANCE else None)

    def _of_slow_ranks(self, layout: Layout) -> DestroyStep:
        """Items of the slowest ranks by each part, and of one more rank."""
        ranks = {*layout.parts_ms().argmax(axis=1).tolist(), int(self.rng.integers(layout.num_ranks))}
        held = HeldShards.of(self.context.flat, layout.chosen)
        items = np.concatenate([held.item_X[held.on(rank)] for rank in sorted(ranks)])
        return DestroyStep(items=self._some(np.unique(items).tolist()))

    def _at_random(self, _layout: Layout) -> DestroyStep:
        """Any items."""
        return DestroyStep(items=self._some(range(len(self.context.space.items))))


def _by_regret(grown_ms: Sequence[float]) -> float:
    """What an item costs more by its second best option; those with most to lose come first."""
    return grown_ms[1] - grown_ms[0] if len(grown_ms) > 1 else np.inf


def _by_size(grown_ms: Sequence[float]) -> float:
    """What an item costs by its best option; the largest come first."""
    return grown_ms[0] if grown_ms else np.inf
