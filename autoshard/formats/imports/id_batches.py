"""Raw batches of ids, as Parquet or as tensors of `torch.save`, counted into tables.

Shape suffixes: B samples, F features, L lookups, R distinct rows, N distinct lengths.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autoshard.core import AccessProfile, EmbeddingTable, Feature, TableSet
from autoshard.core.accepted import MAX_POOLING_FACTOR, MAX_ROWS, MAX_TABLES
from autoshard.core.access import FloatArray, IntArray, log_spaced_ranks
from autoshard.core.errors import FormatError
from autoshard.core.quoting import shortened
from autoshard.formats.archives.torch_archive import read_tensors
from autoshard.formats.documents.fields import from_source
from autoshard.formats.documents.tables_json import DEFAULT_BATCH_SIZE
from autoshard.formats.files import files_of, open_file, reason_of
from autoshard.formats.imports.dlrm_datasets import Advance

if TYPE_CHECKING:
    import pyarrow as pa

#: Dimension of tables from files of ids or counts, which do not say it.
DEFAULT_EMBEDDING_DIM = 64

_PARQUET_START = b"PAR1"
_TORCH_START = b"PK\x03\x04"
_SUFFIXES = (".parquet", ".pt")
#: Samples that are held at once.
_CHUNK_SAMPLES = 4096
#: Ids of one feature that are held before they are counted: as many as it has distinct rows, within these.
_MIN_PENDING, _MAX_PENDING = 2**16, 2**22
#: Most ids of one bag: as many as a tables.json takes for the mean.
_MAX_BAG_IDS = int(MAX_POOLING_FACTOR)
#: Most distinct ids of all features together: they take 16 bytes each, and twice that while more are added.
MAX_DISTINCT_IDS = 2**24
#: Parquet: ids that are read at once, and most that a column of one row group may have, since all may be in one bag.
_CHUNK_IDS, MAX_GROUP_IDS = 2**20, 2**25
#: Parquet: most bytes of a column of one row group when unpacked.
_MAX_GROUP_BYTES = 2**29


def read_id_batches(
    path: str | Path,
    *,
    embedding_dim: int = DEFAULT_EMBEDDING_DIM,
    batch_size: int | None = None,
    num_embeddings: int | None = None,
    advance: Advance = lambda _: None,
) -> TableSet:
    """Tables from raw batches of ids: a file, or all files of a folder that end in `.parquet` or `.pt`.

    - Parquet: a column per feature, a row per sample. Lists of whole numbers are bags, whole numbers are bags of one,
      null and the empty list are empty bags. Files of a folder have the same columns, in any order. Index columns
      that pandas adds are left out; other columns that are no ids (labels, dense features) must not be there.
    - `.pt`: a tuple of tensors, nothing else, read without unpickling. Either `(values, lengths)` as of a
      `KeyedJaggedTensor`: ids by feature, then sample, and lengths of shape [features, samples]; or the
      `(indices, offsets, lengths)` of facebookresearch/dlrm_datasets. Features have no names there and are
      numbered. Such a file comes from
      `torch.save((kjt.values(), kjt.lengths().view(len(kjt.keys()), -1)), "batch.pt")`.

    What tables get:

    - Rows: `num_embeddings`, else one more than the largest id.
    - Pooling factor, variance and 99th percentile: of the lengths of all samples.
    - Access profile: of the counts of all files. Rows that were met once are spread over all rows that were not
      met more often: of the distinct rows of a next batch that expects 85% to 99% after one batch, where counts as
      they are expect 63% to 71% of a table that a batch does not exhaust; after 32 batches both expect 98% and more.
    - Global batch: `batch_size`; else the samples of the largest `.pt` file, or of Parquet 65,536, at most all samples.
    - Weights are fp32, pooling is a sum, the optimizer row-wise AdaGrad.

    Files are streamed: memory grows with the distinct ids, 16 bytes each, and not with the samples. There may be 2**24
    distinct ids (16.8 million), 10**6 ids in a bag, and in Parquet 2**25 ids of a column in a row group.

    Args:
        path: The file or folder.
        embedding_dim: Dimension of all tables, which files of ids do not say.
        batch_size: Global batch.
        num_embeddings: Rows of every table; ids must be below.
        advance: Is told of progress.

    Raises:
        FormatError: If a file cannot be read as such; the text names file, column and row (from 0) of a bad id.
    """
    files, is_parquet = _files(Path(path))
    limit = num_embeddings if num_embeddings is not None else MAX_ROWS
    features: dict[str, FeatureCounts] = {}
    read = _add_parquet if is_parquet else _add_tensors
    num_samples = []

    def advance_and_check(share: float) -> None:
        _check_distinct(features)
        advance(share / len(files))

    for file in files:
        add = functools.partial(read, file, features, files[0], limit, advance_and_check)
        num_samples.append(from_source(str(file), add))
    if sum(num_samples) == 0:
        raise FormatError("must hold at least one sample")
    if batch_size is None:
        batch_size = min(DEFAULT_BATCH_SIZE, sum(num_samples)) if is_parquet else max(num_samples)
    tables = tuple(counts.table(name, embedding_dim, num_embeddings) for name, counts in features.items())
    return TableSet(batch_size=batch_size, tables=tables)


class FeatureCounts:
    """Lengths of one feature's bags and lookups of its rows, counted so far."""

    __slots__ = ("_counts_R", "_lengths", "_num_pending", "_pending", "_rows_R")

    def __init__(self) -> None:
        self._rows_R: IntArray = np.zeros(0, dtype=np.int64)
        self._counts_R: IntArray = np.zeros(0, dtype=np.int64)
        self._pending: list[IntArray] = []
        self._num_pending = 0
        self._lengths: Counter[int] = Counter()

    def add(self, ids_L: IntArray, lengths_B: IntArray) -> None:
        """Counts the bags of some samples; the ids are kept, and must not change.

        Raises:
            FormatError: If there are too many distinct ids.
        """
        values_N, counts_N = np.unique(lengths_B, return_counts=True)
        self._lengths.update(dict(zip(values_N.tolist(), counts_N.tolist(), strict=True)))
        self._pending.append(ids_L)
        self._num_pending += len(ids_L)
        # As many as are counted already: each id is then merged a logarithmic number of times.
        if self._num_pending >= min(max(_MIN_PENDING, len(self._rows_R)), _MAX_PENDING):
            self._merge()
            if len(self._rows_R) > MAX_DISTINCT_IDS:
                raise _too_many_distinct()

    @property
    def num_distinct(self) -> int:
        """Distinct ids that were counted; those that wait for it left out."""
        return len(self._rows_R)

    def access(self, num_rows: int) -> AccessProfile | None:
        """The profile of a table's rows; None where no id was counted."""
        self._merge()
        return _access(self._counts_R, num_rows) if len(self._counts_R) else None

    def table(self, name: str, embedding_dim: int, num_embeddings: int | None) -> EmbeddingTable:
        """The table of what was counted."""
        self._merge()
        num_rows = num_embeddings or (int(self._rows_R[-1]) + 1 if len(self._rows_R) else 1)
        lengths_N = np.array(sorted(self._lengths), dtype=np.float64)
        counts_N = np.array([self._lengths[int(length)] for length in lengths_N], dtype=np.float64)
        mean = float(np.average(lengths_N, weights=counts_N))
        # As numpy's "higher": the shortest length that at least 99% of the way through the samples has been reached.
        place = np.searchsorted(np.cumsum(counts_N), np.ceil(0.99 * (counts_N.sum() - 1)), side="right")
        feature = Feature(
            name=name,
            pooling_factor=mean,
            pooling_variance=float(np.average((lengths_N - mean) ** 2, weights=counts_N)),
            pooling_p99=float(lengths_N[place]),
        )
        access = self.access(num_rows) or AccessProfile.uniform(num_rows)
        return EmbeddingTable(
            name=name, num_embeddings=num_rows, embedding_dim=embedding_dim, features=(feature,), access=access
        )

    def _merge(self) -> None:
        if self._num_pending == 0:
            return
        rows_R, counts_R = np.unique(np.concatenate(self._pending), return_counts=True)
        self._pending, self._num_pending = [], 0
        places_R = np.searchsorted(self._rows_R, rows_R)
        is_known_R = self._rows_R[np.minimum(places_R, len(self._rows_R) - 1)] == rows_R if len(self._rows_R) else False
        is_new_R = np.logical_not(is_known_R) & np.ones(len(rows_R), dtype=np.bool_)
        self._counts_R[places_R[~is_new_R]] += counts_R[~is_new_R]
        # One after the other: large tables would not fit twice.
        self._rows_R = np.insert(self._rows_R, places_R[is_new_R], rows_R[is_new_R])
        self._counts_R = np.insert(self._counts_R, places_R[is_new_R], counts_R[is_new_R])


