"""Arguments that several commands take, and how they are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from autoshard.core.costs import Risk
from autoshard.core.errors import InvalidOptionError
from autoshard.core.quoting import shown

TablesArgument = Annotated[
    str,
    typer.Argument(help="A tables.json, or the name of bundled tables (`autoshard list tables`).", metavar="TABLES"),
]
TopologyOption = Annotated[
    str, typer.Option(help="A topology.json, or the name of a bundled one (`autoshard list topologies`).")
]
RegistryOption = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        file_okay=False,
        show_default="$AUTOSHARD_REGISTRY or ~/.local/share/autoshard/registry",
        help="Folder of trained models. Without one for the device there, the one that comes with autoshard is used, "
        "and if there is none, an analytic model.",
    ),
]
RiskOption = Annotated[
    Risk,
    typer.Option(help="Which end of the predictions' intervals counts: the value, or what is exceeded once in twenty."),
]
SeedOption = Annotated[int, typer.Option(min=0, help="Same seed, same plan, time limits aside.")]
TimeLimitOption = Annotated[
    float, typer.Option(min=0, help="Seconds that a planner may use which improves its plan as long as it may.")
]


def parse_settings(settings: Sequence[str]) -> dict[str, object]:
    """Reads `KEY=VALUE` texts.

    Raises:
        InvalidOptionError: If one has no `=`, or a key is given twice.
    """
    parsed: dict[str, object] = {}
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator or not key:
            raise InvalidOptionError(f"must be KEY=VALUE, got {shown(setting)}", field="--set")
        if key in parsed:
            raise InvalidOptionError(f"{shown(key)} is given twice", field="--set")
        parsed[key] = value
    return parsed
