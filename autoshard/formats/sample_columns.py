"""Samples as Parquet: the schema, and the way back from its columns, with every value checked.

Shape suffixes: S samples, N shards of all samples, K knots of all shards.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from autoshard.core import (
    NUM_REUSE_BINS,
    AccessProfile,
    DType,
    Exchange,
    LocalShard,
    MemoryLevel,
    Optimizer,
    Pooling,
    Update,
)
from autoshard.core.errors import FormatError, InputError
from autoshard.core.quoting import shown
from autoshard.formats.measured import MeasuredShard, Sample, sample_row
from autoshard.formats.sample_parts import open_part

SCHEMA_VERSION = "autoshard.samples/2"
_SCHEMA_KEY = b"autoshard.schema"

_KNOTS = pa.list_(pa.float64())
_SHARD = pa.struct(
    [
        ("table", pa.string()),
        ("num_embeddings", pa.int64()),
        ("embedding_dim", pa.int32()),
        ("num_bags", pa.int64()),
        ("pooling_factor", pa.float64()),
        ("dtype", pa.string()),
        ("pooling", pa.string()),
        ("optimizer", pa.string()),
        ("output", pa.string()),
        ("update", pa.string()),
        ("level", pa.string()),
        ("cache_bytes", pa.int64()),
        ("num_lookups", pa.int64()),
        ("num_distinct", pa.int64()),
        ("reuse_bins", pa.list_(pa.float32())),
        ("access_ranks", _KNOTS),
        ("access_cumulative", _KNOTS),
    ]
)
_SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("set_id", pa.string()),
        ("collected_at", pa.timestamp("us", tz="UTC")),
        ("device", pa.string()),
        ("device_name", pa.string()),
        ("num_threads", pa.int32()),
        ("torch_version", pa.string()),
        ("fbgemm_version", pa.string()),
        ("autoshard_version", pa.string()),
        ("git_commit", pa.string()),
        ("source", pa.string()),
        ("shards", pa.list_(_SHARD)),
        ("forward_ms", pa.float64()),
        ("backward_ms", pa.float64()),
        ("forward_spread", pa.float64()),
        ("backward_spread", pa.float64()),
        ("reference_forward_ms", pa.float64()),
        ("reference_backward_ms", pa.float64()),
        ("num_rounds", pa.int32()),
        ("num_attempts", pa.int32()),
        ("is_noisy", pa.bool_()),
        ("sm_clock_mhz", pa.float64()),
        ("throttle_reasons", pa.string()),
    ],
    metadata={_SCHEMA_KEY: SCHEMA_VERSION.encode()},
)
_MEASURED = ("forward_ms", "backward_ms", "forward_spread", "backward_spread", "sm_clock_mhz")
_POSITIVE = ("reference_forward_ms", "reference_backward_ms", "num_rounds", "num_threads", "num_attempts")

#: Shards by their columns' values: equal ones are built and checked once, which makes large stores quick to read.
ShardCache = dict[tuple[Any, ...], LocalShard]


def parquet_bytes(samples: Sequence[Sample]) -> bytes:
    """A whole Parquet file that holds some samples, which have their ids."""
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(map(sample_row, samples)), _SCHEMA), buffer, compression="zstd")
    return buffer.getvalue()


def read_columns(file: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Columns of a sample file of this version; all when none are named.

    Raises:
        SampleStoreError: If the file cannot be read.
        FormatError: If it is not a sample file of this version.
    """
    with open_part(file) as parquet:
        _check_schema(parquet.schema_arrow, file)
        return parquet.read(columns=columns).combine_chunks()


def read_sample_file(file: Path, rebuilt: ShardCache | None = None) -> tuple[Sample, ...]:
    """Reads one file of a store.

    Args:
        file: The Parquet file.
        rebuilt: Shards seen in other files, shared so that equal shards are one object; added to.

    Raises:
        SampleStoreError: If the file cannot be read.
        FormatError: If it is not a sample file of this version, or holds impossible values.
    """
    table = read_columns(file)
    try:
        return _samples(table, {} if rebuilt is None else rebuilt)
    except InputError as error:
        raise FormatError(error.message, field=error.field, source=str(file)) from error


def _check_schema(schema: pa.Schema, file: Path) -> None:
    version = (schema.metadata or {}).get(_SCHEMA_KEY, b"none").decode(errors="replace")
    if version != SCHEMA_VERSION:
        raise FormatError(
            f"must be {SCHEMA_VERSION}, got {version}; collect into another folder, or use the version of autoshard "
            "that wrote this one",
            field="schema",
            source=str(file),
        )
    if not schema.equals(_SCHEMA):
        names = {*schema.names, *_SCHEMA.names}
        wrong = {name for name in names if _type_of(name, schema) != _type_of(name, _SCHEMA)}
        raise FormatError("column is missing or not of this schema", field=", ".join(sorted(wrong)), source=str(file))