def _check_distinct(features: Mapping[str, FeatureCounts]) -> None:
    if sum(counts.num_distinct for counts in features.values()) > MAX_DISTINCT_IDS:
        raise _too_many_distinct()


def _too_many_distinct() -> FormatError:
    return FormatError(
        f"must have at most {MAX_DISTINCT_IDS:,} distinct ids, all features together; take fewer batches or features"
    )


def _check_bags(lengths_B: IntArray, column: str, first_row: int) -> None:
    if lengths_B.size and lengths_B.max() > _MAX_BAG_IDS:
        row = int(np.argmax(lengths_B > _MAX_BAG_IDS))
        raise FormatError(
            f"bags must have at most {_MAX_BAG_IDS:,} ids; row {first_row + row} has {lengths_B[row]:,}",
            field=shortened(column),
        )


def _access(counts_R: IntArray, num_rows: int) -> AccessProfile:
    """Profile of the rows that were met, those met once spread over all rows that were not met more often."""
    repeated_R = np.sort(counts_R[counts_R > 1])[::-1]
    num_once = len(counts_R) - len(repeated_R)
    ranks = log_spaced_ranks(len(repeated_R)) if len(repeated_R) else np.zeros(1, dtype=np.int64)
    knots: FloatArray = ranks.astype(np.float64)
    cumulative = np.concatenate([[0.0], np.cumsum(repeated_R, dtype=np.float64)])[ranks]
    if len(repeated_R) < num_rows:
        knots, cumulative = np.append(knots, num_rows), np.append(cumulative, cumulative[-1] + num_once)
    return AccessProfile(knots, cumulative / cumulative[-1])


