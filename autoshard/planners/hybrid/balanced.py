"""Starts of the search: every item takes what would cost least if all ranks were alike, and then its place.

Shape suffixes: I items, O options, E shards of options, V kinds of shards, R ranks, M memory levels, S sites.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from autoshard.core import Tier
from autoshard.planners.hybrid.compiled.linear import placed
from autoshard.planners.space.cost_gradient import CostGradient, FlatOptions, shard_costs
from autoshard.planners.space.kinds import FloatArray
from autoshard.planners.space.layout import Layout, Limits
from autoshard.planners.space.planner_space import IndexArray, PlannerSpace

#: Doublings and halvings of the price of memory.
_NUM_PRICES = 24
#: Share of the memory that choices made as if all ranks were alike may use: shards do not pack without gaps.
_PACKED_SHARE = 0.95
#: Share of the largest shard's time by which the slowest rank is above the mean: with it, estimates of 14 starts of
#: each of five tasks (metasyn, 80 to 800 tables) rank them about as their steps do.
_LUMP_SHARE = 0.25
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
    space: PlannerSpace,
    flat: FlatOptions,
    rates: CostGradient,
    limits: Limits,
    chosen: IndexArray,
    *,
    with_uneven: bool = True,
    around: Layout | None = None,
) -> Layout | None:
    """Items with their options placed, largest shards first, where the slowest rank grows least.

    An item whose shards find no room takes another option of those that do, the one with the least time.

    Args:
        space: What there is to choose from.
        flat: Its options.
        rates: What shards add.
        limits: Memory.
        chosen: The number of the option that each item is to get.
        with_uneven: Whether other options may have rows in uneven shares.
        around: What training needs for a batch counts, as linear around this layout; None for tables alone.

    Returns:
        None if some item finds no room at all.
    """
    option_I = flat.first_I + chosen
    may_O = np.ones(len(flat.item_O), dtype=np.bool_) if with_uneven else ~flat.is_uneven_O
    for size_V in (rates.served_VP.sum(axis=1), space.kinds.bytes_VM.sum(axis=1)):
        order_I = _order(flat, option_I, size_V)
        layout = placed(space, flat, rates, limits, option_I=option_I, order_I=order_I, may_O=may_O, around=around)
        if layout is not None:
            return layout if layout.fits() else None
    return None


def _order(flat: FlatOptions, option_I: IndexArray, size_V: FloatArray) -> IndexArray:
    """Items that all ranks hold come first, then those whose shards have least choice of sites, then the largest."""
    _, _, shard_X = flat.shards_of(option_I)
    first_I = np.cumsum(flat.count_O[option_I]) - flat.count_O[option_I]
    is_shared_X = flat.is_shared_E[shard_X]
    choice_I = np.minimum.reduceat(np.where(is_shared_X, np.iinfo(np.int64).max, flat.num_sites_E[shard_X]), first_I)
    size_I = np.maximum.reduceat(np.where(is_shared_X, 0.0, size_V[flat.kind_E[shard_X]]), first_I)
    choice_I[np.logical_and.reduceat(is_shared_X, first_I)] = 0
    return np.lexsort((-size_I, choice_I))
