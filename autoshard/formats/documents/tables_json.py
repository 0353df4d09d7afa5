"""`tables.json` (`autoshard.tables/1`): the tables of one model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Final

from autoshard.core import Constraints, DenseLayers, DType, EmbeddingTable, Feature, Optimizer, Pooling, TableSet, Tier
from autoshard.core.errors import FormatError
from autoshard.formats.documents.access_json import ACCESS, AccessContext, access_from_json
from autoshard.formats.documents.document import Document
from autoshard.formats.documents.kinds import (
    TEXT,
    Field,
    Kind,
    list_of,
    named,
    number_in,
    one_of,
    optional,
    record,
    whole_number,
)

#: Largest accepted sizes: some hundred times what published models have, small enough that bytes fit 64 bits.
MAX_ROWS = 2**40
MAX_EMBEDDING_DIM = 2**16
MAX_BATCH_SIZE = 2**31
MAX_POOLING_FACTOR = 1e6
MAX_TABLES = 100_000
MAX_TOTAL_BYTES = 2**62

_WIDTHS: Final = list_of(whole_number(1, 2**20))
NUM_ROWS: Final = whole_number(1, MAX_ROWS)
DIM: Final = whole_number(1, MAX_EMBEDDING_DIM)
BATCH_SIZE: Final = whole_number(1, MAX_BATCH_SIZE)
POOLING_FACTOR: Final = number_in(0, MAX_POOLING_FACTOR)
_POOLING_VARIANCE: Final = number_in(0, MAX_POOLING_FACTOR**2)
_NAME: Final = named("tables", "name", TEXT, "Used once.")
DTYPE: Final = named("tables", "dtype", one_of(DType))
TIER: Final = named("tables", "tier", one_of(Tier), "How a shard is held.")

_FEATURE: Final = named(
    "tables",
    "feature",
    record(
        Feature,
        Field("name", _NAME),
        Field("pooling_factor", POOLING_FACTOR, "Mean number of ids per sample."),
        optional("pooling_variance", _POOLING_VARIANCE, "Variance of the number of ids per sample.", 0.0),
        optional("pooling_p99", POOLING_FACTOR, "99th percentile of the number of ids per sample.", None),
    ),
)
_CONSTRAINTS: Final = named(
    "tables",
    "constraints",
    record(
        Constraints,
        optional("pinned_ranks", list_of(whole_number()), "Ranks that may hold the table.", ()),
        optional("colocate_with", list_of(TEXT), "Tables that share this table's ranks.", ()),
        optional("forbidden_tiers", list_of(TIER), "Tiers that the table may not have.", ()),
    ),
    "Limits that planners keep to.",
)
_DENSE: Final = named(
    "tables",
    "dense",
    record(
        DenseLayers,
        Field("num_dense_features", whole_number(0, 2**16), "Numbers per sample that the bottom MLP takes."),
        Field("bottom_mlp", _WIDTHS, "Widths of its layers."),
        Field("top_mlp", _WIDTHS, "Widths of its layers."),
        Field("interaction", one_of(("dot",)), "How dense and embedded features meet."),
    ),
    "The dense layers.",
)


def _table_kind(folder: Path | None) -> Kind[EmbeddingTable]:
    pooling = "How looked-up rows become one vector per sample; sequence keeps every row."
    table = record(
        partial(_table, folder),
        Field("name", _NAME),
        Field("num_embeddings", NUM_ROWS, "Rows."),
        Field("embedding_dim", DIM, "Columns: numbers per row."),
        Field("dtype", DTYPE, "Number format of the weights."),
        Field("pooling", one_of(Pooling), pooling),
        optional("optimizer", one_of(Optimizer), "rowwise_adagrad if left out."),
        Field("features", list_of(_FEATURE), "What looks rows up in the table; several may share it."),
        Field("access", ACCESS),
        optional("constraints", _CONSTRAINTS, default=Constraints()),
    )
    return named("tables", "table", table)


def _table(
    folder: Path | None, *, num_embeddings: int, features: tuple[Feature, ...], access: object, **values: Any
) -> EmbeddingTable:
    pooling_factor = sum(feature.pooling_factor for feature in features)
    context = AccessContext(num_embeddings=num_embeddings, pooling_factor=pooling_factor, folder=folder)
    profile = access_from_json(access, "access", context)
    return EmbeddingTable(num_embeddings=num_embeddings, features=features, access=profile, **values)


def _fields(folder: Path | None) -> tuple[Field, ...]:
    tables = list_of(_table_kind(folder), 1, MAX_TABLES)
    return (
        Field("batch_size", BATCH_SIZE, "Samples per step over all ranks."),
        Field("tables", tables, "Names of tables differ, and so do names of features over all tables."),
        optional("dense", _DENSE, "The dense layers, which the predicted step then includes.", None),
    )


def _table_set(*, tables: tuple[EmbeddingTable, ...], **values: Any) -> TableSet:
    if sum(table.storage_bytes for table in tables) > MAX_TOTAL_BYTES:
        raise FormatError(f"must need at most {MAX_TOTAL_BYTES:,} bytes in total", field="tables")
    return TableSet(tables=tables, **values)


TABLES: Final = Document(
    name="tables",
    meaning="The embedding tables of one model and the batch that they see.",
    make=_table_set,
    fields=_fields,
    definitions=(_NAME, _table_kind(None), DTYPE, TIER, _FEATURE, _CONSTRAINTS, _DENSE, ACCESS),
)
read_tables, write_tables = TABLES.read, TABLES.write
tables_from_json, tables_to_json = TABLES.from_json, TABLES.to_json
