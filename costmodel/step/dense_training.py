"""Fits the model of dense layers to a store's samples.

Shape suffixes: S samples, Q numbers that the residual sees.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.core.dense import DenseShape
from autoshard.core.errors import ModelError
from autoshard.formats.stores.dense_samples import DenseSample
from autoshard.formats.stores.drift import corrected_ms
from autoshard.formats.stores.measured_samples import machine_of
from costmodel.samples import newest
from costmodel.step.dense_features import RESIDUAL_NAMES, residual_features, term_features
from costmodel.step.dense_model import PASSES, DenseCard, DenseFit, LearnedDense, fit_key, residual_columns
from costmodel.step.regression import (
    NUM_FOLDS,
    FloatArray,
    check_samples,
    error_metrics,
    fit_nonnegative,
    folds_of,
    quantile_bounds,
)

#: A roofline has seven coefficients, drawn to zero.
MIN_SAMPLES = 10
#: Pull of the residual's weights to 0, in samples.
_RESIDUAL_PULL = 3.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedDense:
    """A fitted model, ready to be published or used.

    Attributes:
        model: The model.
        samples: What it was fitted to: samples of kinds and number formats that were measured often enough.
        measured_ms_S: Forward plus backward, the machine's drift divided out.
        held_out_ms_S: The same, predicted by fits to other samples.
    """

    model: LearnedDense
    samples: tuple[DenseSample, ...]
    measured_ms_S: FloatArray
    held_out_ms_S: FloatArray

    @property
    def fitted_errors_S(self) -> FloatArray:  # noqa: N802 - a shape suffix
        """Relative errors of the model itself, shape (S,)."""
        return self.errors_S(self.model)

    def errors_S(self, model: LearnedDense) -> FloatArray:  # noqa: N802 - a shape suffix
        """Relative errors of a model's prices of the samples, forward plus backward, shape (S,).

        Raises:
            ModelError: If the model was fitted to none of a kind.
        """
        if missing := sorted({fit_key(one.shape) for one in self.samples} - model.card.bounds.keys()):
            raise ModelError(f"was not fitted to any {', '.join(missing)}", field="kind")
        costs = model.predict_parts([one.shape for one in self.samples])
        errors_S: FloatArray = np.abs((costs.forward_ms_N + costs.backward_ms_N) / self.measured_ms_S - 1)
        return errors_S

    @property
    def held_out_errors_S(self) -> FloatArray:  # noqa: N802 - a shape suffix
        """Relative errors of the predictions by fits to other samples, shape (S,)."""
        return np.asarray(np.abs(self.held_out_ms_S / self.measured_ms_S - 1))


def train_dense_model(samples: Sequence[DenseSample]) -> TrainedDense:
    """Fits a roofline to every kind and number format of one device's samples, with a residual where that helps.

    Latencies are divided by those of the reference perceptron in the same rounds. A residual is kept only if it lowers
    the error on samples held out, a fifth at a time, which the intervals come from as well.

    Raises:
        ModelError: If samples are of several devices, too few, or not finite.
    """
    times = ("forward_ms", "backward_ms", "reference_forward_ms", "reference_backward_ms")
    check_samples(samples, alike=("device",), positive=times)
    measured = dict(zip(PASSES, corrected_ms(samples), strict=True))
    members: dict[str, list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        members[fit_key(sample.shape)].append(index)
    fits: dict[str, DenseFit] = {}
    bounds: dict[str, tuple[float, float]] = {}
    fitted: list[int] = []
    held_out: list[FloatArray] = []
    for key, indices in sorted(members.items()):
        if len(indices) < MIN_SAMPLES:
            continue
        shapes = [samples[index].shape for index in indices]
        held_S = np.zeros(len(indices))
        for name in PASSES:
            fit, predicted_S = _fit_checked(shapes, measured[name][indices], backward=name == "backward")
            fits[f"{key}.{name}"] = fit
            held_S += predicted_S
        ratio_S = sum(measured[name][indices] for name in PASSES) / held_S
        bounds[key] = quantile_bounds(np.asarray(ratio_S))
        fitted += indices
        held_out.append(held_S)
    if not fits:
        most = max(len(indices) for indices in members.values())
        raise ModelError(f"needs at least {MIN_SAMPLES} samples of one kind and dtype, got {most}", field="samples")
    held_out_ms_S = np.concatenate(held_out)
    measured_ms_S = np.asarray(sum(measured[name][fitted] for name in PASSES))
    card = DenseCard(
        device=samples[0].device,
        bounds=bounds,
        metrics=error_metrics(np.abs(held_out_ms_S / measured_ms_S - 1.0)),
        training={
            "num_samples": len(samples),
            "samples_until": newest(samples),
            "num_folds": NUM_FOLDS,
            "with_residual": sorted(key for key, fit in fits.items() if fit.residual_C.any()),
        },
        measured_on=machine_of(samples),
    )
    return TrainedDense(
        model=LearnedDense(fits, card),
        samples=tuple(samples[index] for index in fitted),
        measured_ms_S=measured_ms_S,
        held_out_ms_S=held_out_ms_S,
    )


def _fit_checked(
    shapes: Sequence[DenseShape], measured_ms_S: FloatArray, *, backward: bool
) -> tuple[DenseFit, FloatArray]:
    """The better of a fit with and one without a residual, and its predictions of held-out samples."""
    fold_S = folds_of(len(shapes))
    best: tuple[float, bool, FloatArray] | None = None
    for with_residual in (False, True):
        predicted_S = np.empty(len(shapes))
        for fold in range(NUM_FOLDS):
            kept, out = np.flatnonzero(fold_S != fold).tolist(), np.flatnonzero(fold_S == fold).tolist()
            fit = _fit([shapes[i] for i in kept], measured_ms_S[kept], backward=backward, with_residual=with_residual)
            predicted_S[out] = fit.ms([shapes[i] for i in out], backward=backward)
        error = float(np.mean(np.abs(np.log(predicted_S / measured_ms_S))))
        if best is None or error < best[0]:
            best = error, with_residual, predicted_S
    assert best is not None
    return _fit(shapes, measured_ms_S, backward=backward, with_residual=best[1]), best[2]


def _fit(shapes: Sequence[DenseShape], measured_ms_S: FloatArray, *, backward: bool, with_residual: bool) -> DenseFit:
    features_SF = term_features(shapes, backward=backward)
    terms_F = fit_nonnegative(features_SF, measured_ms_S)
    logs_SQ = residual_features(shapes)
    middle_Q, spread_Q = logs_SQ.mean(axis=0), np.maximum(logs_SQ.std(axis=0), 0.1)
    residual_C: FloatArray = np.zeros(1 + 2 * len(RESIDUAL_NAMES))
    if with_residual:
        columns_SC = residual_columns((logs_SQ - middle_Q) / spread_Q)
        left_S = np.log(measured_ms_S / np.maximum(features_SF @ terms_F, 1e-9))
        pulled = columns_SC.T @ columns_SC + _RESIDUAL_PULL * np.eye(len(residual_C))
        residual_C = np.asarray(np.linalg.solve(pulled, columns_SC.T @ left_S), dtype=np.float64)
    return DenseFit(
        terms_F=terms_F,
        residual_C=residual_C,
        middle_Q=middle_Q,
        spread_Q=spread_Q,
        low_Q=logs_SQ.min(axis=0),
        high_Q=logs_SQ.max(axis=0),
    )
