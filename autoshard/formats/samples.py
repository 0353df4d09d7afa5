"""Benchmark samples in Parquet: one row per measured set of shards, files appended to a store folder.

A store is a folder with one sub-folder per device (`device=cpu`), each holding files `part-<time>-<hash>.parquet`
that are written once and never changed.

Shape suffixes: S samples, N shards of all samples, K knots of all shards.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

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
from autoshard.core.errors import FormatError, InputError, SampleStoreError
from autoshard.formats.digest import digest
from autoshard.formats.files import atomic_write

SCHEMA_VERSION = "autoshard.samples/1"
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
    ],
    metadata={_SCHEMA_KEY: SCHEMA_VERSION.encode()},
)
_MEASURED = ("forward_ms", "backward_ms", "forward_spread", "backward_spread")
_POSITIVE = ("reference_forward_ms", "reference_backward_ms", "num_rounds", "num_threads")

MsArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredShard:
    """A shard with what its measured batch held.

    Attributes:
        shard: What was measured; its access profile is what the batch was drawn from.
        num_lookups: Ids in the measured batch.
        num_distinct: Distinct rows among them.
        reuse_bins: Shares of the distinct rows per reuse bin of AutoShard, 17 numbers; all 0 in an empty batch.
    """

    shard: LocalShard
    num_lookups: int
    num_distinct: int
    reuse_bins: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Measured kernel latency of one set of shards, run fused.

    Attributes:
        collected_at: When the measurement ended, in UTC.
        device: Key of the kind of device, such as `cpu` or `h200`; cost models are made per key.
        device_name: Full name of the processor.
        num_threads: Intra-op threads of the kernel; 1 on devices that do not care.
        source: How the set was chosen, such as `random`.
        shards: The set.
        forward_ms: Forward kernel.
        backward_ms: Backward kernel with the fused optimizer.
        forward_spread: Standard deviation of single rounds over the mean, drift divided out.
        backward_spread: As `forward_spread`.
        reference_forward_ms: The reference set of the device in the same rounds.
        reference_backward_ms: As `reference_forward_ms`.
        num_rounds: Rounds measured, warm-ups left out.
        sample_id: Hash of all else; given by `identified`.
    """

    collected_at: datetime
    device: str
    device_name: str
    num_threads: int
    torch_version: str
    fbgemm_version: str
    autoshard_version: str
    git_commit: str
    source: str
    shards: tuple[MeasuredShard, ...]
    forward_ms: float
    backward_ms: float
    forward_spread: float
    backward_spread: float
    reference_forward_ms: float
    reference_backward_ms: float
    num_rounds: int
    sample_id: str = ""

    @property
    def kernel_ms(self) -> float:
        """Forward plus backward."""
        return self.forward_ms + self.backward_ms

    @property
    def local_shards(self) -> tuple[LocalShard, ...]:
        """The set, without what was measured of it."""
        return tuple(measured.shard for measured in self.shards)

    def identified(self) -> Sample:
        """The same sample with its id filled in."""
        return replace(self, sample_id=_sample_id(_row(self)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTable:
    """Samples of one device.

    Attributes:
        samples: In the order in which they were written.
    """

    samples: tuple[Sample, ...]

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def reference_forward_ms(self) -> float:
        """Median over samples of the reference set's forward latency."""
        return float(np.median([sample.reference_forward_ms for sample in self.samples]))

    @property
    def reference_backward_ms(self) -> float:
        """Median over samples of the reference set's backward latency."""
        return float(np.median([sample.reference_backward_ms for sample in self.samples]))

    def corrected_ms(self) -> tuple[MsArray, MsArray]:
        """Forward and backward latencies with the machine's drift divided out, shapes (S,).

        Each latency relative to the reference set of the same rounds, times the table's median reference latency.
        """
        forward_S = np.array([sample.forward_ms / sample.reference_forward_ms for sample in self.samples])
        backward_S = np.array([sample.backward_ms / sample.reference_backward_ms for sample in self.samples])
        return forward_S * self.reference_forward_ms, backward_S * self.reference_backward_ms

    def damaged(self, advance: Callable[[float], None] = lambda _: None) -> tuple[Sample, ...]:
        """Samples whose content does not match their id; `advance` is told how many more were looked at."""
        found = []
        for sample in self.samples:
            if sample.identified().sample_id != sample.sample_id:
                found.append(sample)
            advance(1)
        return tuple(found)


def write_samples(store: str | Path, samples: Sequence[Sample]) -> Path:
    """Appends samples of one device to a store as a new file.

    Args:
        store: The store's folder; made when missing.
        samples: At least one; ids are filled in.

    Returns:
        The file, complete: a process killed while writing leaves none.

    Raises:
        SampleStoreError: If the folder cannot be written.
    """
    rows = [_row(sample) for sample in samples]
    rows = [row | {"sample_id": _sample_id(row)} for row in rows]
    (device,) = {sample.device for sample in samples}
    stamp = max(sample.collected_at for sample in samples).strftime("%Y%m%dT%H%M%S%f")
    mark = digest([row["sample_id"] for row in rows]).removeprefix("sha256:")[:12]
    file = Path(store) / f"device={device}" / f"part-{stamp}-{mark}.parquet"
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, _SCHEMA), buffer, compression="zstd")
    try:
        atomic_write(file, buffer.getvalue())
    except FormatError as error:
        raise SampleStoreError(error.message, source=error.source) from error
    return file


