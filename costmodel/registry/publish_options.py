"""Options of the commands that train: where the model goes, and what becomes of it there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from autoshard.commands.arguments import registry_folder
from autoshard.commands.options import Needs, command_options
from autoshard.core.errors import InvalidOptionError
from costmodel.registry.aliases import Alias


def _registry_option(*names: str) -> Any:
    return typer.Option(
        *names,
        parser=registry_folder,
        metavar="<path or address>",
        help="Folder of trained models, here or on object storage (`s3://bucket/models`). "
        "[default: $AUTOSHARD_REGISTRY or ~/.local/share/autoshard/registry]",
    )


RegistryOption = Annotated[Path | None, _registry_option("--registry")]


@command_options(panel="Registry")
class PublishOptions:
    """What to do with a trained version."""

    registry: Annotated[Path | None, _registry_option("--registry", "--output", "-o")] = None
    alias: Annotated[
        Alias,
        typer.Option(help="`production` is used by default; `candidate` is to be tried out, also if it is worse."),
        Needs("--publish", lambda options: options.publish),
    ] = Alias.PRODUCTION
    publish: Annotated[bool, typer.Option(help="Whether the model goes to the registry.")] = True
    force: Annotated[
        bool, typer.Option("--force", help="Make it the production version even if it is worse than the current one.")
    ] = False

    def __post_init__(self) -> None:
        if self.force and not (self.publish and self.alias == Alias.PRODUCTION):
            raise InvalidOptionError("goes with --alias production only, and not with --no-publish", field="--force")
