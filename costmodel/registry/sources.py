"""Where `autoshard models` finds trained models and changes their aliases: a registry, or a service with its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Protocol

from costmodel.registry.aliases import Action, Alias, AliasEntry
from costmodel.registry.listing import ListedVersion, alias_histories, listed_versions
from costmodel.registry.versions import Registry, Version, shipped_models

if TYPE_CHECKING:
    from autoshard.api import AliasChange, ModelState, ModelSummary
    from autoshard.client import Client

History = tuple[AliasEntry, ...]


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

    def listed(self, kind: str | None, device: str | None) -> list[ListedVersion]:
        """All versions, of one kind and device if these are given."""
        ...

    def is_shipped_production(self, item: ListedVersion) -> bool:
        """Whether a version is the one that is used until the device has a model of its own."""
        ...

    def histories(self, item: ListedVersion) -> Mapping[Alias, History]:
        """What the aliases of a version's model have named; as shipped where they were never given."""
        ...

    def history(self, item: ListedVersion, alias: Alias) -> History:
        """What one alias has named; empty if it was never given."""
        ...

    def promote(self, item: ListedVersion, alias: Alias) -> History:
        """Has an alias name a version; returns what it has named."""
        ...

    def roll_back(self, item: ListedVersion, alias: Alias) -> History:
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

    def listed(self, kind: str | None, device: str | None) -> list[ListedVersion]:
        """As `ModelSource.listed`."""
        return [
            item
            for item in listed_versions(self.store)
            if kind in (None, item.version.kind) and device in (None, item.version.name)
        ]

    def is_shipped_production(self, item: ListedVersion) -> bool:
        """As `ModelSource.is_shipped_production`."""
        return shipped_models().production_id(item.version.kind, item.version.name) == item.version.id

    def histories(self, item: ListedVersion) -> Mapping[Alias, History]:
        """As `ModelSource.histories`."""
        return alias_histories(self.store, item)

    def history(self, item: ListedVersion, alias: Alias) -> History:
        """As `ModelSource.history`."""
        return self.store.history(item.version.kind, item.version.name, alias)

    def promote(self, item: ListedVersion, alias: Alias) -> History:
        """As `ModelSource.promote`."""
        self.store.promote(item.version.kind, item.version.name, item.version.id, alias)
        return self.history(item, alias)

    def roll_back(self, item: ListedVersion, alias: Alias) -> History:
        """As `ModelSource.roll_back`."""
        self.store.roll_back(item.version.kind, item.version.name, alias)
        return self.history(item, alias)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModels:
    """The models of a service.

    Attributes:
        client: Asks the service.
        place: Its address.
        force: Whether a cost model becomes the production version without a comparison in the shadow.
    """

    client: Client
    place: str
    force: bool = False

    @property
    def shipped_place(self) -> str:
        """The service's address."""
        return self.place

    def listed(self, kind: str | None, device: str | None) -> list[ListedVersion]:
        """As `ModelSource.listed`."""
        return [_listed(found) for found in self.client.list_models(kind, device, cards=True)]

    def is_shipped_production(self, item: ListedVersion) -> bool:
        """Whether it came with the service's autoshard, which has one version of each model."""
        return item.is_shipped

    def histories(self, item: ListedVersion) -> Mapping[Alias, History]:
        """As `ModelSource.histories`."""
        found = self.client.read_model(item.version.kind, item.version.name, item.version.id)
        return {alias: _entries(found.history.get(alias, ())) for alias in Alias}

    def history(self, item: ListedVersion, alias: Alias) -> History:
        """As `ModelSource.history`."""
        return _history(self.client.read_model_state(item.version.kind, item.version.name), alias)

    def promote(self, item: ListedVersion, alias: Alias) -> History:
        """As `ModelSource.promote`."""
        version = item.version
        state = self.client.promote_model(version.kind, version.name, version.id, alias=alias, force=self.force)
        return _history(state, alias)

    def roll_back(self, item: ListedVersion, alias: Alias) -> History:
        """As `ModelSource.roll_back`."""
        return _history(self.client.roll_back_model(item.version.kind, item.version.name, alias=alias), alias)


def _listed(found: ModelSummary) -> ListedVersion:
    version = Version(
        kind=found.kind,
        name=found.name,
        id=found.id,
        aliases=tuple(found.aliases),
        published_s=datetime.fromisoformat(found.published_at).timestamp(),
        card=dict(found.card or {}),
    )
    return ListedVersion(version=version, is_shipped=found.shipped, aliases=tuple(found.aliases))


def _history(state: ModelState, alias: Alias) -> History:
    return _entries(state.history.get(alias, ()))


def _entries(changes: Sequence[AliasChange]) -> History:
    return tuple(
        AliasEntry(action=Action(change.action), id=change.id, at=change.at, by=change.by) for change in changes
    )
