"""`tables.json` (`autoshard.tables/1`): the tables of one model."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any, Final

from autoshard.core import (
    Constraints,
    DenseLayers,
    DType,
    EmbeddingTable,
    Feature,
    ImpliedOrder,
    Optimizer,
    Pooling,
    RowOrder,
    TableSet,
    Tier,
)
from autoshard.core.accepted import MAX_BATCH_SIZE, MAX_EMBEDDING_DIM, MAX_POOLING_FACTOR, MAX_ROWS, MAX_TABLES
from autoshard.core.errors import FormatError
from autoshard.core.quoting import shown
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
    text_of,
    whole_number,
)
from autoshard.formats.row_orders import described_row_order

#: Of all tables with their optimizer state.
MAX_TOTAL_BYTES = 2**62
_DIGEST = "sha256:[0-9a-f]{64}"

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


def _check_name(file: str) -> None:
    if Path(file).name != file or "\\" in file:
        raise FormatError(f"must be the name of a file in the same folder, got {shown(file)}", field="file")


def _listed_order(file: str, digest: str, num_ordered: int) -> RowOrder:
    _check_name(file)
    if not re.fullmatch(_DIGEST, digest):
        raise FormatError(f"must be sha256: and 64 hexadecimal digits, got {shown(digest)}", field="digest")
    return RowOrder(file=file, digest=digest, num_ordered=num_ordered)


_FILE: Final = Field("file", TEXT, "Parquet file beside this one: row ids in falling access frequency, a column row.")
_DIGEST_OF_FILE: Final = text_of(_DIGEST)
_NUM_ORDERED: Final = "Row ids in the file; all other rows follow by ascending id."
LISTED_ORDER: Final = record(
    _listed_order,
    _FILE,
    Field("digest", _DIGEST_OF_FILE, "SHA-256 of the file."),
    Field("num_ordered", NUM_ROWS, _NUM_ORDERED),
)


def _named_order(file: str, **given: Any) -> dict[str, Any]:
    _check_name(file)
    return {"file": file, **given}


_NAMED_ORDER: Final = record(
    _named_order,
    _FILE,
    optional("digest", _DIGEST_OF_FILE, "SHA-256 of the file, which is read for it if left out."),
    optional("num_ordered", NUM_ROWS, _NUM_ORDERED),
)
_IMPLIED_ORDER: Final = one_of(ImpliedOrder)
_EITHER_ORDER: Final[Kind[Any]] = Kind(
    {"oneOf": [_IMPLIED_ORDER.schema, _NAMED_ORDER.schema]},
    lambda value, _: value,
    lambda order: LISTED_ORDER.write(order) if isinstance(order, RowOrder) else str(order),
)
_ROW_ORDER: Final = named(
    "tables",
    "row_order",
    _EITHER_ORDER,
    "Which rows are accessed most: by_id (those with the lowest ids), assumed (unknown, but planned with), or a file "
    "that lists them. Without it, planners do not cut the table by access rank.",
)


def _row_order(value: object, folder: Path | None, num_rows: int) -> RowOrder | ImpliedOrder | None:
    """The order that a table's field names; a file without a digest is read."""
    if not isinstance(value, dict):
        return None if value is None else _IMPLIED_ORDER.read(value, "row_order")
    given = _NAMED_ORDER.read(value, "row_order")
    if len(given) > 1:
        return LISTED_ORDER.read(value, "row_order")
    if folder is None:
        raise FormatError("can only be read from a file that lies beside tables.json", field="row_order.file")
    try:
        return described_row_order(folder / given["file"], num_rows)
    except FormatError as error:
        raise FormatError(f"{given['file']} {error.message}", field="row_order.file") from None


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
        optional("row_order", _ROW_ORDER, default=None),
    )
    return named("tables", "table", table)


def _table(
    folder: Path | None,
    *,
    num_embeddings: int,
    features: tuple[Feature, ...],
    access: object,
    row_order: object = None,
    **values: Any,
) -> EmbeddingTable:
    pooling_factor = sum(feature.pooling_factor for feature in features)
    context = AccessContext(num_embeddings=num_embeddings, pooling_factor=pooling_factor, folder=folder)
    profile = access_from_json(access, "access", context)
    order = _row_order(row_order, folder, num_embeddings)
    return EmbeddingTable(num_embeddings=num_embeddings, features=features, access=profile, row_order=order, **values)


#: A table by itself.
TABLE: Final = _table_kind(None)


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
    definitions=(_NAME, TABLE, DTYPE, TIER, _FEATURE, _CONSTRAINTS, _ROW_ORDER, _DENSE, ACCESS),
)
read_tables, write_tables = TABLES.read, TABLES.write
tables_from_json, tables_to_json = TABLES.from_json, TABLES.to_json
