"""The versions of a registry and those that come with this package, side by side."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from costmodel.registry.aliases import Alias, AliasEntry
from costmodel.registry.versions import Registry, Version, shipped_models


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedVersion:
    """A version, where it is, and what names it.

    Attributes:
        version: The version.
        is_shipped: Whether it came with this package.
        aliases: Its aliases: the registry's; for a shipped version, also those of shipped models that the registry has
            not given.
    """

    version: Version
    is_shipped: bool
    aliases: tuple[str, ...]

    @property
    def is_used(self) -> bool:
        """Whether plans are priced with it, unless another version is asked for."""
        return Alias.PRODUCTION in self.aliases

    @property
    def published_at(self) -> str:
        """When it was published, as ISO 8601, UTC."""
        return datetime.fromtimestamp(self.version.published_s, UTC).isoformat(timespec="seconds")

    @property
    def label(self) -> str:
        """Kind, device and id."""
        return f"{self.version.kind} {self.version.name} {self.version.id}"

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        version = self.version
        return {
            "kind": version.kind,
            "name": version.name,
            "id": version.id,
            "production": self.is_used,
            "aliases": list(self.aliases),
            "shipped": self.is_shipped,
            "used": self.is_used,
            "published_at": self.published_at,
            "card": version.card,
        }


def listed_versions(store: Registry) -> list[ListedVersion]:
    """Versions of a registry, then those shipped, which are used where the registry has no production version.

    Raises:
        ModelError: If a card or an alias is damaged; the text names the file.
    """
    own = store.list()
    shipped = shipped_models()
    found = [ListedVersion(version=item, is_shipped=False, aliases=item.aliases) for item in own]
    if store.is_shipped:
        return found
    own_ids = {(item.kind, item.name, item.id) for item in own}
    return found + [
        ListedVersion(version=item, is_shipped=True, aliases=_aliases_of(store, item))
        for item in shipped.list()
        if (item.kind, item.name, item.id) not in own_ids
    ]


def alias_histories(store: Registry, item: ListedVersion) -> dict[Alias, tuple[AliasEntry, ...]]:
    """What each alias of a version's model has named in a registry; for a shipped version, as shipped if it is nothing.

    Raises:
        ModelError: If an alias is damaged.
    """
    kind, name, home = item.version.kind, item.version.name, shipped_models() if item.is_shipped else store
    return {alias: store.history(kind, name, alias) or home.history(kind, name, alias) for alias in Alias}


def _aliases_of(store: Registry, shipped: Version) -> tuple[str, ...]:
    """A shipped version's names: those that the registry gives it, and its own where the registry gives none."""
    found = []
    for alias in Alias:
        history = store.history(shipped.kind, shipped.name, alias)
        if history[-1].id == shipped.id if history else alias in shipped.aliases:
            found.append(alias.value)
    return tuple(found)
