"""Which sharding type each table gets, by what it adds to the step.

Shape suffixes: I items, O options, E shards of options, M memory levels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from autoshard.core import MemoryLevel, Tier
from autoshard.planners.hybrid.balanced import BalancedOptions
from autoshard.planners.space.cost_gradient import CostGradient, FlatOptions
from autoshard.planners.space.kinds import LEVELS
from autoshard.planners.space.layout import Limits
from autoshard.planners.space.planner_space import BoolArray, IndexArray, PlannerSpace

#: Most that a shard may add to its rank before others wait for it, over the mean of what ranks have: of all options;
#: without those of nodes; without reduce-scatters, which take something however little is in them; on single ranks.
_ALL, _NO_NODES, _NO_SCATTERS, _ALONE = (1.0, 2.0, 0.25), (0.35,), (0.35,), (math.inf, 0.35)
#: Bytes of alike shards, the largest over the smallest.
_EVENLY = 1.01
_HOST = LEVELS.index(MemoryLevel.DDR)


class Picks:
    """Picks options of all items in several ways.

    Args:
        space: The options.
        limits: Memory.
    """

    def __init__(self, space: PlannerSpace, limits: Limits) -> None:
        self._flat = flat = FlatOptions.of(space)
        self._balanced = BalancedOptions(space, flat, CostGradient.of(space), limits)
        bytes_EM, share_E = space.kinds.bytes_VM[flat.kind_E], flat.holders_E / space.topology.world_size
        self._room_M, most_M = limits.capacity_RM.mean(axis=0), limits.capacity_RM.max(axis=0)
        # Bytes on a level that no rank has are more than any share of it.
        self._largest_share_O = flat.largest((bytes_EM / np.maximum(most_M, 1e-3)).max(axis=1))
        self._bytes_OM = np.stack([flat.sums(of_E * share_E) for of_E in bytes_EM.T], axis=1)
        largest_bytes_O = flat.largest(bytes_EM.max(axis=1))
        finest_I = np.minimum.reduceat(largest_bytes_O, flat.first_I)
        self._is_finest_O = largest_bytes_O <= _EVENLY * finest_I[flat.item_O]
        is_of_nodes_E = flat.in_node_E | flat.is_held(Tier.TABLE_ROW_WISE)
        is_scattered_E = space.prices.is_scattered(space.kinds.moved_VC)[flat.kind_E]
        self._is_copied_O = flat.are_within((Tier.DATA_PARALLEL,))
        self._families = (
            (np.ones_like(self._is_copied_O), _ALL),
            (flat.largest(is_of_nodes_E) == 0, _NO_NODES),
            (flat.largest(is_scattered_E) == 0, _NO_SCATTERS),
            (flat.are_within((Tier.TABLE_WISE, Tier.DATA_PARALLEL)), _ALONE),
        )

    def within(self, fills: Sequence[float], largest: float) -> Iterator[IndexArray]:
        """Numbers of options of several kinds, each with copies on all ranks and without; some of them are alike.

        None where the smallest options together take more than the device memory.

        Args:
            fills: Shares of the device memory that they may take together.
            largest: Share of a rank's memory that a shard may take, if its item can be cut so finely.
        """
        if np.minimum.reduceat(self._balanced.hbm_O, self._flat.first_I).sum() > self._room_M[0]:
            return
        fits_O = (self._largest_share_O <= largest) | (self._is_finest_O & (self._largest_share_O <= 1))
        ways = [
            (fits_O & may_O & copies_O, lump)
            for may_O, lumps in self._families
            for lump in lumps
            for copies_O in (np.ones_like(fits_O), ~self._is_copied_O)
        ]
        # Without any all-to-all, whatever that takes.
        ways.append((fits_O & self._is_copied_O, math.inf))
        for fill in fills:
            for may_O, lump in ways:
                yield from self._cheapest(may_O, lump, fill)

    def _cheapest(self, may_O: BoolArray, lump: float, fill: float) -> Iterator[IndexArray]:
        """Numbers of the cheapest options with which no memory level holds more than it has, if there are such.

        Where host memory is short, some items leave it for anything else, or for disks alone.
        """
        has_O: BoolArray = self._bytes_OM > 0
        for may_take_O in (~has_O[:, _HOST], np.any(has_O[:, _HOST + 1 :], axis=1)):
            self._balanced.fits_O, self._balanced.room = may_O, fill * float(self._room_M[0])
            before_I = numbers_I = self._balanced.cheapest(lump)
            while len(leaves := self._leaving(numbers_I, may_take_O)):
                leaves_O = np.isin(self._flat.item_O, leaves) & has_O[:, _HOST]
                self._balanced.fits_O = self._balanced.fits_O & ~leaves_O
                numbers_I = self._balanced.cheapest(lump)
            yield numbers_I
            yield self._filled(numbers_I, lump)
            if numbers_I is before_I:
                return

    def _leaving(self, numbers_I: IndexArray, may_take_O: BoolArray) -> IndexArray:
        """Items that have to leave host memory, those that lose least per byte by other options; none if all fit."""
        flat, balanced, chosen_I = self._flat, self._balanced, self._flat.first_I + numbers_I
        held_I = self._bytes_OM[chosen_I, _HOST]
        over_bytes = float(held_I.sum() - self._room_M[_HOST])
        if over_bytes <= 0:
            return np.zeros(0, dtype=np.int64)
        other_O = np.where(balanced.fits_O & may_take_O, balanced.cost_O, np.inf)
        loss_I = np.minimum.reduceat(other_O, flat.first_I) - balanced.cost_O[chosen_I]
        may_I = np.flatnonzero((held_I > 0) & np.isfinite(loss_I) & balanced.fits_O[chosen_I])
        may_I = may_I[np.argsort(loss_I[may_I] / held_I[may_I], kind="stable")]
        return may_I[: int(np.searchsorted(held_I[may_I].cumsum(), over_bytes)) + 1]

    def _filled(self, numbers_I: IndexArray, lump: float) -> IndexArray:
        """With cheaper options as far as the device memory goes, those that save most per byte first.

        The price of a byte is the same for all: items that are alike leave all at once.
        """
        flat, balanced = self._flat, self._balanced
        chosen_I = flat.first_I + numbers_I
        limit_ms = lump * float(balanced.cost_O[chosen_I].sum())
        score_O = balanced.cost_O + np.maximum(balanced.lump_O - limit_ms, 0.0)
        best_I = flat.lowest(np.where(balanced.fits_O, score_O, np.inf))
        gain_I, more_I = score_O[chosen_I] - score_O[best_I], balanced.hbm_O[best_I] - balanced.hbm_O[chosen_I]
        order_I = np.argsort(-gain_I / np.maximum(more_I, 1.0), kind="stable")
        order_I = order_I[gain_I[order_I] > 0]
        left_bytes = balanced.room - balanced.hbm_O[chosen_I].sum()
        taken = order_I[: int(np.searchsorted(np.maximum(more_I[order_I], 0).cumsum(), left_bytes, side="right"))]
        chosen_I[taken] = best_I[taken]
        return np.asarray(flat.number_O[chosen_I])
