"""Starts of the search: every item takes what would cost least if all ranks were alike, and then its place.

Shape suffixes: I items, O options, E shards of options, V kinds of shards, R ranks, M memory levels, S sites.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from autoshard.core import Tier
from autoshard.core.step import EMBEDDING_PARTS
from autoshard.planners.hybrid.cost_gradient import CostGradient, FlatOptions, shard_costs
from autoshard.planners.hybrid.layout import Choice, Layout, Limits
from autoshard.planners.space.kinds import FloatArray
from autoshard.planners.space.planner_space import BoolArray, IndexArray, ItemOption, ItemShard, PlannerSpace

#: Doublings and halvings of the price of memory.
_NUM_PRICES = 24
#: Share of the memory that choices made as if all ranks were alike may use: shards do not pack without gaps.
_PACKED_SHARE = 0.95
#: Share of the largest shard's time by which the slowest rank is above the mean: with it, estimates of 14 starts of
#: each of five tasks (metasyn, 80 to 800 tables) rank them about as their steps do.
_LUMP_SHARE = 0.25
#: Power of a rank's load by which it counts.
_POWER = 8
#: Milliseconds that options cost which may not be taken.
_BARRED_MS = 1e12


class BalancedOptions:
    """Chooses options as if all ranks were alike.

    Args:
        space: What there is to choose from.
        flat: Its options.
        rates: What shards add.
        limits: Memory.
        with_uneven: Whether rows may be in uneven shares.
    """

    def __init__(
        self, space: PlannerSpace, flat: FlatOptions, rates: CostGradient, limits: Limits, *, with_uneven: bool = True
    ) -> None:
        self.flat = flat
        alone_E = rates.served_VP[flat.kind_E].sum(axis=1)
        self.cost_O = flat.sums(shard_costs(flat, rates, space.topology.world_size))
        self.lump_O = flat.largest(np.where(flat.is_shared_E, 0.0, alone_E))
        self.largest_bytes_O = flat.largest(space.kinds.bytes_VM[flat.kind_E, 0])
        self.hbm_O = flat.sums(space.kinds.bytes_VM[flat.kind_E, 0] * (flat.holders_E / space.topology.world_size))
        self.fits_O = self.largest_bytes_O <= limits.capacity_RM[:, 0].max()
        if not with_uneven:
            self.fits_O &= ~flat.is_uneven_O
        self.room = _PACKED_SHARE * float(np.maximum(limits.capacity_RM[:, 0], 0.0).mean())

    def cheapest(self, max_lump: float = math.inf, tiers: Collection[Tier] = tuple(Tier)) -> IndexArray:
        """For each item the option that costs least, within the memory of all ranks together; shape (I,).

        Args:
            max_lump: Most that a single shard may add to its rank, over the mean of what ranks have; above it, it adds
                the excess to the slowest rank.
            tiers: Which tiers options may use.
        """
        may_O = self.fits_O & self.flat.are_within(tiers)
        barred_O = np.where(may_O, 0.0, _BARRED_MS)

        def choose(price_per_byte: float, limit_ms: float) -> IndexArray:
            excess_O = np.maximum(self.lump_O - limit_ms, 0.0)
            return self.flat.lowest(self.cost_O + excess_O + price_per_byte * self.hbm_O + barred_O)

        limit_ms = math.inf
        chosen_I = choose(0.0, limit_ms)
        if math.isfinite(max_lump):
            chosen_I = choose(0.0, max_lump * float(self.cost_O[chosen_I].sum()))
            limit_ms = max_lump * float(self.cost_O[chosen_I].sum())
        if self.hbm_O[chosen_I].sum() > self.room:
            low, high = 0.0, float(self.cost_O[chosen_I].sum()) / max(self.room, 1.0) * 2**20
            for _ in range(_NUM_PRICES * 2):
                middle = math.sqrt(low * high) if low else high / 2**_NUM_PRICES
                is_full = self.hbm_O[choose(middle, limit_ms)].sum() > self.room
                low, high = (middle, high) if is_full else (low, middle)
            chosen_I = choose(high, limit_ms)
        return np.asarray(self.flat.number_O[chosen_I])

    def whole(self, max_lump: float) -> IndexArray:
        """For each item its first option, mostly a whole table, unless that is too much for one rank; shape (I,).

        Args:
            max_lump: Most that a single shard may add to its rank, over the mean of what ranks have; items that are
                above it whole are held as `cheapest` has it, within that limit.
        """
        first_I = self.flat.first_I
        limit_ms = max_lump * float(self.cost_O[first_I].sum())
        is_whole_I = (self.lump_O[first_I] <= limit_ms) & self.fits_O[first_I]
        excess_O = np.maximum(self.lump_O - limit_ms, 0.0)
        cut_I = self.flat.lowest(self.cost_O + excess_O + np.where(self.fits_O, 0.0, _BARRED_MS))
        number_I = self.flat.number_O[np.where(is_whole_I, first_I, cut_I)]
        return np.asarray(number_I)

    def likely_ms(self, numbers_I: IndexArray) -> float:
        """About what the step will be of which options are placed: the mean of ranks, and a share of the largest shard.

        Args:
            numbers_I: The option of each item.
        """
        chosen_I = self.flat.first_I + numbers_I
        return float(self.cost_O[chosen_I].sum() + _LUMP_SHARE * self.lump_O[chosen_I].max())

    def leanest(self) -> IndexArray:
        """For each item the option whose largest shard takes least memory of a rank; shape (I,)."""
        return np.asarray(self.flat.number_O[self.flat.lowest(self.largest_bytes_O)])


def placed_options(
    space: PlannerSpace, rates: CostGradient, limits: Limits, chosen: Sequence[int], *, with_uneven: bool = True
) -> Layout | None:
    """Items with their options placed, largest shards first, where the slowest rank grows least.

    An item whose shards find no room takes another option of those that do, the one with the least time.

    Args:
        space: What there is to choose from.
        rates: What shards add.
        limits: Memory.
        chosen: The option that each item is to get.
        with_uneven: Whether other options may have rows in uneven shares.

    Returns:
        None if some item finds no room at all.
    """
    for size_V in (rates.served_VP.sum(axis=1), space.kinds.bytes_VM.sum(axis=1)):
        found = _placed(space, rates, limits, chosen, _order(space, chosen, size_V), with_uneven=with_uneven)
        if found is not None:
            layout = Layout(space, limits, found)
            return layout if layout.fits() else None
    return None


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
    space: PlannerSpace,
    rates: CostGradient,
    limits: Limits,
    chosen: Sequence[int],
    order: Sequence[int],
    *,
    with_uneven: bool,
) -> list[Choice] | None:
    filling = _Filling(space, rates, limits, chosen)
    found: dict[int, Choice] = {}
    for item in order:
        options, number = space.items[item].options, chosen[item]
        sites = filling.put(options[number])
        if sites is None:
            grown = [
                (filling.growth(option), index)
                for index, option in enumerate(options)
                if with_uneven or not option.is_uneven
            ]
            least, number = min(grown)
            sites = filling.put(options[number]) if math.isfinite(least) else None
        if sites is None:
            return None
        found[item] = (number, sites)
    return [found[item] for item in range(len(chosen))]


class _Filling:
    """Ranks that fill up item by item, in all parts of the step and in memory.

    What a rank's load counts for rises with a power of it over the mean that the chosen options lead to.

    Args:
        space: What there is to choose from.
        rates: What shards add.
        limits: Memory.
        chosen: The option that each item is likely to get.
    """

    def __init__(self, space: PlannerSpace, rates: CostGradient, limits: Limits, chosen: Sequence[int]) -> None:
        self.space, self.rates = space, rates
        num_ranks = space.topology.world_size
        shards = [
            shard for item, number in zip(space.items, chosen, strict=True) for shard in item.options[number].shards
        ]
        total_P = np.zeros(len(EMBEDDING_PARTS))
        for shard in shards:
            total_P += (
                rates.shared_VP[shard.kind]
                if shard.is_everywhere
                else (rates.served_VP[shard.kind] * shard.num_holders / num_ranks)
            )
        self.mean_P1 = np.maximum(total_P, 1e-12)[:, None]
        self.share_PR = np.zeros((len(EMBEDDING_PARTS), num_ranks))
        self.free_RM: FloatArray = limits.capacity_RM.copy()
        self.grown_ms = 0.0

    def growth(self, option: ItemOption) -> float:
        """What an option would add; infinite if there is too little room."""
        before = self.share_PR.copy(), self.free_RM.copy(), self.grown_ms
        if self.put(option) is None:
            return math.inf
        grown_ms = self.grown_ms - before[2]
        self.share_PR, self.free_RM, self.grown_ms = before
        return grown_ms + sum(float(self.rates.sync_V[shard.kind]) for shard in option.shards)

    def put(self, option: ItemOption) -> tuple[int, ...] | None:
        """Sites of an option's shards, which then take their room; None, and no room taken, if there is too little."""
        before = self.share_PR.copy(), self.free_RM.copy(), self.grown_ms
        sites = self.space.take_sites(option, self.free_RM, self._choose)
        if sites is None:
            self.share_PR, self.free_RM, self.grown_ms = before
        return sites

    def _choose(self, shard: ItemShard, open_S: BoolArray) -> int:
        """The open site where the load counts least, which then has it."""
        added_VP = self.rates.shared_VP if shard.is_everywhere else self.rates.served_VP
        after_PR = self.share_PR + added_VP[shard.kind][:, None] / self.mean_P1
        grown_R = self.mean_P1[:, 0] @ (_powered(after_PR) - _powered(self.share_PR)) / _POWER
        cost_S = grown_R if shard.num_holders == 1 else shard.by_site(grown_R).sum(axis=1)
        site = 0 if shard.is_everywhere else int(np.where(open_S, cost_S, np.inf).argmin())
        ranks = shard.ranks(site)
        self.share_PR[:, ranks] = after_PR[:, ranks]
        self.grown_ms += float(cost_S[site]) / self.share_PR.shape[1]
        return site


def _powered(share_PR: FloatArray) -> FloatArray:
    """Shares of the mean to the power by which they count, a power of two."""
    for _ in range(_POWER.bit_length() - 1):
        share_PR = share_PR * share_PR
    return share_PR
