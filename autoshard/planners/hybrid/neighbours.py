"""Changes that look worthwhile, by rates made linear around a layout.

Shape suffixes: V kinds of shards, P parts of a step, R ranks, S sites, O options, E shards of options, I items.
"""

from __future__ import annotations

import numpy as np

from autoshard.core import Tier
from autoshard.core.costs import MsArray
from autoshard.planners.hybrid.exchanges import Exchanges
from autoshard.planners.hybrid.layout import Change, Layout
from autoshard.planners.hybrid.rates import FlatOptions, Rates
from autoshard.planners.space.planner_space import BoolArray, ItemOption, ItemShard

#: Changes of each kind that a step of the search prices.
_NUM_OPTIONS, _NUM_MOVES, _NUM_EXCHANGES = 24, 8, 48
#: Options of other items that are tried whatever they seem to cost.
_NUM_RANDOM = 8
#: Places that are tried for a shard that is to leave a rank.
_NUM_TARGETS = 4


class Neighbourhood:
    """Estimates of what changes of one layout would save, and the best of them.

    A part of the step counts at a p-norm over ranks; its gradient says what a millisecond on each rank is worth.

    Args:
        layout: The layout.
        flat: All options of its space.
        rates: What shards add.
        exponent: p.
    """

    def __init__(self, layout: Layout, flat: FlatOptions, rates: Rates, exponent: int) -> None:
        self.layout, self.flat, self.space, self.rates = layout, flat, layout.space, rates
        self.exponent = exponent
        self.parts_PR = parts_PR = layout.parts_ms()
        worth_PR = _worth(parts_PR, exponent)
        self.rank_VR: MsArray = rates.served_VP @ worth_PR
        self.shared_V: MsArray = rates.shared_VP @ worth_PR.sum(axis=1) + rates.sync_V
        self.free_RM = layout.free_bytes()
        self.slowest = list(dict.fromkeys(parts_PR.argmax(axis=1).tolist()))
        self.on_rank = self._shards_on_ranks()

    def changes(self, rng: np.random.Generator) -> list[Change]:
        """Changes to be priced, each of one item or two."""
        return [*self._other_options(rng), *self._moves(rng), *self._exchanges(rng)]

    def sites_of(self, item: int, option: ItemOption) -> tuple[int, ...] | None:
        """The cheapest sites for an option's shards with the memory there is; None if there are none."""
        free_RM = self.free_RM.copy()
        for shard, site in self.layout.held(item):
            free_RM[shard.ranks(site)] += self.space.kinds.bytes_VM[shard.kind]
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
        return np.asarray(shard.by_site(self.rank_VR[shard.kind]).sum(axis=1))

    def _other_options(self, rng: np.random.Generator) -> list[Change]:
        """Options that seem to save most, at their cheapest sites, and some at random."""
        flat, cheapest_V = self.flat, self.rank_VR.min(axis=1)
        node = self.space.topology.local_world_size
        by_node_V = self.rank_VR.reshape(len(self.rank_VR), -1, node).sum(axis=2).min(axis=1)
        is_node_E = flat.tier_E == Tier.TABLE_ROW_WISE
        alone_E = np.where(is_node_E, by_node_V[flat.kind_E], cheapest_V[flat.kind_E])
        cost_O = flat.sums(np.where(flat.is_shared_E, self.shared_V[flat.kind_E], alone_E))
        now_I = np.array([self._cost(item) for item in range(len(self.space.items))])
        is_other_O = np.ones(len(cost_O), dtype=np.bool_)
        chosen_I = np.array([one[0] if one else -1 for one in self.layout.chosen])
        is_other_O &= chosen_I[flat.item_O] != flat.number_O
        saved_O = np.where(is_other_O, now_I[flat.item_O] - cost_O, -np.inf)
        count = min(_NUM_OPTIONS, len(saved_O))
        best = np.argpartition(-saved_O, count - 1)[:count]
        others = rng.integers(0, len(saved_O), _NUM_RANDOM)
        found: list[Change] = []
        for index in dict.fromkeys([*best[np.argsort(-saved_O[best], kind="stable")].tolist(), *others.tolist()]):
            if not is_other_O[index]:
                continue
            item, number = int(flat.item_O[index]), int(flat.number_O[index])
            sites = self.sites_of(item, self.space.items[item].options[number])
            if sites is not None:
                found.append(((item, number, sites),))
        return found

    def _moves(self, rng: np.random.Generator) -> list[Change]:
        """Shards of the slowest ranks that may not go anywhere, to where they cost least."""
        found: list[tuple[float, Change]] = []
        for rank in self.slowest:
            shards = self.on_rank[rank]
            for index in rng.permutation(len(shards))[: 2 * _NUM_MOVES].tolist():
                item, number = shards[index]
                shard, now = self.layout.held(item)[number]
                if shard.is_free:
                    continue  # that is what exchanges do
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
        exchanges = Exchanges(self.layout, self.rates.served_VP, self.parts_PR, self.free_RM, self.exponent)
        count = -(-_NUM_EXCHANGES // len(self.slowest))
        return [change for rank in self.slowest for change in exchanges.best(rank, count, rng)]

    def _cost(self, item: int) -> float:
        return sum(float(self.site_costs(shard)[site]) for shard, site in self.layout.held(item))

    def _shards_on_ranks(self) -> list[list[tuple[int, int]]]:
        """For each rank, the shards that not all ranks hold, as item and number."""
        on_rank: list[list[tuple[int, int]]] = [[] for _ in range(len(self.free_RM))]
        for item in range(len(self.space.items)):
            for number, (shard, site) in enumerate(self.layout.held(item)):
                if not shard.is_everywhere:
                    for of_rank in on_rank[shard.ranks(site)]:
                        of_rank.append((item, number))
        return on_rank


def _worth(parts_PR: MsArray, exponent: int) -> MsArray:
    """Gradient of the p-norms (as means over ranks) of each part, shape (P, R)."""
    scale_P1 = np.maximum(parts_PR.max(axis=1, keepdims=True), 1e-30)
    share_PR = parts_PR / scale_P1
    mean_P1 = np.maximum((share_PR**exponent).mean(axis=1, keepdims=True), 1e-300)
    return np.asarray(share_PR ** (exponent - 1) * mean_P1 ** (1 / exponent - 1) / parts_PR.shape[1])