def devices_in(store: str | Path) -> tuple[str, ...]:
    """Keys of the devices that a store holds samples of.

    Raises:
        SampleStoreError: If there is no such folder.
    """
    if not Path(store).is_dir():
        raise SampleStoreError("is no folder; `autoshard collect --store` makes one", source=str(store))
    return tuple(sorted({file.parent.name.removeprefix("device=") for file in _files(store, "*")}))


def read_samples(store: str | Path, device: str | None = None) -> SampleTable:
    """Reads all samples of one device.

    Args:
        store: The store's folder.
        device: Key of the device; may be left out when the store holds one only.

    Raises:
        SampleStoreError: If the store is missing, holds no samples of the device, or a file cannot be read.
        FormatError: If a file is not a sample file of this version, or holds impossible values.
    """
    found = devices_in(store)
    if device is None:
        if len(found) > 1:
            raise SampleStoreError(f"holds several devices; name one of: {', '.join(found)}", source=str(store))
        device = found[0] if found else "*"
    if device not in found:
        held = f"; it holds: {', '.join(found)}" if found else ""
        raise SampleStoreError(f"holds no samples of device {device!r}{held}", source=str(store))
    rebuilt: dict[tuple[Any, ...], LocalShard] = {}
    parts = [read_sample_file(file, rebuilt) for file in _files(store, device)]
    return SampleTable(samples=tuple(sample for part in parts for sample in part))


def read_sample_file(file: Path, rebuilt: dict[tuple[Any, ...], LocalShard] | None = None) -> tuple[Sample, ...]:
    """Reads one file of a store.

    Args:
        file: The Parquet file.
        rebuilt: Shards seen in other files, shared so that equal shards are one object; added to.

    Raises:
        SampleStoreError: If the file cannot be read.
        FormatError: If it is not a sample file of this version, or holds impossible values.
    """
    try:
        table = pq.ParquetFile(file).read()
    except OSError as error:
        raise SampleStoreError(f"cannot be read: {error}", source=str(file)) from error
    except pa.ArrowInvalid as error:
        raise FormatError(f"is no Parquet file, or is damaged: {error}", source=str(file)) from error
    version = (table.schema.metadata or {}).get(_SCHEMA_KEY, b"none").decode(errors="replace")
    if version != SCHEMA_VERSION:
        raise FormatError(f"must be {SCHEMA_VERSION}, got {version}", field="schema", source=str(file))
    if not table.schema.equals(_SCHEMA):
        names = {*table.schema.names, *_SCHEMA.names}
        wrong = {name for name in names if _type_of(name, table.schema) != _type_of(name, _SCHEMA)}
        raise FormatError("column is missing or not of this schema", field=", ".join(sorted(wrong)), source=str(file))
    try:
        return _samples(table.combine_chunks(), {} if rebuilt is None else rebuilt)
    except InputError as error:
        raise FormatError(error.message, field=error.field, source=str(file)) from error


def _files(store: str | Path, device: str) -> Iterable[Path]:
    return sorted(Path(store).glob(f"device={device}/part-*.parquet"))


def _type_of(name: str, schema: pa.Schema) -> pa.DataType | None:
    return schema.field(name).type if schema.names.count(name) == 1 else None


def _row(sample: Sample) -> dict[str, Any]:
    row = {item.name: getattr(sample, item.name) for item in fields(sample) if item.name != "sample_id"}
    return row | {"shards": [_shard_row(measured) for measured in sample.shards]}


def _shard_row(measured: MeasuredShard) -> dict[str, Any]:
    shard = measured.shard
    row = {item.name: getattr(shard, item.name) for item in fields(shard) if item.name != "access"}
    for name in ("dtype", "pooling", "optimizer", "output", "update", "level"):
        row[name] = str(row[name])
    return row | {
        "num_lookups": measured.num_lookups,
        "num_distinct": measured.num_distinct,
        "reuse_bins": np.array(measured.reuse_bins, dtype=np.float32).tolist(),
        "access_ranks": shard.access.ranks_K.tolist(),
        "access_cumulative": shard.access.cumulative_K.tolist(),
    }


def _sample_id(row: dict[str, Any]) -> str:
    collected_at = row["collected_at"].astimezone(UTC).isoformat(timespec="microseconds")
    return digest(row | {"collected_at": collected_at})


def _samples(table: pa.Table, rebuilt: dict[tuple[Any, ...], LocalShard]) -> tuple[Sample, ...]:
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


def _measured_shards(rows_N: pa.StructArray, rebuilt: dict[tuple[Any, ...], LocalShard]) -> list[MeasuredShard]:
    """Rebuilds the shards; equal ones are built and checked once, which makes large stores quick to read."""
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
            raise FormatError(f"must be one of {accepted}; got {row[name]!r}", field=f"shards.{name}") from error
    ranks, cumulative = np.frombuffer(row.pop("access_ranks")), np.frombuffer(row.pop("access_cumulative"))
    access = AccessProfile(ranks, cumulative)
    if access.num_rows != row["num_embeddings"]:
        raise FormatError(
            f"describes {access.num_rows} rows, the shard has {row['num_embeddings']}", field="shards.access_ranks"
        )
    return LocalShard(**row, access=access)
