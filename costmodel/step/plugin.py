"""Models of collectives, dense layers and steps as a plugin of the entry-point group `autoshard.step_models`."""

from __future__ import annotations

from pathlib import Path

from autoshard.core.costs import StepModels
from costmodel.step.collective_model import LearnedCollectives
from costmodel.step.dense_model import LearnedDense
from costmodel.step.model import CalibratedStep


def load_step_models(registry: Path | None, device: str) -> StepModels:
    """The production models of a device: the registry's, or those that come with this package.

    Args:
        registry: Folder of the registry; the default one if None.
        device: Key of the device kind, such as `cpu`.

    Returns:
        None in place of each that there is none of.

    Raises:
        ModelError: If there is one, but damaged, or of another schema or device.
    """
    return StepModels(
        comm=LearnedCollectives.in_use(registry, device),
        dense=LearnedDense.in_use(registry, device),
        step=CalibratedStep.in_use(registry, device),
    )
