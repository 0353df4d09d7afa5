"""The learned model as a plugin of the entry-point group `autoshard.cost_models`."""

from __future__ import annotations

from pathlib import Path

from autoshard.core import CostModel
from costmodel.learned import COST_KIND, LearnedCostModel
from costmodel.registry import Registry


def load_learned_model(registry: Path | None, device: str, num_bags: int) -> CostModel | None:
    """The production model of a device.

    Args:
        registry: Folder of the registry; the default one if None.
        device: Key of the device kind, such as `cpu`.
        num_bags: Bags per step that are to be priced.

    Returns:
        The model, or None if the registry has none for the device, or one for another number of bags.

    Raises:
        ModelError: If there is one, but damaged.
    """
    models = Registry(registry)
    if models.production_id(COST_KIND, device) is None:
        return None
    model = LearnedCostModel.load(models, device)
    return model if num_bags == model.card.coverage.num_bags else None
