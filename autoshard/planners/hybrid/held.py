"""The shards of a layout as arrays.

Shape suffixes: X shards that are held, Y items that are held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from autoshard.planners.hybrid.cost_gradient import FlatOptions
from autoshard.planners.hybrid.layout import Choice
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
        which_X, number_X, shard_X = flat.shards_of(flat.first_I[item_Y] + number_Y)
        site_X = np.fromiter(chain.from_iterable(sites for *_, sites in held), dtype=np.int64, count=len(shard_X))
        holders_X = flat.holders_E[shard_X]
        return cls(
            item_X=item_Y[which_X],
            number_X=number_X,
            shard_X=shard_X,
            site_X=site_X,
            kind_X=flat.kind_E[shard_X],
            first_X=site_X * holders_X,
            end_X=(site_X + 1) * holders_X,
            is_shared_X=flat.is_shared_E[shard_X],
        )

    def on(self, rank: int) -> IndexArray:
        """The shards on a rank that not all ranks hold."""
        return np.flatnonzero((self.first_X <= rank) & (rank < self.end_X) & ~self.is_shared_X)
