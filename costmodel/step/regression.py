"""Fits of models of a few coefficients: least squares of relative errors with weights of at least 0, folds, intervals.

Shape suffixes: S samples, F features.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.core.accepted import FINITE_ABOVE_0
from autoshard.core.errors import ModelError
from autoshard.core.quoting import shortened

FloatArray = NDArray[np.float64]

_ROUNDS = 6
#: Parts of the samples that are held out in turn.
NUM_FOLDS = 5
#: Relative error above which a sample counts as disturbed.
_OUTLIER = 0.1


def fit_nonnegative(
    features_SF: FloatArray,
    measured_S: FloatArray,
    prior_F: FloatArray | None = None,
    strength_F: FloatArray | float = 1e-3,
) -> FloatArray:
    """Coefficients of at least 0 with the least relative errors, drawn to a prior, whatever a few outliers say.

    Squared errors are relative to the prediction of the round before: relative to the measurement they would draw
    predictions below the middle, since a disturbed measurement is a large one. Beyond `_OUTLIER` they count linearly.

    Args:
        features_SF: At least 0; a column of zeros gets its prior.
        measured_S: Above 0.
        prior_F: What coefficients are drawn to; 0 if left out.
        strength_F: Of the pull, per feature: a coefficient that is off by as much as makes a mean squared relative
            difference of 1 costs as much as a mean squared relative error of this.

    Returns:
        Coefficients, shape (F,).
    """
    prior = np.zeros(features_SF.shape[1]) if prior_F is None else np.asarray(prior_F, dtype=np.float64)
    strength = np.broadcast_to(np.asarray(strength_F, dtype=np.float64), prior.shape)
    reference_S, weight_S = measured_S, np.ones(len(measured_S))
    fitted_F = prior
    for _ in range(_ROUNDS):
        fitted_F = _fit_round(features_SF, measured_S, reference_S, weight_S, prior, strength)
        predicted_S = features_SF @ fitted_F
        # Nothing far from what was measured may decide what errors are relative to.
        reference_S = np.clip(predicted_S, measured_S / 3, measured_S * 3)
        error_S = np.abs(predicted_S - measured_S) / reference_S
        weight_S = np.minimum(1.0, _OUTLIER / np.maximum(error_S, 1e-9))
    return fitted_F


def _fit_round(
    features_SF: FloatArray,
    measured_S: FloatArray,
    reference_S: FloatArray,
    weight_S: FloatArray,
    prior_F: FloatArray,
    strength_F: FloatArray,
) -> FloatArray:
    from scipy.optimize import nnls  # a third of a second that plans by a fitted model do without

    root_S = np.sqrt(weight_S / weight_S.mean())
    relative_SF = features_SF * (root_S / reference_S)[:, None]
    target_S = measured_S * root_S / reference_S
    size_F = np.sqrt(np.mean(relative_SF**2, axis=0))
    is_used_F = size_F > 0
    scale_F = np.where(is_used_F, size_F, 1.0)
    scaled_SF, scaled_prior_F = relative_SF / scale_F, prior_F * scale_F
    gram_FF = scaled_SF.T @ scaled_SF / len(measured_S) + np.diag(strength_F)
    target_F = scaled_SF.T @ target_S / len(measured_S) + strength_F * scaled_prior_F
    fitted_F = scaled_prior_F.copy()
    if len(used := np.flatnonzero(is_used_F)):
        # The least x G x / 2 - t x is the least |R' x - s| of G = R R' and R s = t.
        root_FF = np.linalg.cholesky(gram_FF[np.ix_(used, used)])
        fitted_F[used], _ = nnls(root_FF.T, np.linalg.solve(root_FF, target_F[used]))
    return np.asarray(fitted_F / scale_F)


def check_samples(samples: Sequence[object], *, alike: Sequence[str], positive: Sequence[str]) -> None:
    """Makes sure that samples can be fitted together.

    Args:
        samples: Any number.
        alike: Fields of text in which all must agree.
        positive: Fields that must be finite and above 0.

    Raises:
        ModelError: If one is not; the text names it.
    """
    for name in alike:
        found = sorted({getattr(sample, name) for sample in samples})
        if len(found) != 1:
            listed = ", ".join(map(shortened, found)) or "none"
            raise ModelError(f"samples must be of one {name}, got {listed}", field=name)
    for name in positive:
        if not all(getattr(sample, name) in FINITE_ABOVE_0 for sample in samples):
            raise ModelError("must be finite and above 0 in every sample", field=name)


def folds_of(count: int) -> NDArray[np.int64]:
    """The fold of each of some samples, drawn; shape (S,)."""
    return np.random.default_rng(0).permutation(count) % NUM_FOLDS


def error_metrics(error_S: FloatArray) -> dict[str, float]:
    """What cards say of relative errors of samples held out."""
    return {
        "num_samples": float(len(error_S)),
        "relative_error": float(error_S.mean()),
        "median_error": float(np.median(error_S)),
    }


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
