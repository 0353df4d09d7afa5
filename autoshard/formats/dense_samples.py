"""Measured dense layers of a DLRM in Parquet: one row per perceptron or interaction.

They lie beside the embedding samples of a store, in `<store>/dense/device=<key>/part-<time>-<hash>.parquet`; files are
written once, appear by rename and are never changed.

Shape suffixes: S samples.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from autoshard.core import DType
from autoshard.core.dense import DenseKind, DenseShape
from autoshard.core.errors import FormatError, InputError, SampleStoreError
from autoshard.core.quoting import shown
from autoshard.formats.digest import digest
from autoshard.formats.sample_parts import open_part, write_part
from autoshard.formats.samples import devices_in

SCHEMA_VERSION = "autoshard.dense-samples/1"
_SCHEMA_KEY = b"autoshard.schema"
_FOLDER = "dense"

_Choice = TypeVar("_Choice", bound=StrEnum)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSample:
    """Measured latency of one part of a dense model. No optimizer step is part of it.

    Attributes:
        collected_at: When the measurement ended, in UTC.
        device: Key of the kind of device, such as `cpu` or `h200`.
        device_name: Full name of the processor.
        num_threads: Intra-op threads; 1 on devices that do not care.
        source: How the shape was chosen, such as `square`.
        shape: What was measured.
        forward_ms: Forward pass.
        backward_ms: Backward pass: gradients of weights and biases, and of the inputs unless they are data.
        forward_spread: Standard deviation of single rounds over the mean, drift divided out.
        backward_spread: As `forward_spread`.
        reference_forward_ms: The device's reference perceptron in the same rounds.
        reference_backward_ms: As `reference_forward_ms`.
        num_rounds: Rounds measured, warm-ups left out.
        num_attempts: Measurements that this is the mean of: more than one if their spread asked for it.
        is_noisy: Whether the spread stayed above the harness's bound.
        sm_clock_mhz: Clock of the GPU right after it was measured; 0 where it is not read.
        throttle_reasons: Why the device held its clock back, separated by commas; empty for no reason.
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
    shape: DenseShape
    forward_ms: float
    backward_ms: float
    forward_spread: float
    backward_spread: float
    reference_forward_ms: float
    reference_backward_ms: float
    num_rounds: int
    num_attempts: int = 1
    is_noisy: bool = False
    sm_clock_mhz: float = 0.0
    throttle_reasons: str = ""
    sample_id: str = ""

    @property
    def forward_flops_per_s(self) -> float:
        """Achieved floating-point operations per second, forward."""
        return self.shape.forward_flops / self.forward_ms * 1e3

    @property
    def backward_flops_per_s(self) -> float:
        """Achieved floating-point operations per second, backward."""
        return self.shape.backward_flops / self.backward_ms * 1e3

    def identified(self) -> DenseSample:
        """The same sample with its id filled in."""
        stamp = self.collected_at.astimezone(UTC).isoformat(timespec="microseconds")
        said = {name: value for name, value in _row(self).items() if name != "sample_id"}
        return replace(self, sample_id=digest(said | {"collected_at": stamp}))


_SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("collected_at", pa.timestamp("us", tz="UTC")),
        *((name, pa.string()) for name in ("device", "device_name")),
        ("num_threads", pa.int32()),
        *((name, pa.string()) for name in ("torch_version", "fbgemm_version", "autoshard_version", "git_commit")),
        *((name, pa.string()) for name in ("source", "kind", "dtype")),
        ("batch_size", pa.int64()),
        ("widths", pa.list_(pa.int64())),
        *((name, pa.float64()) for name in ("forward_ms", "backward_ms", "forward_spread", "backward_spread")),
        *((name, pa.float64()) for name in ("reference_forward_ms", "reference_backward_ms")),
        *((name, pa.int32()) for name in ("num_rounds", "num_attempts")),
        ("is_noisy", pa.bool_()),
        ("sm_clock_mhz", pa.float64()),
        ("throttle_reasons", pa.string()),
    ],
    metadata={_SCHEMA_KEY: SCHEMA_VERSION.encode()},
)
_AT_LEAST_0 = ("forward_spread", "backward_spread", "sm_clock_mhz")
_LATENCIES = ("forward_ms", "backward_ms", "reference_forward_ms", "reference_backward_ms")
_ABOVE_0 = (*_LATENCIES, "num_rounds", "num_threads", "num_attempts")


def write_dense_samples(store: str | Path, samples: Sequence[DenseSample]) -> Path:
    """Appends samples of one device to a store as a new file.

    Args:
        store: The store's folder, the same as for embedding samples; made when missing.
        samples: At least one; ids are filled in.

    Returns:
        The file, complete: a process killed while writing leaves none.

    Raises:
        SampleStoreError: If the folder cannot be written.
    """
    complete = [sample.identified() for sample in samples]
    content = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([_row(sample) for sample in complete], _SCHEMA), content, compression="zstd")
    return write_part(Path(store, _FOLDER), complete, content.getvalue())


