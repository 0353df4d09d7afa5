"""The learned model as a plugin of the entry-point group `autoshard.cost_models`."""

from __future__ import annotations

from pathlib import Path

from autoshard.core import CostModel
from costmodel.learned import COST_KIND, LearnedCostModel
from costmodel.registry import find_registry


def load_learned_model(registry: Path | None, device: str) -> CostModel | None:
    """The production model of a device: the registry's, or the one that comes with this package if it has none.

    Args:
        registry: Folder of the registry; the default one if None.
        device: Key of the device kind, such as `cpu`.

    Returns:
        The model, or None if there is none for the device.

    Raises:
        ModelError: If there is one, but damaged or of another schema.
    """
    models = find_registry(COST_KIND, device, registry)
    return None if models is None else LearnedCostModel.load(models, device)
