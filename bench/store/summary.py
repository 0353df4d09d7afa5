"""What a store of samples holds."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.formats.stores.drift import corrected_ms
from autoshard.formats.stores.samples import KERNEL_SAMPLES, SampleTable
from autoshard.report.wording import write_ms, write_percent
from autoshard.table import Table, texts
from bench.measuring.robust_stats import SIGMA_PER_DEVIATION, MsArray


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSummary:
    """What a store holds of one device.

    Attributes:
        device: Key of the device.
        device_names: Full names; more than one means that unlike machines were mixed.
        software: Versions of torch and FBGEMM.
        num_samples: Samples.
        num_tables: Different shards among them.
        schema: Version of the files.
        num_duplicates: Copies of samples, which count once.
        num_noisy: Samples whose runs disagreed; cost models are not trained on them.
        num_measured_again: Samples that took more than one attempt.
        num_throttled: Samples measured while the device held its clock back.
        sources: Samples per way of choosing sets.
        first: When the first was collected, ISO 8601.
        last: When the last was.
        set_sizes: Smallest, median and largest number of shards.
        kernel_ms: Smallest, median and largest latency, forward plus backward.
        reference_ms: Median latency of the reference set, forward plus backward.
        num_repeated: Sets that were measured more than once.
        repeatability: Standard deviation over mean of their latencies, drift divided out, by the median absolute
            deviation; None without repeated sets.
    """

    device: str
    device_names: tuple[str, ...]
    software: tuple[str, ...]
    num_samples: int
    num_tables: int
    schema: str
    num_duplicates: int
    num_noisy: int
    num_measured_again: int
    num_throttled: int
    sources: Mapping[str, int]
    first: str
    last: str
    set_sizes: tuple[int, int, int]
    kernel_ms: tuple[float, float, float]
    reference_ms: float
    num_repeated: int
    repeatability: float | None


def summarise(table: SampleTable) -> StoreSummary:
    """The summary of a table with at least one sample."""
    items = table.samples
    kernel_ms = np.array([sample.kernel_ms for sample in items])
    dates = sorted(sample.collected_at for sample in items)
    sizes = np.array([len(sample.shards) for sample in items])
    repeated = _repeated_ms(table)
    return StoreSummary(
        device=items[0].device,
        device_names=tuple(sorted({sample.device_name for sample in items})),
        software=tuple(sorted({f"torch {sample.torch_version}, fbgemm {sample.fbgemm_version}" for sample in items})),
        num_samples=len(items),
        num_tables=len({shard for sample in items for shard in sample.local_shards}),
        schema=KERNEL_SAMPLES.schema,
        num_duplicates=table.num_duplicates,
        num_noisy=sum(sample.is_noisy for sample in items),
        num_measured_again=sum(sample.num_attempts > 1 for sample in items),
        num_throttled=sum(bool(sample.throttle_reasons) for sample in items),
        sources=dict(sorted(Counter(sample.source for sample in items).items())),
        first=dates[0].isoformat(timespec="seconds"),
        last=dates[-1].isoformat(timespec="seconds"),
        set_sizes=(int(sizes.min()), int(np.median(sizes)), int(sizes.max())),
        kernel_ms=(float(kernel_ms.min()), float(np.median(kernel_ms)), float(kernel_ms.max())),
        reference_ms=table.reference_forward_ms + table.reference_backward_ms,
        num_repeated=len(repeated),
        repeatability=_relative_deviation(repeated) if repeated else None,
    )


def summary_table(summaries: Sequence[StoreSummary]) -> Table:
    """One column per device."""
    rows = [
        ("device", lambda s: f"{s.device} ({'; '.join(s.device_names)})"),
        ("software", lambda s: "; ".join(s.software)),
        ("samples", lambda s: f"{s.num_samples:,} ({', '.join(f'{n:,} {kind}' for kind, n in s.sources.items())})"),
        ("schema", lambda s: s.schema),
        ("quality", _quality_text),
        ("tables", lambda s: f"{s.num_tables:,} different ones, {_range(s.set_sizes)} in a set"),
        ("collected", lambda s: f"{s.first} to {s.last}"),
        ("kernel ms", lambda s: _range(tuple(map(write_ms, s.kernel_ms)))),
        ("reference ms", lambda s: write_ms(s.reference_ms)),
        ("repeatability", _repeatability_text),
    ]
    return Table(
        columns=texts(*[""] * (1 + len(summaries))),
        rows=[(label, *(text(summary) for summary in summaries)) for label, text in rows],
    )


def _repeated_ms(table: SampleTable) -> list[MsArray]:
    """Latencies of every set that was measured more than once."""
    forward_ms_S, backward_ms_S = corrected_ms(table.samples)
    found: defaultdict[str, list[float]] = defaultdict(list)
    for sample, kernel_ms in zip(table.samples, forward_ms_S + backward_ms_S, strict=True):
        found[sample.set_id].append(float(kernel_ms))
    return [np.array(values) for values in found.values() if len(values) > 1]


def _relative_deviation(repeated: Sequence[MsArray]) -> float:
    # The mean of n values is nearer to each of them than the true one, by a factor of sqrt((n - 1) / n).
    deviations = [
        np.abs(values_ms / values_ms.mean() - 1) * math.sqrt(len(values_ms) / (len(values_ms) - 1))
        for values_ms in repeated
    ]
    return SIGMA_PER_DEVIATION * float(np.median(np.concatenate(deviations)))


def _range(values: Sequence[object]) -> str:
    low, middle, high = values
    return f"{low} to {high}, median {middle}"


def _quality_text(summary: StoreSummary) -> str:
    counts = {
        "noisy": summary.num_noisy,
        "measured again": summary.num_measured_again,
        "throttled": summary.num_throttled,
        "duplicates left out": summary.num_duplicates,
    }
    return ", ".join(f"{number:,} {what}" for what, number in counts.items())


def _repeatability_text(summary: StoreSummary) -> str:
    if summary.repeatability is None:
        return "no set was measured twice"
    return f"{write_percent(summary.repeatability)} between runs of the same set ({summary.num_repeated} repeated)"
