"""Where latencies lie, and how far apart they are, when some of them were disturbed.

Shape suffixes: S sets, R rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MsArray = NDArray[np.float64]

#: Standard deviation over median absolute deviation of normally distributed values.
SIGMA_PER_DEVIATION = 1.4826


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where the latencies of S sets lie."""

    mean_ms_S: MsArray
    """Trimmed means."""
    spread_S: MsArray
    """Standard deviation of single runs over the mean, by the median absolute deviation, which hiccups leave alone."""


def locate(latency_ms_SR: MsArray, num_dropped: int) -> Location:
    """Trimmed means after dividing out each round's own slowness.

    A round in which the whole machine was slow shows in all sets alike: its factor is the median over sets of the
    round's latency over the set's median, which is near 1.

    Args:
        latency_ms_SR: Latencies per set and round; all 0 for sets that run nothing.
        num_dropped: Highest and lowest values dropped per set.
    """
    middle_ms_S = np.median(latency_ms_SR, axis=1)
    is_run_S = middle_ms_S > 0
    if not is_run_S.any():
        return Location(mean_ms_S=middle_ms_S, spread_S=np.zeros_like(middle_ms_S))
    drift_R = np.median(latency_ms_SR[is_run_S] / middle_ms_S[is_run_S, None], axis=0)
    steady_SR = np.sort(latency_ms_SR / drift_R, axis=1)
    mean_ms_S = steady_SR[:, num_dropped : steady_SR.shape[1] - num_dropped].mean(axis=1)
    deviation_SR = np.abs(steady_SR - np.median(steady_SR, axis=1, keepdims=True))
    spread_S = SIGMA_PER_DEVIATION * np.median(deviation_SR, axis=1) / np.where(is_run_S, mean_ms_S, 1.0)
    return Location(mean_ms_S=mean_ms_S, spread_S=spread_S)
