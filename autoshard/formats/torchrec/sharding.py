"""How TorchRec holds one table: the same as placed shards say it, as far as TorchRec can.

This module imports neither torch nor TorchRec.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

from autoshard.core import (
    Collective,
    DType,
    EmbeddingTable,
    Exchange,
    GradSync,
    MemoryLevel,
    MemoryPlacement,
    Optimizer,
    PlacedShard,
    Pooling,
    RowRange,
    Shard,
    Tier,
)
from autoshard.core.errors import InvalidPlanError
from autoshard.core.quoting import shown


class TorchRecType(StrEnum):
    """TorchRec's sharding types of training."""

    TABLE_WISE = "table_wise"
    COLUMN_WISE = "column_wise"
    TABLE_COLUMN_WISE = "table_column_wise"
    ROW_WISE = "row_wise"
    TABLE_ROW_WISE = "table_row_wise"
    GRID_SHARD = "grid_shard"
    DATA_PARALLEL = "data_parallel"


#: How the shards of each sharding type are held.
TIERS = {
    TorchRecType.TABLE_WISE: Tier.TABLE_WISE,
    TorchRecType.COLUMN_WISE: Tier.TABLE_WISE,
    TorchRecType.TABLE_COLUMN_WISE: Tier.TABLE_WISE,
    TorchRecType.ROW_WISE: Tier.ROW_WISE,
    TorchRecType.TABLE_ROW_WISE: Tier.TABLE_ROW_WISE,
    TorchRecType.GRID_SHARD: Tier.TABLE_ROW_WISE,
    TorchRecType.DATA_PARALLEL: Tier.DATA_PARALLEL,
}


def also_allowed(kinds: Collection[TorchRecType]) -> frozenset[TorchRecType]:
    """Sharding types that the tiers of some sharding types stand for, too.

    `column_wise` covers `table_column_wise`, whose columns are on one node.
    """
    tiers = {TIERS[kind] for kind in kinds}
    covered = {*kinds, *((TorchRecType.TABLE_COLUMN_WISE,) if TorchRecType.COLUMN_WISE in kinds else ())}
    return frozenset(kind for kind, tier in TIERS.items() if tier in tiers and kind not in covered)


#: Sharding types whose ranks each sum up some rows of a bag; TorchRec divides the sums of means afterwards.
BY_ROWS = frozenset({TorchRecType.ROW_WISE, TorchRecType.TABLE_ROW_WISE})
#: FBGEMM's kernels load four numbers at a time.
_DIM_MULTIPLE = 4


class ComputeKernel(StrEnum):
    """TorchRec's compute kernels that plans have."""

    DENSE = "dense"
    FUSED = "fused"
    FUSED_UVM = "fused_uvm"
    FUSED_UVM_CACHING = "fused_uvm_caching"


class NotInTorchRecError(InvalidPlanError):
    """A plan, or a part of it, that TorchRec has no words for; made by `refused`."""

    @property
    def reason(self) -> str:
        """What TorchRec does, and what the plan has instead."""
        return self.message.removeprefix("TorchRec ")


