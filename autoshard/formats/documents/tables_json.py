"""`tables.json` (`autoshard.tables/1`): the tables of one model."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from autoshard.core import (
    AccessProfile,
    Constraints,
    DenseLayers,
    DType,
    EmbeddingTable,
    Feature,
    ImpliedOrder,
    RowOrder,
    TableSet,
    Tier,
)
from autoshard.core.accepted import MAX_TABLES
from autoshard.core.errors import FormatError
from autoshard.core.quoting import shown
from autoshard.formats.documents.access_json import ACCESS, AccessContext, access_from_json, access_to_json
from autoshard.formats.documents.document import Document
from autoshard.formats.documents.kinds import (
    TEXT,
    Field,
    Kind,
    field_kind,
    fields_of,
    list_of,
    named,
    one_of,
    optional,
    record,
    text_of,
)
from autoshard.formats.row_orders import described_row_order

_DIGEST = "sha256:[0-9a-f]{64}"

NUM_ROWS: Final[Kind[int]] = field_kind(EmbeddingTable, "num_embeddings")
DIM: Final[Kind[int]] = field_kind(EmbeddingTable, "embedding_dim")
BATCH_SIZE: Final[Kind[int]] = field_kind(TableSet, "batch_size")
#: Global batch of what tables are imported from, where it does not say it.
DEFAULT_BATCH_SIZE: Final = 65_536
POOLING_FACTOR: Final[Kind[float]] = field_kind(Feature, "pooling_factor")
DTYPE: Final = named("tables", "dtype", one_of(DType))
TIER: Final = named("tables", "tier", one_of(Tier), "How a shard is held.")
_NAME: Final = named("tables", "name", TEXT)
_KNOWN: Final[dict[type, Kind[Any]]] = {DType: DTYPE, Tier: TIER}
_FEATURE: Final = named("tables", "feature", record(Feature, *fields_of(Feature, name=_NAME)))
#: Limits of one table.
CONSTRAINTS: Final = named(
    "tables",
    "constraints",
    record(Constraints, *fields_of(Constraints, known=_KNOWN)),
    "Limits that planners keep to.",
)
_DENSE: Final = named(
    "tables",
    "dense",
    record(DenseLayers, *fields_of(DenseLayers, interaction=one_of(("dot", "concat")))),
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
)


def _row_order(value: object, folder: Path | None, num_rows: int) -> RowOrder | ImpliedOrder | None:
    """The order that a table's field names; a file without its digest or number of ids is read."""
    if not isinstance(value, dict):
        return None if value is None else _IMPLIED_ORDER.read(value, "row_order")
    given = _NAMED_ORDER.read(value, "row_order")
    if {"digest", "num_ordered"} <= given.keys():
        return LISTED_ORDER.read(value, "row_order")
    if folder is None:
        raise FormatError("can only be read from a file that lies beside tables.json", field="row_order.file")
    try:
        found = described_row_order(folder / given["file"], num_rows)
    except FormatError as error:
        raise FormatError(f"{given['file']} {error.message}", field="row_order.file") from None
    for name, stated in given.items():
        if stated != (held := getattr(found, name)):
            raise FormatError(
                f"must be {shown(held)}, as {found.file} has it, got {shown(stated)}", field=f"row_order.{name}"
            )
    return found


#: How fields of a table are called and ordered at the beginning of its object.
_FIRST: Final = ("name", "num_embeddings", "embedding_dim", "dtype", "pooling", "optimizer", "features", "access")


def _table_kind(folder: Path | None, known: dict[bytes, AccessProfile] | None = None) -> Kind[EmbeddingTable]:
    access = ACCESS if known is None else replace(ACCESS, write=partial(access_to_json, known={}))
    special: dict[str, Kind[Any]] = {"name": _NAME, "features": list_of(_FEATURE), "access": access}
    listed = fields_of(EmbeddingTable, *_FIRST, known=_KNOWN, **special, constraints=CONSTRAINTS, row_order=_ROW_ORDER)
    return named("tables", "table", record(partial(_table, folder, known), *listed))


def _table(
    folder: Path | None,
    known: dict[bytes, AccessProfile] | None,
    *,
    num_embeddings: int,
    features: tuple[Feature, ...],
    access: object,
    row_order: object = None,
    **values: Any,
) -> EmbeddingTable:
    pooling_factor = sum(feature.pooling_factor for feature in features)
    context = AccessContext(
        num_embeddings=num_embeddings,
        pooling_factor=pooling_factor,
        folder=folder,
        known={} if known is None else known,
    )
    profile = access_from_json(access, "access", context)
    order = _row_order(row_order, folder, num_embeddings)
    return EmbeddingTable(num_embeddings=num_embeddings, features=features, access=profile, row_order=order, **values)


#: A table by itself.
TABLE: Final = _table_kind(None)


def _fields(folder: Path | None) -> tuple[Field, ...]:
    return fields_of(TableSet, tables=list_of(_table_kind(folder, {}), 1, MAX_TABLES), dense=_DENSE)


TABLES: Final = Document(
    name="tables",
    meaning="The embedding tables of one model and the batch that they see.",
    make=TableSet,
    fields=_fields,
    definitions=(_NAME, TABLE, DTYPE, TIER, _FEATURE, CONSTRAINTS, _ROW_ORDER, _DENSE, ACCESS),
)
read_tables, write_tables = TABLES.read, TABLES.write
tables_from_json, tables_to_json = TABLES.from_json, TABLES.to_json
