"""Trained models of collectives, dense layers and steps against other versions, by their errors on the same samples.

Shape suffixes: S samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from costmodel.registry.promotion import TrainedVersion
from costmodel.samples import are_unseen
from costmodel.step.calibration import CalibrationRun, step_errors
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

    On samples that the other one was fitted to as well, both are errors of fits; on all others, both are held out.
    """
    is_unseen_S = are_unseen(trained.samples, other.card.training, other.card.measured_on)
    own_S = np.where(is_unseen_S, trained.held_out_errors_S, trained.errors_S(trained.model))
    return np.asarray(own_S - trained.errors_S(other))


def step_version(model: CalibratedStep, runs: Sequence[CalibrationRun]) -> TrainedVersion:
    """A calibration of steps, compared on the plans of its runs.

    The other one was fitted to earlier runs; this one's errors are those of calibrations that each leave one plan out.
    """
    device = model.card.device
    return TrainedVersion.by_errors(
        model, lambda other: step_errors(runs, device) - step_errors(runs, device, other), "plans"
    )
