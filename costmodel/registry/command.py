"""Command `models`: what is in the registry, which versions are in use, and changing that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoshard import console
from autoshard.commands.options import Needs, command_options
from autoshard.core.errors import InvalidOptionError
from autoshard.core.quoting import shown
from costmodel.registry.aliases import Alias
from costmodel.registry.publish_options import RegistryOption

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from costmodel.registry.listing import ListedVersion
    from costmodel.registry.versions import Registry


class Action(StrEnum):
    """What to do with the registry."""

    LIST = "list"
    SHOW = "show"
    PROMOTE = "promote"
    ROLL_BACK = "roll-back"


#: What names the production version of the models that come with this package.
_SHIPPED = "shipped"


@command_options()
class ModelsOptions:
    """What to do with which models."""

    action: Annotated[Action, typer.Argument(help="What to do.", show_default=True)] = Action.LIST
    version: Annotated[
        str | None,
        typer.Argument(help="`production`, `candidate`, `shipped`, or the first digits of an id.", show_default=False),
    ] = None
    alias: Annotated[
        Alias,
        typer.Option(help="Which alias `promote` and `roll-back` change."),
        Needs("promote or roll-back", lambda options: options.action in (Action.PROMOTE, Action.ROLL_BACK)),
    ] = Alias.PRODUCTION
    kind: Annotated[
        str | None,
        typer.Option(
            help="Only models of this kind: cost, policy, policy-row_groups, policy-tiers, collective, dense, step."
        ),
    ] = None
    device: Annotated[str | None, typer.Option(help="Only models of this device.")] = None
    registry: RegistryOption = None

    def __post_init__(self) -> None:
        action, version = self.action, self.version
        if version is None and action in (Action.SHOW, Action.PROMOTE):
            raise InvalidOptionError(
                "needs an id, `production`, `candidate` or `shipped`", field="version", source=str(action)
            )
        if version is not None and action in (Action.LIST, Action.ROLL_BACK):
            raise InvalidOptionError(f"takes none, got {shown(version)}", field="version", source=str(action))


def models(options: ModelsOptions, as_json: console.JsonOption = False) -> None:
    """Lists the trained models of a registry; a star marks the version in use.

    `show VERSION` prints one version's card and history, `promote VERSION` gives it the alias without comparing it, and
    `roll-back` gives the alias back to the version before. Models that come with autoshard are listed as shipped; they
    are used until a device has a model of its own, and can be promoted again.

    Example:
        autoshard models
        autoshard models show production --kind cost --device cpu
        autoshard models promote 3f2a
        autoshard models promote shipped --kind policy --device cpu
        autoshard models roll-back --kind cost --device cpu
    """
    from costmodel.registry.listing import listed_versions
    from costmodel.registry.versions import Registry

    store, kind, device = Registry(options.registry), options.kind, options.device
    chosen = [
        item
        for item in listed_versions(store)
        if kind in (None, item.version.kind) and device in (None, item.version.name)
    ]
    if options.action is Action.LIST:
        result: dict[str, Any] = {"registry": str(store.root), "models": [item.to_json() for item in chosen]}
        empty = f"No models in {store.root}; `autoshard train` makes some."
        rendered: RenderableType = _list_table(chosen) if chosen else empty
    elif options.action is Action.SHOW:
        assert options.version is not None
        result, rendered = _show(store, _find(chosen, options.version))
    else:
        result, rendered = _move(store, options, chosen)
    console.emit(result, rendered, as_json=as_json)


def _find(listed: Sequence[ListedVersion], wanted: str) -> ListedVersion:
    """The one version that an alias, `shipped` or the first digits of an id name.

    Raises:
        UnknownNameError: If there is none, or several.
    """
    from autoshard.core.errors import UnknownNameError
    from costmodel.registry.versions import shipped_models

    if wanted in list(Alias):
        found = [item for item in listed if wanted in item.aliases]
    elif wanted == _SHIPPED:
        shipped = shipped_models()
        found = [
            item for item in listed if shipped.production_id(item.version.kind, item.version.name) == item.version.id
        ]
    else:
        found = [item for item in listed if wanted and item.version.id.startswith(wanted)]
    if not found:
        raise UnknownNameError(f"no model is {shown(wanted)}; `autoshard models` lists them", field="version")
    if len(found) > 1:
        labels = ", ".join(item.label for item in found)
        raise UnknownNameError(
            f"{shown(wanted)} names several models; choose one by --kind and --device: {labels}", field="version"
        )
    return found[0]


def _move(store: Registry, options: ModelsOptions, listed: Sequence[ListedVersion]) -> tuple[dict[str, Any], str]:
    """Has an alias name another version."""
    alias = options.alias
    if options.action is Action.ROLL_BACK:  # of what the registry has named; shipped aliases are not ours to change
        listed = [item for item in listed if store.history(item.version.kind, item.version.name, alias)]
    item = _find(listed, str(alias) if options.version is None else options.version).version
    if options.action is Action.PROMOTE:
        identity = store.promote(item.kind, item.name, item.id, alias)
    else:
        identity = store.roll_back(item.kind, item.name, alias)
    history = store.history(item.kind, item.name, alias)
    result = {
        "kind": item.kind,
        "name": item.name,
        "alias": str(alias),
        "id": identity,
        "history": [asdict(entry) for entry in history],
    }
    return result, f"The {alias} version of {item.kind} {item.name} is {identity}."


def _show(store: Registry, item: ListedVersion) -> tuple[dict[str, Any], RenderableType]:
    from rich.console import Group
    from rich.table import Table

    version = item.version
    histories = {
        alias: store.history(version.kind, version.name, alias)
        or item.models.history(version.kind, version.name, alias)
        for alias in Alias
    }
    history = {alias: [asdict(entry) for entry in entries] for alias, entries in histories.items()}
    facts = Table(title=f"Model {item.label}", title_justify="left", show_header=False)
    facts.add_column("")
    facts.add_column("", overflow="fold")
    facts.add_row("published", item.published_at)
    facts.add_row("aliases", ", ".join(item.aliases) or "none")
    facts.add_row("from", "shipped with autoshard" if item.is_shipped else str(item.models.root))
    for label, value in _facts(version.card):
        facts.add_row(label, value)
    changes = Table(title="What its aliases have named", title_justify="left")
    for heading in ("alias", "version", "since", "by", "how"):
        changes.add_column(heading)
    for alias, entries in history.items():
        for entry in entries:
            changes.add_row(alias, entry["id"], entry["at"], entry["by"], entry["action"])
    rendered = Group(facts, changes) if changes.row_count else facts
    return {**item.to_json(), "registry": str(item.models.root), "history": history}, rendered


def _facts(card: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Numbers and texts of a card by their path; long lists are left to `--json`."""
    for key, value in card.items():
        if isinstance(value, Mapping):
            yield from _facts(value, f"{prefix}{key}.")
        elif isinstance(value, float):
            yield f"{prefix}{key}", f"{value:.6g}"
        elif isinstance(value, str | int):
            yield f"{prefix}{key}", str(value)
        elif isinstance(value, list) and len(value) <= 4:
            yield f"{prefix}{key}", ", ".join(str(part) for part in value)


