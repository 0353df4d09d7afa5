"""What all learned models have in common: tensors and a card, in a registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Generic, Self, TypeVar

from autoshard.core.machine import MeasuredMachine
from autoshard.formats.documents.fields import from_source
from costmodel.registry.card_fields import ModelCard
from costmodel.registry.versions import PRODUCTION, Registry, StoredModel, Tensors, find_model

CardT = TypeVar("CardT", bound=ModelCard)


class LearnedModel(ABC, Generic[CardT]):
    """A model that is published to a registry as tensors and a card, and loaded from it.

    Args:
        card: What the tensors are of.
        version: Of the registry that they come from, and whether that came with this package; empty for a model that
            was not published.

    Attributes:
        kind: What it is for, by the registry's word.
        card_type: Class of its card.
        label: What its name begins with.
    """

    kind: str
    card_type: type[CardT]
    label: str = "learned"

    def __init__(self, card: CardT, version: str = "") -> None:
        self.card = card
        self.version = version

    @classmethod
    def load(cls, registry: Registry, device: str, version: str = PRODUCTION) -> Self:
        """The model of a device from a registry.

        Raises:
            ModelError: If it is missing, damaged, or of another schema or device; the text names the file.
        """
        return cls.from_stored(registry.load(cls.kind, device, version))

    @classmethod
    def in_use(cls, root: Path | None, device: str) -> Self | None:
        """The production model of a device: the registry's, or the one that comes with this package if it has none.

        Args:
            root: Folder of the registry; the default one if None.
            device: Key of the device kind, such as `cpu`.

        Returns:
            The model, or None if there is none for the device, nor for its family where the key names a model of it.

        Raises:
            ModelError: If there is one, but damaged, or of another schema or device.
        """
        found = find_model(cls.kind, device, root)
        return None if found is None else cls.load(*found)

    @classmethod
    def from_stored(cls, stored: StoredModel) -> Self:
        """The model of a registry's version.

        Raises:
            ModelError: If it is damaged, or of another schema.
        """
        card = cls.card_type.from_json(stored.card, stored.source)
        return from_source(stored.source, lambda: cls.restored(stored, card))

    @classmethod
    @abstractmethod
    def restored(cls, stored: StoredModel, card: CardT) -> Self:
        """The model of a version, whose card has been read.

        Raises:
            ModelError: If a tensor is missing or impossible; the text names it.
        """

    @abstractmethod
    def tensors(self) -> Tensors:
        """Its numbers by name, as they are stored."""

    def publish(self, registry: Registry) -> str:
        """Makes it the production version of its device, compared with nothing, and returns its id.

        Raises:
            ModelError: If the registry cannot be written.
        """
        return registry.publish(self.kind, self.card.device, self.tensors(), self.card.to_json())

    @property
    def version_id(self) -> str:
        """Its id in the registry that it comes from; empty for a model that was not published."""
        return self.version.partition(" ")[0]

    @property
    def name(self) -> str:
        """`learned:<device>@<version>`, or `learned:<device>` for a model that was not published."""
        return f"{self.label}:{self.card.device}" + (f"@{self.version}" if self.version else "")

    @property
    def measured_on(self) -> MeasuredMachine | None:
        """The machine of its samples or runs; None if its card does not say."""
        return self.card.measured_on
