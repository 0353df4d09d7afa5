"""What a sweep has found so far, as a file from which it goes on: `autoshard.simulation/1`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from autoshard.core.errors import FormatError, InputError
from autoshard.core.quoting import shown
from autoshard.formats.files import atomic_write
from autoshard.formats.json_document import format_json, read_json
from autoshard.simulation.points import Point, PointMemory, PointStatus, SimulatedPoint, scaling_factors
from autoshard.simulation.spread import StepSpread

SIMULATION_SCHEMA = "autoshard.simulation/1"

_POINT = ("machine", "num_ranks", "num_groups", "group_size", "batch_size", "is_batch_per_rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRecord:
    """Points of a sweep, and what they were simulated with.

    Attributes:
        settings: All that decides what a point costs; a file goes on only with the same.
        points: In the order in which they were asked for.
    """

    settings: Mapping[str, object]
    points: tuple[SimulatedPoint, ...] = ()

    def find(self, point: Point) -> SimulatedPoint | None:
        """The point, if it has been simulated."""
        return next((one for one in self.points if one.point == point), None)

    def with_points(self, points: Sequence[SimulatedPoint]) -> SweepRecord:
        """The same settings with these points, and behind them those that nobody asked for this time."""
        asked = [one.point for one in points]
        others = [one for one in self.points if one.point not in asked]
        return replace(self, points=(*points, *others))

    def to_json(self) -> dict[str, object]:
        """The object of the file."""
        factors = scaling_factors(self.points)
        return {
            "schema": SIMULATION_SCHEMA,
            "settings": dict(self.settings),
            "points": [_point_to_json(one, factor) for one, factor in zip(self.points, factors, strict=True)],
        }

    def write(self, path: Path) -> None:
        """Writes the file.

        Raises:
            FormatError: If it cannot be written.
        """
        atomic_write(path, format_json(self.to_json()))


def read_record(path: Path, settings: Mapping[str, object]) -> SweepRecord:
    """Reads what a sweep has found so far; nothing if there is no such file.

    Raises:
        FormatError: If the file holds something else, or was made with other settings; the text names the field.
    """
    if not path.exists():
        return SweepRecord(settings=settings)
    document, source = read_json(path), str(path)
    if not isinstance(document, dict) or document.get("schema") != SIMULATION_SCHEMA:
        raise FormatError(f"must be {SIMULATION_SCHEMA!r}", source=source, field="schema")
    found = document.get("settings")
    for name, value in settings.items():
        known = found.get(name) if isinstance(found, dict) else None
        if known != value:
            raise FormatError(
                f"must be {shown(value)} as in this run, got {shown(known)}; name another file for other settings",
                source=source,
                field=f"settings.{name}",
            )
    points = document.get("points")
    if not isinstance(points, list):
        raise FormatError("must be a list", source=source, field="points")
    return SweepRecord(
        settings=settings,
        points=tuple(_point_from_json(value, source, f"points[{index}]") for index, value in enumerate(points)),
    )


def _point_to_json(simulated: SimulatedPoint, factor: float | None) -> dict[str, object]:
    point = simulated.point
    return {
        **{name: getattr(point, name) for name in _POINT},
        "global_batch_size": point.global_batch_size,
        "status": simulated.status.value,
        "reason": simulated.reason,
        "needed_bytes": simulated.needed_bytes,
        "available_bytes": simulated.available_bytes,
        "step_ms": None if simulated.step_ms is None else dict(zip(_ENDS, simulated.step_ms, strict=True)),
        "samples_per_s": simulated.samples_per_s,
        "scaling_factor": factor,
        "imbalance": simulated.imbalance,
        "exchange_balance": simulated.exchange_balance,
        "parts_ms": dict(simulated.parts_ms),
        "memory": None if simulated.memory is None else asdict(simulated.memory),
        "num_shards": dict(simulated.num_shards),
        "planned_groups": simulated.planned_groups,
        "spread": None if simulated.spread is None else asdict(simulated.spread),
        "models": dict(simulated.models),
        "planning_s": simulated.planning_s,
    }


_ENDS = ("value", "low", "high")


def _point_from_json(value: Any, source: str, path: str) -> SimulatedPoint:
    try:
        step, memory, spread = value["step_ms"], value["memory"], value["spread"]
        return SimulatedPoint(
            point=Point(**{name: value[name] for name in _POINT}),
            status=PointStatus(value["status"]),
            reason=value["reason"],
            needed_bytes=value["needed_bytes"],
            available_bytes=value["available_bytes"],
            step_ms=None if step is None else (step["value"], step["low"], step["high"]),
            parts_ms=dict(value["parts_ms"]),
            imbalance=value["imbalance"],
            exchange_balance=value["exchange_balance"],
            memory=None if memory is None else PointMemory(**memory),
            num_shards=dict(value["num_shards"]),
            planned_groups=value["planned_groups"],
            spread=None if spread is None else StepSpread(**spread),
            models=dict(value["models"]),
            planning_s=value["planning_s"],
        )
    except (InputError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"must be a point of this program, not read: {error}", source=source, field=path) from error
