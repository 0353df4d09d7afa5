"""What a store holds of dense layers, and how fast they were."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.formats.stores.dense_samples import DenseSample
from autoshard.table import Column, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSummary:
    """Samples of one part of the dense model in one number format.

    Attributes:
        kind: The part.
        dtype: The number format.
        num_samples: Samples.
        num_noisy: Samples among them whose spread stayed above the harness's bound.
        batch_sizes: Smallest and largest.
        total_ms: Smallest, median and largest latency, forward plus backward.
        forward_gflops_per_s: Median and largest achieved 10⁹ operations per second.
        backward_gflops_per_s: As `forward_gflops_per_s`.
    """

    kind: str
    dtype: str
    num_samples: int
    num_noisy: int
    batch_sizes: tuple[int, int]
    total_ms: tuple[float, float, float]
    forward_gflops_per_s: tuple[float, float]
    backward_gflops_per_s: tuple[float, float]


def summarise_dense(samples: Sequence[DenseSample]) -> tuple[DenseSummary, ...]:
    """Summaries of one device's samples, one per part and number format, in order of their names."""
    grouped: dict[tuple[str, str], list[DenseSample]] = defaultdict(list)
    for sample in samples:
        grouped[str(sample.shape.kind), str(sample.shape.dtype)].append(sample)
    return tuple(_summary(*key, grouped[key]) for key in sorted(grouped))


def dense_table(samples: Sequence[DenseSample]) -> Table:
    """The report as a table; arithmetic is counted as `autoshard.core.dense` says, so concatenation has none."""

    def rate(which: str) -> Callable[[DenseSummary], str]:
        def text(one: DenseSummary) -> str:
            middle, best = getattr(one, f"{which}_gflops_per_s")
            return f"{middle:.0f}, best {best:.0f}" if best else "–"

        return text

    return Table.of(
        summarise_dense(samples),
        [
            ("part", lambda one: one.kind),
            (Column("dtype"), lambda one: one.dtype),
            ("samples", lambda one: one.num_samples),
            ("noisy", lambda one: one.num_noisy),
            ("batch", lambda one: "–".join(map(str, one.batch_sizes))),
            ("ms (min, median, max)", lambda one: ", ".join(f"{value:.3g}" for value in one.total_ms)),
            ("forward GFLOP/s", rate("forward")),
            ("backward GFLOP/s", rate("backward")),
        ],
        title="Dense layers, forward and backward without the optimizer",
        title_justify="center",
        is_boxed=True,
    )


def _summary(kind: str, dtype: str, samples: Sequence[DenseSample]) -> DenseSummary:
    total_ms = [sample.forward_ms + sample.backward_ms for sample in samples]
    forward, backward = (
        [getattr(sample, f"{pass_}_flops_per_s") / 1e9 for sample in samples] for pass_ in ("forward", "backward")
    )
    batch_sizes = [sample.shape.batch_size for sample in samples]
    return DenseSummary(
        kind=kind,
        dtype=dtype,
        num_samples=len(samples),
        num_noisy=sum(sample.is_noisy for sample in samples),
        batch_sizes=(min(batch_sizes), max(batch_sizes)),
        total_ms=(min(total_ms), float(np.median(total_ms)), max(total_ms)),
        forward_gflops_per_s=(float(np.median(forward)), max(forward)),
        backward_gflops_per_s=(float(np.median(backward)), max(backward)),
    )
