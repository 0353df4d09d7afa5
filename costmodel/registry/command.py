"""Command `models`: what is in the registry, which versions are in use, and changing that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoshard import console
from autoshard.commands.arguments import ServerOption, open_client, refuse_local
from autoshard.commands.options import Needs, command_options
from autoshard.core.errors import InvalidOptionError
from autoshard.core.quoting import shown
from autoshard.table import Column, Table, facts, texts
from costmodel.registry.aliases import Alias
from costmodel.registry.publish_options import RegistryOption

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autoshard.api import ModelSummary
    from costmodel.registry.sources import ModelSource


class RegistryAction(StrEnum):
    """What to do with the registry."""

    LIST = "list"
    SHOW = "show"
    PROMOTE = "promote"
    ROLL_BACK = "roll-back"


#: What names the production version of the models that come with this package.
_SHIPPED = "shipped"
#: Kinds of results of actions; of all others an alias names another version.
_KINDS = {RegistryAction.LIST: "models", RegistryAction.SHOW: "model"}


@command_options()
class ModelsOptions:
    """What to do with which models."""

    action: Annotated[RegistryAction, typer.Argument(help="What to do.", show_default=True)] = RegistryAction.LIST
    version: Annotated[
        str | None,
        typer.Argument(help="`production`, `candidate`, `shipped`, or the first digits of an id.", show_default=False),
    ] = None
    alias: Annotated[
        Alias,
        typer.Option(help="Which alias `promote` and `roll-back` change."),
        Needs(
            "promote or roll-back", lambda options: options.action in (RegistryAction.PROMOTE, RegistryAction.ROLL_BACK)
        ),
    ] = Alias.PRODUCTION
    kind: Annotated[
        str | None,
        typer.Option(help="Only models of this kind: cost, policy, collective, dense, step."),
    ] = None
    device: Annotated[str | None, typer.Option(help="Only models of this device.")] = None
    registry: RegistryOption = None
    server: ServerOption = None
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Promote a version that was worse when it was trained, or was not compared in the shadow."
        ),
        Needs(
            "promote and --server",
            lambda options: options.server is not None and options.action is RegistryAction.PROMOTE,
        ),
    ] = False

    def __post_init__(self) -> None:
        refuse_local(self.server, {"--registry": self.registry})
        action, version = self.action, self.version
        if version is None and action in (RegistryAction.SHOW, RegistryAction.PROMOTE):
            raise InvalidOptionError(
                "needs an id, `production`, `candidate` or `shipped`", field="version", source=str(action)
            )
        if version is not None and action in (RegistryAction.LIST, RegistryAction.ROLL_BACK):
            raise InvalidOptionError(f"takes none, got {shown(version)}", field="version", source=str(action))


def models(options: ModelsOptions, as_json: console.JsonOption = False) -> None:
    """Lists the trained models of a registry; a star marks the version in use.

    `show VERSION` prints one version's card and history, `promote VERSION` gives it the alias without comparing it, and
    `roll-back` gives the alias back to the version before. Models that come with autoshard are listed as shipped; they
    are used until a device has a model of its own, and can be promoted again.

    With --server, the models are those of a service, which loads a version before it is promoted, refuses one that was
    worse when it was trained, and compares a cost model with the one in use before it becomes the production version.

    Example:
        autoshard models
        autoshard models show production --kind cost --device cpu
        autoshard models promote 3f2a
        autoshard models promote shipped --kind policy --device cpu
        autoshard models roll-back --kind cost --device cpu
        autoshard models promote 3f2a --alias candidate --server http://localhost:8000
    """
    with _source(options) as source:
        result, rendered = _done(source, options)
    console.emit(result, rendered, as_json=as_json, kind=_KINDS.get(options.action, "model-alias"))


@contextmanager
def _source(options: ModelsOptions) -> Iterator[ModelSource]:
    from costmodel.registry.sources import LocalModels, ServedModels
    from costmodel.registry.versions import Registry

    if options.server is None:
        yield LocalModels(store=Registry(options.registry))
        return
    with open_client(options.server) as client:
        yield ServedModels(client=client, place=options.server, force=options.force)


def _done(source: ModelSource, options: ModelsOptions) -> tuple[dict[str, Any], RenderableType]:
    chosen = source.listed(options.kind, options.device)
    if options.action is RegistryAction.LIST:
        found = {"registry": source.place, "models": [_printed(item) for item in chosen]}
        return found, _list_table(chosen) if chosen else _nothing_listed(source, options)
    if options.action is RegistryAction.SHOW:
        assert options.version is not None
        return _show(source, _find(source, chosen, options.version))
    return _move(source, options, chosen)


def _nothing_listed(source: ModelSource, options: ModelsOptions) -> str:
    """Why a list is empty: there are no models, or none of the kind and device that were asked for."""
    known = {item.kind: None for item in source.listed(None, options.device)}
    wanted = "".join(f" of {shown(one)}" for one in (options.kind, options.device) if one is not None)
    others = f"kinds there: {', '.join(known)}" if known and options.kind else "`autoshard train` makes some"
    return f"No models{wanted} in {source.place}; {others}."


def _find(source: ModelSource, listed: Sequence[ModelSummary], wanted: str) -> ModelSummary:
    """The one version that an alias, `shipped` or the first digits of an id name.

    Raises:
        UnknownNameError: If there is none, or several.
    """
    from autoshard.core.errors import UnknownNameError

    if wanted in list(Alias):
        found = [item for item in listed if wanted in item.aliases]
    elif wanted == _SHIPPED:
        found = [item for item in listed if source.is_shipped_production(item)]
    else:
        found = [item for item in listed if wanted and item.id.startswith(wanted)]
    if not found:
        raise UnknownNameError(f"no model is {shown(wanted)}; `autoshard models` lists them", field="version")
    if len(found) > 1:
        labels = ", ".join(map(_label, found))
        raise UnknownNameError(
            f"{shown(wanted)} names several models; choose one by --kind and --device: {labels}", field="version"
        )
    return found[0]


def _move(source: ModelSource, options: ModelsOptions, listed: Sequence[ModelSummary]) -> tuple[dict[str, Any], str]:
    """Has an alias name another version."""
    alias = options.alias
    if (
        options.action is RegistryAction.ROLL_BACK
    ):  # of what the registry has named; shipped aliases are not ours to change
        listed = [item for item in listed if source.history(item, alias)]
    item = _find(source, listed, str(alias) if options.version is None else options.version)
    change = source.promote if options.action is RegistryAction.PROMOTE else source.roll_back
    history = change(item, alias)
    result = {
        "kind": item.kind,
        "name": item.name,
        "alias": str(alias),
        "id": history[-1].id,
        "history": [entry.model_dump() for entry in history],
    }
    return result, f"The {alias} version of {item.kind} {item.name} is {history[-1].id}."


def _show(source: ModelSource, item: ModelSummary) -> tuple[dict[str, Any], RenderableType]:
    from rich.console import Group

    history = {alias: [entry.model_dump() for entry in entries] for alias, entries in source.histories(item).items()}
    known = [
        ("published", item.published_at),
        ("aliases", ", ".join(item.aliases) or "none"),
        ("from", "shipped with autoshard" if item.shipped else source.place),
        *_facts(item.card or {}),
    ]
    changes = Table(
        columns=texts("alias", "version", "since", "by", "how"),
        rows=[
            (alias, entry["id"], entry["at"], entry["by"], entry["action"])
            for alias, entries in history.items()
            for entry in entries
        ],
        title="What its aliases have named",
        is_boxed=True,
    )
    about = facts(known, title=f"Model {_label(item)}", is_boxed=True)
    rendered = Group(about, changes) if changes.rows else about
    place = source.shipped_place if item.shipped else source.place
    return {**_printed(item), "registry": place, "history": history}, rendered


def _label(item: ModelSummary) -> str:
    return f"{item.kind} {item.name} {item.id}"


def _printed(item: ModelSummary) -> dict[str, Any]:
    return {**item.model_dump(exclude={"relative_error"}), "production": item.used}


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


def _list_table(listed: Sequence[ModelSummary]) -> Table:
    return Table.of(
        listed,
        [
            ("", lambda item: "*" if item.used else ""),
            (Column("kind"), lambda item: item.kind),
            (Column("name"), lambda item: item.name),
            (Column("version"), lambda item: item.id),
            (Column("alias"), lambda item: ", ".join([*item.aliases, *([_SHIPPED] if item.shipped else [])])),
            (Column("published"), lambda item: item.published_at),
            (Column("about"), lambda item: _about(item.card or {})),
        ],
        is_boxed=True,
    )


def _about(card: Mapping[str, Any]) -> str:
    """What a card says about accuracy and the machine of its samples, or about a policy's plans of its test tasks."""
    error = _at(card, "metrics", "relative_error")
    if error is not None:
        machine = card.get("measured_on")
        where = machine.get("device_name", "") if isinstance(machine, Mapping) else ""
        return ", ".join(filter(None, (f"held-out error {error:.2%}", where)))
    excess = _at(card, "training", "test", "over_greedy")
    return "" if excess is None else f"step {abs(excess):.1%} {'above' if excess > 0 else 'below'} cost-greedy's"


def _at(data: Any, *path: str) -> float | None:
    for key in path:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data if isinstance(data, int | float) else None
