"""Trained models of collectives, dense layers and steps against other versions, by their errors on the same samples.

Shape suffixes: S samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from costmodel.registry.promotion import Comparison, TrainedVersion
from costmodel.registry.versions import StoredModel
from costmodel.step.calibration import CalibrationRun, step_errors
from costmodel.step.collective_model import COLLECTIVE_KIND, LearnedCollectives
from costmodel.step.collective_training import collective_errors
from costmodel.step.dense_model import DENSE_KIND, LearnedDense
from costmodel.step.dense_training import dense_errors
from costmodel.step.model import STEP_KIND, CalibratedStep

if TYPE_CHECKING:
    from autoshard.formats.stores.collective_samples import CollectiveSample
    from autoshard.formats.stores.dense_samples import DenseSample


def collective_version(model: LearnedCollectives, samples: Sequence[CollectiveSample]) -> TrainedVersion:
    """A model of collectives, compared on all samples: curves have a handful of coefficients."""

    def compare(stored: StoredModel) -> Comparison:
        other = LearnedCollectives.from_stored(stored)
        difference_S = collective_errors(model, samples) - collective_errors(other, samples)
        return Comparison.of_errors(difference_S, stored, "samples")

    return _version(COLLECTIVE_KIND, model, compare)


def dense_version(model: LearnedDense, samples: Sequence[DenseSample]) -> TrainedVersion:
    """A model of dense layers, compared on all samples: fits have a handful of coefficients."""

    def compare(stored: StoredModel) -> Comparison:
        difference_S = dense_errors(model, samples) - dense_errors(LearnedDense.from_stored(stored), samples)
        return Comparison.of_errors(difference_S, stored, "samples")

    return _version(DENSE_KIND, model, compare)


def step_version(model: CalibratedStep, runs: Sequence[CalibrationRun]) -> TrainedVersion:
    """A calibration of steps, compared on its runs.

    The other one was fitted to earlier runs; this one's errors are those of calibrations that each leave one run out.
    """

    def compare(stored: StoredModel) -> Comparison:
        device = model.card.device
        difference_S = step_errors(runs, device) - step_errors(runs, device, CalibratedStep.from_stored(stored))
        return Comparison.of_errors(difference_S, stored, "runs")

    return _version(STEP_KIND, model, compare)


def _version(
    kind: str, model: LearnedCollectives | LearnedDense | CalibratedStep, compare: Callable[[StoredModel], Comparison]
) -> TrainedVersion:
    card: Any = model.card
    return TrainedVersion(kind=kind, name=card.device, tensors=model.tensors(), card=card.to_json(), compare=compare)
