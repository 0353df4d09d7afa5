"""What stores and replays are shown as."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table

from autoshard.core import LocalShard, ShardingPlan
from autoshard.formats.samples import SampleTable
from autoshard.report.measured import MeasuredPlan
from autoshard.report.wording import write_ms, write_percent
from bench.replay import Replay


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSummary:
    """What a store holds of one device.

    Attributes:
        device: Key of the device.
        device_names: Full names; more than one means that unlike machines were mixed.
        software: Versions of torch and FBGEMM.
        num_samples: Samples.
        num_tables: Different shards among them.
        sources: Samples per way of choosing sets.
        first: When the first was collected, ISO 8601.
        last: When the last was.
        set_sizes: Smallest, median and largest number of shards.
        kernel_ms: Smallest, median and largest latency, forward plus backward.
        reference_ms: Median latency of the reference set, forward plus backward.
        num_repeated: Sets that were measured more than once.
        repeatability: Standard deviation over mean of their latencies, drift divided out, as the root mean square
            over these sets; None without repeated sets.
    """

    device: str
    device_names: tuple[str, ...]
    software: tuple[str, ...]
    num_samples: int
    num_tables: int
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
    variances = _variances_of_repeated(table)
    return StoreSummary(
        device=items[0].device,
        device_names=tuple(sorted({sample.device_name for sample in items})),
        software=tuple(sorted({f"torch {sample.torch_version}, fbgemm {sample.fbgemm_version}" for sample in items})),
        num_samples=len(items),
        num_tables=len({shard for sample in items for shard in sample.local_shards}),
        sources=dict(sorted(Counter(sample.source for sample in items).items())),
        first=dates[0].isoformat(timespec="seconds"),
        last=dates[-1].isoformat(timespec="seconds"),
        set_sizes=(int(sizes.min()), int(np.median(sizes)), int(sizes.max())),
        kernel_ms=(float(kernel_ms.min()), float(np.median(kernel_ms)), float(kernel_ms.max())),
        reference_ms=table.reference_forward_ms + table.reference_backward_ms,
        num_repeated=len(variances),
        repeatability=float(np.sqrt(np.mean(variances))) if variances else None,
    )


def summary_table(summaries: Sequence[StoreSummary]) -> RenderableType:
    """One column per device."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    for _ in summaries:
        table.add_column(overflow="fold")
    rows = [
        ("device", lambda s: f"{s.device} ({'; '.join(s.device_names)})"),
        ("software", lambda s: "; ".join(s.software)),
        ("samples", lambda s: f"{s.num_samples:,} ({', '.join(f'{n:,} {kind}' for kind, n in s.sources.items())})"),
        ("tables", lambda s: f"{s.num_tables:,} different ones, {_range(s.set_sizes)} in a set"),
        ("collected", lambda s: f"{s.first} to {s.last}"),
        ("kernel ms", lambda s: _range(tuple(map(write_ms, s.kernel_ms)))),
        ("reference ms", lambda s: write_ms(s.reference_ms)),
        ("repeatability", _repeatability_text),
    ]
    for label, text in rows:
        table.add_row(label, *(text(summary) for summary in summaries))
    return table


def replay_json(plan: ShardingPlan, replay: Replay) -> dict[str, object]:
    """A replayed plan as the JSON object of `autoshard replay --json`."""
    (measured,) = replay.plans
    predicted = _predicted_ms(plan)
    shards = plan.local_shards()
    ranks = [
        {
            "rank": rank,
            "num_shards": len(shards[rank]),
            "forward_ms": measured.forward_ms_R[rank],
            "backward_ms": measured.backward_ms_R[rank],
            "kernel_ms": kernel_ms,
            "predicted_ms": predicted[rank] if predicted else None,
        }
        for rank, kernel_ms in enumerate(measured.kernel_ms_per_rank)
    ]
    return {
        "device": replay.device,
        "device_name": replay.device_name,
        "num_rounds": replay.num_rounds,
        "num_groups": replay.num_groups,
        "max_kernel_ms": measured.max_kernel_ms,
        "balance": measured.balance,
        "ceiling_balance": replay.ceiling.balance,
        "predicted_max_kernel_ms": plan.predicted.max_kernel_ms if plan.predicted else None,
        "max_error": _max_error(plan, measured),
        "mean_absolute_error": _mean_absolute_error(predicted, measured),
        "cost_model": plan.predicted.cost_model if plan.predicted else None,
        "ranks": ranks,
    }