def refused(reason: str, field: str) -> NotInTorchRecError:
    """The error of a plan that TorchRec cannot say.

    Args:
        reason: What TorchRec does, and what the plan has instead; follows the word TorchRec.
        field: Field of the plan.
    """
    return NotInTorchRecError(f"TorchRec {reason}", field=field)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Rows and columns of a table on one rank, ends excluded."""

    rank: int
    rows: tuple[int, int]
    columns: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSharding:
    """A table's entry in a TorchRec plan.

    Attributes:
        sharding_type: How it is cut.
        blocks: What the ranks hold, columns by columns and there by rising rows; of a data-parallel table, one for each
            rank.
        kernel: What looks rows up and updates them.
        cache_load_factor: Rows of the cache over those of a rank, with the kernel `fused_uvm_caching`; else None.
        cache_policy: Which rows that cache evicts: `lru` or `lfu`.
        cache_dtype: Number format of cached rows; None for the table's.
    """

    sharding_type: TorchRecType
    blocks: tuple[Block, ...]
    kernel: ComputeKernel = ComputeKernel.FUSED
    cache_load_factor: float | None = None
    cache_policy: str = "lru"
    cache_dtype: str | None = None


def row_blocks(num_rows: int, num_ranks: int) -> list[tuple[int, int]]:
    """TorchRec's blocks of rows, `ceil(rows / ranks)` each; the last ones have fewer, or none.

    Source:
        TorchRec 1.8, `calculate_shard_sizes_and_offsets`.
    """
    size = -(-num_rows // num_ranks)
    return [(min(rank * size, num_rows), min((rank + 1) * size, num_rows)) for rank in range(num_ranks)]


def fault_of(
    table: EmbeddingTable, kind: TorchRecType, *, device_type: str, world_size: int, node_size: int
) -> str | None:
    """What TorchRec cannot do, or does wrong, with a table of a sharding type; None if it trains the table rightly.

    Args:
        table: The table.
        kind: The sharding type.
        device_type: `cuda` or `cpu`.
        world_size: Ranks.
        node_size: Ranks of a node.

    Returns:
        A text that follows the word TorchRec.

    Source:
        TorchRec and FBGEMM 1.8 against the unsharded model, `tests/contracts/test_torchrec_kinds.py`.
    """
    name, on_host = shown(table.name), device_type == "cpu"
    if table.optimizer is Optimizer.NONE:
        return f"shards quantised modules by other kernels; {name} has no optimizer"
    trained = (DType.FP32, DType.FP16) if on_host else (DType.FP32, DType.FP16, DType.BF16)
    if table.dtype not in trained:
        return f"trains {', '.join(trained)} on {device_type}; {name} is {table.dtype}"
    if kind is TorchRecType.DATA_PARALLEL:
        if on_host and table.pooling is Pooling.SEQUENCE:
            return f"computes wrong rows of data-parallel sequence tables on cpu, such as {name}"
        return None
    if on_host and table.optimizer.has_decaying_moments:
        return f"trains with sgd, rowwise_adagrad or adagrad on cpu; {name} has {table.optimizer}"
    if table.embedding_dim % _DIM_MULTIPLE:
        return f"needs dimensions that are multiples of {_DIM_MULTIPLE}; {name} has {table.embedding_dim}"
    if kind is TorchRecType.GRID_SHARD and table.pooling is Pooling.MEAN:
        return f"computes wrong means of grid_shard tables, such as {name}"
    num_parts = world_size if kind is TorchRecType.ROW_WISE else node_size
    is_split = kind in BY_ROWS or kind is TorchRecType.GRID_SHARD
    if is_split and row_blocks(table.num_embeddings, num_parts)[-1] == (table.num_embeddings, table.num_embeddings):
        return f"needs rows in every block; {name} has {table.num_embeddings} for {num_parts} ranks"
    return None


def fault_of_means(kinds: Mapping[EmbeddingTable, TorchRecType]) -> tuple[EmbeddingTable, str] | None:
    """As `fault_of`, of the tables of one module together.

    A module with means that are split by rows divides the outputs of all its tables by lengths, but for features of
    sums that are split by rows, too.

    Args:
        kinds: Sharding types of all tables of the module.

    Returns:
        Such a mean and a text that follows the word TorchRec; None if there is no fault.
    """
    means = [table for table, kind in kinds.items() if table.pooling is Pooling.MEAN and kind in BY_ROWS]
    if not means:
        return None
    for table, kind in kinds.items():
        if kind not in BY_ROWS:
            return means[0], (
                f"splits means by rows only where it splits all tables of their module by rows; {shown(table.name)} is "
                f"{kind}, {shown(means[0].name)} is {kinds[means[0]]}"
            )
    features = {table.name_in_batches(feature.name) for table in means for feature in table.features}
    for table in kinds:
        if table.pooling is Pooling.SUM and any(table.name_in_batches(one.name) in features for one in table.features):
            return means[0], (
                f"computes wrong means by rows of features that sums by rows look up, too, as {shown(table.name)} does"
            )
    return None


def renamed(
    sharding: TableSharding, kinds: Collection[TorchRecType], *, world_size: int, node_size: int
) -> TableSharding | None:
    """The entry under the first of its sharding types that is accepted; None if none is.

    A whole table is also one column shard; where nodes have one rank, its rows are also split over a node, and where
    there is one rank in all, over all of them, each of which has a copy. Rows split over all ranks are also split over
    those of a node if there is only one.

    Args:
        sharding: The entry.
        kinds: Sharding types that are accepted.
        world_size: Ranks.
        node_size: Ranks of a node.
    """
    in_one_node = len({block.rank // node_size for block in sharding.blocks}) == 1
    over_node = (TorchRecType.TABLE_ROW_WISE, TorchRecType.GRID_SHARD)
    # Dense kernels train rows in device memory.
    copies = (TorchRecType.DATA_PARALLEL,) if sharding.kernel is ComputeKernel.FUSED else ()
    others = {
        TorchRecType.TABLE_WISE: (
            *(TorchRecType.COLUMN_WISE, TorchRecType.TABLE_COLUMN_WISE),
            *(over_node if node_size == 1 else ()),
            *((TorchRecType.ROW_WISE, *copies) if world_size == 1 else ()),
        ),
        TorchRecType.COLUMN_WISE: (TorchRecType.TABLE_COLUMN_WISE,) if in_one_node else (),
        TorchRecType.ROW_WISE: over_node if node_size == world_size else (),
        TorchRecType.TABLE_ROW_WISE: (TorchRecType.GRID_SHARD,),
    }
    for kind in (sharding.sharding_type, *others.get(sharding.sharding_type, ())):
        if kind in kinds:
            kernel = ComputeKernel.DENSE if kind is TorchRecType.DATA_PARALLEL else sharding.kernel
            return replace(sharding, sharding_type=kind, kernel=kernel)
    return None


def sharding_of(shards: Sequence[PlacedShard], *, world_size: int, node_size: int, field: str) -> TableSharding:
    """TorchRec's entry of the table that some placed shards make.

    TorchRec deals rows in blocks to ranks in rising order, whatever split the shards name, and owners send sums of
    pooled tables, never rows: that changes where a row is and what travels, and nothing that is computed.

    Args:
        shards: All shards of one table.
        world_size: Ranks.
        node_size: Ranks of a node.
        field: Field of the plan that holds the first of them, for errors.

    Raises:
        NotInTorchRecError: If TorchRec has no sharding type that says it.
    """
    ordered = sorted(shards, key=lambda one: one.shard.columns)
    _check_cut(ordered, field)
    kernel = _kernel(ordered, field)
    if len(ordered[0].replicas) > 1:
        return _data_parallel(ordered, world_size, field)
    table = ordered[0].shard.table
    ranks_of = [tuple(sorted(placed.replicas[0])) for placed in ordered]
    sharding_type = _sharding_type(ordered, ranks_of, world_size, node_size, field)
    blocks = tuple(
        Block(rank=rank, rows=rows, columns=placed.shard.columns)
        for placed, ranks in zip(ordered, ranks_of, strict=True)
        for rank, rows in zip(ranks, row_blocks(table.num_embeddings, len(ranks)), strict=True)
    )
    memory, load_factor = ordered[0].memory, None
    if kernel is ComputeKernel.FUSED_UVM_CACHING:
        load_factor = memory.cache_bytes / _cacheable_bytes(table, blocks, memory)
        if load_factor > 1:
            raise refused(f"caches at most all rows of a rank; {shown(table.name)} has more", field)
    return TableSharding(
        sharding_type=sharding_type,
        blocks=blocks,
        kernel=kernel,
        cache_load_factor=load_factor,
        cache_policy=memory.policy if load_factor is not None else "lru",
        cache_dtype=memory.cache_dtype if load_factor is not None else None,
    )


def shards_of(
    table: EmbeddingTable, sharding: TableSharding, *, world_size: int, field: str
) -> tuple[PlacedShard, ...]:
    """The placed shards that say what TorchRec does with a table.

    Pooled tables whose rows are split over all ranks send their sums by reduce-scatter, as TorchRec does.

    Args:
        table: The table.
        sharding: Its entry in TorchRec's plan.
        world_size: Ranks.
        field: Place in that plan, for errors.

    Raises:
        NotInTorchRecError: If the entry does not hold the table as its sharding type says, or by a kernel that is no
            fused one.
    """
    if sharding.sharding_type is TorchRecType.DATA_PARALLEL:
        return (_replicated(table, world_size),)
    if sharding.kernel is ComputeKernel.DENSE:
        raise refused("must train the table in a fused kernel, got dense", f"{field}.compute_kernel")
    by_columns: dict[tuple[int, int], list[Block]] = {}
    for block in sharding.blocks:
        by_columns.setdefault(block.columns, []).append(block)
    _check_tiled(table, by_columns, field)
    shards = []
    for columns, blocks in sorted(by_columns.items()):
        ranks = tuple(block.rank for block in blocks)
        expected = row_blocks(table.num_embeddings, len(ranks))
        if [block.rows for block in blocks] != expected:
            raise refused(
                f"routes ids by equal blocks of rows, {expected[0][1]} each; other blocks are trained wrongly",
                f"{field}.sharding_spec",
            )
        shards.append(_placed(table, columns, ranks, sharding, world_size))
    return tuple(shards)


def _check_cut(shards: Sequence[PlacedShard], field: str) -> None:
    name = shown(shards[0].shard.table.name)
    if not all(one.shard.num_embeddings == one.shard.table.num_embeddings for one in shards):
        raise refused(f"splits all rows of a table alike; {name} has several ranges of rows", field)
    widths = {one.shard.embedding_dim for one in shards}
    if len(widths) > 1:
        raise refused(f"cuts columns evenly; {name} has shards of several widths", field)
    if len(shards) > 1 and max(widths) % _DIM_MULTIPLE:
        raise refused(f"cuts columns in multiples of {_DIM_MULTIPLE}; {name} has shards of {max(widths)}", field)


def _kernel(shards: Sequence[PlacedShard], field: str) -> ComputeKernel:
    """The compute kernel for the shards' memory."""
    name, memory = shown(shards[0].shard.table.name), shards[0].memory
    if any(one.memory != memory for one in shards):
        raise refused(f"keeps all of a table in one memory; {name} is in several", f"{field}.memory")
    if memory.level is MemoryLevel.SSD:
        raise refused(
            f"keeps rows on disks by settings that a plan lacks (KeyValueParams); {name} is on ssd",
            f"{field}.memory",
        )
    if memory.level is MemoryLevel.HBM:
        if memory.cache_bytes:
            raise refused(f"caches rows of host memory; {name} is in hbm with a cache", f"{field}.memory")
        return ComputeKernel.FUSED
    return ComputeKernel.FUSED_UVM_CACHING if memory.cache_bytes else ComputeKernel.FUSED_UVM


