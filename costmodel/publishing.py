"""What the commands that train share: where the model goes, and what is said of that."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard import console
from autoshard.commands.options import Needs, command_options
from autoshard.core.errors import InvalidOptionError

if TYPE_CHECKING:
    from costmodel.promotion import Published


class Alias(StrEnum):
    """Names of versions, as `costmodel.registry.ALIASES`."""

    PRODUCTION = "production"
    CANDIDATE = "candidate"


RegistryOption = Annotated[
    Path | None,
    typer.Option(
        file_okay=False,
        help="Folder of trained models. [default: $AUTOSHARD_REGISTRY or ~/.local/share/autoshard/registry]",
    ),
]


@command_options(panel="Registry")
class PublishOptions:
    """What to do with a trained version."""

    registry: RegistryOption = None
    alias: Annotated[
        Alias,
        typer.Option(
            help="`production` is used by default; `candidate` is to be tried out, and compared with nothing."
        ),
        Needs("--publish", lambda options: options.publish),
    ] = Alias.PRODUCTION
    publish: Annotated[bool, typer.Option(help="Whether the model goes to the registry.")] = True
    force: Annotated[
        bool, typer.Option("--force", help="Make it the production version even if it is worse than the current one.")
    ] = False

    def __post_init__(self) -> None:
        if self.force and not (self.publish and self.alias == Alias.PRODUCTION):
            raise InvalidOptionError("goes with --alias production only, and not with --no-publish", field="--force")


def report_published(published: Published, kind: str, name: str) -> None:
    """Prints on standard error why a version was not promoted, or not compared; nothing if all went as usual."""
    for note in published.notes:
        console.log(f"{kind} {name}: {note}")
    if published.refused:
        reasons = "; ".join(map(str, published.refused))
        command = f"autoshard models promote {published.id} --registry {shlex.quote(str(published.registry))}"
        console.log(f"{kind} {name}: {published.id} is not promoted: {reasons}. To promote it anyway: {command}")


def status_of(published: Published) -> str:
    """The version, and what became of it unless it is the production one, for titles of tables."""
    if published.id is None:
        return "not published"
    if published.alias == Alias.PRODUCTION:
        return f"version {published.id}"
    return f"version {published.id} ({published.alias or 'not promoted'})"
