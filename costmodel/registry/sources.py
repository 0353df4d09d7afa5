"""Where `autoshard models` finds trained models and changes their aliases: a registry, or a service with its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from autoshard.api import AliasChange, ModelSummary
from autoshard.core.choices import Alias
from costmodel.registry.listing import History, alias_histories, listed_versions
from costmodel.registry.versions import Registry, shipped_models

if TYPE_CHECKING:
    from autoshard.client import Client

Changes = Sequence[AliasChange]


class ModelSource(Protocol):
    """Lists models, and changes their aliases. All methods raise ModelError, or what a client raises."""

    @property
    def place(self) -> str:
        """Where the models are."""
        ...

    @property
    def shipped_place(self) -> str:
        """Where those are that come with autoshard."""
        ...

    def listed(self, kind: str | None, device: str | None) -> list[ModelSummary]:
        """All versions, of one kind and device if these are given."""
        ...

    def is_shipped_production(self, item: ModelSummary) -> bool:
        """Whether a version is the one that is used until the device has a model of its own."""
        ...

    def histories(self, item: ModelSummary) -> History:
        """What the aliases of a version's model have named; as shipped where they were never given."""
        ...

    def history(self, item: ModelSummary, alias: Alias) -> Changes:
        """What one alias has named; empty if it was never given."""
        ...

    def promote(self, item: ModelSummary, alias: Alias) -> Changes:
        """Has an alias name a version; returns what it has named."""
        ...

    def roll_back(self, item: ModelSummary, alias: Alias) -> Changes:
        """Gives an alias back to the version before; returns what it has named."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModels:
    """A registry, and the models that come with this package."""

    store: Registry

    @property
    def place(self) -> str:
        """The registry's folder."""
        return self.store.place

    @property
    def shipped_place(self) -> str:
        """A folder of this package."""
        return str(shipped_models().root)

    def listed(self, kind: str | None, device: str | None) -> list[ModelSummary]:
        """As `ModelSource.listed`."""
        return listed_versions(self.store, kind, device)

    def is_shipped_production(self, item: ModelSummary) -> bool:
        """As `ModelSource.is_shipped_production`."""
        return shipped_models().production_id(item.kind, item.name) == item.id

    def histories(self, item: ModelSummary) -> History:
        """As `ModelSource.histories`."""
        return alias_histories(self.store, item)

    def history(self, item: ModelSummary, alias: Alias) -> Changes:
        """As `ModelSource.history`."""
        return self.store.history(item.kind, item.name, alias)

    def promote(self, item: ModelSummary, alias: Alias) -> Changes:
        """As `ModelSource.promote`."""
        self.store.promote(item.kind, item.name, item.id, alias)
        return self.history(item, alias)

    def roll_back(self, item: ModelSummary, alias: Alias) -> Changes:
        """As `ModelSource.roll_back`."""
        self.store.roll_back(item.kind, item.name, alias)
        return self.history(item, alias)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModels:
    """The models of a service.

    Attributes:
        client: Asks the service.
        place: Its address.
        force: Whether a version becomes the production one that was worse, or not compared in the shadow.
    """

    client: Client
    place: str
    force: bool = False

    @property
    def shipped_place(self) -> str:
        """The service's address."""
        return self.place

    def listed(self, kind: str | None, device: str | None) -> list[ModelSummary]:
        """As `ModelSource.listed`."""
        return list(self.client.list_models(kind, device, cards=True))

    def is_shipped_production(self, item: ModelSummary) -> bool:
        """Whether it came with the service's autoshard, which has one version of each model."""
        return item.shipped

    def histories(self, item: ModelSummary) -> History:
        """As `ModelSource.histories`."""
        return self.client.read_model(item.kind, item.name, item.id).history

    def history(self, item: ModelSummary, alias: Alias) -> Changes:
        """As `ModelSource.history`."""
        return self.client.read_model_state(item.kind, item.name).history.get(alias, ())

    def promote(self, item: ModelSummary, alias: Alias) -> Changes:
        """As `ModelSource.promote`."""
        state = self.client.promote_model(item.kind, item.name, item.id, alias=alias, force=self.force)
        return state.history.get(alias, ())

    def roll_back(self, item: ModelSummary, alias: Alias) -> Changes:
        """As `ModelSource.roll_back`."""
        return self.client.roll_back_model(item.kind, item.name, alias=alias).history.get(alias, ())
