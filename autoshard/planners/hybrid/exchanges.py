"""Moves and swaps of shards between a slow rank and others, all of them weighed at once.

Shape suffixes: P parts of a step, R ranks, V kinds of shards, M memory levels, X shards on single ranks, G of them that
a rank may give, T what it may get for one: a shard of another rank, or nothing from a rank.
"""

from __future__ import annotations

import numpy as np

from autoshard.core.costs import MsArray
from autoshard.planners.hybrid.held import HeldShards
from autoshard.planners.space.kinds import FloatArray
from autoshard.planners.space.layout import Change, Layout
from autoshard.planners.space.planner_space import BoolArray, IndexArray

#: Most shards of the slow rank and of the others that are weighed.
_MAX_GIVEN, _MAX_TAKEN = 24, 512


class Exchanges:
    """Moves and swaps of shards that are on single ranks and may go to any.

    Args:
        layout: The layout.
        held: Its shards.
        is_free_X: Which of them may be on any rank by themselves.
        served_VP: What a shard of each kind adds to the parts of its rank.
        parts_PR: Times of the parts.
        free_RM: Memory that is left.
        exponent: p of the p-norms over ranks.
    """

    def __init__(
        self,
        layout: Layout,
        held: HeldShards,
        is_free_X: BoolArray,
        *,
        served_VP: MsArray,
        parts_PR: MsArray,
        free_RM: FloatArray,
        exponent: int,
    ) -> None:
        self.layout, self.parts_PR, self.free_RM, self.exponent = layout, parts_PR, free_RM, exponent
        self.item_X, self.number_X = held.item_X[is_free_X], held.number_X[is_free_X]
        self.rank_X, kind_X = held.first_X[is_free_X], held.kind_X[is_free_X]
        self.served_XP, self.bytes_XM = served_VP[kind_X], layout.space.kinds.bytes_VM[kind_X]

    def best(self, slow: int, count: int, rng: np.random.Generator) -> list[Change]:
        """Exchanges of a slow rank that seem to shorten the step most.

        The measure is the sum of the parts' p-norms, with ranks' times changed by what shards add.

        Args:
            slow: The rank that gives.
            count: How many exchanges at most.
            rng: Draws from more shards than can be weighed.
        """
        mine_G = _some(np.flatnonzero(self.rank_X == slow), _MAX_GIVEN, rng)
        theirs = _some(np.flatnonzero(self.rank_X != slow), _MAX_TAKEN, rng)
        others = np.delete(np.arange(self.layout.num_ranks), slow)
        if not len(mine_G) or not len(others):
            return []
        # After the shards of other ranks, the ranks themselves, for moves that take nothing.
        to_T = np.concatenate([self.rank_X[theirs], others])
        got_TP, got_TM = (np.pad(of_X[theirs], ((0, len(others)), (0, 0))) for of_X in (self.served_XP, self.bytes_XM))
        more_GTM = self.bytes_XM[mine_G][:, None] - got_TM[None]
        fits_GT = ((more_GTM <= self.free_RM[to_T]) & (-more_GTM <= self.free_RM[slow])).all(axis=2)
        fits_GT[:, : len(theirs)] &= self.item_X[mine_G][:, None] != self.item_X[theirs]
        change_GT = self._changes(slow, to_T, self.served_XP[mine_G], got_TP)
        change_GT[~fits_GT] = np.inf
        found = []
        for index in np.argsort(change_GT, axis=None, kind="stable")[:count]:
            give, take = np.unravel_index(index, change_GT.shape)
            if not np.isfinite(change_GT[give, take]):
                break
            change = self._moved(int(mine_G[give]), int(to_T[take]))
            found.append(change if take >= len(theirs) else change + self._moved(int(theirs[take]), slow))
        return found

    def _changes(self, slow: int, to_T: IndexArray, given_GP: MsArray, got_TP: MsArray) -> FloatArray:
        """By how much the sum of p-norms of the parts would change, shape (G, T)."""
        exponent = self.exponent
        scale_P = np.maximum(self.parts_PR.max(axis=1), 1e-30)
        share_PR = self.parts_PR / scale_P[:, None]
        power_PR = share_PR**exponent
        mean_P = power_PR.mean(axis=1)
        more_GTP = (given_GP[:, None] - got_TP[None]) / scale_P
        here_GTP = np.maximum(share_PR[:, slow] - more_GTP, 0.0) ** exponent
        there_GTP = np.maximum(share_PR[:, to_T].T + more_GTP, 0.0) ** exponent
        changed_GTP = (here_GTP - power_PR[:, slow] + there_GTP - power_PR[:, to_T].T) / share_PR.shape[1]
        norm_GTP = np.maximum(mean_P + changed_GTP, 0.0) ** (1 / exponent) - mean_P ** (1 / exponent)
        return np.asarray(norm_GTP @ scale_P)

    def _moved(self, index: int, rank: int) -> Change:
        return self.layout.moved(int(self.item_X[index]), int(self.number_X[index]), rank)


def _some(indices: IndexArray, count: int, rng: np.random.Generator) -> IndexArray:
    return indices if len(indices) <= count else np.sort(rng.choice(indices, count, replace=False))
