"""Starts of the search: every item takes what would cost least if all ranks were alike, and then its place.

Shape suffixes: I items, O options, E shards of options, R ranks, M memory levels.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from autoshard.core import Tier
from autoshard.planners.hybrid.layout import Layout, Limits
from autoshard.planners.hybrid.rates import FlatOptions, Rates
from autoshard.planners.space.planner_space import (
    BoolArray,
    FloatArray,
    IndexArray,
    ItemOption,
    ItemShard,
    PlannerSpace,
)

#: Doublings and halvings of the price of memory.
_NUM_PRICES = 24
#: Share of the memory that choices made as if all ranks were alike may use: shards do not pack without gaps.
_PACKED_SHARE = 0.95
_KERNEL_PARTS, _MOVING_PARTS = [1, 4], [0, 2, 3]


def balanced_options(
    space: PlannerSpace,
    flat: FlatOptions,
    rates: Rates,
    limits: Limits,
    *,
    max_lump: float = math.inf,
    tiers: Collection[Tier] = tuple(Tier),
) -> IndexArray:
    """For each item the option that costs least if all ranks were alike, within their memory together; shape (I,).

    Args:
        space: What there is to choose from.
        flat: Its options.
        rates: What shards add.
        limits: Memory.
        max_lump: Most that a single shard may add to its rank, over the mean of what ranks have.
        tiers: Which tiers options may use.
    """
    num_ranks = space.topology.world_size
    alone_E = rates.served_VP[flat.kind_E].sum(axis=1)
    shared_E = rates.shared_VP[flat.kind_E].sum(axis=1)
    cost_O = flat.sums(np.where(flat.is_shared_E, shared_E, alone_E * flat.holders_E / num_ranks))
    cost_O = cost_O + flat.sums(np.where(flat.is_shared_E, rates.sync_V[flat.kind_E], 0.0))
    lump_O = flat.largest(np.where(flat.is_shared_E, 0.0, alone_E))
    bytes_EM = space.bytes_VM[flat.kind_E] * (flat.holders_E / num_ranks)[:, None]
    hbm_O = flat.sums(bytes_EM[:, 0])
    may_O = flat.largest(~np.isin(flat.tier_E, list(tiers))) < 1
    fits_O = flat.largest(space.bytes_VM[flat.kind_E, 0]) <= limits.capacity_RM[:, 0].max()
    barred_O = np.where(may_O & fits_O, 0.0, 1e12)

    def choose(price_per_byte: float, limit_ms: float) -> IndexArray:
        # A shard above the limit adds what it is above it to the slowest rank.
        score_O = cost_O + np.maximum(lump_O - limit_ms, 0.0) + price_per_byte * hbm_O + barred_O
        order = np.lexsort((score_O, flat.item_O))
        first = np.flatnonzero(np.diff(flat.item_O[order], prepend=-1))
        return np.asarray(order[first])

    chosen_I = choose(0.0, math.inf)
    if math.isfinite(max_lump):
        chosen_I = choose(0.0, max_lump * float(cost_O[chosen_I].sum()))
    limit_ms = max_lump * float(cost_O[chosen_I].sum()) if math.isfinite(max_lump) else math.inf
    room = _PACKED_SHARE * float(np.maximum(limits.capacity_RM[:, 0], 0.0).mean())
    if hbm_O[chosen_I].sum() > room:
        low, high = 0.0, float(cost_O[chosen_I].sum()) / max(room, 1.0) * 2**20
        for _ in range(_NUM_PRICES * 2):
            middle = math.sqrt(low * high) if low else high / 2**_NUM_PRICES
            if hbm_O[choose(middle, limit_ms)].sum() > room:
                low = middle
            else:
                high = middle
        chosen_I = choose(high, limit_ms)
    return np.asarray(flat.number_O[chosen_I])


def leanest_options(space: PlannerSpace, flat: FlatOptions) -> IndexArray:
    """For each item the option whose largest shard takes least memory of a rank; shape (I,)."""
    bytes_O = flat.largest(space.bytes_VM[flat.kind_E, 0])
    order = np.lexsort((bytes_O, flat.item_O))
    return np.asarray(flat.number_O[order[np.flatnonzero(np.diff(flat.item_O[order], prepend=-1))]])


def placed_options(
    space: PlannerSpace, rates: Rates, limits: Limits, options: Sequence[int] | IndexArray
) -> Layout | None:
    """Items with their options placed, largest shards first, where the slowest rank grows least.

    A item whose shards find no room takes another option of those that do, the one with the least time.

    Returns:
        None if some item finds no room at all.
    """
    chosen = [int(number) for number in options]
    by_time = _order(space, chosen, rates.served_VP.sum(axis=1))
    found = _placed(space, rates, limits, chosen, by_time)
    if found is None:
        found = _placed(space, rates, limits, chosen, _order(space, chosen, space.bytes_VM.sum(axis=1)))
    if found is None:
        return None
    layout = Layout(space, limits, found)
    return layout if layout.fits() else None


def _order(space: PlannerSpace, chosen: Sequence[int], size_V: FloatArray) -> list[int]:
    """Items whose shards have no choice of sites come first, then those with the largest shards."""

    def key(item: int) -> tuple[int, float]:
        shards = space.items[item].options[chosen[item]].shards
        placed = [shard for shard in shards if not shard.is_everywhere]
        if not placed:
            return 0, 0.0
        return min(int(shard.allowed_S.sum()) for shard in placed), -max(float(size_V[shard.kind]) for shard in placed)

    return sorted(range(len(chosen)), key=key)


def _placed(
    space: PlannerSpace, rates: Rates, limits: Limits, chosen: Sequence[int], order: Sequence[int]
) -> list[tuple[int, tuple[int, ...]]] | None:
    filling = _Filling(space, rates, limits)
    found: dict[int, tuple[int, tuple[int, ...]]] = {}
    for item in order:
        sites = filling.put(space.items[item].options[chosen[item]])
        number = chosen[item]
        if sites is None:
            tried = [(*filling.tried(option), index) for index, option in enumerate(space.items[item].options)]
            fitting = [(score, index) for score, at, index in tried if at is not None]
            if not fitting:
                return None
            number = min(fitting)[1]
            sites = filling.put(space.items[item].options[number])
            assert sites is not None, "it was tried"
        found[item] = (number, sites)
    return [found[item] for item in range(len(chosen))]


class _Filling:
    """Ranks that fill up item by item: kernels, exchanges and memory."""

    def __init__(self, space: PlannerSpace, rates: Rates, limits: Limits) -> None:
        self.space, self.limits = space, limits
        self.load_2R = np.zeros((2, space.topology.world_size))
        self.free_RM: FloatArray = limits.capacity_RM.copy()
        self.alone_V2, self.shared_V2 = (
            np.stack([of_VP[:, _KERNEL_PARTS].sum(axis=1), of_VP[:, _MOVING_PARTS].sum(axis=1)], axis=1)
            for of_VP in (rates.served_VP, rates.shared_VP)
        )
        self.sync_V = rates.sync_V

    def tried(self, option: ItemOption) -> tuple[float, tuple[int, ...] | None]:
        """What the slowest rank would grow by with an option, and its sites, without taking it."""
        load_2R, free_RM = self.load_2R.copy(), self.free_RM.copy()
        sites = self.put(option)
        grown = float((self.load_2R.max(axis=1) - load_2R.max(axis=1)).sum())
        grown += sum(float(self.sync_V[shard.kind]) for shard in option.shards)
        self.load_2R, self.free_RM = load_2R, free_RM
        return grown, sites

    def put(self, option: ItemOption) -> tuple[int, ...] | None:
        """Sites of an option's shards, which then take their room; None, and no room taken, if there is too little."""
        before = self.load_2R.copy(), self.free_RM.copy()
        sites = self.space.take_sites(option, self.free_RM, self._choose)
        if sites is None:
            self.load_2R, self.free_RM = before
        return sites

    def _choose(self, shard: ItemShard, open_S: BoolArray) -> int:
        """The open site where the slowest rank grows least, which then has the shard's load."""
        if shard.is_everywhere:
            self.load_2R += self.shared_V2[shard.kind][:, None]
            return 0
        load_2 = self.alone_V2[shard.kind]
        score_R = np.maximum(self.load_2R + load_2[:, None], self.load_2R.max(axis=1)[:, None]).sum(axis=0)
        # Among ranks that make nothing slower, the one with least to do.
        score_R = score_R + 1e-3 * self.load_2R.sum(axis=0)
        site = int(np.where(open_S, shard.by_site(score_R).max(axis=1), np.inf).argmin())
        self.load_2R[:, shard.ranks(site)] += load_2[:, None]
        return site
