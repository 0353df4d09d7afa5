"""The `shards` of a plan: one placed shard, read and written."""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.core import (
    DType,
    EmbeddingTable,
    Exchange,
    GradSync,
    MemoryLevel,
    MemoryPlacement,
    PlacedShard,
    Pooling,
    RowRange,
    RowsBy,
    Shard,
    Split,
    Tier,
)
from autoshard.core.errors import FormatError
from autoshard.core.quoting import shown
from autoshard.core.shard import Replicas
from autoshard.formats.documents.fields import Fields, whole
from autoshard.formats.documents.rank_layouts import RankLayouts
from autoshard.formats.documents.tables_json import MAX_EMBEDDING_DIM, MAX_ROWS
from autoshard.formats.documents.topology_json import MAX_MEMORY_BYTES

CACHE_POLICIES = ("lru", "lfu")

_REQUIRED = ("table", "rows", "columns", "tier", "replicas", "deduplicate")
_OPTIONAL = ("split", "exchange", "grad_sync", "memory", "fetch")


def shard_from_json(
    value: object, path: str, tables: Mapping[str, EmbeddingTable], layouts: RankLayouts
) -> PlacedShard:
    """Reads a placed shard; what is left out follows from the tier, the rows and the table's pooling.

    Args:
        value: The object.
        path: Its dotted path.
        tables: The plan's tables by name.
        layouts: Named replicas of the plan's replica group.

    Raises:
        InputError: If it is no shard of one of the tables.
    """
    fields = Fields(value, path, required=_REQUIRED, optional=_OPTIONAL)
    name = fields.text("table")
    if name not in tables:
        raise FormatError(f"no table is named {shown(name)}", field=fields.at("table"))
    table = tables[name]
    rows = _rows_from_json(fields)
    columns = _columns_from_json(fields)
    replicas = layouts.read(fields["replicas"], fields.at("replicas"))
    tier = fields.choice("tier", Tier, Tier.TABLE_WISE)
    return PlacedShard(
        shard=fields.build(lambda: Shard(table=table, rows=rows, columns=columns)),
        tier=tier,
        replicas=replicas,
        split=fields.choice("split", Split, _usual_split(rows, replicas)),
        exchange=fields.choice("exchange", Exchange, _usual_exchange(table)),
        deduplicate=fields.flag("deduplicate"),
        grad_sync=fields.choice("grad_sync", GradSync, _usual_grad_sync(tier, replicas)),
        memory=_memory_from_json(fields),
        fetch=_fetch_from_json(fields, len(replicas), layouts.group_size),
    )


def shard_to_json(placed: PlacedShard, layouts: RankLayouts) -> dict[str, object]:
    """The object of a placed shard."""
    rows = placed.shard.rows
    memory: dict[str, object] = {"level": placed.memory.level}
    if placed.memory.cache_bytes:
        memory["cache_bytes"] = placed.memory.cache_bytes
    if placed.memory.cache_bytes or placed.memory.policy != CACHE_POLICIES[0]:
        memory["policy"] = placed.memory.policy
    if placed.memory.cache_dtype is not None:
        memory["cache_dtype"] = placed.memory.cache_dtype
    written: dict[str, object] = {
        "table": placed.shard.table.name,
        "rows": {"by": rows.by, "start": rows.start, "stop": rows.stop},
        "columns": list(placed.shard.columns),
        "tier": placed.tier,
        "replicas": layouts.write(placed.replicas, placed.tier),
        "split": placed.split,
        "exchange": placed.exchange,
        "deduplicate": placed.deduplicate,
        "grad_sync": placed.grad_sync,
        "memory": memory,
    }
    if placed.fetch is not None:
        written["fetch"] = list(placed.fetch)
    return written


def _usual_split(rows: RowRange, replicas: Replicas) -> Split:
    """Blocks of rows in falling access frequency would overload the first rank."""
    return Split.CYCLIC if rows.by is RowsBy.ACCESS_RANK and len(replicas[0]) > 1 else Split.BLOCK


def _usual_exchange(table: EmbeddingTable) -> Exchange:
    return Exchange.ROWS if table.pooling is Pooling.SEQUENCE else Exchange.PARTIAL_SUMS


def _usual_grad_sync(tier: Tier, replicas: Replicas) -> GradSync:
    if len(replicas) == 1:
        return GradSync.NONE
    return GradSync.DENSE if tier is Tier.DATA_PARALLEL else GradSync.SPARSE


def _rows_from_json(shard: Fields) -> RowRange:
    fields = shard.fields("rows", required=("by", "start", "stop"))
    by = fields.choice("by", RowsBy, RowsBy.INDEX)
    start, stop = fields.whole("start", maximum=MAX_ROWS), fields.whole("stop", maximum=MAX_ROWS)
    return shard.build(lambda: RowRange(start=start, stop=stop, by=by))


def _columns_from_json(shard: Fields) -> tuple[int, int]:
    path = shard.at("columns")
    start, stop = (
        whole(value, f"{path}[{index}]", maximum=MAX_EMBEDDING_DIM)
        for index, value in enumerate(shard.items("columns", minimum=2, maximum=2))
    )
    return start, stop


def _memory_from_json(shard: Fields) -> MemoryPlacement:
    if "memory" not in shard:
        return MemoryPlacement()
    fields = shard.fields("memory", required=("level",), optional=("cache_bytes", "policy", "cache_dtype"))
    return MemoryPlacement(
        level=fields.choice("level", MemoryLevel, MemoryLevel.HBM),
        cache_bytes=fields.whole("cache_bytes", maximum=MAX_MEMORY_BYTES),
        policy=fields.word("policy", CACHE_POLICIES, default=CACHE_POLICIES[0]),
        cache_dtype=fields.choice("cache_dtype", DType, DType.FP32) if "cache_dtype" in fields else None,
    )


def _fetch_from_json(shard: Fields, num_replicas: int, group_size: int) -> tuple[int, ...] | None:
    if "fetch" not in shard:
        return None
    path = shard.at("fetch")
    return tuple(
        whole(value, f"{path}[{rank}]", maximum=num_replicas - 1)
        for rank, value in enumerate(shard.items("fetch", minimum=group_size, maximum=group_size))
    )
