"""What OPER places as one.

Shape suffixes: R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autoshard.core import RowRange, Shard, Tier
from autoshard.planners.oper.partition import cut_by, lookup_bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class RowGroup:
    """Rows that are placed as one: those of one shard of a table, or whole tables that must share a rank.

    Attributes:
        shards: One, or the whole tables.
        allowed_R: Whether a rank may hold it, shape (R,).
    """

    shards: tuple[Shard, ...]
    allowed_R: NDArray[np.bool_]

    @property
    def is_cuttable(self) -> bool:
        """Whether its rows may go to different ranks."""
        return len(self.shards) == 1

    @cached_property
    def num_bytes(self) -> int:
        """Weights and optimizer state."""
        return sum(shard.storage_bytes for shard in self.shards)

    @cached_property
    def lookup_bytes(self) -> float:
        """Bytes that lookups read per sample."""
        return sum(lookup_bytes(shard) for shard in self.shards)

    @cached_property
    def frequency(self) -> float:
        """Lookups per row and sample, on average; 0 for whole tables that share a rank."""
        if not self.is_cuttable:
            return 0.0
        (shard,) = self.shards
        return self.lookup_bytes / (shard.num_embeddings * (shard.embedding_dim * shard.table.dtype.num_bytes))

    @property
    def start(self) -> int:
        """Access rank of its first row, or its id where the table's row order is unknown."""
        return self.shards[0].rows.start

    @property
    def label(self) -> str:
        """Names of its tables."""
        return "+".join(shard.table.name for shard in self.shards)

    def may_be(self, tier: Tier) -> bool:
        """Whether no table forbids a tier."""
        return all(tier not in shard.table.constraints.forbidden_tiers for shard in self.shards)

    def rows_within(self, num_bytes: int) -> int:
        """As many of its rows as take that many bytes, rounded down."""
        return num_bytes * self.shards[0].num_embeddings // self.num_bytes

    def cut(self, num_rows: int) -> tuple[RowGroup, RowGroup]:
        """Its first rows, which are the hottest where the row order is known, and the others."""
        start, stop = self.start, self.shards[0].rows.stop
        return self._of_rows(start, start + num_rows), self._of_rows(start + num_rows, stop)

    def precedes(self, other: RowGroup) -> bool:
        """Whether the other's rows come next in the same table."""
        return self.label == other.label and self.shards[-1].rows.stop == other.start

    def joined(self, following: RowGroup) -> RowGroup:
        """With the rows that come next in the table."""
        return self._of_rows(self.start, following.shards[0].rows.stop)

    def _of_rows(self, start: int, stop: int) -> RowGroup:
        (shard,) = self.shards
        rows = RowRange(start=start, stop=stop, by=cut_by(shard.table))
        return replace(self, shards=(replace(shard, rows=rows),))


Owner: TypeAlias = tuple[RowGroup, int]
"""A group and the rank that holds it."""
