"""Shards: parts of tables, first cut, then placed, then as one rank holds them.

Shape suffix: N placed shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

import numpy as np

from autoshard.core.access import AccessProfile, ProfileBatch
from autoshard.core.declared import Role, undecided, values
from autoshard.core.errors import InvalidPlanError
from autoshard.core.tables import (
    DType,
    EmbeddingTable,
    KernelTraits,
    Pooling,
    Tier,
    traits_of,
    weight_row_bytes,
)
from autoshard.core.topology import MemoryLevel

Replicas = tuple[tuple[int, ...], ...]
FusedKernel = tuple[object, ...]
#: Traits whose value alone tells, in `LocalShard.kernel_kind`.
NAMED_TRAITS = ("dtype", "optimizer", "pooling")
#: Writes of each row that any replica's batch hits, by the update after the sum: its squared gradient, its step, its
#: weights as they were, the step by the learning rate, the new weights, and these in their place.
UPDATE_WRITES = 6
#: Bytes of a device's memory for each row of the host's that is behind a cache: where it is in the cache, and with LFU
#: how often it was looked up (FBGEMM's `cache_index_table_map` and `lxu_state`).
_CACHE_INDEX_BYTES = {"lru": 4, "lfu": 12}
#: And for each row that the cache has room for: which row is there (`lxu_cache_state`), and with LRU when it was looked
#: up last (`lxu_state`) and how many batches it waits for (`lxu_cache_locking_counter`).
_CACHE_SLOT_BYTES = {"lru": 20, "lfu": 8}
#: Access curves of parts of tables that are kept, about a kilobyte each: 800 tables have 3,000 of either kind.
_NUM_CURVES = 1 << 14

_NO_BYTES = dict.fromkeys(MemoryLevel, 0)


class RowsBy(StrEnum):
    """What a row range counts: row ids, or access ranks."""

    INDEX = "index"
    ACCESS_RANK = "access_rank"


class Split(StrEnum):
    """How rows are dealt to the ranks of one replica."""

    BLOCK = "block"
    CYCLIC = "cyclic"
    HASH = "hash"


class Exchange(StrEnum):
    """What owners send back: one vector per bag they serve, or the rows asked for."""

    PARTIAL_SUMS = "partial_sums"
    ROWS = "rows"


class Collective(StrEnum):
    """How sums of bags travel: owner by owner, or added up on the way where all ranks own some of the rows."""

    ALL_TO_ALL = "all_to_all"
    REDUCE_SCATTER = "reduce_scatter"
    """An all-gather in the backward pass."""


class GradSync(StrEnum):
    """How gradients of replicated rows meet."""

    NONE = "none"
    """Not at all: there is one replica."""
    DENSE = "dense"
    """An all-reduce of the gradients of all rows."""
    SPARSE = "sparse"
    """An all-gather of the ids of rows that were hit, and an all-reduce of their gradients (OPER Sec. 5.3)."""
    ALL_GATHER = "all_gather"
    """An all-gather of ids and gradients of rows that were hit; every holder adds them up."""


class Update(StrEnum):
    """Where the optimizer runs: fused into the backward kernel, or after an all-reduce."""

    FUSED = "fused"
    ALL_REDUCED = "all_reduced"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRange:
    """Rows [start, stop) of a table, by row id or by access rank."""

    start: int
    stop: int
    by: RowsBy = RowsBy.INDEX

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise InvalidPlanError(f"must satisfy 0 <= start < stop, got {self.start}, {self.stop}", field="rows")

    @property
    def num_rows(self) -> int:
        """Rows in the range."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlacement:
    """Memory level of a shard's rows, and the cache before it."""

    level: MemoryLevel = MemoryLevel.HBM
    cache_bytes: int = 0
    policy: str = "lru"
    cache_dtype: DType | None = None

    @property
    def slot_bytes(self) -> int:
        """Bytes of the device's memory beside each row that the cache has room for."""
        return _CACHE_SLOT_BYTES[self.policy] if self.level is MemoryLevel.DDR else 0

    def cached_row_bytes(self, of: KernelTraits, embedding_dim: int) -> int:
        """Bytes that a row takes in the cache: its weights, in the cache's number format.

        Args:
            of: The table, or what is held of it.
            embedding_dim: Columns of the row.
        """
        return weight_row_bytes(self.cache_dtype or of.dtype, of.optimizer, embedding_dim)

    def held_bytes(self, of: KernelTraits, num_rows: int, embedding_dim: int) -> dict[MemoryLevel, int]:
        """Bytes that a rank holds for so many rows by memory level: weights, optimizer state, and a cache before them.

        For rows in host memory, the device's holds the moments of which each row has one number, and what a cache
        knows of rows and of its slots.

        Args:
            of: The table, or what is held of it.
            num_rows: Rows that the rank holds.
            embedding_dim: Columns of them.

        Source:
            FBGEMM 1.8, `construct_split_state` and `_apply_cache_state` of its training kernels, on a GPU.
        """
        weights = weight_row_bytes(of.dtype, of.optimizer, embedding_dim)
        near, far, num_slots = 0, weights + of.optimizer.state_bytes_per_row(embedding_dim), 0
        if self.level is MemoryLevel.DDR:
            near = of.optimizer.row_moment_bytes
            far -= near
            if self.cache_bytes:
                near += _CACHE_INDEX_BYTES[self.policy]
                num_slots = self.cache_bytes // self.cached_row_bytes(of, embedding_dim)
        held = _NO_BYTES.copy()
        held[self.level] += num_rows * far
        held[MemoryLevel.HBM] += num_rows * near + num_slots * self.slot_bytes + self.cache_bytes
        return held