def _data_parallel(shards: Sequence[PlacedShard], world_size: int, field: str) -> TableSharding:
    placed, name = shards[0], shown(shards[0].shard.table.name)
    everywhere = len(placed.replicas) == world_size and all(len(replica) == 1 for replica in placed.replicas)
    if len(shards) > 1 or not everywhere:
        raise refused(f"holds a table once, or whole on all ranks; {name} has replicas", field)
    if placed.memory != MemoryPlacement():
        raise refused(f"keeps data-parallel tables in hbm; {name} is elsewhere", f"{field}.memory")
    rows, columns = (0, placed.shard.num_embeddings), placed.shard.columns
    blocks = tuple(Block(rank=rank, rows=rows, columns=columns) for rank in range(world_size))
    return TableSharding(sharding_type=TorchRecType.DATA_PARALLEL, blocks=blocks, kernel=ComputeKernel.DENSE)


def _sharding_type(
    shards: Sequence[PlacedShard], ranks_of: Sequence[tuple[int, ...]], world_size: int, node_size: int, field: str
) -> TorchRecType:
    table, ranks = shards[0].shard.table, ranks_of[0]
    if all(len(one) == 1 for one in ranks_of):
        return TorchRecType.TABLE_WISE if len(shards) == 1 else TorchRecType.COLUMN_WISE
    if len(shards) == 1 and len(ranks) == world_size:
        return TorchRecType.ROW_WISE
    for one in ranks_of:
        first = one[0] - one[0] % node_size
        if one != tuple(range(first, first + node_size)):
            raise refused(
                f"splits rows over all ranks or those of a node; {shown(table.name)} is split over ranks "
                f"{', '.join(map(str, one))} of {world_size}",
                field,
            )
    if table.pooling is Pooling.SEQUENCE:
        raise refused(f"splits rows of sequence tables over all ranks; {shown(table.name)} is split over a node", field)
    if len(shards) == 1:
        return TorchRecType.TABLE_ROW_WISE
    if len({one[0] for one in ranks_of}) < len(shards):
        raise refused(
            f"puts each part of the columns on a node of its own; {shown(table.name)} has several on one", field
        )
    return TorchRecType.GRID_SHARD