def _files(path: Path) -> tuple[list[Path], bool]:
    """The files, and whether they are Parquet rather than tensors."""
    files = files_of(path, lambda file: file.suffix in _SUFFIXES and file.name[0] not in "._", " or ".join(_SUFFIXES))
    kinds = [_is_parquet(file) for file in files]
    if len({*kinds}) > 1:
        raise FormatError(
            f"must be files of one kind: {files[kinds.index(True)].name} is Parquet, "
            f"{files[kinds.index(False)].name} is not"
        )
    return files, kinds[0]


def _is_parquet(file: Path) -> bool:
    try:
        with open_file(file) as opened:
            start = opened.read(4)
    except OSError as error:
        raise FormatError(f"cannot be read: {reason_of(error)}", source=str(file)) from error
    if start not in (_PARQUET_START, _TORCH_START):
        raise FormatError("is neither a Parquet file nor one that torch.save wrote", source=str(file))
    return start == _PARQUET_START


def _checked(ids_L: NDArray[np.integer], lengths_B: IntArray, limit: int, column: str, first_row: int) -> IntArray:
    """The ids as int64, all of them within [0, limit)."""
    bad = ids_L.size and not (ids_L.min() >= 0 and ids_L.max() < limit)
    if bad:
        place = int(np.flatnonzero((ids_L < 0) | (ids_L >= limit))[0])
        row = first_row + int(np.searchsorted(np.cumsum(lengths_B), place, side="right"))
        hint = "; hash larger ones into rows first" if limit == MAX_ROWS and ids_L[place] > 0 else ""
        raise FormatError(
            f"ids must be in [0, {limit - 1}]{hint}; row {row} has {ids_L[place]}", field=shortened(column)
        )
    return ids_L.astype(np.int64)


def _add_parquet(file: Path, features: dict[str, FeatureCounts], first: Path, limit: int, advance: Advance) -> int:
    """Counts a file's ids; returns the number of its samples."""
    import pyarrow as pa
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file, memory_map=True, pre_buffer=False) as parquet:
            columns = _columns(parquet.schema_arrow)
            if features and features.keys() != {*columns}:
                other = sorted(features.keys() ^ {*columns})[0]
                where = f"is in {first} and not here" if other in features else f"is not in {first}"
                raise FormatError(f"{where}; files of a folder must have the same columns", field=shortened(other))
            for name in columns:
                features.setdefault(name, FeatureCounts())
            num_samples: int = parquet.metadata.num_rows
            for group, chunk in _column_groups(parquet, columns):
                row = 0
                for batch in parquet.iter_batches(chunk, columns=group):
                    for name in group:
                        ids_L, lengths_B = _bags(batch.column(name), name, row)
                        features[name].add(_checked(ids_L, lengths_B, limit, name, row), lengths_B)
                    row += batch.num_rows
                    advance(batch.num_rows / max(num_samples, 1) * len(group) / len(columns))
                if row != num_samples:
                    raise FormatError(f"is a damaged Parquet file: it says {num_samples} rows and has {row}")
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: of a column's name
        raise FormatError(f"is a damaged Parquet file: {shortened(str(error))}") from None
    if num_samples == 0:
        advance(1.0)
    return num_samples


