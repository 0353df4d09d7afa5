"""Samples of embedding collectives in Parquet: one row per measured collective, files appended to a store folder.

They lie beside the kernel samples of a store: `collectives/device=<key>/part-<time>-<hash>.parquet`, written once,
by rename, and never changed.

Shape suffixes: S samples.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from autoshard.core import DType
from autoshard.core.errors import FormatError, InvalidOptionError, SampleStoreError
from autoshard.core.quoting import shown
from autoshard.formats.digest import digest
from autoshard.formats.sample_parts import open_part, write_part

COLLECTIVE_SCHEMA = "autoshard.collective-samples/1"
#: Folder of a store that holds them.
FOLDER = "collectives"
_SCHEMA_KEY = b"autoshard.schema"


class Operator(StrEnum):
    """A collective, by torch.distributed's name."""

    ALL_TO_ALL = "all_to_all"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_REDUCE = "all_reduce"

    @property
    def is_reduction(self) -> bool:
        """Whether it adds numbers up."""
        return self in (Operator.REDUCE_SCATTER, Operator.ALL_REDUCE)


class Splits(StrEnum):
    """Whether every pair of ranks exchanges as many bytes as any other."""

    EQUAL = "equal"
    UNEQUAL = "unequal"


class GroupLevel(StrEnum):
    """Which ranks take part together; groups of one level run at the same time, as they do in training.

    `node`: the ranks of one node. `across_nodes`: the ranks of one local index, one per node. `world`: all.
    """

    NODE = "node"
    ACROSS_NODES = "across_nodes"
    WORLD = "world"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """What is measured.

    Attributes:
        level: Who takes part.
        operator: The operator.
        dtype: Format of the payload.
        bytes_per_rank: Bytes of a rank's larger buffer: the input of all-to-all (its mean over ranks, where splits
            are unequal), reduce-scatter and all-reduce, the output of all-gather. What stays on its rank counts.
        splits: Unequal for all-to-all only.
        skew: Of unequal splits: standard deviation of the logarithm of the shares, 0 for equal ones.
        split_seed: Of unequal splits, 0 for equal ones.
    """

    level: GroupLevel
    operator: Operator
    dtype: DType
    bytes_per_rank: int
    splits: Splits = Splits.EQUAL
    skew: float = 0.0
    split_seed: int = 0

    def __post_init__(self) -> None:
        if self.bytes_per_rank < 1:
            raise InvalidOptionError(f"must be at least 1, got {self.bytes_per_rank}", field="bytes_per_rank")
        if self.splits is Splits.UNEQUAL and self.operator is not Operator.ALL_TO_ALL:
            raise InvalidOptionError(f"must be equal for {self.operator}, got {self.splits}", field="splits")
        if not (0 <= self.skew < float("inf")) or (self.skew > 0) != (self.splits is Splits.UNEQUAL):
            raise InvalidOptionError(
                f"must be above 0 and finite for unequal splits and 0 for equal ones, got {self.skew}", field="skew"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSample:
    """Measured latency of one collective.

    Attributes:
        collected_at: When the measurement ended, in UTC.
        device: Key of the kind of device, such as `cpu` or `h200`.
        device_name: Full name of the processor.
        backend: `gloo` or `nccl`.
        num_hosts: Machines that took part.
        nproc: Processes in all.
        node_size: Processes per declared node.
        collective: What ran.
        group_size: Ranks that took part together.
        num_nodes: Declared nodes that they span.
        mean_sent_bytes: Mean over ranks of the bytes that have to leave a rank, whatever the algorithm:
            (n - 1) / n of `bytes_per_rank` for equal splits, twice that for an all-reduce.
        max_sent_bytes: As `mean_sent_bytes`, of the rank that sends most.
        max_received_bytes: Of the rank that receives most.
        latency_ms: Trimmed mean over rounds of the slowest rank's time.
        spread: Standard deviation of single rounds over the mean, drift divided out.
        reference_ms: The reference collective in the same rounds.
        num_rounds: Rounds measured, warm-ups left out.
        sample_id: Hash of all else; given by `identified`.
    """

    collected_at: datetime
    device: str
    device_name: str
    backend: str
    torch_version: str
    autoshard_version: str
    git_commit: str
    num_hosts: int
    nproc: int
    node_size: int
    collective: Collective
    group_size: int
    num_nodes: int
    mean_sent_bytes: float
    max_sent_bytes: int
    max_received_bytes: int
    latency_ms: float
    spread: float
    reference_ms: float
    num_rounds: int
    sample_id: str = ""

    def __post_init__(self) -> None:
        sizes = (self.group_size, self.node_size, self.num_nodes)
        if self.nproc % self.node_size or max(sizes) > self.nproc or self.group_size < 2:
            raise FormatError(
                f"is impossible: {self.group_size} ranks on {self.num_nodes} nodes, of {self.nproc} processes with "
                f"{self.node_size} to a node",
                field="group_size",
            )
        if self.max_sent_bytes < self.mean_sent_bytes * (1 - 1e-9):
            raise FormatError(
                f"is below the mean of {self.mean_sent_bytes:g}, got {self.max_sent_bytes}", field="max_sent_bytes"
            )

    def identified(self) -> CollectiveSample:
        """The same sample with its id filled in."""
        row = _row(self)
        del row["sample_id"]
        moment = self.collected_at.astimezone(UTC).isoformat(timespec="microseconds")
        return replace(self, sample_id=digest(row | {"collected_at": moment}))


_ARROW = {"int": pa.int64(), "float": pa.float64(), "str": pa.string(), "datetime": pa.timestamp("us", tz="UTC")}
_KINDS: dict[str, type[StrEnum]] = {"level": GroupLevel, "operator": Operator, "dtype": DType, "splits": Splits}
_OWN = tuple(item.name for item in fields(CollectiveSample) if item.name != "collective")
_SCHEMA = pa.schema(
    [
        (item.name, _ARROW.get(str(item.type), pa.string()))
        for item in (*fields(CollectiveSample), *fields(Collective))
        if item.name != "collective"
    ],
    metadata={_SCHEMA_KEY: COLLECTIVE_SCHEMA.encode()},
)
_AT_LEAST_ZERO = ("spread", "skew", "split_seed", "mean_sent_bytes", "max_sent_bytes", "max_received_bytes")
_ABOVE_ZERO = ("latency_ms", "reference_ms", "num_rounds", "num_hosts", "nproc", "node_size", "num_nodes")


def write_collective_samples(store: str | Path, samples: Sequence[CollectiveSample]) -> Path:
    """Appends samples of one device to a store as a new file.

    Args:
        store: The store's folder; made when missing.
        samples: At least one; ids are filled in.

    Returns:
        The file, complete: a process killed while writing leaves none.

    Raises:
        SampleStoreError: If the folder cannot be written.
    """
    complete = [sample.identified() for sample in samples]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist([_row(sample) for sample in complete], _SCHEMA), buffer, compression="zstd")
    return write_part(_folder(store), complete, buffer.getvalue())