def _replicated(table: EmbeddingTable, world_size: int) -> PlacedShard:
    """A data-parallel table, whose dense gradients DistributedDataParallel sums."""
    if world_size == 1:
        return PlacedShard.table_wise(Shard.whole(table), 0)
    return PlacedShard(
        shard=Shard.whole(table),
        tier=Tier.DATA_PARALLEL,
        replicas=tuple((rank,) for rank in range(world_size)),
        exchange=Exchange.ROWS if table.pooling is Pooling.SEQUENCE else Exchange.PARTIAL_SUMS,
        grad_sync=GradSync.DENSE,
    )


def _placed(
    table: EmbeddingTable, columns: tuple[int, int], ranks: tuple[int, ...], sharding: TableSharding, world_size: int
) -> PlacedShard:
    is_summed = table.pooling is not Pooling.SEQUENCE
    over_all = len(ranks) == world_size > 1
    tier = Tier.TABLE_WISE if len(ranks) == 1 else Tier.ROW_WISE if over_all else Tier.TABLE_ROW_WISE
    return PlacedShard(
        shard=Shard(table=table, rows=RowRange(start=0, stop=table.num_embeddings), columns=columns),
        tier=tier,
        replicas=(ranks,),
        exchange=Exchange.PARTIAL_SUMS if is_summed else Exchange.ROWS,
        collective=Collective.REDUCE_SCATTER if over_all and is_summed else Collective.ALL_TO_ALL,
        memory=_memory(table, sharding),
    )


