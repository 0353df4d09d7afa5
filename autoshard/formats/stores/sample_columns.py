"""Columns of a file of samples, made from the dataclass of a sample: their Arrow types, their ranges, the way back.

Every field is a column of its name; the fields of a dataclass inside it are columns beside it. Metadata of `Annotated`
say what the type does not: an Arrow type, a `Range`, or the `StoredRows` of a tuple of objects.

Shape suffixes: N rows, V values of the lists of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from datetime import datetime
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from autoshard.core.accepted import ABOVE_0, FINITE, FINITE_AT_LEAST_0, Range
from autoshard.core.errors import FormatError
from autoshard.core.quoting import shown

#: Objects that equal rows share, by what they were made of: large stores are then quick to read.
SharedObjects = dict[tuple[Any, ...], Any]

_T = TypeVar("_T")
_ARROW = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    datetime: pa.timestamp("us", tz="UTC"),
}


#: Types of fields that samples of several kinds have.
#: A nanosecond to a day, so that no arithmetic on measured times overflows.
Milliseconds = Annotated[float, Range(at_least=1e-6, at_most=1e8, kind=FINITE)]
Amount = Annotated[float, FINITE_AT_LEAST_0]
Count = Annotated[int, pa.int32(), ABOVE_0]


@dataclass(frozen=True, slots=True)
class StoredRows:
    """How a tuple of objects is stored: a list of rows in each row.

    Attributes:
        row: Dataclass of such a row.
        store: Makes one of an object.
        restore: Makes objects of columns by name, and shares what equal rows have in common.

    Raises:
        InputError: By `restore`, if there is no such object.
    """

    row: type
    store: Callable[[Any], Any]
    restore: Callable[[Mapping[str, Sequence[Any]], SharedObjects], list[Any]]


@dataclass(frozen=True, slots=True)
class _Column:
    """Numbers, texts or times."""

    name: str
    type: pa.DataType
    range: Range | None

    def stored(self, value: Any) -> Any:
        return value

    def values(self, array_N: pa.Array, path: str, _shared: SharedObjects) -> list[Any]:
        if array_N.null_count:
            raise FormatError("must not be null", field=path)
        if self.range is not None:
            _check(self.range, array_N.to_numpy(zero_copy_only=False), path)
        values: list[Any] = array_N.to_pylist()
        return values


@dataclass(frozen=True, slots=True)
class _WordColumn(_Column):
    """Members of an enumeration."""

    kind: type[StrEnum]

    def stored(self, value: Any) -> Any:
        return str(value)

    def values(self, array_N: pa.Array, path: str, shared: SharedObjects) -> list[Any]:
        members = dict(self.kind._value2member_map_)
        for word in _Column.values(self, pc.unique(array_N), path, shared):
            if word not in members:
                raise FormatError(f"must be one of {', '.join(self.kind)}; got {shown(word)}", field=path)
        return [members[word] for word in array_N.to_pylist()]


@dataclass(frozen=True, slots=True)
class _ListColumn(_Column):
    """Lists of numbers, read as arrays or tuples."""

    make: Callable[[NDArray[Any]], Any]

    def stored(self, value: Any) -> Any:
        return np.asarray(value, dtype=self.type.value_type.to_pandas_dtype()).tolist()

    def values(self, array_N: pa.Array, path: str, _shared: SharedObjects) -> list[Any]:
        values_V = _flattened(array_N, path).to_numpy()
        return [self.make(values_V[start:stop]) for start, stop in _spans(array_N)]


@dataclass(frozen=True, slots=True)
class _RowsColumn(_Column):
    """Lists of rows."""

    rows: StoredRows
    columns: tuple[_Column, ...]

    def stored(self, value: Any) -> Any:
        rows = map(self.rows.store, value)
        return [{item.name: item.stored(getattr(row, item.name)) for item in self.columns} for row in rows]

    def values(self, array_N: pa.Array, path: str, shared: SharedObjects) -> list[Any]:
        rows_V = _flattened(array_N, path)
        columns = {
            item.name: item.values(rows_V.field(index), f"{path}.{item.name}", shared)
            for index, item in enumerate(self.columns)
        }
        objects = self.rows.restore(columns, shared)
        return [tuple(objects[start:stop]) for start, stop in _spans(array_N)]


class RecordColumns:
    """Columns of a dataclass.

    Args of the constructor:
        record: The dataclass.
    """

    def __init__(self, record: type) -> None:
        hints = get_type_hints(record, include_extras=True)
        self._record = record
        self._parts: dict[str, _Column | RecordColumns] = {
            name: RecordColumns(hint) if isinstance(hint, type) and is_dataclass(hint) else _column(name, hint)
            for name, hint in hints.items()
        }

    @property
    def columns(self) -> tuple[_Column, ...]:
        """All columns, in the order of the fields."""
        parts = self._parts.values()
        return tuple(item for part in parts for item in (part.columns if isinstance(part, RecordColumns) else (part,)))

    def schema(self, metadata: Mapping[bytes, bytes]) -> pa.Schema:
        """The Arrow schema."""
        return pa.schema([(item.name, item.type) for item in self.columns], metadata=dict(metadata))

    def row(self, record: object) -> dict[str, Any]:
        """A record as a row: JSON values by column, but for times."""
        row: dict[str, Any] = {}
        for name, part in self._parts.items():
            value = getattr(record, name)
            row |= part.row(value) if isinstance(part, RecordColumns) else {name: part.stored(value)}
        return row

    def records(self, table: pa.Table, shared: SharedObjects) -> list[Any]:
        """The rows of a table that has these columns as records, every value checked.

        Raises:
            InputError: If a value is impossible; the error names the column.
        """
        parts = [
            part.records(table, shared)
            if isinstance(part, RecordColumns)
            else part.values(_joined(table[name]), name, shared)
            for name, part in self._parts.items()
        ]
        return [self._record(**dict(zip(self._parts, row, strict=True))) for row in zip(*parts, strict=True)]


def _column(name: str, hint: Any) -> _Column:
    kind, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    range_, rows = _first(marks, Range), _first(marks, StoredRows)
    if rows is not None:
        columns = RecordColumns(rows.row).columns
        return _RowsColumn(name, pa.list_(pa.struct([(item.name, item.type) for item in columns])), None, rows, columns)
    if get_origin(kind) is np.ndarray:
        return _ListColumn(name, pa.list_(pa.float64()), None, _unchanged)
    if get_origin(kind) is tuple:
        return _ListColumn(name, pa.list_(_column(name, get_args(kind)[0]).type), None, _as_tuple)
    if issubclass(kind, StrEnum):
        return _WordColumn(name, pa.string(), None, kind)
    return _Column(name, _first(marks, pa.DataType) or _ARROW[kind], range_)


def _check(accepted: Range, values_N: NDArray[Any], path: str) -> None:
    lowest = accepted.at_least if accepted.above is None else accepted.above
    assert lowest is not None
    for value in np.unique(values_N[~(np.isfinite(values_N) & (values_N > lowest))]).tolist():
        accepted.check(value, path, FormatError)


def _first(marks: Sequence[object], kind: type[_T]) -> _T | None:
    return next((mark for mark in marks if isinstance(mark, kind)), None)


def _unchanged(values: NDArray[Any]) -> NDArray[Any]:
    return values


def _as_tuple(values: NDArray[Any]) -> tuple[Any, ...]:
    return tuple(values.tolist())


def _joined(column_N: pa.ChunkedArray) -> pa.Array:
    return column_N.combine_chunks() if column_N.num_chunks else pa.array([], column_N.type)


def _flattened(lists_N: pa.ListArray, path: str) -> pa.Array:
    values_V = lists_N.flatten()
    if lists_N.null_count or values_V.null_count:
        raise FormatError("must not be null", field=path)
    return values_V


def _spans(lists_N: pa.ListArray) -> Iterator[tuple[int, int]]:
    """Where the values of each list start and end."""
    return pairwise(np.concatenate([[0], np.cumsum(lists_N.value_lengths().to_numpy())]).tolist())
