"""`autoshard show`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoshard.commands.arguments import ImageOption, PageOption
from autoshard.console import JsonOption, emit, log, progress, warn
from autoshard.core.errors import FormatError

if TYPE_CHECKING:
    from autoshard.report import MeasuredPlan


def show(
    plan: Annotated[Path, typer.Argument(help="Plan to look at.", metavar="PLAN")],
    html: PageOption = None,
    image: ImageOption = None,
    replayed: Annotated[
        Path | None, typer.Option(help="Output of `autoshard replay --json`, to show measured beside predicted times.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Shows what a plan costs and where its tables are.

    Example:
        autoshard show plan.json --html plan.html --image plan.svg

    Example with measured times:
        autoshard replay plan.json --json > replay.json
        autoshard show plan.json --replayed replay.json
    """
    from autoshard.formats import atomic_write, plan_to_json, read_plan
    from autoshard.report import plan_figures, plan_page, plan_summary, plan_warnings

    loaded = read_plan(plan)
    measured = None if replayed is None else _read_replay(replayed, loaded.group_size)
    if html is not None:
        atomic_write(html, plan_page(loaded, measured, title=f"Sharding plan {plan.name}"))
        log(f"Wrote {html}")
    for warning in plan_warnings(loaded):
        warn(warning)
    emit(plan_to_json(loaded), plan_summary(loaded, measured), as_json=as_json)
    if image is not None:
        pictures = plan_figures(loaded, measured)
        draw({picture.name: picture.figure for picture in pictures}, image)


def draw(figures: Mapping[str, Any], image: Path) -> None:
    """Writes figures as images, with a progress bar, and logs their names; see `write_images`."""
    from autoshard.report.images import write_images

    with progress("Drawing", len(figures)) as advance:
        files = write_images(figures, image, on_drawn=advance)
    for file in files:
        log(f"Wrote {file}")


def _read_replay(path: Path, num_ranks: int) -> MeasuredPlan:
    from autoshard.report.replay_json import REPLAY

    found = REPLAY.read(path)
    if len(found.ranks) != num_ranks:
        message = f"must hold {num_ranks} values, one per rank of the plan, got {len(found.ranks)}"
        raise FormatError(message, field="ranks", source=str(path))
    return found.measured
