"""Planners by name, from the entry-point group `autoshard.planners`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.core.errors import AutoshardError, UnknownNameError
from autoshard.core.quoting import shown
from autoshard.entry_points import installed

if TYPE_CHECKING:
    from autoshard.planners.planner import PlannerProtocol

GROUP = "autoshard.planners"
#: This project's planners as `describe_planner` finds them, by entry point: generated, so that lists import no planner.
SUMMARIES = Path(__file__).parent / "summaries.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionHelp:
    """One option of a planner, as `autoshard list planners` shows it."""

    name: str
    default: object
    help: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerHelp:
    """A planner, as `autoshard list planners` and the docs show it; attributes as of `PlannerProtocol`."""

    name: str
    summary: str
    options: tuple[OptionHelp, ...]
    when: str = ""
    takes_start: bool = False
    is_compared: bool = False


def planner_names() -> tuple[str, ...]:
    """Names of all registered planners, sorted."""
    return tuple(sorted(_registered()))


def get_planner(name: str) -> PlannerProtocol:
    """The planner of a name.

    Raises:
        UnknownNameError: If none is registered under it; the text lists those that are.
        AutoshardError: If the plugin that has it cannot be loaded, whatever it fails with.
    """
    found = _registered()
    if name not in found:
        raise UnknownNameError(
            f"no planner is named {shown(name)}; there are: {', '.join(sorted(found))}", field="planner"
        )
    point = found[name]
    try:
        planner: PlannerProtocol = point.load()()
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise AutoshardError(f"{point.value} cannot be loaded: {reason}", source=f"planner {name}") from error
    return planner


def describe_planners() -> tuple[PlannerHelp, ...]:
    """All registered planners with their options; those of other packages are imported for it."""
    known = json.loads(SUMMARIES.read_text(encoding="utf-8"))
    points = sorted(_registered().items())
    return tuple(
        _listed(name, **known[point.value]) if point.value in known else describe_planner(name)
        for name, point in points
    )


def _listed(name: str, *, options: Sequence[Mapping[str, Any]], **known: Any) -> PlannerHelp:
    return PlannerHelp(name=name, options=tuple(OptionHelp(**option) for option in options), **known)


def describe_planner(name: str) -> PlannerHelp:
    """A registered planner with its options; one that cannot be loaded is described by the reason."""
    try:
        planner = get_planner(name)
    except AutoshardError as error:
        # One damaged plugin must not take the others' help away.
        return PlannerHelp(name=name, summary=f"Unavailable: {error.message}", options=())
    options = tuple(
        OptionHelp(name=item.name, default=item.default, help=item.metadata.get("help", ""))
        for item in fields(planner.options_type)
    )
    return PlannerHelp(
        name=name,
        summary=planner.summary,
        options=options,
        when=getattr(planner, "when", ""),
        takes_start=getattr(planner, "takes_start", False),
        is_compared=getattr(planner, "is_compared", False),
    )


def _registered() -> dict[str, EntryPoint]:
    return {point.name: point for point in installed(GROUP)}
