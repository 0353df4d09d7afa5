"""Columns of a file of samples, made from the dataclass of a sample: their Arrow types, their ranges, the way back.

Every field is a column of its name; the fields of a dataclass inside it are columns beside it. Metadata of `Annotated`
say what the type does not: an Arrow type, a `Range`, or the `StoredRows` of a tuple of objects.

Shape suffixes: N rows, V values of the lists of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from datetime import datetime
from enum import StrEnum
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

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
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    datetime: pa.timestamp("us", tz="UTC"),
}


#: What a type of arrays is a form of: numpy 2.5 has an alias of its own for it.
_ARRAYS = (np.ndarray, get_origin(NDArray[Any]))

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


class _Column(NamedTuple):
    """A field of a dataclass, as its type declares it."""

    kind: Any
    """Its type without metadata; of a list, `tuple` or `np.ndarray`."""
    type: pa.DataType
    range: Range | None = None
    rows: StoredRows | None = None
    is_record: bool = False
    """Whether it is a dataclass, whose fields are the columns."""


def schema_of(record: Any, metadata: Mapping[bytes, bytes] | None = None) -> pa.Schema:
    """The Arrow schema of a dataclass, its columns in the order of the fields."""
    columns: list[pa.Field] = []
    for name, column in _columns(record).items():
        columns += column.type if column.is_record else [pa.field(name, column.type)]
    return pa.schema(columns, metadata)


def row_of(record: Any) -> dict[str, Any]:
    """A record as a row: JSON values by column, but for times."""
    row: dict[str, Any] = {}
    for name, column in _columns(record.__class__).items():
        value = getattr(record, name)
        if column.rows is not None:
            row[name] = [row_of(column.rows.store(one)) for one in value]
        elif column.is_record:
            row |= row_of(value)
        else:
            row[name] = value.tolist() if column.kind is np.ndarray else value
    return row


def records_of(record: Any, table: pa.Table, shared: SharedObjects) -> list[Any]:
    """The rows of a table that has the columns of a dataclass as its records, every value checked.

    Raises:
        InputError: If a value is impossible; the error names the column.
    """
    values = [
        records_of(column.kind, table, shared)
        if column.is_record
        else _values(table[name].combine_chunks(), column, name, shared)
        for name, column in _columns(record).items()
    ]
    return [record(**dict(zip(_columns(record), row, strict=True))) for row in zip(*values, strict=True)]


@cache
def _columns(record: Any) -> Mapping[str, _Column]:
    return {name: _column(hint) for name, hint in get_type_hints(record, include_extras=True).items()}


def _column(hint: Any) -> _Column:
    kind, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    listed, range_, rows = get_origin(kind), _first(marks, Range), _first(marks, StoredRows)
    if listed in _ARRAYS:
        return _Column(np.ndarray, pa.list_(pa.float64()))
    if is_dataclass(kind):
        return _Column(kind, pa.struct(list(schema_of(kind))), is_record=True)
    if listed is None:
        arrow = _first(marks, pa.DataType) or (pa.string() if issubclass(kind, str) else _ARROW[kind])
        return _Column(kind, arrow, range_)
    of = _column(rows.row if rows else get_args(kind)[0])
    return _Column(listed, pa.list_(of.type), rows=rows)


def _values(array_N: pa.Array, column: _Column, path: str, shared: SharedObjects) -> list[Any]:
    """The values of a column, checked."""
    if array_N.null_count:
        raise FormatError("must not be null", field=path)
    if isinstance(array_N, pa.ListArray):
        return _lists(array_N, column, path, shared)
    if column.range is not None:
        _check(column.range, array_N.to_numpy(zero_copy_only=False), path)
    values: list[Any] = array_N.to_pylist()
    if not issubclass(column.kind, StrEnum):
        return values
    members = dict(column.kind._value2member_map_)
    for word in pc.unique(array_N).to_pylist():
        if word not in members:
            raise FormatError(f"must be one of {', '.join(column.kind)}; got {shown(word)}", field=path)
    return [members[word] for word in values]


def _lists(lists_N: pa.ListArray, column: _Column, path: str, shared: SharedObjects) -> list[Any]:
    array_V = lists_N.flatten()
    if array_V.null_count:
        raise FormatError("must not be null", field=path)
    ends = pairwise([0, *np.cumsum(lists_N.value_lengths().to_numpy()).tolist()])
    if column.kind is np.ndarray:
        values_V = array_V.to_numpy()
        return [values_V[start:stop] for start, stop in ends]
    if column.rows is None:
        values = array_V.to_pylist()
    else:
        of = _columns(column.rows.row)
        parts = {name: _values(array_V.field(name), of[name], f"{path}.{name}", shared) for name in of}
        values = column.rows.restore(parts, shared)
    return [tuple(values[start:stop]) for start, stop in ends]


def _check(accepted: Range, values_N: NDArray[Any], path: str) -> None:
    lowest = accepted.at_least if accepted.above is None else accepted.above
    assert lowest is not None
    for value in np.unique(values_N[~(np.isfinite(values_N) & (values_N > lowest))]).tolist():
        accepted.check(value, path, FormatError)


def _first(marks: Sequence[object], kind: type[_T]) -> _T | None:
    return next((mark for mark in marks if isinstance(mark, kind)), None)
