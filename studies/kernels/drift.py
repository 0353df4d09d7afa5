"""Drift of the machine, as the reference kernel shows it, and the spread of latencies.

Shape suffixes: N measurements, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from bench.measuring.robust_stats import SIGMA_PER_DEVIATION


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """How far repeated measurements of one thing lie apart, relative to where they lie."""

    plain: float
    """Standard deviation over mean."""
    robust: float
    """The same by median absolute deviation and median, which single hiccups leave alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """How a reference changed over time.

    Attributes:
        variation: Of its latencies.
        range: Largest latency over the smallest, less 1.
        per_minute: Slope of a line through the latencies, relative to their mean.
    """

    variation: Variation
    range: float
    per_minute: float


def variation(latency_ms_N: ArrayLike) -> Variation:
    """Coefficient of variation of two or more latencies."""
    latency_ms = np.asarray(latency_ms_N, dtype=np.float64)
    assert latency_ms.size > 1
    middle_ms = np.median(latency_ms)
    robust = SIGMA_PER_DEVIATION * np.median(np.abs(latency_ms - middle_ms)) / middle_ms
    return Variation(plain=float(latency_ms.std(ddof=1) / latency_ms.mean()), robust=float(robust))


def drift_of(reference_ms_N: ArrayLike, elapsed_s_N: Sequence[float]) -> Drift:
    """Drift of a reference that was measured at these times, at least twice."""
    reference_ms, minutes = np.asarray(reference_ms_N, dtype=np.float64), np.asarray(elapsed_s_N) / 60
    slope_ms = np.polyfit(minutes, reference_ms, 1)[0]
    return Drift(
        variation=variation(reference_ms),
        range=float(reference_ms.max() / reference_ms.min() - 1),
        per_minute=float(slope_ms / reference_ms.mean()),
    )
