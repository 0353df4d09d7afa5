"""`autoshard show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autoshard.console import JsonOption, emit, log


def show(
    plan: Annotated[Path, typer.Argument(help="Plan to look at.", metavar="PLAN")],
    html: Annotated[Path | None, typer.Option(help="Also write a page that opens without a network.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Shows what a plan costs and where its tables are.

    Example:
        autoshard show plan.json --html plan.html
    """
    from autoshard.formats import atomic_write, plan_to_json, read_plan
    from autoshard.report import plan_page, plan_summary

    loaded = read_plan(plan)
    if html is not None:
        atomic_write(html, plan_page(loaded, title=f"Sharding plan {plan.name}"))
        log(f"Wrote {html}")
    emit(plan_to_json(loaded), plan_summary(loaded), as_json=as_json)
