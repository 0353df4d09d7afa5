"""What options in place of those that items have would make of a layout's step, about.

Shape suffixes: P parts of a step, R ranks, Q sites, H ranks of a site, I items, Y options, X
shards of options, K kinds, Z shards that are held, W pairs of both; "..." any axes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autoshard.core import Tier, Topology
from autoshard.core.costs import MsArray
from autoshard.core.step import EMBEDDING_PARTS
from autoshard.planners.hybrid.held import HeldShards
from autoshard.planners.space.cost_gradient import CostGradient, FlatOptions, ragged
from autoshard.planners.space.kinds import FloatArray
from autoshard.planners.space.planner_space import BoolArray, IndexArray

#: Sites that shards are tried at: ranks, and nodes.
_NUM_RANKS, _NUM_NODES = 12, 4
#: Largest share of the slowest rank's time that is raised to a power.
_MOST_SHARE = 100.0


class CostGrowth:
    """The norms of a layout's parts, each a root of the mean over ranks of powers.

    Args:
        parts_PR: Times of the parts.
        exponent: p, a power of two.

    Attributes:
        worth_PR: What one more millisecond on a rank adds to each norm.
    """

    def __init__(self, parts_PR: MsArray, exponent: int) -> None:
        self._exponent = exponent
        self._scale_P = np.maximum(parts_PR.max(axis=1), 1e-30)
        share_PR = parts_PR / self._scale_P[:, None]
        power_PR = self._powers(share_PR)
        self._mean_P = np.maximum(power_PR.mean(axis=1), 1e-300)
        self._share_RP, self._power_RP = share_PR.T.copy(), power_PR.T.copy()
        slope_PR = np.divide(power_PR, share_PR, out=np.zeros_like(power_PR), where=share_PR > 0)
        self.worth_PR: FloatArray = (
            slope_PR * (self._mean_P ** (1 / exponent - 1))[:, None] / np.float64(share_PR.shape[1])
        )

    def powers(self, load_P: MsArray, ranks_H: IndexArray) -> FloatArray:
        """What loads add to the sums of powers where all of some ranks get them, shape (..., P).

        Args:
            load_P: Milliseconds, shape (..., P); negative where ranks lose them.
            ranks_H: The ranks, shape (..., H).
        """
        after_HP = self._share_RP[ranks_H] + (load_P / self._scale_P)[..., None, :]
        added_HP = self._powers(np.clip(after_HP, 0.0, _MOST_SHARE)) - self._power_RP[ranks_H]
        return np.asarray(added_HP.sum(axis=-2))

    def ms(self, powers_P: FloatArray) -> MsArray:
        """By how many milliseconds all norms together grow with what is added to their sums of powers.

        Args:
            powers_P: Sums of what `powers` gives, shape (..., P).
        """
        mean_P = np.maximum(self._mean_P + powers_P / len(self._share_RP), 0.0)
        root_P = mean_P ** (1 / self._exponent) - self._mean_P ** (1 / self._exponent)
        return np.asarray(root_P @ self._scale_P)

    def _powers(self, share: FloatArray) -> FloatArray:
        for _ in range(self._exponent.bit_length() - 1):
            share = share * share
        return share


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MoveScorer:
    """Estimates for one layout, from rates that are linear; memory is left out.

    Attributes:
        flat: All options.
        rates: What shards add to ranks.
        growth: Norms of the layout's parts.
        held: Its shards.
        topology: Of the task.
    """

    flat: FlatOptions
    rates: CostGradient
    growth: CostGrowth
    held: HeldShards
    topology: Topology

    def grown_ms(self, item_I: IndexArray, which_Y: IndexArray, option_Y: IndexArray) -> MsArray:
        """By how much the step would grow with options in place of what items have, shape (Y,).

        Args:
            item_I: Items, rising.
            which_Y: The item of each option, by its place among these.
            option_Y: Options.
        """
        of_X, number_X, shard_X = self.flat.shards_of(option_Y)
        place_Z = self._places(item_I)
        powers_XP, sync_ms_X = self._added(shard_X, number_X)
        shared_X = np.flatnonzero(self.flat.is_shared_E[shard_X])
        powers_XP[shared_X] += self._relief(shard_X[shared_X], which_Y[of_X[shared_X]], place_Z, len(item_I))
        start_Y = np.searchsorted(of_X, np.arange(len(option_Y)))
        lost_IP, unsynced_ms_I = self._lost(place_Z, len(item_I))
        grown_ms_Y = self.growth.ms(np.add.reduceat(powers_XP, start_Y) + lost_IP[which_Y])
        return np.asarray(grown_ms_Y + np.add.reduceat(sync_ms_X, start_Y) - unsynced_ms_I[which_Y])

    def slope_ms(self, item_I: IndexArray, which_Y: IndexArray, option_Y: IndexArray) -> MsArray:
        """As `grown_ms`, by the norms' slopes alone: they overrate what leaves the slowest ranks; shape (Y,)."""
        of_X, number_X, shard_X = self.flat.shards_of(option_Y)
        kind_X = self.flat.kind_E[shard_X]
        slope_ms_X = np.where(self.flat.is_shared_E[shard_X], self.rates.sync_V[kind_X], 0.0)
        for is_such_X, load_VP, ranks_QH in self._ways(shard_X):
            worth_QP = self.growth.worth_PR[:, ranks_QH].sum(axis=2).T
            site_X = np.minimum(number_X[is_such_X], len(ranks_QH) - 1)
            slope_ms_X[is_such_X] += (load_VP[kind_X[is_such_X]] * worth_QP[site_X]).sum(axis=1)
        start_Y = np.searchsorted(of_X, np.arange(len(option_Y)))
        return np.asarray(np.add.reduceat(slope_ms_X, start_Y) - self._held_ms(item_I)[which_Y])

    def _held_ms(self, item_I: IndexArray) -> MsArray:
        """What items add where they are, by the slopes; shape (I,)."""
        held, rates, worth_PR = self.held, self.rates, self.growth.worth_PR
        before_PR = np.pad(np.cumsum(worth_PR, axis=1), ((0, 0), (1, 0)))
        worth_ZP = (before_PR[:, held.end_X] - before_PR[:, held.first_X]).T
        load_ZP = np.where(held.is_shared_X[:, None], rates.shared_VP[held.kind_X], rates.served_VP[held.kind_X])
        sync_ms_Z = np.where(held.is_shared_X, rates.sync_V[held.kind_X], 0.0)
        held_ms = np.bincount(held.item_X, (load_ZP * worth_ZP).sum(axis=1) + sync_ms_Z, minlength=item_I[-1] + 1)
        return np.asarray(held_ms[item_I])

    def _places(self, item_I: IndexArray) -> IndexArray:
        """For each shard that is held, the place of its item among some, -1 for none of them; shape (Z,)."""
        place_Z = np.minimum(np.searchsorted(item_I, self.held.item_X), len(item_I) - 1)
        return np.where(item_I[place_Z] == self.held.item_X, place_Z, -1)

    def _added(self, shard_X: IndexArray, number_X: IndexArray) -> tuple[FloatArray, MsArray]:
        """What shards add to sums of powers, the first of an option at its best site, and to the all-reduce."""
        kind_X = self.flat.kind_E[shard_X]
        powers_XP = np.zeros((len(shard_X), len(EMBEDDING_PARTS)))
        for is_such_X, load_VP, ranks_QH in self._ways(shard_X):
            kind_K, which_X = np.unique(kind_X[is_such_X], return_inverse=True)
            powers_KQP = self.growth.powers(load_VP[kind_K][:, None], ranks_QH)
            best_K = self.growth.ms(powers_KQP).argmin(axis=1)
            others_X = np.minimum(number_X[is_such_X], len(ranks_QH) - 1)
            site_X = np.where(number_X[is_such_X] == 0, best_K[which_X], others_X)
            powers_XP[is_such_X] = powers_KQP[which_X, site_X]
        return powers_XP, np.where(self.flat.is_shared_E[shard_X], self.rates.sync_V[kind_X], 0.0)

    def _lost(self, place_Z: IndexArray, num_items: int) -> tuple[FloatArray, MsArray]:
        """What items take off the sums of powers and the all-reduce, if nobody holds them."""
        held, kind_Z = self.held, self.held.kind_X
        lost_IP, unsynced_ms_I = np.zeros((num_items, len(EMBEDDING_PARTS))), np.zeros(num_items)
        for is_such_Z, load_VP, ranks_QH in self._ways(held.shard_X):
            of_Z = np.flatnonzero(is_such_Z & (place_Z >= 0))
            ranks_ZH = held.first_X[of_Z][:, None] + np.arange(ranks_QH.shape[1])
            np.add.at(lost_IP, place_Z[of_Z], self.growth.powers(-load_VP[kind_Z[of_Z]], ranks_ZH))
        synced_Z = np.flatnonzero((place_Z >= 0) & held.is_shared_X)
        np.add.at(unsynced_ms_I, place_Z[synced_Z], self.rates.sync_V[kind_Z[synced_Z]])
        return lost_IP, unsynced_ms_I

    def _relief(self, shard_X: IndexArray, place_X: IndexArray, place_Z: IndexArray, num_items: int) -> FloatArray:
        """By how much less shards on all ranks add to the sums of powers, as their item leaves single ranks for them.

        Args:
            shard_X: Such shards.
            place_X: The places of their items.
            place_Z: Those of the items of shards that are held; -1 for any other.
            num_items: I.
        """
        held = self.held
        is_single_Z = (held.end_X - held.first_X == 1) & ~held.is_shared_X
        single_Z = np.flatnonzero(is_single_Z & (place_Z >= 0))
        count_I = np.bincount(place_Z[single_Z], minlength=num_items)
        which_W, number_W, _ = ragged(count_I[place_X])
        leaving_W = single_Z[(np.cumsum(count_I) - count_I)[place_X][which_W] + number_W]
        rank_W1 = held.first_X[leaving_W][:, None]
        left_WP = self.rates.served_VP[held.kind_X[leaving_W]]
        shared_WP = self.rates.shared_VP[self.flat.kind_E[shard_X]][which_W]
        powers = self.growth.powers
        together_WP = powers(shared_WP - left_WP, rank_W1)
        relief_XP = np.zeros((len(shard_X), len(EMBEDDING_PARTS)))
        apart_WP = powers(shared_WP, rank_W1) + powers(-left_WP, rank_W1)
        np.add.at(relief_XP, which_W, together_WP - apart_WP)
        return relief_XP

    def _ways(self, shard_X: IndexArray) -> Iterator[tuple[BoolArray, MsArray, IndexArray]]:
        """Shards of each number of ranks: which they are, what kinds add to each rank, and the likely sites."""
        num_ranks, node = self.topology.world_size, self.topology.local_world_size
        is_shared_X = self.flat.is_shared_E[shard_X]
        is_node_X = self.flat.is_held(Tier.TABLE_ROW_WISE, shard_X)
        served_VP, shared_VP = self.rates.served_VP, self.rates.shared_VP
        load_R = served_VP.mean(axis=0) @ self.growth.worth_PR
        ranks_Q = np.argsort(load_R, kind="stable")[:_NUM_RANKS]
        yield ~is_shared_X & ~is_node_X, served_VP, ranks_Q[:, None]
        if is_node_X.any():
            nodes_Q = np.argsort(load_R.reshape(-1, node).sum(axis=1), kind="stable")[:_NUM_NODES]
            yield is_node_X, served_VP, nodes_Q[:, None] * node + np.arange(node)
        if is_shared_X.any():
            yield is_shared_X, shared_VP, np.arange(num_ranks)[None]
