"""Ways of choosing sets of shards to measure: what they choose from, and the simple ones among them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from autoshard.core import EmbeddingTable, LocalShard, PlacedShard, Shard, TableSet, local_shard
from autoshard.core.accepted import AT_LEAST_1
from autoshard.core.errors import InvalidOptionError
from autoshard.core.machine import device_family
from autoshard.formats.stores.samples import SampleTable

ShardSet = tuple[LocalShard, ...]

#: Largest batch of the strategy `batches`, on a CPU and on a GPU.
LARGEST_BATCH_CPU, LARGEST_BATCH_CUDA = 8_192, 65_536

#: Sets near a memory limit fill this share of it to all of it.
LEAST_FILLED = 0.9
#: Tables whose rows are multiplied stay below this, so that row ids and offsets stay what kernels are built for.
_MOST_ROWS = 2**31 - 1


def accept_all(_: LocalShard) -> bool:
    """Takes every shard as measurable."""
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class SetSource:
    """What sets are chosen from, and within which limits.

    Attributes:
        tables: The pool of tables with their batch.
        max_tables: Largest number of shards in a set.
        device: Key of the device that is measured; cost models of planners are found by it.
        memory_bytes: Most bytes of weights and optimizer state in a set; None for no limit.
        registry: Folder of trained cost models and policies that planners use; None to do without them, so that the
            choice depends on nothing else on the machine.
        accepts: Whether the device can run a shard; others are never chosen.
        samples: What the store holds of the device already, for the strategy `uncertain`.

    Raises:
        InvalidOptionError: If a limit is below 1.
    """

    tables: TableSet
    max_tables: int
    device: str = "cpu"
    memory_bytes: int | None = None
    registry: Path | None = None
    accepts: Callable[[LocalShard], bool] = accept_all
    samples: SampleTable | None = None

    def __post_init__(self) -> None:
        AT_LEAST_1.check_fields(self, "max_tables", "memory_bytes")

    def holds(self, shard: LocalShard) -> bool:
        """Whether a shard can be measured on its own."""
        return (self.memory_bytes is None or shard.memory_bytes <= self.memory_bytes) and self.accepts(shard)

    def whole_tables(self) -> tuple[tuple[EmbeddingTable, LocalShard], ...]:
        """Tables that can be measured whole, each with what a rank runs that holds it.

        Raises:
            InvalidOptionError: If there is none.
        """
        pairs = [(table, whole_shard(table, self.tables.batch_size)) for table in self.tables.tables]
        found = tuple((table, shard) for table, shard in pairs if self.holds(shard))
        if not found:
            raise InvalidOptionError("no table of the pool can be measured whole within the limits", field="tables")
        return found

    def within_limits(self, shards: Sequence[LocalShard]) -> ShardSet:
        """The first shards that the limits leave room for; those that find none are left out."""
        kept: list[LocalShard] = []
        held = 0
        for shard in shards:
            if len(kept) < self.max_tables and (
                self.memory_bytes is None or held + shard.memory_bytes <= self.memory_bytes
            ):
                kept.append(shard)
                held += shard.memory_bytes
        return tuple(kept)


class Strategy(Protocol):
    """An endless stream of sets in which any one can be asked for by its number."""

    def draw(self, number: int) -> ShardSet:
        """Set number `number`, from 0: at least one shard, within the source's limits."""
        ...


def generator_of(seed: int, name: str, number: int) -> np.random.Generator:
    """Randomness of one numbered draw of a strategy, apart from that of all others."""
    return np.random.default_rng((seed, zlib.crc32(name.encode()), number))


def whole_shard(table: EmbeddingTable, batch_size: int) -> LocalShard:
    """A table as a rank runs it that holds it whole."""
    return local_shard(PlacedShard.table_wise(Shard.whole(table), 0), group_batch_size=batch_size)


class RandomSubsets:
    """Subsets of the pool, of every size alike."""

    def __init__(self, source: SetSource, seed: int) -> None:
        self._source = source
        self._seed = seed
        self._pool = [shard for _, shard in source.whole_tables()]

    def draw(self, number: int) -> ShardSet:
        """A subset."""
        rng = generator_of(self._seed, "random", number)
        size = int(rng.integers(1, min(self._source.max_tables, len(self._pool)) + 1))
        chosen = rng.choice(len(self._pool), size, replace=False)
        return self._source.within_limits([self._pool[index] for index in chosen])