def dense_devices_in(store: str | Path) -> tuple[str, ...]:
    """Keys of the devices that a store holds samples of dense layers of; none where there is no such store."""
    folder = Path(store, _FOLDER)
    return devices_in(folder) if folder.is_dir() else ()


def read_dense_samples(store: str | Path, device: str | None = None) -> tuple[DenseSample, ...]:
    """Reads all samples of dense layers of one device, in the order in which they were written, each once.

    Args:
        store: The store's folder.
        device: Key of the device; may be left out when the store holds one only.

    Raises:
        SampleStoreError: If the store is missing, holds no such samples of the device, or a file cannot be read.
        FormatError: If a file is not of this version, or holds impossible values.
    """
    found = dense_devices_in(store)
    if not found:
        raise SampleStoreError(
            "holds no samples of dense layers; `autoshard collect --what dense` adds some", source=str(store)
        )
    held = ", ".join(found)
    if device is None and len(found) > 1:
        raise SampleStoreError(f"holds several devices; name one of: {held}", source=str(store))
    chosen = device or found[0]
    if chosen not in found:
        raise SampleStoreError(f"holds no dense layers of device {shown(chosen)}; it holds: {held}", source=str(store))
    files = sorted(Path(store, _FOLDER, f"device={chosen}").glob("part-*.parquet"))
    samples = [sample for file in files for sample in read_dense_sample_file(file)]
    return tuple({sample.sample_id: sample for sample in samples}.values())


def read_dense_sample_file(file: Path) -> tuple[DenseSample, ...]:
    """Reads one file of a store.

    Raises:
        SampleStoreError: If the file cannot be read.
        FormatError: If it is not a file of this version, or holds impossible values.
    """
    with open_part(file) as parquet:
        table = parquet.read()
    try:
        _check_columns(table)
        return tuple(map(_sample, table.to_pylist()))
    except InputError as error:
        raise FormatError(error.message, field=error.field, source=str(file)) from error


def corrected_dense_ms(samples: Sequence[DenseSample]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Forward and backward latencies of one device's samples with its drift divided out, shapes (S,).

    Each latency relative to the reference of the same rounds, times the median reference latency.
    """
    measured_S4 = np.array([[getattr(sample, name) for name in _LATENCIES] for sample in samples]).reshape(-1, 4)
    latency_S2, reference_S2 = measured_S4[:, :2], measured_S4[:, 2:]
    corrected_S2 = latency_S2 / reference_S2 * np.median(reference_S2, axis=0)
    return corrected_S2[:, 0], corrected_S2[:, 1]


def _row(sample: DenseSample) -> dict[str, Any]:
    row = {item.name: getattr(sample, item.name) for item in fields(sample) if item.name != "shape"}
    shape = sample.shape
    return row | {
        "kind": str(shape.kind),
        "dtype": str(shape.dtype),
        "batch_size": shape.batch_size,
        "widths": list(shape.widths),
    }


def _check_columns(table: pa.Table) -> None:
    version = (table.schema.metadata or {}).get(_SCHEMA_KEY, b"none").decode(errors="replace")
    if version != SCHEMA_VERSION:
        raise FormatError(f"must be {SCHEMA_VERSION}, got {version}", field="schema")
    if not table.schema.equals(_SCHEMA):
        types = [
            {name: schema.field(index).type for index, name in enumerate(schema.names)}
            for schema in (table.schema, _SCHEMA)
        ]
        wrong = sorted(name for name in {*types[0], *types[1]} if types[0].get(name) != types[1].get(name))
        raise FormatError("column is missing, misplaced, or not of this schema", field=", ".join(wrong) or "schema")
    for name in _SCHEMA.names:
        if table[name].null_count or (name == "widths" and pc.list_flatten(table[name]).null_count):
            raise FormatError("must not be null", field=name)
    for name in (*_AT_LEAST_0, *_ABOVE_0):
        values_S = table[name].to_numpy()
        if not np.isfinite(values_S).all() or (values_S < 0).any():
            raise FormatError("must be finite and at least 0", field=name)
        if name in _ABOVE_0 and (values_S == 0).any():
            raise FormatError("must be above 0", field=name)


def _sample(row: Mapping[str, Any]) -> DenseSample:
    kind, dtype = _choice(row, "kind", DenseKind), _choice(row, "dtype", DType)
    shape = DenseShape(kind=kind, batch_size=row["batch_size"], widths=tuple(row["widths"]), dtype=dtype)
    names = {item.name for item in fields(DenseSample)} & row.keys()
    return DenseSample(shape=shape, **{name: row[name] for name in names})


def _choice(row: Mapping[str, Any], name: str, kind: type[_Choice]) -> _Choice:
    try:
        return kind(row[name])
    except ValueError as error:
        raise FormatError(f"must be one of {', '.join(kind)}; got {shown(row[name])}", field=name) from error
