"""`tables.json` (`autoshard.tables/1`): the tables of one model, read and written."""

from __future__ import annotations

from pathlib import Path

from autoshard.core import (
    Constraints,
    DenseLayers,
    DType,
    EmbeddingTable,
    Feature,
    Optimizer,
    Pooling,
    TableSet,
    Tier,
)
from autoshard.core.errors import FormatError
from autoshard.formats.documents.access_json import AccessContext, access_from_json, access_to_json
from autoshard.formats.documents.fields import Fields, choice, from_source, text
from autoshard.formats.documents.json_document import format_json, join, read_json
from autoshard.formats.files import atomic_write

TABLES_SCHEMA = "autoshard.tables/1"

#: Largest accepted sizes: some hundred times what published models have, small enough that bytes fit 64 bits.
MAX_ROWS = 2**40
MAX_EMBEDDING_DIM = 2**16
MAX_BATCH_SIZE = 2**31
MAX_POOLING_FACTOR = 1e6
MAX_TABLES = 100_000
MAX_TOTAL_BYTES = 2**62

_TABLE_FIELDS = ("name", "num_embeddings", "embedding_dim", "dtype", "pooling", "features", "access")


def read_tables(path: str | Path) -> TableSet:
    """Reads a `tables.json`.

    Raises:
        InputError: If the file cannot be read or does not hold tables; the text names file and field.
    """
    document = read_json(path)
    return from_source(str(path), lambda: tables_from_json(document, folder=Path(path).parent))


def write_tables(tables: TableSet, path: str | Path) -> None:
    """Writes a `tables.json` that reads back as equal tables.

    Raises:
        FormatError: If the file cannot be written.
    """
    atomic_write(path, format_json(tables_to_json(tables)))


def tables_from_json(document: object, path: str = "", *, folder: Path | None = None) -> TableSet:
    """Reads the object of a `tables.json`.

    Args:
        document: The parsed JSON.
        path: Dotted path of the object, if it is part of another.
        folder: Where Parquet files that it names lie.

    Raises:
        InputError: If it does not hold tables; the text names the field.
    """
    fields = Fields(
        document, path, required=("schema", "batch_size", "tables"), optional=("dense",), schema=TABLES_SCHEMA
    )
    batch_size = fields.whole("batch_size", minimum=1, maximum=MAX_BATCH_SIZE)
    where = fields.at("tables")
    tables = tuple(
        _table_from_json(value, f"{where}[{index}]", folder)
        for index, value in enumerate(fields.items("tables", maximum=MAX_TABLES))
    )
    if sum(table.storage_bytes for table in tables) > MAX_TOTAL_BYTES:
        raise FormatError(f"must need at most {MAX_TOTAL_BYTES:,} bytes in total", field=where)
    dense = _dense_from_json(fields) if "dense" in fields else None
    return fields.build(lambda: TableSet(batch_size=batch_size, tables=tables, dense=dense))


def tables_to_json(tables: TableSet) -> dict[str, object]:
    """The object of a `tables.json`."""
    document: dict[str, object] = {
        "schema": TABLES_SCHEMA,
        "batch_size": tables.batch_size,
        "tables": [_table_to_json(table) for table in tables.tables],
    }
    if tables.dense is not None:
        document["dense"] = {
            "num_dense_features": tables.dense.num_dense_features,
            "bottom_mlp": list(tables.dense.bottom_mlp),
            "top_mlp": list(tables.dense.top_mlp),
            "interaction": tables.dense.interaction,
        }
    return document


