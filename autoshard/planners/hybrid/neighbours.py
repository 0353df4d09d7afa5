"""Changes that look worthwhile, by rates made linear around a layout.

Shape suffixes: V kinds of shards, P parts of a step, R ranks, S sites, I items, Y options, X shards that
are held.
"""

from __future__ import annotations

import numpy as np

from autoshard.core.costs import MsArray
from autoshard.planners.hybrid.exchanges import Exchanges
from autoshard.planners.hybrid.held import HeldShards
from autoshard.planners.hybrid.move_scorer import CostGrowth, MoveScorer
from autoshard.planners.space.cost_gradient import CostGradient, FlatOptions
from autoshard.planners.space.kinds import FloatArray
from autoshard.planners.space.layout import Change, Layout
from autoshard.planners.space.planner_space import BoolArray, IndexArray, ItemOption, ItemShard

#: Changes of each kind that a step of the search prices; options by each of two estimates.
_NUM_OPTIONS, _NUM_MOVES, _NUM_EXCHANGES = 16, 8, 48
#: Options of other items that are tried whatever they seem to cost.
_NUM_RANDOM = 8
#: Places that are tried for a shard that is to leave a rank.
_NUM_TARGETS = 4
#: Items whose options are estimated in one step.
_NUM_ITEMS = 128


