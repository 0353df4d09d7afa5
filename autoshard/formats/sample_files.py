"""Files of training samples: Parquet with a column for each feature, and Criteo's tab-separated text.

Shape suffixes: N samples of a block.
"""

from __future__ import annotations

import gzip
import io
import itertools
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import csv

from autoshard.core import TableSet
from autoshard.core.errors import FormatError, InputError
from autoshard.core.quoting import shown

#: Column of labels, 0 or 1; dense features are `int_0`, `int_1` and so on, as TorchRec names those of Criteo.
LABEL: Final = "label"
_DENSE: Final = "int_{}"
#: Columns of Criteo's files, without names: the label, counts, and hashed categories in hexadecimal digits.
CRITEO_DENSE, CRITEO_CATEGORIES = 13, 26
#: Text that is read at once.
_BLOCK_BYTES = 2**20
_NAMED_CRITEO = re.compile(r"day_\d+|.*\.(tsv|txt)", re.IGNORECASE)


class FilePlace(NamedTuple):
    """Where a block begins.

    Attributes:
        file: Number of the file.
        offset: Bytes of text, or row groups, of the file before it.
        row: Samples or lines of the file before it.
    """

    file: int = 0
    offset: int = 0
    row: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBlock:
    """Samples that follow each other in a file.

    Attributes:
        rows: Columns `label`, `int_0` and so on, of float32, and the features: int64, null where a sample has none, or
            large lists of int64.
        num_bad: Lines or rows that are none, and are left out.
        first_bad: Which one is the first of these, and what is wrong with it.
        after: Where the next block begins.
    """

    rows: pa.Table
    num_bad: int
    first_bad: str | None
    after: FilePlace


class SampleFiles(Protocol):
    """Files of samples, in their order."""

    paths: Sequence[Path]

    @property
    def num_dense(self) -> int:
        """Dense features that every file has, numbered from 0 on; at least 1.

        Raises:
            FormatError: If a file cannot be read.
        """
        ...

    def check(self, tables: TableSet, num_dense: int) -> None:
        """Checks that there is a column for each feature, without reading samples.

        Raises:
            InputError: If not; it names the column.
        """
        ...

    def blocks(self, tables: TableSet, num_dense: int, begin: FilePlace) -> Iterator[SampleBlock]:
        """Blocks from a place on to the end.

        Args:
            tables: Tables of the features.
            num_dense: Dense features.
            begin: Where the first block begins.

        Raises:
            FormatError: If a file cannot be read.
        """
        ...

    def share_before(self, place: FilePlace) -> float:
        """Which share of all lies before a place, in [0, 1]; about."""
        ...


def open_samples(path: Path) -> SampleFiles:
    """The files of samples that a path names: one file, or all of a folder in the order of their names and numbers.

    Parquet files end in `.parquet`; Criteo's are `day_0` and so on or end in `.tsv` or `.txt`, and may be compressed
    (`.gz`).

    Raises:
        InputError: If there is none, or files are of both kinds.
    """
    if not path.exists():
        raise InputError(f"is not there: {path}", field="data")
    files = [path]
    if path.is_dir():
        files = sorted((one for one in path.iterdir() if _kind(one) is not None), key=_numbers_last)
        if not files:
            raise InputError(
                f"{path} holds no files of samples: names end in .parquet, .tsv or .txt, or are day_0, day_1 and so on",
                field="data",
            )
    kinds = {_kind(one) for one in files}
    if None in kinds:
        raise InputError(f"must be a .parquet, .tsv or .txt file, or one of Criteo's days, got {path}", field="data")
    if len(kinds) > 1:
        raise InputError(f"{path} holds Parquet and text: use one of the two", field="data")
    return ParquetFiles(files) if kinds == {"parquet"} else CriteoFiles(files)


def _kind(path: Path) -> str | None:
    if path.suffix == ".parquet":
        return "parquet"
    return "criteo" if _NAMED_CRITEO.fullmatch(path.name.removesuffix(".gz")) else None


