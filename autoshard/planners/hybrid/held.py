"""The shards of a layout as arrays.

Shape suffixes: X shards that are held (columns, of what they add), Y some of these, or items that are held, V kinds of
shards, R ranks, Z pairs of a shard and a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from autoshard.planners.space.cost_gradient import FlatOptions, ragged
from autoshard.planners.space.kinds import FloatArray
from autoshard.planners.space.layout import Choice
from autoshard.planners.space.planner_space import BoolArray, IndexArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldShards:
    """The shards of all items that are held, item by item.

    Attributes:
        item_X: Item of each shard.
        number_X: Its number within its option.
        shard_X: Its place among the shards of all options.
        site_X: Its site.
        kind_X: Its kind.
        first_X: First rank that holds it.
        end_X: The rank after its last one.
        is_shared_X: Whether all ranks hold it.
    """

    item_X: IndexArray
    number_X: IndexArray
    shard_X: IndexArray
    site_X: IndexArray
    kind_X: IndexArray
    first_X: IndexArray
    end_X: IndexArray
    is_shared_X: BoolArray

    @classmethod
    def of(cls, flat: FlatOptions, chosen: Sequence[Choice | None]) -> HeldShards:
        """Reads a layout's choices.

        Args:
            flat: All options of its space.
            chosen: For each item its option and sites; None where nothing is held.
        """
        held = [(item, *one) for item, one in enumerate(chosen) if one is not None]
        item_Y = np.array([item for item, _, _ in held], dtype=np.int64)
        number_Y = np.array([number for _, number, _ in held], dtype=np.int64)
        sites = chain.from_iterable(sites for *_, sites in held)
        return cls.at(flat, flat.first_I[item_Y] + number_Y, np.fromiter(sites, dtype=np.int64))

    @classmethod
    def at(cls, flat: FlatOptions, option_Y: IndexArray, site_X: IndexArray) -> HeldShards:
        """The shards of some options, each at its site."""
        which_X, number_X, shard_X = flat.shards_of(option_Y)
        holders_X = flat.holders_E[shard_X]
        return cls(
            item_X=flat.item_O[option_Y][which_X],
            number_X=number_X,
            shard_X=shard_X,
            site_X=site_X,
            kind_X=flat.kind_E[shard_X],
            first_X=site_X * holders_X,
            end_X=(site_X + 1) * holders_X,
            is_shared_X=flat.is_shared_E[shard_X],
        )

    def sums(self, of_kind_VX: FloatArray, num_ranks: int) -> FloatArray:
        """What each rank holds, as sums of what a shard of each kind adds to a rank that has it; shape (R, X)."""
        apart_Y = np.flatnonzero(~self.is_shared_X)
        which_Z, number_Z, _ = ragged(self.end_X[apart_Y] - self.first_X[apart_Y])
        rank_Z = self.first_X[apart_Y][which_Z] + number_Z
        order_Z = np.argsort(rank_Z, kind="stable")
        rows_ZX = of_kind_VX[self.kind_X[apart_Y][which_Z[order_Z]]]
        sums_RX: FloatArray = np.zeros((num_ranks, of_kind_VX.shape[1]))
        if len(order_Z):
            start_Y = np.flatnonzero(np.diff(rank_Z[order_Z], prepend=-1))
            sums_RX[rank_Z[order_Z][start_Y]] = np.add.reduceat(rows_ZX, start_Y)
        return np.asarray(sums_RX + of_kind_VX[self.kind_X[self.is_shared_X]].sum(axis=0))

    def on(self, rank: int) -> IndexArray:
        """The shards on a rank that not all ranks hold."""
        return np.flatnonzero((self.first_X <= rank) & (rank < self.end_X) & ~self.is_shared_X)
