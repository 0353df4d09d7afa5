"""How well predicted latencies agree with measured ones.

Shape suffixes: S samples.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from costmodel.card import HeldOutMetrics

MsArray = NDArray[np.float64]

_INTERVAL = (0.05, 0.95)
# A prediction of 0 has no ratio; a nanosecond is below every latency that can be measured.
_SMALLEST_MS = 1e-6


def held_out_metrics(predicted_ms_S: MsArray, measured_ms_S: MsArray) -> HeldOutMetrics:
    """Compares predictions with measurements that were kept from training; all above 0."""
    error_ms_S = np.abs(predicted_ms_S - measured_ms_S)
    ratio_S = measured_ms_S / np.maximum(predicted_ms_S, _SMALLEST_MS)
    low_ratio, high_ratio = np.quantile(ratio_S, _INTERVAL)
    return HeldOutMetrics(
        num_samples=len(measured_ms_S),
        mae_ms=float(error_ms_S.mean()),
        mse_ms2=float((error_ms_S**2).mean()),
        relative_error=float((error_ms_S / measured_ms_S).mean()),
        kendall_tau=kendall_tau(predicted_ms_S, measured_ms_S),
        low_ratio=float(low_ratio),
        high_ratio=float(high_ratio),
    )


def kendall_tau(first_S: MsArray, second_S: MsArray) -> float:
    """Kendall's rank correlation (tau-a): pairs in the same order minus pairs in opposite order, over all pairs.

    Returns:
        From -1 to 1; 0 for fewer than two samples.
    """
    num_samples = len(first_S)
    if num_samples < 2:
        return 0.0
    agreeing = 0.0
    for index in range(num_samples - 1):  # a row of pairs at a time: all pairs at once would not fit for large S
        rest = slice(index + 1, None)
        agreeing += float(np.sign(first_S[rest] - first_S[index]) @ np.sign(second_S[rest] - second_S[index]))
    return agreeing / (num_samples * (num_samples - 1) / 2)