def _numbers_last(path: Path) -> list[tuple[str, int]]:
    """Sorts `day_2` before `day_10`."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", path.name)]


class ParquetFiles:
    """Columns `label`, `int_0` and so on, and one for each feature: row ids, whole numbers or lists of these.

    A block is a row group, which is held in memory as a whole. A row whose label is not 0 or 1 is bad; a dense feature
    that is missing is 0.

    Args:
        paths: The files.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths
        self._rows: list[int] = []

    @property
    def num_dense(self) -> int:
        """As `SampleFiles`."""
        return max(1, min(map(_num_dense, self.paths)))

    def check(self, tables: TableSet, num_dense: int) -> None:
        """As `SampleFiles`."""
        _check_unweighted(tables)
        for path in self.paths:
            schema = _reading(path, partial(pq.read_schema, path))
            numbers = Counter(schema.names)
            for name, column in _columns(tables, num_dense, schema.names).items():
                accepts, wanted = _ACCEPTED[_role(name, num_dense)]
                if not numbers[column]:
                    wrong = f"has no column {shown(name)}"
                elif numbers[column] > 1:
                    wrong = f"has {numbers[column]} columns {shown(column)}; names must differ"
                elif not accepts(kind := schema.field(column).type):
                    wrong = f"column {shown(column)} must be {wanted}, got {kind}"
                else:
                    continue
                raise InputError(wrong, field="data", source=str(path))

    def blocks(self, tables: TableSet, num_dense: int, begin: FilePlace) -> Iterator[SampleBlock]:
        """As `SampleFiles`."""
        file, group, row = begin
        for number in range(file, len(self.paths)):
            path = self.paths[number]
            with _reading(path, partial(pq.ParquetFile, path)) as parquet:
                columns = _columns(tables, num_dense, parquet.schema_arrow.names)
                for index in range(group, parquet.num_row_groups):
                    rows = _reading(path, partial(parquet.read_row_group, index, columns=[*set(columns.values())]))
                    after = FilePlace(number, index + 1, row + len(rows))
                    yield _reading(path, partial(_parquet_block, path, rows, columns, num_dense, row, after))
                    row = after.row
            group = row = 0

    def share_before(self, place: FilePlace) -> float:
        """As `SampleFiles`."""
        rows = self._rows = self._rows or [pq.read_metadata(path).num_rows for path in self.paths]
        return min(1.0, (sum(rows[: place.file]) + place.row) / max(1, sum(rows)))


def _num_dense(path: Path) -> int:
    """Columns `int_0`, `int_1` and so on of a file, up to the first one that it lacks."""
    names = set(_reading(path, partial(pq.read_schema, path)).names)
    return next(number for number in itertools.count() if _DENSE.format(number) not in names)


def _parquet_block(
    path: Path, rows: pa.Table, columns: Mapping[str, str], num_dense: int, first_row: int, after: FilePlace
) -> SampleBlock:
    """Samples of a row group; columns have one order and, but for numbers and lists, one type in all files."""
    label = rows[LABEL].cast(pa.float32(), safe=False)
    is_good = pc.is_in(label, value_set=pa.array([0.0, 1.0], pa.float32()))
    bad = np.flatnonzero(~is_good.to_numpy().astype(bool))
    first = None
    if len(bad):
        first = f"{path}: row {first_row + int(bad[0])}: {LABEL} must be 0 or 1, got {label[int(bad[0])].as_py()}"
        rows, label = rows.filter(is_good), label.filter(is_good)
    found, dense = {LABEL: label}, {*map(_DENSE.format, range(num_dense))}
    for name, column in columns.items():
        if name in dense:
            found[name] = pc.fill_null(rows[column].cast(pa.float32(), safe=False), 0.0)
        elif name != LABEL:
            ids = rows[column].combine_chunks()
            found[name] = ids.cast(pa.int64(), safe=False) if _is_whole(ids.type) else _as_lists(ids)
    return SampleBlock(rows=pa.table(found), num_bad=len(bad), first_bad=first, after=after)