#: Where rows are unless it is said otherwise; one object, since thousands of shards share it.
IN_DEVICE_MEMORY = MemoryPlacement()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A part of a table that is placed as one: some of its rows, some of its columns."""

    table: EmbeddingTable
    rows: RowRange
    columns: tuple[int, int]

    def __post_init__(self) -> None:
        start, stop = self.columns
        if not 0 <= start < stop <= self.table.embedding_dim:
            raise InvalidPlanError(
                f"must lie within [0, {self.table.embedding_dim}), got {start}, {stop}", field="columns"
            )
        if self.rows.stop > self.table.num_embeddings:
            raise InvalidPlanError(
                f"must lie within [0, {self.table.num_embeddings}), got {self.rows.start}, {self.rows.stop}",
                field="rows",
            )

    @classmethod
    def whole(cls, table: EmbeddingTable) -> Shard:
        """The table as one shard."""
        return cls(table=table, rows=RowRange(start=0, stop=table.num_embeddings), columns=(0, table.embedding_dim))

    @property
    def num_embeddings(self) -> int:
        """Rows of the shard."""
        return self.rows.num_rows

    @property
    def embedding_dim(self) -> int:
        """Columns of the shard."""
        return self.columns[1] - self.columns[0]

    @property
    def storage_bytes(self) -> int:
        """Bytes of weights and optimizer state of one copy, wherever it lives."""
        return self.num_embeddings * self.table.row_bytes(self.embedding_dim)

    def access(self) -> tuple[AccessProfile, float]:
        """Profile of the shard's rows and the share of the table's lookups that they get.

        A range of row ids is taken as an even draw over access ranks.
        """
        if self.num_embeddings == self.table.num_embeddings:
            return self.table.access, 1.0
        if self.rows.by is RowsBy.ACCESS_RANK:
            return _slice(self.table.access, self.rows.start, self.rows.stop)
        share = self.num_embeddings / self.table.num_embeddings
        return _thinned(self.table.access, self.num_embeddings), share


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedShard:
    """A shard with the ranks that hold it and the way its rows and gradients travel.

    Attributes:
        replicas: Each replica is the list of ranks over which its rows are split.
        collective: How sums travel; `reduce_scatter` only where one replica is split over all ranks.
        fetch: For each rank, the index of the replica that it reads; None for the replica of its own node or,
            where there is one replica per rank, its own.
    """

    shard: Shard
    tier: Tier
    replicas: Replicas
    split: Split = Split.BLOCK
    exchange: Exchange = Exchange.PARTIAL_SUMS
    collective: Collective = Collective.ALL_TO_ALL
    deduplicate: bool = False
    grad_sync: GradSync = GradSync.NONE
    memory: MemoryPlacement = IN_DEVICE_MEMORY
    fetch: tuple[int, ...] | None = None

    @property
    def update(self) -> Update:
        """Where the optimizer runs: after an all-reduce if there are several replicas."""
        return Update.FUSED if len(self.replicas) == 1 else Update.ALL_REDUCED

    def stays(self, num_ranks: int) -> bool:
        """Whether each of so many ranks reads a whole copy of its own, so that nothing is exchanged."""
        if len(self.replicas) < num_ranks or any(len(replica) > 1 for replica in self.replicas):
            return False
        return self.fetch is None or all(self.replicas[number] == (rank,) for rank, number in enumerate(self.fetch))

    def as_run(self, num_ranks: int) -> PlacedShard:
        """The shard as so many ranks execute it: what each looks up in a copy of its own is pooled there at once."""
        if self.exchange is not Exchange.ROWS or self.shard.table.pooling is Pooling.SEQUENCE:
            return self
        if not self.stays(num_ranks):
            return self
        return replace(self, exchange=Exchange.PARTIAL_SUMS, deduplicate=False)

    @classmethod
    def table_wise(cls, shard: Shard, rank: int) -> PlacedShard:
        """The shard on a single rank."""
        exchange = Exchange.ROWS if shard.table.pooling is Pooling.SEQUENCE else Exchange.PARTIAL_SUMS
        return cls(shard=shard, tier=Tier.TABLE_WISE, replicas=((rank,),), exchange=exchange)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard(KernelTraits):
    """What one rank holds of a placed shard: a small table that sees a batch. Cost models price it.

    Attributes:
        table: Name of the table that it was cut from; a label, never a feature.
        num_bags: Bags that the kernel pools per step (samples times features).
        pooling_factor: Mean lookups per bag; far below 1 for thin tiers.
        output: `partial_sums` for one vector per bag, `rows` for one per lookup.
        written_rows: Expected rows that a rank writes for the gradients of all-reduced rows and the update after their
            sum, a row that is written several times counted as often; None for a kernel that writes the gradient of
            every row, and leaves the update out.
        cache_bytes: HBM that caches rows which live in another level; 0 without a cache.
        cache_policy: Which rows that cache evicts: `lru` or `lfu`.
        cache_dtype: Number format of cached rows; None for the table's.
    """

    table: str
    num_embeddings: int
    embedding_dim: int
    num_bags: int
    pooling_factor: float
    access: AccessProfile
    output: Exchange = Exchange.PARTIAL_SUMS
    update: Update = Update.FUSED
    written_rows: float | None = None
    level: MemoryLevel = MemoryLevel.HBM
    cache_bytes: int = 0
    cache_policy: str = "lru"
    cache_dtype: DType | None = None

    @property
    def num_lookups(self) -> float:
        """Expected lookups per step."""
        return self.num_bags * self.pooling_factor

    @property
    def num_gradient_rows(self) -> float:
        """Expected rows that are written for gradients that replicas sum, as `written_rows`; 0 for a fused update."""
        if self.update is Update.FUSED:
            return 0.0
        return float(self.num_embeddings) if self.written_rows is None else self.written_rows

    @property
    def is_pooled(self) -> bool:
        """Whether the kernel gives one vector per bag, not one per lookup."""
        return self.pooling is not Pooling.SEQUENCE and self.output is Exchange.PARTIAL_SUMS

    @property
    def kernel_kind(self) -> str:
        """Kind of kernel that runs it: update, memory level, number format, optimizer, and pooling or `rows`.

        Where gradients are all-reduced, the optimizer is no part of the kernel. Other traits are named where they are
        not usual.
        """
        optimizer = self.optimizer if self.update is Update.FUSED else "none"
        pooling = self.pooling if self.is_pooled else "rows"
        others = undecided(self, NAMED_TRAITS, Role.KERNEL, of=KernelTraits)
        named = (f"{name}={getattr(self, name)}" for name in others)
        return "/".join((self.update, self.level, self.dtype, optimizer, pooling, *named))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return self.num_embeddings * weight_row_bytes(self.dtype, self.optimizer, self.embedding_dim)

    @property
    def memory_bytes(self) -> int:
        """Bytes of weights and optimizer state."""
        return self.weight_bytes + self.num_embeddings * self.optimizer.state_bytes_per_row(self.embedding_dim)

    @property
    def memory(self) -> MemoryPlacement:
        """Where its rows live, and the cache before them."""
        return MemoryPlacement(
            level=self.level, cache_bytes=self.cache_bytes, policy=self.cache_policy, cache_dtype=self.cache_dtype
        )

    @property
    def held_bytes(self) -> dict[MemoryLevel, int]:
        """Bytes by memory level, see `MemoryPlacement.held_bytes`."""
        return self.memory.held_bytes(self, self.num_embeddings, self.embedding_dim)

    @property
    def cached_row_bytes(self) -> int:
        """Bytes that a row takes in the cache, see `MemoryPlacement.cached_row_bytes`."""
        return self.memory.cached_row_bytes(self, self.embedding_dim)


# A shard is asked for the same curve by traffic, kernels and memory, and with it its columns and its replicas.
@lru_cache(maxsize=_NUM_CURVES)
def _slice(access: AccessProfile, start: int, stop: int) -> tuple[AccessProfile, float]:
    return access.slice(start, stop)


@lru_cache(maxsize=_NUM_CURVES)
def _thinned(access: AccessProfile, num_rows: int) -> AccessProfile:
    return access.thinned(num_rows)


def fused_kernel(table: EmbeddingTable, update: Update = Update.FUSED) -> FusedKernel:
    """What the runtime's shards of one rank must have in common to run in one fused kernel."""
    return table.pooling, update, *values(table, Role.KERNEL)