def _table_from_json(value: object, path: str, folder: Path | None) -> EmbeddingTable:
    fields = Fields(value, path, required=_TABLE_FIELDS, optional=("optimizer", "constraints"))
    name = fields.text("name")
    num_embeddings = fields.whole("num_embeddings", minimum=1, maximum=MAX_ROWS)
    embedding_dim = fields.whole("embedding_dim", minimum=1, maximum=MAX_EMBEDDING_DIM)
    where = fields.at("features")
    features = tuple(
        _feature_from_json(item, f"{where}[{index}]") for index, item in enumerate(fields.items("features"))
    )
    context = AccessContext(
        num_embeddings=num_embeddings,
        pooling_factor=sum(feature.pooling_factor for feature in features),
        folder=folder,
    )
    access = access_from_json(fields["access"], join(path, "access"), context)
    dtype = fields.choice("dtype", DType, DType.FP32)
    pooling = fields.choice("pooling", Pooling, Pooling.SUM)
    optimizer = fields.choice("optimizer", Optimizer, Optimizer.ROWWISE_ADAGRAD)
    constraints = _constraints_from_json(fields)
    return fields.build(
        lambda: EmbeddingTable(
            name=name,
            num_embeddings=num_embeddings,
            embedding_dim=embedding_dim,
            features=features,
            access=access,
            dtype=dtype,
            pooling=pooling,
            optimizer=optimizer,
            constraints=constraints,
        )
    )


def _table_to_json(table: EmbeddingTable) -> dict[str, object]:
    written: dict[str, object] = {
        "name": table.name,
        "num_embeddings": table.num_embeddings,
        "embedding_dim": table.embedding_dim,
        "dtype": table.dtype.value,
        "pooling": table.pooling.value,
        "optimizer": table.optimizer.value,
        "features": [_feature_to_json(feature) for feature in table.features],
        "access": access_to_json(table.access),
    }
    constraints = {
        "pinned_ranks": list(table.constraints.pinned_ranks),
        "colocate_with": list(table.constraints.colocate_with),
        "forbidden_tiers": [tier.value for tier in table.constraints.forbidden_tiers],
    }
    if any(constraints.values()):
        written["constraints"] = {name: value for name, value in constraints.items() if value}
    return written


def _feature_from_json(value: object, path: str) -> Feature:
    fields = Fields(value, path, required=("name", "pooling_factor"), optional=("pooling_variance", "pooling_p99"))
    name = fields.text("name")
    pooling_factor = fields.number("pooling_factor", maximum=MAX_POOLING_FACTOR)
    variance = fields.number("pooling_variance", maximum=MAX_POOLING_FACTOR**2)
    p99 = fields.number("pooling_p99", maximum=MAX_POOLING_FACTOR) if "pooling_p99" in fields else None
    return Feature(name=name, pooling_factor=pooling_factor, pooling_variance=variance, pooling_p99=p99)


def _feature_to_json(feature: Feature) -> dict[str, object]:
    written: dict[str, object] = {"name": feature.name, "pooling_factor": feature.pooling_factor}
    if feature.pooling_variance:
        written["pooling_variance"] = feature.pooling_variance
    if feature.pooling_p99 is not None:
        written["pooling_p99"] = feature.pooling_p99
    return written


def _constraints_from_json(table: Fields) -> Constraints:
    if "constraints" not in table:
        return Constraints()
    fields = table.fields("constraints", required=(), optional=("pinned_ranks", "colocate_with", "forbidden_tiers"))
    names, tiers = fields.at("colocate_with"), fields.at("forbidden_tiers")
    return Constraints(
        pinned_ranks=fields.whole_numbers("pinned_ranks"),
        colocate_with=tuple(
            text(value, f"{names}[{index}]") for index, value in enumerate(fields.items("colocate_with"))
        ),
        forbidden_tiers=tuple(
            choice(value, f"{tiers}[{index}]", Tier) for index, value in enumerate(fields.items("forbidden_tiers"))
        ),
    )


def _dense_from_json(document: Fields) -> DenseLayers:
    fields = document.fields("dense", required=("num_dense_features", "bottom_mlp", "top_mlp", "interaction"))
    return DenseLayers(
        num_dense_features=fields.whole("num_dense_features", maximum=MAX_EMBEDDING_DIM),
        bottom_mlp=fields.whole_numbers("bottom_mlp", minimum=1, maximum=2**20),
        top_mlp=fields.whole_numbers("top_mlp", minimum=1, maximum=2**20),
        interaction=fields.word("interaction", ("dot",)),
    )