def _column_groups(parquet: pa.parquet.ParquetFile, columns: list[str]) -> Iterator[tuple[list[str], int]]:
    """Columns that are read together, few enough that their ids fit the memory, and samples to read at once.

    Raises:
        FormatError: If a column of one row group has too many ids or bytes; found before ids are read.
    """
    metadata = parquet.metadata
    num_ids = dict.fromkeys(columns, 0)
    for index in range(metadata.num_row_groups):
        row_group = metadata.row_group(index)
        # A reader says what is wrong with a column's statistics; pyarrow's metadata would end the process.
        next(parquet.iter_batches(1, row_groups=[index], columns=columns, use_threads=False), None)
        for leaf in map(row_group.column, range(row_group.num_columns)):
            path = leaf.path_in_schema
            name = path if path in num_ids else path.rsplit(".", 2)[0]
            if leaf.num_values > MAX_GROUP_IDS or leaf.total_uncompressed_size > _MAX_GROUP_BYTES:
                raise FormatError(
                    f"must have at most {MAX_GROUP_IDS:,} ids and {_MAX_GROUP_BYTES:,} bytes in a row group, number "
                    f"{index} has {leaf.num_values:,} and {leaf.total_uncompressed_size:,}; write smaller row groups",
                    field=shortened(name),
                )
            if leaf.num_values > _MAX_BAG_IDS * row_group.num_rows:
                raise FormatError(
                    f"bags must have at most {_MAX_BAG_IDS:,} ids; row group {index} has {leaf.num_values:,} in "
                    f"{row_group.num_rows:,} bags",
                    field=shortened(name),
                )
            if name in num_ids:
                num_ids[name] = max(num_ids[name], leaf.num_values)
    group_rows = max((metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)), default=0)
    group: list[str] = []
    for name in columns:
        held = sum(num_ids[other] for other in group)
        if group and held + num_ids[name] > MAX_GROUP_IDS:
            yield group, _chunk_samples(held, group_rows)
            group = []
        group.append(name)
    yield group, _chunk_samples(sum(num_ids[other] for other in group), group_rows)