def local_shard(placed: PlacedShard, *, group_batch_size: int, bags_share: float = 1.0) -> LocalShard:
    """What each rank of a replica holds of a placed shard.

    Args:
        placed: The placed shard; all ranks of a replica hold alike shares of its rows.
        group_batch_size: Samples per step of the replica group.
        bags_share: Share of the group's samples that the replica serves.
    """
    return local_shards([placed], group_batch_size=group_batch_size, bags_share_N=[bags_share])[0]


def local_shards(
    placed_N: Sequence[PlacedShard], *, group_batch_size: int, bags_share_N: Sequence[float]
) -> list[LocalShard]:
    """As `local_shard`, of many placed shards."""
    held = [_local(placed, group_batch_size, share) for placed, share in zip(placed_N, bags_share_N, strict=True)]
    synced = [index for index, placed in enumerate(placed_N) if placed.grad_sync is not GradSync.NONE]
    if synced:
        of_synced = [(placed_N[index], held[index]) for index in synced]
        for index, rows in zip(synced, _written_rows(of_synced, group_batch_size), strict=True):
            held[index] = replace(held[index], written_rows=rows)
    return held


def _local(placed: PlacedShard, group_batch_size: int, bags_share: float) -> LocalShard:
    """As `local_shard`, without `written_rows`."""
    shard, table = placed.shard, placed.shard.table
    profile, mass = shard.access()
    num_parts = len(placed.replicas[0])
    num_rows = -(-shard.num_embeddings // num_parts)
    if num_rows != shard.num_embeddings:
        profile = _thinned(profile, num_rows)
    return LocalShard(
        table=table.name,
        num_embeddings=num_rows,
        embedding_dim=shard.embedding_dim,
        num_bags=_num_bags(table, group_batch_size * bags_share),
        pooling_factor=table.pooling_factor / len(table.features) * mass / num_parts,
        access=profile,
        **traits_of(table),
        output=placed.exchange,
        update=placed.update,
        level=placed.memory.level,
        cache_bytes=placed.memory.cache_bytes,
        cache_policy=placed.memory.policy,
        cache_dtype=placed.memory.cache_dtype,
    )


def _num_bags(table: EmbeddingTable, num_samples: float) -> int:
    return max(1, round(num_samples)) * len(table.features)


def _written_rows(synced: Sequence[tuple[PlacedShard, LocalShard]], group_batch_size: int) -> list[float]:
    """`LocalShard.written_rows` of shards whose gradients replicas sum."""
    profiles = ProfileBatch.of([local.access for _, local in synced])
    own_N = profiles.expected_distinct(np.array([local.num_lookups for _, local in synced]))
    lookups = [_num_bags(placed.shard.table, group_batch_size) * local.pooling_factor for placed, local in synced]
    hit_N = profiles.expected_distinct(np.array(lookups))
    rows_N = np.array([local.num_embeddings for _, local in synced], dtype=np.float64)
    is_dense_N = np.array([placed.grad_sync is GradSync.DENSE for placed, _ in synced])
    written_N: list[float] = (np.where(is_dense_N, rows_N, own_N + hit_N) + UPDATE_WRITES * hit_N).tolist()
    return written_N
