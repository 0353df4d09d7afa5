"""Lists of tables as CSV or Parquet: a row per table, a column per field."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from autoshard.core import TableSet
from autoshard.core.errors import FormatError
from autoshard.core.quoting import shortened, shown
from autoshard.formats.documents.tables_json import MAX_TABLES, tables_from_json
from autoshard.formats.files import open_file, read_bytes

#: Global batch of lists, which do not say it.
DEFAULT_BATCH_SIZE = 65_536

_NEEDED: Final = ("num_embeddings", "embedding_dim")
#: Columns of texts with what their fields are when left out, and columns of numbers.
_TEXTS: Final = {"name": None, "dtype": "fp32", "pooling": "sum", "optimizer": "rowwise_adagrad", "features": None}
_WHOLE: Final = ("num_embeddings", "embedding_dim")
_NUMBERS: Final = ("pooling_factor", "zipf_alpha")
_COLUMNS: Final = (*_TEXTS, *_WHOLE, *_NUMBERS)
_SEPARATOR: Final = ";"
_PARQUET_START: Final = b"PAR1"
#: Rows that are read at once.
_CHUNK_ROWS: Final = 256


def read_table_list(path: str | Path, *, batch_size: int = DEFAULT_BATCH_SIZE) -> TableSet:
    """Tables of a CSV file with a header, or of a Parquet file.

    Columns `num_embeddings` and `embedding_dim` have to be there. These may be: `name` (else table_0, table_1, …),
    `features` (names, `;` between them; else the table's name), `pooling_factor` (mean ids per sample of each feature;
    else 1), `pooling`, `dtype`, `optimizer`, and `zipf_alpha` (else rows are taken to be looked up alike).

    Args:
        path: The file.
        batch_size: Global batch.

    Raises:
        FormatError: If the file is none, a column is missing or unknown, or a value is not accepted; the field names
            table and column.
    """
    with open_file(path) as file:
        is_parquet = file.read(len(_PARQUET_START)) == _PARQUET_START
    rows = _parquet_rows(path) if is_parquet else _csv_rows(path)
    tables = []
    for number, row in enumerate(rows):
        _check_count(number + 1)
        tables.append(_table(number, row))
    return tables_from_json({"schema": "autoshard.tables/1", "batch_size": batch_size, "tables": tables})


def _check_count(num_rows: int) -> None:
    if num_rows > MAX_TABLES:
        raise FormatError(f"must have at most {MAX_TABLES:,} rows")


def _csv_rows(path: str | Path) -> Iterator[Mapping[str, Any]]:
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise FormatError("is not UTF-8 text") from None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        _check_columns(header)
        for line in reader:
            if not line:
                continue
            if len(line) != len(header):
                raise FormatError(f"must have {len(header)} values in line {reader.line_num}, got {len(line)}")
            yield {
                name: _parsed(name, value.strip()) for name, value in zip(header, line, strict=True) if value.strip()
            }
    except csv.Error as error:
        raise FormatError(f"is not CSV: {shortened(str(error))} in line {reader.line_num}") from None


def _parsed(name: str, value: str) -> object:
    """A value of a CSV file; one that is no number stays a text, and is refused by its field."""
    if name in _TEXTS:
        return value
    try:
        return int(value)
    except ValueError:
        pass
    try:
        return float(value)
    except ValueError:
        return value


def _parquet_rows(path: str | Path) -> Iterator[Mapping[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet

    try:
        with open_file(path) as file, pyarrow.parquet.ParquetFile(file, pre_buffer=False) as parquet:
            _check_count(parquet.metadata.num_rows)
            _check_columns([name for name in parquet.schema_arrow.names if not name.startswith("__index")])
            columns = [name for name in parquet.schema_arrow.names if name in _COLUMNS]
            for batch in parquet.iter_batches(_CHUNK_ROWS, columns=columns, use_threads=False):
                for row in batch.to_pylist():
                    yield {name: value for name, value in row.items() if value is not None}
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise FormatError(f"is a damaged Parquet file: {shortened(str(error))}") from None


def _check_columns(names: list[str]) -> None:
    for name in names:
        if name not in _COLUMNS:
            raise FormatError(f"is no column of table lists; these are: {', '.join(_COLUMNS)}", field=shortened(name))
        if names.count(name) > 1:
            raise FormatError("is there twice", field=name)
    for name in _NEEDED:
        if name not in names:
            raise FormatError("must be a column", field=name)


def _table(number: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as an object of tables.json."""
    field = f"tables[{number}]"
    for name in _NEEDED:
        if name not in row:
            raise FormatError("must have a value", field=f"{field}.{name}")
    name = row.get("name", f"table_{number}")
    features = row.get("features", name)
    if not isinstance(features, str):
        raise FormatError(
            f"must be names with {_SEPARATOR} between them, got {shown(features)}", field=f"{field}.features"
        )
    alpha = row.get("zipf_alpha")
    return {
        "name": name,
        **{key: row[key] for key in _WHOLE},
        **{key: row.get(key, default) for key, default in _TEXTS.items() if default is not None},
        "features": [
            {"name": feature.strip(), "pooling_factor": row.get("pooling_factor", 1.0)}
            for feature in features.split(_SEPARATOR)
        ],
        "access": {"kind": "uniform"} if alpha is None else {"kind": "zipf", "alpha": alpha},
    }
