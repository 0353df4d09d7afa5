"""Trained models of collectives, dense layers and steps against other versions, by their errors on the same samples.

Shape suffixes: S samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from costmodel.registry.promotion import TrainedVersion
from costmodel.step.calibration import CalibrationRun, step_errors
from costmodel.step.collective_model import LearnedCollectives
from costmodel.step.collective_training import collective_errors
from costmodel.step.dense_model import LearnedDense
from costmodel.step.dense_training import dense_errors
from costmodel.step.model import CalibratedStep

if TYPE_CHECKING:
    from autoshard.formats.stores.collective_samples import CollectiveSample
    from autoshard.formats.stores.dense_samples import DenseSample


def collective_version(model: LearnedCollectives, samples: Sequence[CollectiveSample]) -> TrainedVersion:
    """A model of collectives, compared on all samples: curves have a handful of coefficients."""
    return TrainedVersion.by_errors(
        model, lambda other: collective_errors(model, samples) - collective_errors(other, samples), "samples"
    )


def dense_version(model: LearnedDense, samples: Sequence[DenseSample]) -> TrainedVersion:
    """A model of dense layers, compared on all samples: fits have a handful of coefficients."""
    return TrainedVersion.by_errors(
        model, lambda other: dense_errors(model, samples) - dense_errors(other, samples), "samples"
    )


def step_version(model: CalibratedStep, runs: Sequence[CalibrationRun]) -> TrainedVersion:
    """A calibration of steps, compared on the plans of its runs.

    The other one was fitted to earlier runs; this one's errors are those of calibrations that each leave one plan out.
    """
    device = model.card.device
    return TrainedVersion.by_errors(
        model, lambda other: step_errors(runs, device) - step_errors(runs, device, other), "plans"
    )
