"""The `shards` of a plan: placed shards."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from autoshard.core import (
    Collective,
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
from autoshard.core.accepted import MAX_EMBEDDING_DIM, MAX_ROWS, MAX_WORLD_SIZE
from autoshard.core.errors import FormatError
from autoshard.core.quoting import shown
from autoshard.core.shard import Replicas
from autoshard.formats.documents.kinds import (
    FLAG,
    TEXT,
    Field,
    Kind,
    in_context,
    list_of,
    named,
    one_of,
    optional,
    record,
    unchanged,
    whole_number,
)
from autoshard.formats.documents.rank_layouts import ANY_GROUP, REPLICAS, RankLayouts
from autoshard.formats.documents.tables_json import DTYPE, TIER
from autoshard.formats.documents.topology_json import MEMORY_SIZE

_POLICIES: Final = ("lru", "lfu")


def _written_memory(memory: MemoryPlacement) -> dict[str, Any]:
    parts: dict[str, Any] = {"level": memory.level}
    if memory.cache_bytes:
        parts["cache_bytes"] = memory.cache_bytes
    if memory.cache_bytes or memory.policy != _POLICIES[0]:
        parts["policy"] = memory.policy
    if memory.cache_dtype is not None:
        parts["cache_dtype"] = memory.cache_dtype
    return parts


_ROW: Final = whole_number(0, MAX_ROWS)
_BY: Final = "index: row ids; access_rank: rows in falling access frequency. One kind per table."
_ROWS: Final[Kind[dict[str, Any]]] = record(
    dict,
    Field("by", one_of(RowsBy), _BY),
    Field("start", _ROW, "First row."),
    Field("stop", _ROW, "Row after the last."),
    parts=unchanged,
)
_POLICY: Final = "Which rows the cache evicts: least recently or least frequently used."
_MEMORY: Final = record(
    MemoryPlacement,
    Field("level", one_of(MemoryLevel), "Memory level of the rows."),
    optional("cache_bytes", MEMORY_SIZE, "Device memory of each rank that caches these rows."),
    optional("policy", one_of(_POLICIES), _POLICY),
    optional("cache_dtype", DTYPE, "Number format of cached rows; if left out: that of the table."),
    parts=_written_memory,
)
_COLUMNS: Final = list_of(whole_number(0, MAX_EMBEDDING_DIM), 2, 2)
_MEANINGS: Final = {
    "replicas": "Each replica is the list of ranks over which its rows are split; ranks are numbered within a replica "
    "group.",
    "split": "If left out: block, but cyclic for rows by access rank over several ranks.",
    "exchange": "If left out: rows for sequence tables, else partial_sums.",
    "collective": "How partial_sums travel; reduce_scatter (an all-gather in the backward pass) where one replica is "
    "split over all ranks; if left out: all_to_all.",
    "grad_sync": "If left out: none for one replica, dense for tier data_parallel, else sparse.",
    "fetch": "For each rank, the index of the replica that it reads.",
}


def _fetch(num_replicas: int, *num_ranks: int) -> Kind[tuple[int, ...]]:
    return list_of(whole_number(0, num_replicas - 1), *num_ranks)


def shard_kind(tables: Mapping[str, EmbeddingTable], layouts: RankLayouts = ANY_GROUP) -> Kind[PlacedShard]:
    """A placed shard; what is left out follows from the tier, the rows and the table's pooling.

    Args:
        tables: The plan's tables by name; empty to write shards.
        layouts: Named replicas of the plan's replica group.
    """
    shard = record(
        partial(_placed, tables, layouts),
        Field("table", TEXT, "The table's name."),
        Field("rows", _ROWS, "The rows from start to stop, stop excluded."),
        Field("columns", _COLUMNS, "First column, and the column after the last."),
        Field("tier", TIER),
        Field("replicas", REPLICAS, _MEANINGS["replicas"]),
        optional("split", one_of(Split), _MEANINGS["split"]),
        optional("exchange", one_of(Exchange), _MEANINGS["exchange"]),
        optional("collective", one_of(Collective), _MEANINGS["collective"]),
        Field("deduplicate", FLAG, "Whether every distinct row is sent once."),
        optional("grad_sync", one_of(GradSync), _MEANINGS["grad_sync"]),
        optional("memory", _MEMORY, "Where the rows live; if left out: hbm."),
        optional("fetch", in_context(_fetch(MAX_WORLD_SIZE, 1, MAX_WORLD_SIZE).schema), _MEANINGS["fetch"]),
        parts=partial(_parts, layouts),
    )
    return named(
        "plan",
        "shard",
        shard,
        "A part of a table, and the ranks that hold it. The shards of a table tile it exactly.",
    )


def _placed(
    tables: Mapping[str, EmbeddingTable],
    layouts: RankLayouts,
    *,
    table: str,
    rows: dict[str, Any],
    columns: tuple[int, int],
    tier: Tier,
    replicas: object,
    **given: Any,
) -> PlacedShard:
    if table not in tables:
        raise FormatError(f"no table is named {shown(table)}", field="table")
    shard = Shard(table=tables[table], rows=RowRange(**rows), columns=columns)
    held_by = layouts.read(replicas, "replicas")
    if "fetch" in given:
        given["fetch"] = _fetch(len(held_by), layouts.group_size, layouts.group_size).read(given["fetch"], "fetch")
    return PlacedShard(shard=shard, tier=tier, replicas=held_by, **_usual(shard, tier, held_by) | given)


def _usual(shard: Shard, tier: Tier, replicas: Replicas) -> dict[str, Any]:
    # Blocks of rows in falling access frequency would overload the first rank.
    is_cyclic = shard.rows.by is RowsBy.ACCESS_RANK and len(replicas[0]) > 1
    several = GradSync.DENSE if tier is Tier.DATA_PARALLEL else GradSync.SPARSE
    return {
        "split": Split.CYCLIC if is_cyclic else Split.BLOCK,
        "exchange": Exchange.ROWS if shard.table.pooling is Pooling.SEQUENCE else Exchange.PARTIAL_SUMS,
        "grad_sync": GradSync.NONE if len(replicas) == 1 else several,
    }


def _parts(layouts: RankLayouts, placed: PlacedShard) -> dict[str, Any]:
    rows = placed.shard.rows
    parts = {
        "table": placed.shard.table.name,
        "rows": {"by": rows.by, "start": rows.start, "stop": rows.stop},
        "columns": placed.shard.columns,
        "tier": placed.tier,
        "replicas": layouts.write(placed.replicas, placed.tier),
        "split": placed.split,
        "exchange": placed.exchange,
        "deduplicate": placed.deduplicate,
        "grad_sync": placed.grad_sync,
        "memory": placed.memory,
    }
    if placed.collective is not Collective.ALL_TO_ALL:
        parts["collective"] = placed.collective
    return parts if placed.fetch is None else parts | {"fetch": list(placed.fetch)}
