"""Simulated points of a sweep as a file, from which the sweep continues: `autoshard.simulation/1`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from autoshard.core.errors import FormatError, InputError
from autoshard.core.quoting import shown
from autoshard.formats.documents.json_document import format_json, read_json
from autoshard.formats.files import atomic_write
from autoshard.simulation.points import (
    Point,
    PointMemory,
    PointStatus,
    PricedPoint,
    SimulatedPoint,
    UnpricedPoint,
    scaling_factors,
)
from autoshard.simulation.spread import StepSpread

SIMULATION_SCHEMA = "autoshard.simulation/1"

_POINT = ("machine", "num_ranks", "num_groups", "group_size", "batch_size", "is_batch_per_rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRecord:
    """Points of a sweep, and what they were simulated with.

    Attributes:
        settings: All that decides what a point costs; a file goes on only with the same.
        points: In the order of the request.
    """

    settings: Mapping[str, object]
    points: tuple[SimulatedPoint, ...] = ()

    def find(self, point: Point) -> SimulatedPoint | None:
        """The point, if it has been simulated."""
        return next((one for one in self.points if one.point == point), None)

    def with_points(self, points: Sequence[SimulatedPoint]) -> SweepRecord:
        """The same settings with these points, and behind them those of earlier requests."""
        requested = [one.point for one in points]
        others = [one for one in self.points if one.point not in requested]
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


#: Figures of priced points alone, with what stands for them where there is no plan.
_NO_FIGURES: dict[str, object] = {
    "step_ms": None,
    "samples_per_s": None,
    "scaling_factor": None,
    "imbalance": None,
    "exchange_balance": None,
    "parts_ms": {},
    "memory": None,
    "num_shards": {},
    "planned_groups": 1,
    "spread": None,
    "models": {},
}
_ENDS = ("value", "low", "high")


def _point_to_json(simulated: SimulatedPoint, factor: float | None) -> dict[str, object]:
    point = simulated.point
    status, reason, figures = PointStatus.PRICED, "", _NO_FIGURES
    if isinstance(simulated, PricedPoint):
        figures = _figures_to_json(simulated, factor)
    else:
        status, reason = simulated.status, simulated.reason
    return {
        **{name: getattr(point, name) for name in _POINT},
        "global_batch_size": point.global_batch_size,
        "status": status.value,
        "reason": reason,
        "needed_bytes": simulated.needed_bytes,
        "available_bytes": simulated.available_bytes,
        **figures,
        "planning_s": simulated.planning_s,
    }


def _figures_to_json(priced: PricedPoint, factor: float | None) -> dict[str, object]:
    return {
        "step_ms": dict(zip(_ENDS, priced.step_ms, strict=True)),
        "samples_per_s": priced.samples_per_s,
        "scaling_factor": factor,
        "imbalance": priced.imbalance,
        "exchange_balance": priced.exchange_balance,
        "parts_ms": dict(priced.parts_ms),
        "memory": asdict(priced.memory),
        "num_shards": dict(priced.num_shards),
        "planned_groups": priced.planned_groups,
        "spread": None if priced.spread is None else asdict(priced.spread),
        "models": dict(priced.models),
    }


def _point_from_json(value: Any, source: str, path: str) -> SimulatedPoint:
    try:
        known: dict[str, Any] = {
            "point": Point(**{name: value[name] for name in _POINT}),
            **{name: value[name] for name in ("needed_bytes", "available_bytes", "planning_s")},
        }
        status = PointStatus(value["status"])
        if status is not PointStatus.PRICED:
            return UnpricedPoint(status=status, reason=value["reason"], **known)
        step, spread = value["step_ms"], value["spread"]
        return PricedPoint(
            step_ms=(step["value"], step["low"], step["high"]),
            parts_ms=dict(value["parts_ms"]),
            memory=PointMemory(**value["memory"]),
            num_shards=dict(value["num_shards"]),
            models=dict(value["models"]),
            spread=None if spread is None else StepSpread(**spread),
            **{name: value[name] for name in ("imbalance", "exchange_balance", "planned_groups")},
            **known,
        )
    except (InputError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"must be a point of this program, not read: {error}", source=source, field=path) from error
