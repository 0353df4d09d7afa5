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


#: By how much the median absolute deviation of 2 to 9 normally distributed values falls short of that of many.
#: Source: Croux and Rousseeuw, Time-efficient algorithms for two highly robust estimators of scale (1992), Table 1.
_MISSED_BY_FEW = (1.196, 1.495, 1.363, 1.206, 1.200, 1.140, 1.129, 1.107)


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


def standard_errors(latency_ms_SR: MsArray, num_dropped: int) -> MsArray:
    """Standard errors of where S sets lie (`locate`), relative to it, as a plain mean's; 0 for sets that run nothing.

    Args:
        latency_ms_SR: As of `locate`, of at least two rounds.
        num_dropped: As of `locate`.
    """
    num_rounds = latency_ms_SR.shape[1]
    # Above nine values: n / (n - 0.8), also theirs.
    is_few = num_rounds - 2 < len(_MISSED_BY_FEW)
    missed = _MISSED_BY_FEW[num_rounds - 2] if is_few else num_rounds / (num_rounds - 0.8)
    errors_S: MsArray = locate(latency_ms_SR, num_dropped).spread_S * (missed / np.sqrt(num_rounds))
    return errors_S
