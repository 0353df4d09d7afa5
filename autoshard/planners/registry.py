"""Planners by name, from the entry-point group `autoshard.planners`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib.metadata import EntryPoint, entry_points

from autoshard.core.errors import UnknownNameError
from autoshard.planners.planner import Planner

GROUP = "autoshard.planners"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionHelp:
    """One option of a planner, as `autoshard list planners` shows it."""

    name: str
    default: object
    help: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerHelp:
    """A planner, as `autoshard list planners` shows it."""

    name: str
    summary: str
    options: tuple[OptionHelp, ...]


def planner_names() -> tuple[str, ...]:
    """Names of all registered planners, sorted."""
    return tuple(sorted(_registered()))


def get_planner(name: str) -> Planner:
    """The planner of a name.

    Raises:
        UnknownNameError: If none is registered under it; the text lists those that are.
    """
    found = _registered()
    if name not in found:
        raise UnknownNameError(f"no planner is named {name!r}; there are: {', '.join(sorted(found))}", field="planner")
    planner: Planner = found[name].load()()
    return planner


def describe_planners() -> tuple[PlannerHelp, ...]:
    """All registered planners with their options."""
    described = []
    for name in planner_names():
        planner = get_planner(name)
        options = tuple(
            OptionHelp(name=item.name, default=item.default, help=item.metadata.get("help", ""))
            for item in fields(planner.options_type)
        )
        described.append(PlannerHelp(name=name, summary=planner.summary, options=options))
    return tuple(described)


def _registered() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}
