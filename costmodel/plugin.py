"""The learned model as a plugin of the entry-point group `autoshard.cost_models`."""

from __future__ import annotations

from pathlib import Path

from autoshard.core import CostModel
from costmodel.learned import COST_KIND, LearnedCostModel
from costmodel.registry import Registry, find_registry, shipped_models


class PublishedCostModel(LearnedCostModel):
    """A learned model that says which version of which registry it is."""

    _version = ""
    _is_shipped = False

    @classmethod
    def from_registry(cls, models: Registry, device: str) -> PublishedCostModel:
        """The production model of a device.

        Raises:
            ModelError: If it is missing, damaged, or of another schema or device; the text names the file.
        """
        stored = models.load(COST_KIND, device)
        model = cls.from_stored(stored, source=str(models.root / COST_KIND / device / stored.id))
        assert isinstance(model, PublishedCostModel)
        model._version = stored.id
        model._is_shipped = models.root == shipped_models().root
        return model

    @property
    def name(self) -> str:
        """`learned:<device>@<version>`, and whether it came with this package."""
        shipped = " (shipped)" if self._is_shipped else ""
        return f"{super().name}@{self._version}{shipped}"


def load_learned_model(registry: Path | None, device: str, num_bags: int) -> CostModel | None:
    """The production model of a device: the registry's, or the one that comes with this package if it has none.

    Args:
        registry: Folder of the registry; the default one if None.
        device: Key of the device kind, such as `cpu`.
        num_bags: Bags per step that are to be priced; not looked at, for a model says itself what it covers.

    Returns:
        The model, or None if there is none for the device.

    Raises:
        ModelError: If there is one, but damaged or of another schema.
    """
    models = find_registry(COST_KIND, device, registry)
    return None if models is None else PublishedCostModel.from_registry(models, device)