def collective_devices_in(store: str | Path) -> tuple[str, ...]:
    """Keys of the devices that a store holds samples of collectives of; none for a folder that is not there."""
    return tuple(sorted({file.parent.name.removeprefix("device=") for file in _files(store, "*")}))


def read_collective_samples(store: str | Path, device: str | None = None) -> tuple[CollectiveSample, ...]:
    """Reads the samples of one device, each once, in the order in which they were written.

    Args:
        store: The store's folder.
        device: Key of the device; may be left out when the store holds one only.

    Raises:
        SampleStoreError: If the store holds no samples of the device, or a file cannot be read.
        FormatError: If a file is not a sample file of this version, or holds impossible values.
    """
    held = collective_devices_in(store)
    if device is None and len(held) == 1:
        device = held[0]
    if device not in held:
        if device is None and held:
            raise SampleStoreError(f"holds several devices; name one of: {', '.join(held)}", source=str(store))
        kind = "" if device is None else f" of device {shown(device)}"
        others = f"; it holds: {', '.join(held)}" if held else "; `autoshard collect --what collectives` adds some"
        raise SampleStoreError(f"holds no samples of collectives{kind}{others}", source=str(store))
    read = (sample for file in _files(store, device) for sample in read_collective_sample_file(file))
    return tuple(dict.fromkeys(read))


def read_collective_sample_file(file: Path) -> tuple[CollectiveSample, ...]:
    """Reads one file of a store.

    Raises:
        SampleStoreError: If the file cannot be read.
        FormatError: If it is not a sample file of this version, or holds impossible values.
    """
    try:
        with open_part(file) as parquet:
            _check_schema(parquet.schema_arrow)
            table = parquet.read()
        _check_values(table)
        return tuple(_sample(row) for row in table.to_pylist())
    except (FormatError, InvalidOptionError) as error:
        raise FormatError(error.message, field=error.field, source=str(file)) from error


def _folder(store: str | Path) -> Path:
    return Path(store) / FOLDER


def _files(store: str | Path, device: str) -> Iterable[Path]:
    return sorted(_folder(store).glob(f"device={device}/part-*.parquet"))


def _row(sample: CollectiveSample) -> dict[str, Any]:
    row = {name: getattr(sample, name) for name in _OWN}
    for item in fields(Collective):
        value = getattr(sample.collective, item.name)
        row[item.name] = str(value) if isinstance(value, StrEnum) else value
    return row


def _check_schema(schema: pa.Schema) -> None:
    version = (schema.metadata or {}).get(_SCHEMA_KEY, b"none").decode(errors="replace")
    if version != COLLECTIVE_SCHEMA:
        raise FormatError(f"must be {COLLECTIVE_SCHEMA}, got {version}", field="schema")
    theirs, ours = ({(item.name, str(item.type)) for item in one} for one in (schema, _SCHEMA))
    if theirs != ours or len(schema) != len(_SCHEMA):
        wrong = sorted({name for name, _ in theirs ^ ours}) or ["schema"]
        raise FormatError("column is missing, twice there or of another type", field=", ".join(wrong))


def _check_values(table: pa.Table) -> None:
    for name in _SCHEMA.names:
        if table[name].null_count:
            raise FormatError("must not be null", field=name)
    for name in (*_AT_LEAST_ZERO, *_ABOVE_ZERO):
        values_S = table[name].to_numpy()
        if not (np.isfinite(values_S).all() and (values_S >= 0).all()):
            raise FormatError("must be finite and at least 0", field=name)
        if name in _ABOVE_ZERO and not (values_S > 0).all():
            raise FormatError("must be above 0", field=name)


def _sample(row: dict[str, Any]) -> CollectiveSample:
    for name, kind in _KINDS.items():
        if row[name] not in set(kind):
            raise FormatError(f"must be one of {', '.join(kind)}; got {shown(row[name])}", field=name)
        row[name] = kind(row[name])
    what = {item.name: row.pop(item.name) for item in fields(Collective)}
    return CollectiveSample(**row, collective=Collective(**what))
