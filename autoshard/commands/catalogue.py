"""`autoshard list`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard.console import JsonOption, emit
from autoshard.table import Column, Table, texts

if TYPE_CHECKING:
    from autoshard.planners.registry import OptionHelp


class NameKind(StrEnum):
    """Kinds of names that can be listed."""

    TABLES = "tables"
    TOPOLOGIES = "topologies"
    PLANNERS = "planners"


def list_names(
    what: Annotated[NameKind, typer.Argument(help="What to list.", metavar="WHAT")],
    as_json: JsonOption = False,
) -> None:
    """Lists bundled tables, bundled topologies, or planners with their options.

    Example:
        autoshard list tables
        autoshard list planners --json
    """
    if what is NameKind.PLANNERS:
        _list_planners(as_json)
    else:
        _list_bundled(what, as_json)


def completed_tables(incomplete: str) -> list[tuple[str, str]]:
    """Names of bundled tables that begin so, with their descriptions, for shells to complete."""
    from autoshard.formats import bundled_table_sets

    return [item for item in bundled_table_sets().items() if item[0].startswith(incomplete)]


def completed_topologies(incomplete: str) -> list[tuple[str, str]]:
    """Names of bundled topologies likewise; of several with commas between them, the last."""
    from autoshard.formats import bundled_topologies

    return _last_completed(incomplete, bundled_topologies())


def completed_planners(incomplete: str) -> list[tuple[str, str]]:
    """Names of planners likewise."""
    from autoshard.planners.registry import describe_planners

    return _last_completed(incomplete, {planner.name: planner.summary for planner in describe_planners()})


def _last_completed(incomplete: str, known: Mapping[str, str]) -> list[tuple[str, str]]:
    before, comma, begun = incomplete.rpartition(",")
    return [(f"{before}{comma}{name}", about) for name, about in known.items() if name.startswith(begun)]


def _list_bundled(what: NameKind, as_json: bool) -> None:
    from autoshard.commands.printed import CATALOGUE
    from autoshard.formats import bundled_table_sets, bundled_topologies

    known = bundled_table_sets() if what is NameKind.TABLES else bundled_topologies()
    table = Table(columns=texts("name", "description"), rows=tuple(known.items()))
    emit(CATALOGUE.to_json({str(what): table.records()}), table, as_json=as_json)


def _list_planners(as_json: bool) -> None:
    from autoshard.commands.printed import CATALOGUE
    from autoshard.planners.registry import describe_planners

    described = describe_planners()
    table = Table.of(
        described,
        [
            ("planner", lambda planner: planner.name),
            (Column("what it does"), lambda planner: planner.summary),
            (Column("options (--set KEY=VALUE)"), lambda planner: "\n".join(map(_option, planner.options))),
        ],
    )
    emit(CATALOGUE.to_json({"planners": [asdict(planner) for planner in described]}), table, as_json=as_json)


def _option(option: OptionHelp) -> str:
    """An option with its default: lists of names can be wrapped, and are read with spaces, too."""
    return f"{option.name}={str(option.default).replace(',', ', ')}  {option.help}"
