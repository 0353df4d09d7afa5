"""The versions of a registry and those that come with this package, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from autoshard.api import AliasChange, ModelSummary
from autoshard.core.choices import Alias
from costmodel.registry.versions import Registry, Version, shipped_models

#: What aliases have named, the latest last.
History = dict[str, list[AliasChange]]


def listed_versions(store: Registry, kind: str | None = None, name: str | None = None) -> list[ModelSummary]:
    """Versions of a registry, then those shipped, which are used where the registry has no production version.

    Args:
        store: The registry.
        kind: Only those of this kind.
        name: Only those of this device.

    Raises:
        ModelError: If a card or an alias is damaged; the text names the file.
    """
    own = store.list()
    own_ids = {(item.kind, item.name, item.id) for item in own}
    found = [_summary(store, item, item.aliases, is_shipped=False) for item in own]
    if not store.is_shipped:
        shipped = [item for item in shipped_models().list() if (item.kind, item.name, item.id) not in own_ids]
        found += [_summary(store, item, _aliases_of(store, item), is_shipped=True) for item in shipped]
    return [item for item in found if kind in (None, item.kind) and name in (None, item.name)]


def _summary(store: Registry, version: Version, aliases: Sequence[str], *, is_shipped: bool) -> ModelSummary:
    metrics = version.card.get("metrics")
    places = (store, shipped_models())
    in_use = next(filter(None, (models.production_id(version.kind, version.name) for models in places)), None)
    error = metrics.get("relative_error") if isinstance(metrics, dict) else None
    return ModelSummary(
        kind=version.kind,
        name=version.name,
        id=version.id,
        aliases=list(aliases),
        shipped=is_shipped,
        used=in_use == version.id,
        published_at=datetime.fromtimestamp(version.published_s, UTC).isoformat(timespec="seconds"),
        relative_error=float(error) if isinstance(error, int | float) else None,
        card=version.card,
    )


def alias_histories(store: Registry, item: ModelSummary) -> History:
    """What each alias of a version's model has named in a registry; for a shipped version, as shipped if it is nothing.

    Raises:
        ModelError: If an alias is damaged.
    """
    home = shipped_models() if item.shipped else store
    found = {alias: store.history(item.kind, item.name, alias) for alias in Alias}
    return {alias.value: list(of or home.history(item.kind, item.name, alias)) for alias, of in found.items()}


def _aliases_of(store: Registry, shipped: Version) -> tuple[str, ...]:
    """A shipped version's names: those that the registry gives it, and its own where the registry gives none."""
    found = []
    for alias in Alias:
        history = store.history(shipped.kind, shipped.name, alias)
        if history[-1].id == shipped.id if history else alias in shipped.aliases:
            found.append(alias.value)
    return tuple(found)