def _type_of(name: str, schema: pa.Schema) -> pa.DataType | None:
    return schema.field(name).type if schema.names.count(name) == 1 else None


def _samples(table: pa.Table, rebuilt: ShardCache) -> tuple[Sample, ...]:
    for name in _SCHEMA.names:
        if table[name].null_count:
            raise FormatError("must not be null", field=name)
    for name in (*_MEASURED, *_POSITIVE):
        values_S = table[name].to_numpy()
        if not (np.isfinite(values_S).all() and (values_S >= 0).all()):
            raise FormatError("must be finite and at least 0", field=name)
        if name in _POSITIVE and not (values_S > 0).all():
            raise FormatError("must be above 0", field=name)
    lists = table["shards"].combine_chunks() if table.num_rows else pa.array([], _SCHEMA.field("shards").type)
    shards_N = _measured_shards(lists.flatten(), rebuilt)
    ends = np.concatenate([[0], np.cumsum(lists.value_lengths().to_numpy())]).tolist()
    plain = table.drop_columns(["shards"]).to_pylist()
    return tuple(
        Sample(**row, shards=tuple(shards_N[start:stop]))
        for row, (start, stop) in zip(plain, pairwise(ends), strict=True)
    )


def _measured_shards(rows_N: pa.StructArray, rebuilt: ShardCache) -> list[MeasuredShard]:
    if rows_N.null_count:
        raise FormatError("must not be null", field="shards")
    columns: dict[str, list[Any]] = {}
    for index, item in enumerate(_SHARD):
        column = rows_N.field(index)
        if column.null_count:
            raise FormatError("must not be null", field=f"shards.{item.name}")
        columns[item.name] = _pieces(column) if item.type == _KNOTS else column.to_pylist()
    names = [name for name in columns if name not in ("num_lookups", "num_distinct", "reuse_bins")]
    result = []
    keys = zip(*(columns[name] for name in names), strict=True)
    measured = zip(columns["num_lookups"], columns["num_distinct"], columns["reuse_bins"], strict=True)
    for key, (num_lookups, num_distinct, bins) in zip(keys, measured, strict=True):
        if key not in rebuilt:
            rebuilt[key] = _local_shard(dict(zip(names, key, strict=True)))
        if not (0 <= num_distinct <= num_lookups and len(bins) == NUM_REUSE_BINS and math.isfinite(sum(bins))):
            raise FormatError("has an impossible measured batch", field="shards")
        result.append(
            MeasuredShard(
                shard=rebuilt[key], num_lookups=num_lookups, num_distinct=num_distinct, reuse_bins=tuple(bins)
            )
        )
    return result


def _pieces(lists_N: pa.ListArray) -> list[bytes]:
    """Each row's numbers as bytes: quick to cut, compare and hash."""
    values_K = np.asarray(lists_N.flatten(), dtype=np.float64)
    ends = np.concatenate([[0], np.cumsum(lists_N.value_lengths().to_numpy())]).tolist()
    return [values_K[start:stop].tobytes() for start, stop in pairwise(ends)]


def _local_shard(row: dict[str, Any]) -> LocalShard:
    for name in ("num_embeddings", "embedding_dim", "num_bags"):
        if row[name] < 1:
            raise FormatError(f"must be at least 1, got {row[name]}", field=f"shards.{name}")
    if row["cache_bytes"] < 0:
        raise FormatError(f"must be at least 0, got {row['cache_bytes']}", field="shards.cache_bytes")
    if not (math.isfinite(row["pooling_factor"]) and row["pooling_factor"] >= 0):
        raise FormatError(f"must be at least 0, got {row['pooling_factor']}", field="shards.pooling_factor")
    kinds: dict[str, Any] = {
        "dtype": DType,
        "pooling": Pooling,
        "optimizer": Optimizer,
        "output": Exchange,
        "update": Update,
        "level": MemoryLevel,
    }
    for name, kind in kinds.items():
        try:
            row[name] = kind(row[name])
        except ValueError as error:
            accepted = ", ".join(kind)
            raise FormatError(f"must be one of {accepted}; got {shown(row[name])}", field=f"shards.{name}") from error
    ranks, cumulative = np.frombuffer(row.pop("access_ranks")), np.frombuffer(row.pop("access_cumulative"))
    access = AccessProfile(ranks, cumulative)
    if access.num_rows != row["num_embeddings"]:
        raise FormatError(
            f"describes {access.num_rows} rows, the shard has {row['num_embeddings']}", field="shards.access_ranks"
        )
    return LocalShard(**row, access=access)
