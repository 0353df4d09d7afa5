"""Models of collectives, dense layers and steps as a plugin of the entry-point group `autoshard.step_models`."""

from __future__ import annotations

from pathlib import Path

from autoshard.core.costs import StepModels
from costmodel.registry.versions import find_registry
from costmodel.step.collective_model import COLLECTIVE_KIND, LearnedCollectives
from costmodel.step.dense_model import DENSE_KIND, LearnedDense
from costmodel.step.model import STEP_KIND, CalibratedStep


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
    comm, dense, step = (find_registry(kind, device, registry) for kind in (COLLECTIVE_KIND, DENSE_KIND, STEP_KIND))
    return StepModels(
        comm=LearnedCollectives.load(comm, device) if comm else None,
        dense=LearnedDense.load(dense, device) if dense else None,
        step=CalibratedStep.load(step, device) if step else None,
    )