def _list_table(listed: Sequence[ListedVersion]) -> Table:
    from rich.table import Table

    table = Table()
    for heading in ("", "kind", "name", "version", "alias", "published", "about"):
        table.add_column(heading)
    for item in listed:
        version = item.version
        aliases = [*item.aliases, *([_SHIPPED] if item.is_shipped else [])]
        star = "*" if item.is_used else ""
        about = _about(version.card)
        table.add_row(star, version.kind, version.name, version.id, ", ".join(aliases), item.published_at, about)
    return table


def _about(card: Mapping[str, Any]) -> str:
    """What a card says about accuracy, or about a policy's plans of its test tasks."""
    error = _at(card, "metrics", "relative_error")
    if error is not None:
        return f"held-out error {error:.2%}"
    has_steps = _at(card, "training", "test", "policy", "step_ms") is not None
    label, name = ("step", "step_ms") if has_steps else ("slowest rank", "max_ms")
    ours, greedy = (_at(card, "training", "test", planner, name) for planner in ("policy", "cost-greedy"))
    balance = _at(card, "training", "test", "policy", "balance")
    if ours is None or greedy is None or balance is None:
        return ""
    return f"balance {balance:.1%}, {label} {ours:.3g} ms (cost-greedy {greedy:.3g} ms)"


def _at(data: Any, *path: str) -> float | None:
    for key in path:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data if isinstance(data, int | float) else None
