"""Files of per-row counts: how often each row of a table was looked up, in Parquet, read in parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from autoshard.core.access import IntArray
from autoshard.core.count_histogram import CountHistogram, Counts
from autoshard.core.errors import FormatError, InvalidTableError
from autoshard.core.quoting import shortened
from autoshard.formats.files import open_file

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet

COLUMN = "count"
SUFFIX = ".parquet"
#: Rows that are held at once, and bytes of a file that are.
_CHUNK_ROWS = 1 << 18
_BUFFER_BYTES = 1 << 20


def read_row_counts(
    path: Path, *, num_rows: int | None = None, advance: Callable[[float], None] = lambda _: None
) -> CountHistogram:
    """Counts of one table, from a Parquet file or a folder of them in the order of their names.

    The column `count` has one number per row, whole or not, at least 0; other columns are not read. Memory is that of
    a `CountHistogram` and some megabytes, whatever the number of rows, files and row groups.

    Args:
        path: The file, or the folder, of which files that end in `.parquet` and do not start with `.` or `_` count.
        num_rows: Rows that the table has; None for as many as there are.
        advance: Is told of progress, in shares that add up to 1.

    Raises:
        FileNotFoundError: If the path is not there.
        FormatError: If it cannot be read, has no such column, or not `num_rows` rows; found before rows are read.
        InvalidTableError: If a count is null, negative or not finite; the text has it and its row.
    """
    import pyarrow as pa

    histogram = CountHistogram()
    try:
        files = _parts(path)
        total = sum(map(_num_rows, files))
        if num_rows is not None and total != num_rows:
            files_have = f"file {total}" if files == [path] else f"{len(files)} files {total}"
            raise FormatError(f"must hold one count per row: the table has {num_rows}, the {files_have}")
        for file in files:
            _add_file(file, histogram, lambda rows: advance(rows / total))
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise FormatError(f"{path.name} is no readable Parquet file: {shortened(str(error))}") from None
    if histogram.num_rows != total:
        raise FormatError(f"{path.name} is damaged: it says {total} rows and has {histogram.num_rows}")
    return histogram


def ids_by_count(path: Path) -> IntArray:
    """Ids of the rows that were looked up, by falling counts and then by rising ids; of files that were read before."""
    batches = []
    for file in _parts(path):
        with _opened(file) as parquet:
            for batch in parquet.iter_batches(_CHUNK_ROWS, columns=[COLUMN], use_threads=False):
                batches.append(batch.column(0).to_numpy(zero_copy_only=False))
    counts_N = np.concatenate(batches)
    looked_up_N = np.flatnonzero(counts_N)
    return np.asarray(looked_up_N[np.argsort(-counts_N[looked_up_N].astype(np.float64), kind="stable")])


def _parts(path: Path) -> list[Path]:
    """The files of one table."""
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.iterdir() if is_counts_file(file))
    if not found:
        raise FormatError(f"{path.name} holds no {SUFFIX} files")
    return found


def is_counts_file(path: Path) -> bool:
    """Whether a file within a folder counts, by its name."""
    return path.suffix == SUFFIX and path.name[0] not in "._" and path.is_file()


def _num_rows(file: Path) -> int:
    """Rows that a file says it has, its columns looked at."""
    with _opened(file) as parquet:
        kinds = [column.type for column in parquet.schema_arrow if column.name == COLUMN]
        if len(kinds) != 1 or not _is_number(kinds[0]):
            found = f"has {shortened(str(kinds[0]))}" if len(kinds) == 1 else f"has {len(kinds)}"
            raise FormatError(f"{file.name} must have one column of numbers named {COLUMN}, {found}")
        num_rows: int = parquet.metadata.num_rows
        return num_rows


def _add_file(file: Path, histogram: CountHistogram, advance: Callable[[float], None]) -> None:
    with _opened(file) as parquet:
        for batch in parquet.iter_batches(_CHUNK_ROWS, columns=[COLUMN], use_threads=False):
            histogram.add(_values(batch.column(0), histogram.num_rows))
            advance(batch.num_rows)


def _opened(file: Path) -> pa.parquet.ParquetFile:
    import pyarrow.parquet

    if file.exists():
        open_file(file).close()  # which refuses a pipe: it would be waited for
    # Through a buffer: else a row group is read, or mapped, as a whole, and may be all of the file.
    return pyarrow.parquet.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False, memory_map=False)


def _is_number(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _values(column: pa.Array, first_row: int) -> Counts:
    if column.null_count:
        row = first_row + int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        raise InvalidTableError(f"must be finite and at least 0, got null in row {row}", field="counts")
    values: Counts = column.to_numpy(zero_copy_only=False)
    return values
