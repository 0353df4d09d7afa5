"""Measured sets of shards: the samples of kernels, stored as `sample_store` says."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
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
from autoshard.core.accepted import AT_LEAST_0, AT_LEAST_1
from autoshard.core.declared import Role, undecided
from autoshard.core.errors import FormatError, SampleStoreError
from autoshard.core.machine import MeasuredMachine
from autoshard.core.shard import UPDATE_WRITES
from autoshard.core.tables import KernelTraits
from autoshard.formats.documents.digest import digest
from autoshard.formats.stores.measured_samples import MACHINE_COLUMNS, TimedSample, machine_of
from autoshard.formats.stores.sample_columns import Amount, SharedObjects, StoredRows, row_of
from autoshard.formats.stores.sample_store import SampleStore, without_copies


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredShard:
    """A shard with what its measured batch held.

    Attributes:
        shard: What was measured; its access profile is what the batch was drawn from.
        num_lookups: Ids in the measured batch.
        num_distinct: Distinct rows among them.
        reuse_bins: Amounts of the distinct rows per reuse bin of AutoShard, 17 numbers; all 0 in an empty batch.
    """

    shard: LocalShard
    num_lookups: int
    num_distinct: int
    reuse_bins: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShardRow:
    """A measured shard as it is stored. Caches are measured as FBGEMM has them by default, and not described."""

    table: str
    num_embeddings: Annotated[int, AT_LEAST_1]
    embedding_dim: Annotated[int, pa.int32(), AT_LEAST_1]
    num_bags: Annotated[int, AT_LEAST_1]
    pooling_factor: Amount
    dtype: DType
    pooling: Pooling
    optimizer: Optimizer
    output: Exchange
    update: Update
    level: MemoryLevel
    cache_bytes: Annotated[int, AT_LEAST_0]
    num_lookups: int
    num_distinct: Annotated[int, AT_LEAST_0]
    reuse_bins: tuple[Annotated[float, pa.float32()], ...]
    access_ranks: NDArray[np.float64]
    access_cumulative: NDArray[np.float64]


_OF_BATCH = ("num_lookups", "num_distinct", "reuse_bins")
_OF_ACCESS = ("access_ranks", "access_cumulative")
_OF_SHARD = tuple(item.name for item in fields(_ShardRow) if item.name not in (*_OF_BATCH, *_OF_ACCESS))


def _shard_row(measured: MeasuredShard) -> _ShardRow:
    shard = measured.shard
    if lacking := undecided(shard, _OF_SHARD, Role.PRICE, of=KernelTraits):
        raise FormatError("has no column in samples", field=f"shards.{lacking[0]}")
    return _ShardRow(
        **{name: getattr(shard, name) for name in _OF_SHARD},
        num_lookups=measured.num_lookups,
        num_distinct=measured.num_distinct,
        # As they are read again, so that ids stay.
        reuse_bins=tuple(np.asarray(measured.reuse_bins, dtype=np.float32).tolist()),
        access_ranks=shard.access.ranks_K,
        access_cumulative=shard.access.cumulative_K,
    )


def _measured_shards(columns: Mapping[str, Sequence[Any]], shared: SharedObjects) -> list[MeasuredShard]:
    access = ([values_K.tobytes() for values_K in columns[name]] for name in _OF_ACCESS)
    keys = zip(*(columns[name] for name in _OF_SHARD), *access, strict=True)
    result = []
    for key, *batch in zip(keys, *(columns[name] for name in _OF_BATCH), strict=True):
        if key not in shared:
            shared[key] = _local_shard(*key)
        num_lookups, num_distinct, bins = batch
        if not (num_distinct <= num_lookups and len(bins) == NUM_REUSE_BINS and math.isfinite(sum(bins))):
            raise FormatError("has an impossible measured batch", field="shards")
        result.append(
            MeasuredShard(shard=shared[key], num_lookups=num_lookups, num_distinct=num_distinct, reuse_bins=bins)
        )
    return result


def _local_shard(*values: Any) -> LocalShard:
    *plain, ranks, cumulative = values
    access = AccessProfile(np.frombuffer(ranks), np.frombuffer(cumulative))
    shard = LocalShard(**dict(zip(_OF_SHARD, plain, strict=True)), access=access)
    if access.num_rows != shard.num_embeddings:
        raise FormatError(
            f"describes {access.num_rows} rows, the shard has {shard.num_embeddings}", field="shards.access_ranks"
        )
    return shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(TimedSample):
    """Measured kernel latency of one set of shards, run fused.

    Attributes:
        source: How the set was chosen, such as `random`.
        forward_ms: Forward kernel.
        backward_ms: Backward kernel with the fused optimizer.
        reference_forward_ms: The reference set of the device in the same rounds.
        set_id: Hash of what was measured, see `set_id_of`; given by `identified`.
        shards: The set.
        sums_hit_rows: Whether gradients of replicas were summed for the rows that the batch hits, and these updated, as
            the runtime does; before the fourth version of the columns, they were summed for all rows of a table.
        updated_rows: Of each shard, rows of a replica that any of its ranks hits, which all of them update; 0 of other
            shards. Empty before the sixth version, where replicas updated the rows that they hit themselves.
    """

    set_id: str = ""
    shards: Annotated[tuple[MeasuredShard, ...], StoredRows(_ShardRow, _shard_row, _measured_shards)]
    sums_hit_rows: bool = False
    updated_rows: tuple[Annotated[int, AT_LEAST_0], ...] = ()

    def __post_init__(self) -> None:
        if self.updated_rows and len(self.updated_rows) != len(self.shards):
            raise FormatError(
                f"must be none, or one for each of {len(self.shards)} shards, got {len(self.updated_rows)}",
                field="updated_rows",
            )
        for measured, rows in zip(self.shards, self.updated_rows, strict=False):
            if not 0 <= rows <= measured.shard.num_embeddings:
                raise FormatError(
                    f"must be within the {measured.shard.num_embeddings} rows of the shard, got {rows}",
                    field="updated_rows",
                )

    @property
    def kernel_ms(self) -> float:
        """Forward plus backward."""
        return self.forward_ms + self.backward_ms

    @property
    def local_shards(self) -> tuple[LocalShard, ...]:
        """The set, without what was measured of it but the rows that replicas wrote."""
        if not self.sums_hit_rows:
            return tuple(one.shard for one in self.shards)
        written = [(1 + UPDATE_WRITES) * one.num_distinct for one in self.shards]
        if self.updated_rows:
            pairs = zip(self.shards, self.updated_rows, strict=True)
            written = [one.num_distinct + (1 + UPDATE_WRITES) * rows for one, rows in pairs]
        return tuple(
            replace(one.shard, written_rows=float(rows)) if one.shard.update is Update.ALL_REDUCED else one.shard
            for one, rows in zip(self.shards, written, strict=True)
        )

    def identified(self) -> Sample:
        """The same sample with its ids filled in."""
        set_id = set_id_of(self.local_shards, device=self.device, num_threads=self.num_threads)
        return replace(self, sample_id=KERNEL_SAMPLES.content_id(self), set_id=set_id)


#: What samples say of the machine since the fifth version of their columns; the rest since the third.
_SINCE_FIFTH = ("core", "core_threads", "cache_threads", "memory_bytes_per_s")
KERNEL_SAMPLES = SampleStore(
    Sample,
    schema="autoshard.samples/6",
    earlier={
        "autoshard.samples/2": (*MACHINE_COLUMNS, "sums_hit_rows", "updated_rows"),
        "autoshard.samples/3": (*_SINCE_FIFTH, "sums_hit_rows", "updated_rows"),
        "autoshard.samples/4": (*_SINCE_FIFTH, "updated_rows"),
        "autoshard.samples/5": ("updated_rows",),
    },
    folder="",
    kind="samples",
    command="autoshard collect",
)
write_samples, read_sample_file = KERNEL_SAMPLES.write, KERNEL_SAMPLES.read_file


def set_id_of(shards: Iterable[LocalShard], *, device: str, num_threads: int) -> str:
    """Hash of what is measured: where, and a multiset of shards, whatever their order and their tables' names."""
    return digest([device, num_threads, *sorted(map(_shard_digest, shards))])


