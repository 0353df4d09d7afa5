"""Tables of other number formats, poolings, optimizers and memory than their own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from autoshard.core import (
    DType,
    EmbeddingTable,
    LocalShard,
    MemoryLevel,
    Optimizer,
    PlacedShard,
    Pooling,
    Shard,
    local_shard,
)
from autoshard.core.errors import InvalidOptionError
from autoshard.core.tables import KernelTraits, traits_of
from bench.sampling.slices import draw_piece
from bench.sampling.strategies import SetSource, ShardSet, generator_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardKind(KernelTraits):
    """What sort of kernel a table needs."""

    level: MemoryLevel

    def of(self, table: EmbeddingTable) -> EmbeddingTable:
        """The table in this kind; where its rows live is not the table's to say."""
        return replace(table, **traits_of(self))

    def placed(self, table: EmbeddingTable, batch_size: int) -> LocalShard:
        """The table in this kind as a rank runs it that holds it whole."""
        placed = PlacedShard.table_wise(Shard.whole(self.of(table)), 0)
        placed = replace(placed, memory=replace(placed.memory, level=self.level))
        return local_shard(placed, group_batch_size=batch_size)


#: Every combination; a device runs those that `SetSource.accepts`.
KINDS: tuple[ShardKind, ...] = tuple(
    ShardKind(dtype=dtype, pooling=pooling, optimizer=optimizer, level=level)
    for dtype, pooling, optimizer, level in product(
        (DType.FP32, DType.FP16, DType.BF16),
        (Pooling.SUM, Pooling.MEAN, Pooling.SEQUENCE),
        (Optimizer.SGD, Optimizer.ROWWISE_ADAGRAD, Optimizer.ADAM),
        (MemoryLevel.HBM, MemoryLevel.DDR),
    )
)


class OtherKinds:
    """Sets in which all tables are of one kind, or each of its own; whole tables and slices.

    Kinds come in a shuffled order, all of them before any comes again: a model that is calibrated on a few sets errs
    most on kinds that none of these has.
    """

    def __init__(self, source: SetSource, seed: int) -> None:
        self._source = source
        self._seed = seed
        self._batch_size = source.tables.batch_size
        # Not those alone that the first table allows: a table may be too narrow or too large in one of them.
        self._kinds = tuple(kind for kind in KINDS if any(self._runs(table, kind) for table in source.tables.tables))
        if len(self._kinds) < 2:
            raise InvalidOptionError(
                f"the strategy kinds needs a device that runs several; this one runs {len(self._kinds)} of the "
                f"{len(KINDS)}",
                field="accepts",
            )

    def draw(self, number: int) -> ShardSet:
        """One to `max_tables` tables of the pool, or slices of them, in other kinds."""
        rng = generator_of(self._seed, "kinds", number)
        pool = self._source.tables.tables
        kind = self._next_kind(number)
        while True:
            size = int(rng.integers(1, min(self._source.max_tables, len(pool)) + 1))
            is_mixed, is_sliced = rng.random() < 0.3, rng.random() < 0.3
            drawn = (
                self._shard(pool[index], self._any_kind(rng) if is_mixed else kind, rng, is_sliced=is_sliced)
                for index in rng.choice(len(pool), size, replace=False)
            )
            shards = self._source.within_limits([shard for shard in drawn if shard is not None])
            if shards:
                return shards
            kind = self._any_kind(rng)  # few tables may be measurable in the one before

    def _next_kind(self, number: int) -> ShardKind:
        lap, place = divmod(number, len(self._kinds))
        order = generator_of(self._seed, "laps of kinds", lap).permutation(len(self._kinds))
        return self._kinds[int(order[place])]

    def _any_kind(self, rng: np.random.Generator) -> ShardKind:
        return self._kinds[int(rng.integers(len(self._kinds)))]

    def _runs(self, table: EmbeddingTable, kind: ShardKind) -> bool:
        return self._source.holds(kind.placed(table, self._batch_size))

    def _shard(
        self, table: EmbeddingTable, kind: ShardKind, rng: np.random.Generator, *, is_sliced: bool
    ) -> LocalShard | None:
        if is_sliced and kind.level is MemoryLevel.HBM:
            return draw_piece(self._source, kind.of(table), rng)
        shard = kind.placed(table, self._batch_size)
        return shard if self._source.holds(shard) else None
