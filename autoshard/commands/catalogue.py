"""`autoshard list`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

import typer
from rich.table import Table

from autoshard.console import JsonOption, emit


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
    rendered = _empty_table("name", "description")
    for name, description in known.items():
        rendered.add_row(name, description)
    listed = [{"name": name, "description": description} for name, description in known.items()]
    emit(CATALOGUE.to_json({str(what): listed}), rendered, as_json=as_json)


def _list_planners(as_json: bool) -> None:
    from autoshard.commands.printed import CATALOGUE
    from autoshard.planners.registry import describe_planners

    described = describe_planners()
    rendered = _empty_table("planner", "what it does", "options (--set KEY=VALUE)")
    for planner in described:
        options = [f"{option.name}={_spaced(option.default)}  {option.help}" for option in planner.options]
        rendered.add_row(planner.name, planner.summary, "\n".join(options))
    listed = [
        {
            "name": planner.name,
            "summary": planner.summary,
            "options": [
                {"name": option.name, "default": option.default, "help": option.help} for option in planner.options
            ],
        }
        for planner in described
    ]
    emit(CATALOGUE.to_json({"planners": listed}), rendered, as_json=as_json)


def _spaced(default: object) -> str:
    """A default as a table shows it: lists of names can be wrapped, and are read with spaces, too."""
    return str(default).replace(",", ", ")


def _empty_table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
