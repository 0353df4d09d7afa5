"""Measured sets of shards, with the hashes that tell them apart.

Shape suffixes: S samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.core import LocalShard
from autoshard.formats.digest import digest
from autoshard.formats.sample_parts import damaged_samples

MsArray = NDArray[np.float64]

_IDS = ("sample_id", "set_id")
#: Of a shard: caches are measured as FBGEMM has them by default, least recently used rows out, as they are stored.
_NOT_MEASURED = ("access", "cache_policy", "cache_dtype")


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
        num_attempts: Measurements that this is the mean of: more than one if their spread asked for it.
        is_noisy: Whether the spread stayed above the harness's bound.
        sm_clock_mhz: Clock of the processor while it was measured; 0 where it is not read.
        throttle_reasons: Why the device held its clock back, as its driver names it; empty for no reason.
        sample_id: Hash of all else; given by `identified`.
        set_id: Hash of what was measured, see `set_id_of`; given by `identified`.
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
    num_attempts: int = 1
    is_noisy: bool = False
    sm_clock_mhz: float = 0.0
    throttle_reasons: str = ""
    sample_id: str = ""
    set_id: str = ""

    @property
    def kernel_ms(self) -> float:
        """Forward plus backward."""
        return self.forward_ms + self.backward_ms

    @property
    def local_shards(self) -> tuple[LocalShard, ...]:
        """The set, without what was measured of it."""
        return tuple(measured.shard for measured in self.shards)

    def identified(self) -> Sample:
        """The same sample with its ids filled in."""
        set_id = set_id_of(self.local_shards, device=self.device, num_threads=self.num_threads)
        return replace(self, sample_id=content_hash(self), set_id=set_id)


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
        """Samples whose content does not match their ids; `advance` is told how many more were looked at."""
        return damaged_samples(self.samples, advance)


def set_id_of(shards: Iterable[LocalShard], *, device: str, num_threads: int) -> str:
    """Hash of what is measured: where, and a multiset of shards, whatever their order and their tables' names."""
    return digest([device, num_threads, *sorted(map(_shard_digest, shards))])


def content_hash(sample: Sample) -> str:
    """Hash of all that a sample says, its ids left out."""
    row = sample_row(sample)
    collected_at = sample.collected_at.astimezone(UTC).isoformat(timespec="microseconds")
    return digest({name: row[name] for name in row if name not in _IDS} | {"collected_at": collected_at})


def sample_row(sample: Sample) -> dict[str, Any]:
    """A sample as a row of its Parquet file."""
    row = {item.name: getattr(sample, item.name) for item in fields(sample)}
    return row | {"shards": [_measured_row(measured) for measured in sample.shards]}


def _measured_row(measured: MeasuredShard) -> dict[str, Any]:
    return _shard_row(measured.shard) | {
        "num_lookups": measured.num_lookups,
        "num_distinct": measured.num_distinct,
        "reuse_bins": np.array(measured.reuse_bins, dtype=np.float32).tolist(),
    }


def _shard_row(shard: LocalShard) -> dict[str, Any]:
    row = {item.name: getattr(shard, item.name) for item in fields(shard) if item.name not in _NOT_MEASURED}
    for name in ("dtype", "pooling", "optimizer", "output", "update", "level"):
        row[name] = str(row[name])
    return row | {
        "access_ranks": shard.access.ranks_K.tolist(),
        "access_cumulative": shard.access.cumulative_K.tolist(),
    }


@lru_cache(maxsize=65536)
def _shard_digest(shard: LocalShard) -> str:
    row = _shard_row(shard)
    del row["table"]
    return digest(row)