class Neighbourhood:
    """Estimates of what changes of one layout would save, and the best of them.

    A part of the step counts at a p-norm over ranks; its gradient says what a millisecond on each rank is worth.

    Args:
        layout: The layout.
        flat: All options of its space.
        rates: What shards add.
        exponent: p.
    """

    def __init__(self, layout: Layout, flat: FlatOptions, rates: CostGradient, exponent: int) -> None:
        self.layout, self.flat, self.space, self.rates = layout, flat, layout.space, rates
        self.exponent = exponent
        self.parts_PR = parts_PR = layout.parts_ms()
        self.growth = CostGrowth(parts_PR, exponent)
        self.worth_PR = self.growth.worth_PR
        self.shared_V: MsArray = rates.shared_VP @ self.worth_PR.sum(axis=1) + rates.sync_V
        self.free_RM = layout.free_bytes()
        self.slowest = list(dict.fromkeys(parts_PR.argmax(axis=1).tolist()))
        self.held = HeldShards.of(flat, layout.chosen)
        self.estimates = MoveScorer(
            flat=flat, rates=rates, growth=self.growth, held=self.held, topology=layout.space.topology
        )

    def changes(self, rng: np.random.Generator) -> list[Change]:
        """Changes to be priced, each of one item or two."""
        return [*self._other_options(rng), *self._moves(rng), *self._exchanges(rng)]

    def sites_of(self, item: int, option: ItemOption) -> tuple[int, ...] | None:
        """The cheapest sites for an option's shards with the memory there is; None if there are none."""
        free_RM = self.free_RM.copy()
        for shard, site in self.layout.held(item):
            free_RM[shard.ranks(site)] += self.space.kinds.bytes_VM[shard.kind]
        if len(option.shards) > 1 and all(shard.is_free for shard in option.shards):
            sites = self._apart(option, free_RM)
            if sites is not None:
                return sites
        used: list[int] = []

        def cheapest(shard: ItemShard, open_S: BoolArray) -> int:
            if shard.is_everywhere:
                return 0
            unused_S = open_S.copy()
            unused_S[used] = False
            may_S = unused_S if unused_S.any() else open_S
            used.append(int(np.where(may_S, self.site_costs(shard), np.inf).argmin()))
            return used[-1]

        return self.space.take_sites(option, free_RM, cheapest)

    def site_costs(self, shard: ItemShard) -> MsArray:
        """What a shard would add at each of its sites, shape (S,)."""
        if shard.is_everywhere:
            return self.shared_V[[shard.kind]]
        rank_R = self.rates.served_VP[shard.kind] @ self.worth_PR
        return np.asarray(shard.by_site(rank_R).sum(axis=1))

    def _apart(self, option: ItemOption, free_RM: FloatArray) -> tuple[int, ...] | None:
        """The cheapest ranks for shards that may go to any, each to one of its own; None if too few have room."""
        kinds = [shard.kind for shard in option.shards]
        most_M = self.space.kinds.bytes_VM[kinds].max(axis=0)
        open_R = np.flatnonzero((free_RM >= most_M).all(axis=1))
        if len(open_R) < len(kinds):
            return None
        cost_R = self.rates.served_VP[kinds[0]] @ self.worth_PR[:, open_R]
        return tuple(open_R[np.argsort(cost_R, kind="stable")[: len(kinds)]].tolist())

    def _other_options(self, rng: np.random.Generator) -> list[Change]:
        """Options that seem to save most, at their cheapest sites, and some at random."""
        flat, item_I = self.flat, self._looked_at(rng)
        chosen_I = np.array([self.layout.choice(item)[0] for item in item_I.tolist()])
        which_Y, number_Y, option_Y = flat.options_of(item_I)
        is_other_Y = number_Y != chosen_I[which_Y]
        grown_ms_Y = np.where(is_other_Y, self.estimates.grown_ms(item_I, which_Y, option_Y), np.inf)
        slope_ms_Y = np.where(is_other_Y, self.estimates.slope_ms(item_I, which_Y, option_Y), np.inf)
        count = min(_NUM_OPTIONS, len(option_Y))
        best = [np.argpartition(of_Y, count - 1)[:count] for of_Y in (grown_ms_Y, slope_ms_Y)]
        others = rng.integers(0, len(option_Y), _NUM_RANDOM)
        found: list[Change] = []
        for index in dict.fromkeys(np.concatenate([*best, others]).tolist()):
            if not is_other_Y[index]:
                continue
            item, number = int(item_I[which_Y[index]]), int(number_Y[index])
            sites = self.sites_of(item, self.space.items[item].options[number])
            if sites is not None:
                found.append(((item, number, sites),))
        return found

    def _looked_at(self, rng: np.random.Generator) -> IndexArray:
        """Items of the slowest ranks and others at random, as many as are looked at in one step; rising."""
        num_items = len(self.space.items)
        if num_items <= _NUM_ITEMS:
            return np.arange(num_items)
        slow = np.unique(np.concatenate([self.held.item_X[self.held.on(rank)] for rank in self.slowest]))
        slow = rng.permutation(slow)[: _NUM_ITEMS // 2]
        return np.union1d(slow, rng.choice(num_items, _NUM_ITEMS - len(slow), replace=False))

    def _moves(self, rng: np.random.Generator) -> list[Change]:
        """Shards of the slowest ranks that may not go anywhere, to where they cost least."""
        found: list[tuple[float, Change]] = []
        is_free_X = self.flat.is_free_E[self.held.shard_X]  # exchanges move these
        for rank in self.slowest:
            shards_X = self.held.on(rank)
            for index in rng.permutation(shards_X[~is_free_X[shards_X]])[: 2 * _NUM_MOVES].tolist():
                item, number = int(self.held.item_X[index]), int(self.held.number_X[index])
                shard, now = self.layout.held(item)[number]
                cost_S = self.site_costs(shard)
                node = self.space.topology.node_of(rank) if shard.in_one_node else None
                open_S = self.space.open_sites(shard, self.free_RM, node)
                open_S[now] = False
                others = np.flatnonzero(open_S)
                for site in others[np.argsort(cost_S[others], kind="stable")[:_NUM_TARGETS]].tolist():
                    found.append((float(cost_S[now] - cost_S[site]), self.layout.moved(item, number, site)))
        found.sort(key=lambda one: -one[0])
        return [change for _, change in found[:_NUM_MOVES]]

    def _exchanges(self, rng: np.random.Generator) -> list[Change]:
        """Shards of the slowest ranks to other ranks, or against shards of theirs."""
        exchanges = Exchanges(
            self.layout,
            self.held,
            self.flat.is_free_E[self.held.shard_X],
            served_VP=self.rates.served_VP,
            parts_PR=self.parts_PR,
            free_RM=self.free_RM,
            exponent=self.exponent,
        )
        count = -(-_NUM_EXCHANGES // len(self.slowest))
        return [change for rank in self.slowest for change in exchanges.best(rank, count, rng)]