class SingleTables:
    """One table at a time, in a shuffled order: all of the pool before any comes again."""

    def __init__(self, source: SetSource, seed: int) -> None:
        self._seed = seed
        self._pool = [shard for _, shard in source.whole_tables()]

    def draw(self, number: int) -> ShardSet:
        """One table."""
        lap, place = divmod(number, len(self._pool))
        order = generator_of(self._seed, "singles", lap).permutation(len(self._pool))
        return (self._pool[int(order[place])],)


class LargerBatches:
    """Whole tables at 2, 4, 8 ... times the pool's batch, up to the largest that plans have on such a device.

    The larger the batch, the fewer tables: a set has at most as many bags as `max_tables` tables at twice the pool's
    batch, so that it takes no more than twice as long as other sets.
    """

    def __init__(self, source: SetSource, seed: int) -> None:
        self._source = source
        self._seed = seed
        self._pool = [table for table, _ in source.whole_tables()]
        own = source.tables.batch_size
        largest = LARGEST_BATCH_CPU if device_family(source.device) == "cpu" else LARGEST_BATCH_CUDA
        self._factors = [1 << power for power in range(1, 64) if own << power <= largest]
        if not self._factors:
            raise InvalidOptionError(
                f"the strategy batches needs tables with a batch of at most {largest // 2:,}, got {own:,}",
                field="tables.batch_size",
            )

    def draw(self, number: int) -> ShardSet:
        """A subset of the pool at one of the batches."""
        rng = generator_of(self._seed, "batches", number)
        factor = self._factors[int(rng.integers(len(self._factors)))]
        most = min(len(self._pool), max(1, 2 * self._source.max_tables // factor))
        chosen = rng.choice(len(self._pool), int(rng.integers(1, most + 1)), replace=False)
        batch_size = factor * self._source.tables.batch_size
        return self._source.within_limits([whole_shard(self._pool[index], batch_size) for index in chosen])


class NearMemoryLimit:
    """Sets whose weights and optimizer state fill 90 to 100% of the memory limit.

    Tables are taken as they are while they fit. Where these fill too little, the rows of all of them are multiplied
    alike, their access profiles stretched over them: the tables of a rank that is filled are large ones.
    """

    def __init__(self, source: SetSource, seed: int) -> None:
        if source.memory_bytes is None:
            raise InvalidOptionError("the strategy memory-limit needs one", field="memory_bytes")
        self._source = source
        self._limit = source.memory_bytes
        self._seed = seed
        batch_size = source.tables.batch_size
        self._pool = [table for table in source.tables.tables if source.accepts(whole_shard(table, batch_size))]
        room = self._limit * (1 - LEAST_FILLED) / 4
        # Sets are filled by whole rows, so these must be small beside what a set may miss the limit by.
        self._pool = [table for table in self._pool if _row_bytes(table) * source.max_tables <= room]
        if not self._pool:
            raise InvalidOptionError(
                f"{self._limit:,} bytes are too few for sets of {source.max_tables} tables of the pool to come close",
                field="memory_bytes",
            )

    def draw(self, number: int) -> ShardSet:
        """A set that fills the limit."""
        rng = generator_of(self._seed, "memory-limit", number)
        target = int(self._limit * rng.uniform(LEAST_FILLED + 0.03, 1.0))
        size = int(rng.integers(1, min(self._source.max_tables, len(self._pool)) + 1))
        order = [self._pool[index] for index in rng.permutation(len(self._pool))]
        chosen: list[EmbeddingTable] = []
        held = 0
        for table in order:
            if len(chosen) < size and held + table.storage_bytes <= target:
                chosen.append(table)
                held += table.storage_bytes
        if held < self._limit * LEAST_FILLED:
            chosen = _filled(chosen or order[:1], target)
        return tuple(whole_shard(table, self._source.tables.batch_size) for table in chosen)


def _filled(tables: Sequence[EmbeddingTable], target_bytes: int) -> list[EmbeddingTable]:
    """The tables with as many rows, in the same proportions, as fill the target; none has too many."""
    left = target_bytes
    filled = []
    # The smallest first: what a table at the most rows cannot take goes to the larger ones after it.
    ordered = sorted(tables, key=lambda table: table.storage_bytes)
    for index, table in enumerate(ordered):
        rest = sum(item.storage_bytes for item in ordered[index:])
        rows = int(table.num_embeddings * left / rest)
        rows = min(max(1, rows), _MOST_ROWS)
        filled.append(replace(table, num_embeddings=rows, access=table.access.thinned(rows)))
        left -= filled[-1].storage_bytes
    return filled


def _row_bytes(table: EmbeddingTable) -> int:
    return table.storage_bytes // table.num_embeddings