def _as_lists(column: pa.Array) -> pa.LargeListArray:
    """Whole numbers, or lists of these, as large lists of int64, without those that are missing."""
    ids, bounds_N = column, np.arange(len(column) + 1)
    if not _is_whole(column.type):
        ids, bounds_N = column.flatten(), np.append(0, np.cumsum(pc.fill_null(pc.list_value_length(column), 0)))
    if ids.null_count:
        bounds_N = np.append(0, np.cumsum(ids.is_valid()))[bounds_N]
        ids = ids.drop_null()
    return pa.LargeListArray.from_arrays(bounds_N.astype(np.int64), ids.cast(pa.int64(), safe=False))


def with_lists(rows: pa.Table) -> pa.Table:
    """Samples of a block whose ids are lists in all columns of features."""
    columns = {name: rows[name].combine_chunks() for name in rows.column_names}
    return pa.table({name: _as_lists(of) if _is_whole(of.type) else of for name, of in columns.items()})


class CriteoFiles:
    """Criteo's lines: a label, 13 counts, and 26 categories as hexadecimal digits, separated by tabs.

    The categories belong to the features in their order; a row id is the category's number modulo the table's rows. A
    missing one looks up nothing. Counts c become log(1 + max(c, 0)), missing ones 0. A line with another number of
    columns, another label than 0 or 1, or what is no number, is bad.

    Args:
        paths: The files.

    Source:
        The Criteo 1 TB click logs; Naumov et al., "Deep learning recommendation model" (2019), for the logarithm.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    @property
    def num_dense(self) -> int:
        """As `SampleFiles`."""
        return CRITEO_DENSE

    def check(self, tables: TableSet, num_dense: int) -> None:
        """As `SampleFiles`."""
        _check_unweighted(tables)
        num_features = sum(len(table.features) for table in tables.tables)
        for name, found, wanted in (
            ("categories", num_features, CRITEO_CATEGORIES),
            ("dense features", num_dense, CRITEO_DENSE),
        ):
            if found != wanted:
                raise InputError(
                    f"Criteo's lines have {wanted} {name}, the plan's model has {found}",
                    field="data",
                    source=str(self.paths[0]),
                )

    def blocks(self, tables: TableSet, num_dense: int, begin: FilePlace) -> Iterator[SampleBlock]:
        """As `SampleFiles`."""
        del num_dense  # Checked: 13.
        rows_F = [(feature.name, table.num_embeddings) for table in tables.tables for feature in table.features]
        file, offset, line = begin
        for number in range(file, len(self.paths)):
            path = self.paths[number]
            with _reading(path, partial(_open_text, path)) as text:
                _reading(path, partial(text.seek, offset))
                while block := _reading(path, partial(_whole_lines, text)):
                    after = FilePlace(number, offset + len(block), line + block.count(b"\n") + (block[-1:] != b"\n"))
                    yield _reading(path, partial(_criteo_block, path, block, rows_F, line, after))
                    offset, line = after.offset, after.row
            offset = line = 0

    def share_before(self, place: FilePlace) -> float:
        """As `SampleFiles`; compressed files count as if they had as many bytes as their text."""
        sizes = [path.stat().st_size for path in self.paths]
        within = min(place.offset, sizes[place.file]) if place.file < len(sizes) else 0
        return (sum(sizes[: place.file]) + within) / max(1, sum(sizes))


def _criteo_block(
    path: Path, text: bytes, rows_F: Sequence[tuple[str, int]], first_line: int, after: FilePlace
) -> SampleBlock:
    names = [LABEL, *map(_DENSE.format, range(CRITEO_DENSE)), *(name for name, _ in rows_F)]
    faults: dict[int, str] = {}

    def skip(row: Any) -> str:
        faults[row.number - 1] = f"must have {row.expected_columns} columns, got {row.actual_columns}"
        return "skip"

    table = csv.read_csv(
        io.BytesIO(text if text.isascii() else text.decode("latin-1").encode()),
        # One thread, or the numbers of bad lines are not told.
        read_options=csv.ReadOptions(column_names=names, use_threads=False, block_size=2 * _BLOCK_BYTES + len(text)),
        parse_options=csv.ParseOptions(
            delimiter="\t", quote_char=False, ignore_empty_lines=False, invalid_row_handler=skip
        ),
        convert_options=csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False),
    )
    lines_N = np.setdiff1d(np.arange(after.row - first_line), list(faults), assume_unique=True)
    is_good_N = np.ones(len(table), bool)
    for name, column in zip(names, table.columns, strict=True):
        role = _role(name, CRITEO_DENSE)
        pattern, wanted = _WRITTEN[role]
        fits_N = pc.match_substring_regex(column, pattern).to_numpy()
        for index in np.flatnonzero(is_good_N & ~fits_N):
            faults[int(lines_N[index])] = f"{name} must be {wanted}, got {shown(column[int(index)].as_py())}"
        is_good_N &= fits_N
    if faults:
        table = table.filter(pa.array(is_good_N))
    written = {name: column.combine_chunks() for name, column in zip(names, table.columns, strict=True)}
    columns: dict[str, pa.Array] = {LABEL: written[LABEL].cast(pa.float32())}
    for name in names[1 : 1 + CRITEO_DENSE]:
        counts = pc.replace_with_mask(written[name], pc.equal(written[name], ""), "0").cast(pa.float32())
        columns[name] = pc.log1p(pc.max_element_wise(counts, pa.scalar(0.0, pa.float32())))
    for name, num_rows in rows_F:
        digits = b"".join(pc.ascii_lpad(written[name], 8, "0").cast(pa.binary()).to_pylist())
        ids_N = np.frombuffer(bytes.fromhex(digits.decode("ascii")), ">u4").astype(np.int64)
        is_missing_N = pc.equal(written[name], "").to_numpy(zero_copy_only=False)
        columns[name] = pa.array(ids_N % num_rows, mask=is_missing_N)
    first = min(faults, default=None)
    return SampleBlock(
        rows=pa.table(columns),
        num_bad=len(faults),
        first_bad=None if first is None else f"{path}: line {first_line + first + 1}: {faults[first]}",
        after=after,
    )


def _open_text(path: Path) -> io.BufferedIOBase:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _whole_lines(text: io.BufferedIOBase) -> bytes:
    return text.read(_BLOCK_BYTES) + text.readline()


def _check_unweighted(tables: TableSet) -> None:
    for table in tables.tables:
        if table.weighted:
            raise InputError(f"has no weights, and lookups of table {shown(table.name)} are weighted", field="data")


def _columns(tables: TableSet, num_dense: int, known: Sequence[str]) -> dict[str, str]:
    """Columns of a file, by what they are of; ids of several tables may be in one."""
    features = [feature.name for table in tables.tables for feature in table.features]
    names, shared = [LABEL, *map(_DENSE.format, range(num_dense)), *features], tables.shared_features
    return {name: shared[name] if name not in known and shared.get(name) in known else name for name in names}


def _role(name: str, num_dense: int) -> str:
    if name == LABEL:
        return LABEL
    return "dense" if name in {_DENSE.format(index) for index in range(num_dense)} else "feature"


def _is_whole(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_integer(dtype))


def _is_number(dtype: pa.DataType) -> bool:
    return bool(pa.types.is_integer(dtype) or pa.types.is_floating(dtype) or pa.types.is_boolean(dtype))


def _is_whole_or_list(dtype: pa.DataType) -> bool:
    is_list = pa.types.is_list(dtype) or pa.types.is_large_list(dtype) or pa.types.is_fixed_size_list(dtype)
    return _is_whole(dtype.value_type if is_list else dtype)


#: Types of Parquet columns.
_ACCEPTED: Final = {
    LABEL: (_is_number, "a number"),
    "dense": (_is_number, "a number"),
    "feature": (_is_whole_or_list, "whole numbers or lists of these"),
}
#: Text of Criteo's columns.
_WRITTEN: Final = {
    LABEL: ("^[01]$", "0 or 1"),
    "dense": (r"^(-?\d{1,10})?$", "a whole number or nothing"),
    "feature": ("^[0-9a-fA-F]{0,8}$", "up to 8 hexadecimal digits"),
}


def _reading(path: Path, read: Any) -> Any:
    """What reading gives.

    Raises:
        FormatError: If the file cannot be read.
    """
    try:
        return read()
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        raise FormatError(f"cannot be read: {str(error).splitlines()[0]}", source=str(path)) from error
