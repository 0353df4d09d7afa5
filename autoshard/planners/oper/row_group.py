"""What OPER places as one.

Shape suffixes: R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoshard.core import RowRange, RowsBy, Shard
from autoshard.planners.oper.partition import lookup_bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class RowGroup:
    """Rows that are placed as one: a part of a table, or whole tables that must share a rank.

    Attributes:
        shards: One, or the whole tables.
        allowed_R: Whether a rank may hold it, shape (R,).
        cuttable: Whether parts of it may go to different ranks.
    """

    shards: tuple[Shard, ...]
    allowed_R: NDArray[np.bool_]
    cuttable: bool

    @cached_property
    def num_bytes(self) -> int:
        """Weights and optimizer state."""
        return sum(shard.storage_bytes for shard in self.shards)

    @cached_property
    def lookup_bytes(self) -> float:
        """Bytes that lookups read per sample."""
        return sum(lookup_bytes(shard) for shard in self.shards)

    @property
    def label(self) -> str:
        """Names of its tables."""
        return "+".join(shard.table.name for shard in self.shards)

    def cut(self, num_rows: int) -> tuple[RowGroup, RowGroup]:
        """Its hottest rows, and the others."""
        (shard,) = self.shards
        start, stop = shard.rows.start, shard.rows.stop
        ranges = (start, start + num_rows), (start + num_rows, stop)
        hot, cold = (
            replace(shard, rows=RowRange(start=first, stop=last, by=RowsBy.ACCESS_RANK)) for first, last in ranges
        )
        return replace(self, shards=(hot,)), replace(self, shards=(cold,))

    def precedes(self, other: RowGroup) -> bool:
        """Whether the other's rows come next in the same table."""
        return self.label == other.label and self.shards[-1].rows.stop == other.shards[0].rows.start

    def joined(self, following: RowGroup) -> RowGroup:
        """With the rows that come next in the table."""
        (shard,), (other,) = self.shards, following.shards
        rows = RowRange(start=shard.rows.start, stop=other.rows.stop, by=RowsBy.ACCESS_RANK)
        return replace(self, shards=(replace(shard, rows=rows),))


def bytes_of(group: RowGroup) -> float:
    """Weights and optimizer state."""
    return float(group.num_bytes)


def lookups_of(group: RowGroup) -> float:
    """Bytes that lookups read per sample."""
    return group.lookup_bytes
