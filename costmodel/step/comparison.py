"""Trained models of collectives, dense layers and steps against other versions, by their errors on the same samples.

Shape suffixes: S samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from costmodel.registry.promotion import TrainedVersion
from costmodel.samples import are_unseen
from costmodel.step.calibration import CalibrationRun, plans_of, step_errors
from costmodel.step.collective_training import TrainedCollectives
from costmodel.step.dense_training import TrainedDense
from costmodel.step.model import CalibratedStep
from costmodel.step.regression import FloatArray


def collective_version(trained: TrainedCollectives) -> TrainedVersion:
    """A model of collectives, compared on all samples that it was fitted to, see `_difference`."""
    return TrainedVersion.by_errors(trained.model, lambda other: _difference(trained, other), "samples")


def dense_version(trained: TrainedDense) -> TrainedVersion:
    """A model of dense layers, compared on all samples that it was fitted to, see `_difference`."""
    return TrainedVersion.by_errors(trained.model, lambda other: _difference(trained, other), "samples")


def _difference(trained: TrainedCollectives | TrainedDense, other: Any) -> FloatArray:
    """Errors of a model less those of another one, shape (S,).

    On samples that the other one was fitted to as well, both are errors of fits; on all others, both are held out, and
    so are all of this one's where the other one was fitted to more.
    """
    is_unseen_S = are_unseen(trained.samples, other.card.training, other.card.measured_on)
    if other.card.training.get("num_samples", 0) > trained.model.card.training["num_samples"]:
        is_unseen_S[:] = True
    own_S = np.where(is_unseen_S, trained.held_out_errors_S, trained.fitted_errors_S)
    return np.asarray(own_S - trained.errors_S(other))


def step_version(model: CalibratedStep, runs: Sequence[CalibrationRun]) -> TrainedVersion:
    """A calibration of steps, compared on the plans of its runs.

    Plans that the other one was fitted to as well are priced by both as they are, all others by calibrations that each
    leave one plan out; so are all where the other one was fitted to plans that this one was not.
    """
    device = model.card.device

    def difference(other: CalibratedStep) -> FloatArray:
        plans, seen = plans_of(runs)[0], other.card.training.get("plans", [])
        is_unseen_P = ~np.isin(plans, seen if set(seen) <= set(plans) else [])
        own_P = np.where(is_unseen_P, step_errors(runs, device), step_errors(runs, device, model))
        return np.asarray(own_P - step_errors(runs, device, other))

    return TrainedVersion.by_errors(model, difference, "plans")