@lru_cache(maxsize=65536)
def _shard_digest(shard: LocalShard) -> str:
    row = row_of(_shard_row(MeasuredShard(shard=shard, num_lookups=0, num_distinct=0, reuse_bins=())))
    return digest({name: value for name, value in row.items() if name not in ("table", *_OF_BATCH)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTable:
    """Samples of one device.

    Attributes:
        samples: In the order in which they were written, each once.
        num_duplicates: Copies that were left out, equal to one of `samples` in all that they say.
    """

    samples: tuple[Sample, ...]
    num_duplicates: int = 0

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def machine(self) -> MeasuredMachine:
        """The machine of most samples, see `machine_of`."""
        return machine_of(self.samples)

    @property
    def reference_forward_ms(self) -> float:
        """Median over samples of the reference set's forward latency."""
        return float(np.median([sample.reference_forward_ms for sample in self.samples]))

    @property
    def reference_backward_ms(self) -> float:
        """Median over samples of the reference set's backward latency."""
        return float(np.median([sample.reference_backward_ms for sample in self.samples]))


def devices_in(store: str | Path) -> tuple[str, ...]:
    """Keys of the devices that a store holds samples of kernels of.

    Raises:
        SampleStoreError: If there is no such folder.
    """
    if not Path(store).is_dir():
        raise SampleStoreError("is no folder; `autoshard collect --store` makes one", source=str(store))
    return KERNEL_SAMPLES.devices(store)


def read_samples(store: str | Path, device: str | None = None) -> SampleTable:
    """Reads all samples of kernels of one device; one that was written twice, as in a copied file, counts once.

    Args:
        store: The store's folder.
        device: Key of the device; may be left out when the store holds one only.

    Raises:
        SampleStoreError: If the store is missing, holds no samples of the device, or a file cannot be read.
        FormatError: If a file is not a sample file of this version, or holds impossible values.
    """
    devices_in(store)
    read = KERNEL_SAMPLES.read_all(store, device)
    samples = without_copies(read)
    return SampleTable(samples=samples, num_duplicates=len(read) - len(samples))


class MeasuredSet(NamedTuple):
    """What decides whether a set was measured before; a tuple, for there may be a hundred thousand."""

    set_id: str
    """Hash of the set and the kind of device, see `set_id_of`."""
    device_name: str
    """Full name of the processor."""
    core: str
    """Design of its cores."""
    core_cache_bytes: int
    cache_bytes: int
    torch_version: str
    fbgemm_version: str

    @property
    def machine(self) -> MeasuredMachine:
        """Where it was measured, as far as that decides."""
        return MeasuredMachine(**{name: value for name, value in self._asdict().items() if name != "set_id"})


def measured_sets(store: str | Path) -> Mapping[MeasuredSet, int]:
    """How many times each set of shards was measured; reads a few columns of each file.

    Args:
        store: The store's folder; a missing one holds nothing.

    Raises:
        SampleStoreError: If a file cannot be read.
        FormatError: If a file is not a sample file of this version.
    """
    return Counter(map(MeasuredSet._make, KERNEL_SAMPLES.read_columns(store, MeasuredSet._fields)))