def _chunk_samples(num_ids: int, num_rows: int) -> int:
    """Samples that are read at once: fewer where bags are long."""
    return max(1, min(_CHUNK_SAMPLES, _CHUNK_IDS * num_rows // max(num_ids, 1)))


def _columns(schema: pa.Schema) -> list[str]:
    """Names of the columns, all of them ids."""
    import pyarrow as pa

    try:
        index_columns = [name for name in (schema.pandas_metadata or {})["index_columns"] if isinstance(name, str)]
    except (ValueError, KeyError, TypeError):  # pandas did not write the file, or something else wrote its key
        index_columns = []
    fields = [field for field in schema if field.name not in index_columns]
    names = [field.name for field in fields]
    if not 0 < len(names) <= MAX_TABLES:
        raise FormatError(f"must have 1 to {MAX_TABLES} columns of ids, got {len(names)}")
    for field in fields:
        kind = field.type
        lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        if not pa.types.is_integer(kind.value_type if lists else kind):
            raise FormatError(
                f"must hold whole numbers or lists of them, got {shortened(str(kind))}; "
                "leave out columns that are no ids",
                field=shortened(field.name),
            )
        if names.count(field.name) > 1:
            raise FormatError("is there twice; columns must have names of their own", field=shortened(field.name))
    return names


def _bags(column: pa.Array, name: str, first_row: int) -> tuple[NDArray[np.integer], IntArray]:
    """Ids and lengths of a column of a few samples."""
    import pyarrow as pa
    import pyarrow.compute

    if pa.types.is_integer(column.type):
        filled_B = np.asarray(column.is_valid())
        return np.asarray(column.drop_null()), filled_B.astype(np.int64)
    lengths_B = np.asarray(pyarrow.compute.list_value_length(column).fill_null(0)).astype(np.int64)
    _check_bags(lengths_B, name, first_row)
    values = column.flatten()
    if values.null_count:
        place = int(np.flatnonzero(np.asarray(values.is_null()))[0])
        row = first_row + int(np.searchsorted(np.cumsum(lengths_B), place, side="right"))
        raise FormatError(f"ids must not be null; row {row} has a null within its list", field=shortened(name))
    return np.asarray(values), lengths_B


def _add_tensors(file: Path, features: dict[str, FeatureCounts], first: Path, limit: int, advance: Advance) -> int:
    """Counts a file's ids; returns the number of its samples."""
    try:
        with open_file(file) as opened:
            values_L, lengths_FB = _tensors(read_tensors(opened))
            num_features, num_samples = int(lengths_FB.shape[0]), int(lengths_FB.shape[1])
            width = len(str(num_features - 1))
            names = [f"f{index:0{width}d}" for index in range(num_features)]
            if features and len(features) != num_features:
                raise FormatError(f"must have as many features as {first}: {len(features)}, got {num_features}")
            total = sum(
                int(lengths_B.sum())
                for index, name in enumerate(names)
                for _, lengths_B in _chunks(lengths_FB[index], name, len(values_L))
            )
            if total != len(values_L):
                raise FormatError(f"must have lengths that add up to the {len(values_L)} ids, they add up to {total}")
            start = 0
            for index, name in enumerate(names):
                counts = features.setdefault(name, FeatureCounts())
                for row, lengths_B in _chunks(lengths_FB[index], name, len(values_L)):
                    stop = start + int(lengths_B.sum())
                    ids_L = _checked(values_L[start:stop], lengths_B, limit, name, row)
                    counts.add(ids_L, lengths_B)
                    start = stop
                advance(1 / num_features)
            return num_samples
    except OSError as error:
        raise FormatError(f"cannot be read: {reason_of(error)}") from error


def _tensors(tensors: tuple[NDArray[np.generic], ...]) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """Ids, and lengths by feature and sample."""
    found = ", ".join(f"{tensor.ndim}-dimensional" for tensor in tensors)
    if [tensor.ndim for tensor in tensors] not in ([1, 2], [1, 1, 2]):
        raise FormatError(
            "must hold values (1-dimensional) and lengths (2-dimensional: features, samples), or indices, offsets and "
            f"lengths; got {found}"
        )
    if any(tensor.dtype.kind != "i" for tensor in tensors):
        raise FormatError("must hold whole numbers")
    values_L, lengths_FB = np.asarray(tensors[0]), np.asarray(tensors[-1])
    if lengths_FB.size == 0 or lengths_FB.shape[0] > MAX_TABLES:
        raise FormatError(f"must hold lengths of 1 to {MAX_TABLES} features and at least one sample")
    if len(tensors) == 3:
        offsets = np.asarray(tensors[1])
        if len(offsets) != lengths_FB.size + 1 or offsets[0] != 0:
            raise FormatError(f"must have {lengths_FB.size + 1} offsets from 0, got {len(offsets)}")
        for start, stop in pairwise([*range(0, lengths_FB.size, 2**20), lengths_FB.size]):
            if not np.array_equal(np.diff(offsets[start : stop + 1]), lengths_FB.reshape(-1)[start:stop]):
                raise FormatError("must have offsets that follow from lengths")
    return values_L, lengths_FB


def _chunks(lengths_B: NDArray[np.integer], name: str, num_ids: int) -> Iterator[tuple[int, IntArray]]:
    """The lengths of a few samples at a time, each of them possible, and the number of the first sample."""
    for row in range(0, len(lengths_B), _CHUNK_SAMPLES):
        chunk = lengths_B[row : row + _CHUNK_SAMPLES].astype(np.int64)
        bad_B = (chunk < 0) | (chunk > num_ids)
        if bad_B.any():
            place = int(np.argmax(bad_B))
            raise FormatError(
                f"lengths must be in [0, {num_ids}], the number of ids; row {row + place} has {chunk[place]}",
                field=name,
            )
        _check_bags(chunk, name, row)
        # Cut where another `_CHUNK_IDS` ids are full.
        cuts = np.flatnonzero(np.diff(np.cumsum(chunk) // _CHUNK_IDS)) + 1
        for start, stop in pairwise([0, *cuts.tolist(), len(chunk)]):
            yield row + start, chunk[start:stop]
