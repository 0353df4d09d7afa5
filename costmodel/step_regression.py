"""Least squares of relative errors with weights of at least 0 and a prior, for models of a few coefficients.

Shape suffixes: S samples, F features.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

#: Sweeps of coordinate descent; it ends earlier when nothing changes by more than `_TOLERANCE`.
_MAX_SWEEPS = 20_000
_TOLERANCE = 1e-10


def fit_nonnegative(
    features_SF: FloatArray,
    measured_S: FloatArray,
    prior_F: FloatArray | None = None,
    strength_F: FloatArray | float = 1e-3,
) -> FloatArray:
    """Coefficients of at least 0 with the least mean squared relative error, drawn to a prior.

    Args:
        features_SF: At least 0; a column of zeros gets its prior.
        measured_S: Above 0.
        prior_F: What coefficients are drawn to; 0 if left out.
        strength_F: Of the pull, per feature: a coefficient that is off by as much as makes a mean squared relative
            difference of 1 costs as much as a mean squared relative error of this.

    Returns:
        Coefficients, shape (F,).
    """
    relative_SF = features_SF / measured_S[:, None]
    size_F = np.sqrt(np.mean(relative_SF**2, axis=0))
    is_used_F = size_F > 0
    scale_F = np.where(is_used_F, size_F, 1.0)
    prior = np.zeros(len(size_F)) if prior_F is None else np.asarray(prior_F, dtype=np.float64)
    scaled_SF, scaled_prior_F = relative_SF / scale_F, prior * scale_F
    strength = np.broadcast_to(np.asarray(strength_F, dtype=np.float64), size_F.shape)
    gram_FF = scaled_SF.T @ scaled_SF / len(measured_S) + np.diag(strength)
    target_F = scaled_SF.mean(axis=0) + strength * scaled_prior_F
    fitted_F = scaled_prior_F.copy()
    used = np.flatnonzero(is_used_F)
    for _ in range(_MAX_SWEEPS):
        largest = 0.0
        for index in used:
            gradient = target_F[index] - gram_FF[index] @ fitted_F
            moved = max(0.0, fitted_F[index] + gradient / gram_FF[index, index])
            largest = max(largest, abs(moved - fitted_F[index]))
            fitted_F[index] = moved
        if largest < _TOLERANCE:
            break
    return np.asarray(fitted_F / scale_F)


def quantile_bounds(ratio_S: FloatArray) -> tuple[float, float]:
    """Ends of a 90% interval of measured / predicted, from ratios of samples that a fit has not seen.

    Source:
        Split conformal prediction: the ranks of the quantiles count the new sample in, so that few samples give a
        wider interval, at most from the smallest to the largest ratio.
    """
    ordered_S = np.sort(ratio_S)
    count = len(ordered_S)
    low = ordered_S[max(0, int(np.floor(0.05 * (count + 1))) - 1)]
    high = ordered_S[min(count - 1, int(np.ceil(0.95 * (count + 1))) - 1)]
    return min(1.0, float(low)), max(1.0, float(high))