def _memory(table: EmbeddingTable, sharding: TableSharding) -> MemoryPlacement:
    if sharding.kernel is ComputeKernel.FUSED:
        return MemoryPlacement()
    if sharding.cache_load_factor is None:
        return MemoryPlacement(level=MemoryLevel.DDR)
    memory = MemoryPlacement(
        level=MemoryLevel.DDR,
        policy=sharding.cache_policy,
        cache_dtype=DType(sharding.cache_dtype) if sharding.cache_dtype else None,
    )
    cache_bytes = round(sharding.cache_load_factor * _cacheable_bytes(table, sharding.blocks, memory))
    return replace(memory, cache_bytes=cache_bytes)


def _cacheable_bytes(table: EmbeddingTable, blocks: Sequence[Block], memory: MemoryPlacement) -> int:
    """Bytes of a cache of all rows of the largest block, in the number format of the memory's cache."""
    (start, stop), (first, last) = blocks[0].rows, blocks[0].columns
    return (stop - start) * memory.cached_row_bytes(table, last - first)


def _check_tiled(table: EmbeddingTable, by_columns: dict[tuple[int, int], list[Block]], field: str) -> None:
    """Checks that the parts of the columns stand side by side and are all there are."""
    ordered = [(0, 0), *sorted(by_columns), (table.embedding_dim, table.embedding_dim)]
    if any(before[1] != after[0] for before, after in pairwise(ordered)):
        raise refused(
            f"must hold columns [0, {table.embedding_dim}) once, got {sorted(by_columns)[:8]}",
            f"{field}.sharding_spec",
        )