def replay_table(plan: ShardingPlan, replay: Replay) -> RenderableType:
    """A replayed plan for people."""
    (measured,) = replay.plans
    predicted, shards = _predicted_ms(plan), plan.local_shards()
    table = Table(box=None, pad_edge=False, header_style="bold")
    headers = ["rank", "tables", "forward ms", "backward ms", "kernel ms"]
    for header in [*headers, *(["predicted ms", "error"] if predicted else [])]:
        table.add_column(header, justify="right")
    for rank, kernel_ms in enumerate(measured.kernel_ms_per_rank):
        parts = (measured.forward_ms_R[rank], measured.backward_ms_R[rank], kernel_ms)
        cells = [str(rank), str(len(shards[rank])), *map(write_ms, parts)]
        if predicted:
            error = write_percent(predicted[rank] / kernel_ms - 1, signed=True) if kernel_ms else ""
            cells += [write_ms(predicted[rank]), error]
        table.add_row(*cells)
    lines = [
        f"Measured on {replay.device} ({replay.device_name}): slowest rank {write_ms(measured.max_kernel_ms)} ms, "
        f"balance {write_percent(measured.balance)}; identical ranks have {write_percent(replay.ceiling.balance)} here"
    ]
    max_error, mean_error = _max_error(plan, measured), _mean_absolute_error(predicted, measured)
    if plan.predicted and max_error is not None and mean_error is not None:
        lines.append(
            f"Predicted by {plan.predicted.cost_model}: slowest rank {write_ms(plan.predicted.max_kernel_ms)} ms "
            f"({write_percent(max_error, signed=True)}); mean error per rank {write_percent(mean_error)}"
        )
    return Group(table, "", *lines)


def _predicted_ms(plan: ShardingPlan) -> tuple[float, ...]:
    """Predicted kernel time of each rank of a replica group; empty without a prediction."""
    if plan.predicted is None:
        return ()
    by_rank = {cost.rank: cost.kernel_ms for cost in plan.predicted.ranks}
    return tuple(by_rank[rank] for rank in range(plan.group_size)) if len(by_rank) >= plan.group_size else ()


def _max_error(plan: ShardingPlan, measured: MeasuredPlan) -> float | None:
    if plan.predicted is None or measured.max_kernel_ms <= 0:
        return None
    return plan.predicted.max_kernel_ms / measured.max_kernel_ms - 1


def _mean_absolute_error(predicted: Sequence[float], measured: MeasuredPlan) -> float | None:
    errors = [
        abs(expected / found - 1)
        for expected, found in zip(predicted, measured.kernel_ms_per_rank, strict=False)
        if found > 0
    ]
    return float(np.mean(errors)) if errors else None


def _variances_of_repeated(table: SampleTable) -> list[float]:
    forward_ms_S, backward_ms_S = table.corrected_ms()
    found: defaultdict[frozenset[LocalShard], list[float]] = defaultdict(list)
    for sample, kernel_ms in zip(table.samples, forward_ms_S + backward_ms_S, strict=True):
        found[frozenset(sample.local_shards)].append(float(kernel_ms))
    repeated = [np.array(values) for values in found.values() if len(values) > 1]
    return [float(values.var(ddof=1) / values.mean() ** 2) for values in repeated]


def _range(values: Sequence[object]) -> str:
    low, middle, high = values
    return f"{low} to {high}, median {middle}"


def _repeatability_text(summary: StoreSummary) -> str:
    if summary.repeatability is None:
        return "no set was measured twice"
    return f"{write_percent(summary.repeatability)} between runs of the same set ({summary.num_repeated} repeated)"
