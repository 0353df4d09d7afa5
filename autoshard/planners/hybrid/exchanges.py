"""Moves and swaps of shards between a slow rank and others, all of them weighed at once.

Shape suffixes: P parts of a step, R ranks, V kinds of shards, X shards on single ranks, G of them that a rank may give,
T what it may get for one: a shard of another rank, or nothing from a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoshard.core import Tier
from autoshard.core.costs import MsArray
from autoshard.planners.hybrid.layout import Change, Layout
from autoshard.planners.space.planner_space import FloatArray, IndexArray

#: Most shards of the slow rank and of the others that are weighed.
_MAX_GIVEN, _MAX_TAKEN = 24, 512


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SingleShards:
    """Shards that are on single ranks.

    Attributes:
        item_X: Item of each.
        number_X: Its number among the shards of the item.
        kind_X: Its kind.
        rank_X: Where it is.
        is_free_X: Whether it may go to any rank; others are left to slower moves.
    """

    item_X: IndexArray
    number_X: IndexArray
    kind_X: IndexArray
    rank_X: IndexArray
    is_free_X: np.ndarray

    @classmethod
    def of(cls, layout: Layout) -> SingleShards:
        """Reads a layout."""
        rows = []
        for item, chosen in enumerate(layout.chosen):
            if chosen is None:
                continue
            option = layout.space.items[item].options[chosen[0]]
            for number, (shard, site) in enumerate(zip(option.shards, chosen[1], strict=True)):
                if shard.tier is Tier.TABLE_WISE:
                    is_free = not option.in_one_node and bool(shard.allowed_S.all())
                    rows.append((item, number, shard.kind, site, is_free))
        columns = np.array(rows, dtype=np.int64).reshape(-1, 5).T
        item_X, number_X, kind_X, rank_X = columns[:4]
        return cls(item_X=item_X, number_X=number_X, kind_X=kind_X, rank_X=rank_X, is_free_X=columns[4] > 0)


def best_exchanges(
    layout: Layout,
    served_VP: MsArray,
    parts_PR: MsArray,
    free_RM: FloatArray,
    slow: int,
    exponent: int,
    count: int,
    rng: np.random.Generator,
) -> list[Change]:
    """Moves and swaps that seem to shorten the step most, by p-norms of ranks whose times change by the shards' rates.

    Args:
        layout: The layout.
        served_VP: What a shard of each kind adds to its rank.
        parts_PR: Times of the parts.
        free_RM: Memory that is left.
        slow: The rank that gives.
        exponent: p.
        count: How many changes at most.
        rng: Draws from more shards than can be weighed.
    """
    shards, bytes_VM = SingleShards.of(layout), layout.space.bytes_VM
    mine_G = _some(np.flatnonzero(shards.is_free_X & (shards.rank_X == slow)), _MAX_GIVEN, rng)
    theirs = _some(np.flatnonzero(shards.is_free_X & (shards.rank_X != slow)), _MAX_TAKEN, rng)
    others = np.delete(np.arange(layout.num_ranks), slow)
    if not len(mine_G) or not len(others):
        return []
    to_T = np.concatenate([shards.rank_X[theirs], others])
    nothing = np.zeros(len(others))
    got_TP = np.concatenate([served_VP[shards.kind_X[theirs]], np.multiply.outer(nothing, served_VP[0])])
    got_TM = np.concatenate([bytes_VM[shards.kind_X[theirs]], np.multiply.outer(nothing, bytes_VM[0])])
    given_GP, given_GM = served_VP[shards.kind_X[mine_G]], bytes_VM[shards.kind_X[mine_G]]
    more_GTM = given_GM[:, None] - got_TM[None]
    fits_GT = ((more_GTM <= free_RM[to_T]) & (-more_GTM <= free_RM[slow])).all(axis=2)
    fits_GT[:, : len(theirs)] &= shards.item_X[mine_G][:, None] != shards.item_X[theirs]
    change_GT = _changes(parts_PR, slow, to_T, given_GP, got_TP, exponent)
    change_GT[~fits_GT] = np.inf
    best = np.argsort(change_GT, axis=None, kind="stable")[:count]
    found = []
    for give, take in zip(*np.unravel_index(best, change_GT.shape), strict=True):
        if not np.isfinite(change_GT[give, take]):
            break
        change = _moved(layout, shards, int(mine_G[give]), int(to_T[take]))
        if take < len(theirs):
            change += _moved(layout, shards, int(theirs[take]), slow)
        found.append(change)
    return found


def _changes(
    parts_PR: MsArray, slow: int, to_T: IndexArray, given_GP: MsArray, got_TP: MsArray, exponent: int
) -> FloatArray:
    """By how much the sum of p-norms of the parts would change, shape (G, T)."""
    scale_P = np.maximum(parts_PR.max(axis=1), 1e-30)
    share_PR = parts_PR / scale_P[:, None]
    power_PR = share_PR**exponent
    mean_P = power_PR.mean(axis=1)
    more_GTP = (given_GP[:, None] - got_TP[None]) / scale_P
    here_GTP = np.maximum(share_PR[:, slow] - more_GTP, 0.0) ** exponent
    there_GTP = np.maximum(share_PR[:, to_T].T + more_GTP, 0.0) ** exponent
    changed_GTP = (here_GTP - power_PR[:, slow] + there_GTP - power_PR[:, to_T].T) / parts_PR.shape[1]
    norm_GTP = np.maximum(mean_P + changed_GTP, 0.0) ** (1 / exponent) - mean_P ** (1 / exponent)
    return np.asarray(norm_GTP @ scale_P)


def _moved(layout: Layout, shards: SingleShards, index: int, rank: int) -> Change:
    item, number = int(shards.item_X[index]), int(shards.number_X[index])
    option, sites = layout.choice(item)
    return ((item, option, (*sites[:number], rank, *sites[number + 1 :])),)


def _some(indices: IndexArray, count: int, rng: np.random.Generator) -> IndexArray:
    return indices if len(indices) <= count else np.sort(rng.choice(indices, count, replace=False))
