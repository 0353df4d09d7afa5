"""Batches of ids in the format of facebookresearch/dlrm_datasets, as tables.

Shape suffixes: T tables, B samples, L lookups.
"""

from __future__ import annotations

import gzip
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from autoshard.core import NUM_REUSE_BINS, REUSE_BIN_EDGES, AccessProfile, EmbeddingTable, Feature, TableSet
from autoshard.core.access import IntArray
from autoshard.core.errors import FormatError
from autoshard.core.quoting import shortened
from autoshard.formats.archives.torch_archive import read_tensors
from autoshard.formats.files import open_file, reason_of

#: Dimensions that tables get when none is asked for: the files have none, and AutoShard draws them from these.
EMBEDDING_DIMS = (16, 32)

_GZIP_START = b"\x1f\x8b"
_CHUNK_BYTES = 2**22
_MAX_UNPACKED_BYTES = 2**37

#: Is told what share of the work (0 to 1 in all) was just done.
Advance = Callable[[float], None]


def read_dlrm_datasets(
    path: str | Path, *, embedding_dim: int | None = None, seed: int = 0, advance: Advance = lambda _: None
) -> TableSet:
    """Tables from a `.pt` or `.pt.gz` that holds `indices`, `offsets` and `lengths` of one batch.

    - Rows: one more than the largest id, since the file does not say.
    - Pooling factor, variance and 99th percentile: of the lengths.
    - Access profile: of AutoShard's 17 reuse bins, counted. Of the distinct rows of a next batch it expects 85% to
      100% on Zipf and uniform ids; taking each row's count for its frequency expects 64% to 70% of them, because a
      batch misses most rare rows.

    Args:
        path: The file.
        embedding_dim: Dimension of all tables; None draws it from {16, 32}, table by table.
        seed: Of that draw.
        advance: Is told of progress.

    Raises:
        FormatError: If the file is not in that format, or holds anything but tensors.

    Source:
        AutoShard A.1 (format), B.2 (bins), 5.1 (dimensions).
    """
    try:
        with open_file(path) as file:
            if file.read(len(_GZIP_START)) != _GZIP_START:
                file.seek(0)
                return _tables_of(file, embedding_dim, seed, advance, 1.0)
            with tempfile.TemporaryFile() as unpacked:
                _unpack(file, unpacked, lambda share: advance(share / 2))
                return _tables_of(unpacked, embedding_dim, seed, advance, 0.5)
    except OSError as error:
        raise FormatError(f"cannot be read: {reason_of(error)}") from error


def _unpack(packed: BinaryIO, unpacked: BinaryIO, advance: Advance) -> None:
    size = packed.seek(0, 2)
    packed.seek(0)
    position = 0
    try:
        with gzip.GzipFile(fileobj=packed) as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                unpacked.write(chunk)
                if unpacked.tell() > _MAX_UNPACKED_BYTES:
                    raise FormatError(f"must unpack to at most {_MAX_UNPACKED_BYTES:,} bytes")
                advance((packed.tell() - position) / size)
                position = packed.tell()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise FormatError(f"is a damaged gzip file: {shortened(str(error))}") from None
    unpacked.flush()
    unpacked.seek(0)


def _tables_of(file: BinaryIO, embedding_dim: int | None, seed: int, advance: Advance, share: float) -> TableSet:
    tensors = read_tensors(file)
    if len(tensors) != 3 or [tensor.ndim for tensor in tensors] != [1, 1, 2]:
        found = ", ".join(f"{tensor.ndim}-dimensional" for tensor in tensors)
        raise FormatError(f"must hold indices (1-dimensional), offsets (1) and lengths (2), got {found}")
    if any(tensor.dtype.kind != "i" for tensor in tensors):
        raise FormatError("must hold whole numbers")
    indices_L, offsets, lengths_TB = (np.asarray(tensor) for tensor in tensors)
    num_tables, batch_size = lengths_TB.shape
    if lengths_TB.size == 0:
        raise FormatError("must hold lengths of at least one table and one sample")
    if len(offsets) != lengths_TB.size + 1 or offsets[0] != 0 or offsets[-1] != len(indices_L):
        raise FormatError(
            f"must have {lengths_TB.size + 1} offsets from 0 to the {len(indices_L)} indices, got {len(offsets)} from "
            f"{offsets[0] if len(offsets) else 'nothing'} to {offsets[-1] if len(offsets) else 'nothing'}"
        )
    dims_T = np.random.default_rng(seed).choice(EMBEDDING_DIMS, size=num_tables)
    tables = []
    width = len(str(num_tables - 1))
    for index in range(num_tables):
        ends = offsets[index * batch_size : (index + 1) * batch_size + 1].astype(np.int64)
        lengths_B = lengths_TB[index].astype(np.int64)
        if not np.array_equal(np.diff(ends), lengths_B) or lengths_B.min() < 0:
            raise FormatError(f"must have offsets that follow from lengths, table {index} has others")
        ids_L = np.asarray(indices_L[ends[0] : ends[-1]], dtype=np.int64)
        tables.append(_table(f"{index:0{width}d}", ids_L, lengths_B, embedding_dim or int(dims_T[index])))
        advance(share / num_tables)
    return TableSet(batch_size=batch_size, tables=tuple(tables))


def _table(number: str, ids_L: IntArray, lengths_B: IntArray, embedding_dim: int) -> EmbeddingTable:
    if ids_L.size and ids_L.min() < 0:
        raise FormatError(f"must have indices of at least 0, table {number} has {ids_L.min()}")
    num_embeddings = int(ids_L.max()) + 1 if ids_L.size else 1
    return EmbeddingTable(
        name=f"t{number}",
        num_embeddings=num_embeddings,
        embedding_dim=embedding_dim,
        features=(
            Feature(
                name=f"f{number}",
                pooling_factor=float(lengths_B.mean()),
                pooling_variance=float(lengths_B.var()),
                pooling_p99=float(np.percentile(lengths_B, 99, method="higher")),
            ),
        ),
        access=_access(ids_L, num_embeddings),
    )


def _access(ids_L: IntArray, num_embeddings: int) -> AccessProfile:
    if ids_L.size == 0:
        return AccessProfile.uniform(num_embeddings)
    _, counts = np.unique(ids_L, return_counts=True)
    bins = np.searchsorted(REUSE_BIN_EDGES, counts)
    lookups = np.bincount(bins, weights=counts, minlength=NUM_REUSE_BINS)
    return AccessProfile.from_reuse_bins(num_embeddings, lookups.tolist(), of="lookups", num_lookups=len(ids_L))
