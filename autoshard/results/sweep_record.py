"""Simulated points of a sweep as a file, from which the sweep continues: `autoshard.simulation/1`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Final

from autoshard.core.errors import FormatError
from autoshard.core.quoting import shown
from autoshard.formats.documents.document import Document
from autoshard.formats.documents.kinds import (
    ANY_OBJECT,
    ANY_TEXT,
    FLAG,
    TEXT,
    Field,
    by_name,
    derived,
    fields_of,
    kind_of,
    list_of,
    number_in,
    one_of,
    optional,
    or_null,
    record,
    whole_number,
)
from autoshard.formats.documents.prediction_json import ESTIMATE
from autoshard.results.sweep import (
    BYTES,
    PointMemory,
    PointStatus,
    PricedPoint,
    SimulatedPoint,
    StepSpread,
    SweepPoint,
    UnpricedPoint,
    scaling_factors,
)

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

    def _repr_html_(self) -> str:
        """What notebooks show; drawn by the reports, by name, which stand above this package."""
        return str(EntryPoint(name="html", value="autoshard.report.notebooks:sweep_html", group="").load()(self))

    def find(self, point: SweepPoint, basis: str) -> SimulatedPoint | None:
        """The point, if it has been simulated on such a cluster with such models."""
        return next((one for one in self.points if (one.point, one.basis) == (point, basis)), None)

    def with_points(self, points: Sequence[SimulatedPoint]) -> SweepRecord:
        """The same settings with these points, and behind them those of earlier requests."""
        requested = [one.point for one in points]
        others = [one for one in self.points if one.point not in requested]
        return replace(self, points=(*points, *others))


def _priced_or_not(*, status: PointStatus, reason: str, **known: Any) -> tuple[SimulatedPoint, None]:
    point = SweepPoint(**{name: known.pop(name) for name in _POINT})
    if status is not PointStatus.PRICED:
        shared = {name: known[name] for name in ("needed_bytes", "available_bytes", "planning_s", "basis")}
        return UnpricedPoint(point=point, status=status, reason=reason, **shared), None
    for name in ("step_ms", "imbalance", "exchange_balance", "memory"):
        if known[name] is None:
            raise FormatError("must not be null where status is priced", field=name)
    return PricedPoint(point=point, **known), None


def _point_parts(found: tuple[SimulatedPoint, float | None]) -> dict[str, Any]:
    simulated, factor = found
    known = {name: getattr(simulated.point, name) for name in (*_POINT, "global_batch_size")}
    figures = {name: getattr(simulated, name, absent) for name, absent in _ABSENT.items()}
    return {**known, **figures, "scaling_factor": factor, "planning_s": simulated.planning_s, "basis": simulated.basis}


#: What is written of a point where it has no such attribute: figures of points without a plan, the status of others.
_ABSENT: Final[dict[str, object]] = {
    "status": PointStatus.PRICED,
    "reason": "",
    "needed_bytes": 0,
    "available_bytes": 0,
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
_COUNT: Final = whole_number(1)
_BYTES: Final = kind_of(int, (BYTES,))
_MEMORY: Final = record(PointMemory, *fields_of(PointMemory))
_SPREAD: Final = record(StepSpread, *fields_of(StepSpread))
_GROUP_SIZE: Final = "Ranks per replica group, where a curve keeps that; null where it keeps the number of groups."
_PARTS: Final = "Milliseconds of the step's parts at their slowest ranks, by name."
_SIMULATED: Final = record(
    _priced_or_not,
    Field("machine", ANY_TEXT, "Name or file of the topology."),
    Field("num_ranks", _COUNT, "Ranks of the cluster."),
    Field("num_groups", _COUNT, "Replica groups; 1 for full model parallelism."),
    Field("group_size", or_null(_COUNT), _GROUP_SIZE),
    Field("batch_size", _COUNT, "Samples per step, of all ranks or of each."),
    Field("is_batch_per_rank", FLAG, "Whether batch_size is that of each rank."),
    derived("global_batch_size", _COUNT, "Samples per step of all ranks."),
    Field("status", one_of(PointStatus), "Whether the point has a plan; without one, its figures are null or empty."),
    Field("reason", ANY_TEXT, "Why there is no plan; else empty."),
    Field("needed_bytes", _BYTES, "Weights and optimizer states of all tables, once."),
    Field("available_bytes", _BYTES, "Device memory of all ranks of a replica group."),
    Field("step_ms", or_null(ESTIMATE), "One training step."),
    derived("samples_per_s", or_null(number_in()), "Throughput of all ranks together."),
    derived("scaling_factor", or_null(number_in()), "Throughput per rank over that of the curve's smallest cluster."),
    Field("imbalance", or_null(number_in()), "Most over mean kernel time of the ranks (2D)."),
    Field("exchange_balance", or_null(number_in()), "Least over most exchange time of a rank (OPER)."),
    Field("parts_ms", by_name(number_in(-math.inf)), _PARTS),
    Field("memory", or_null(_MEMORY), "Memory of the fullest rank."),
    Field("num_shards", by_name(whole_number()), "Number of shards by tier."),
    Field("planned_groups", _COUNT, "Replica groups of the plan: num_groups, unless the planner chooses them."),
    Field("spread", or_null(_SPREAD), "The step over sampled batches, in ms; null if none were drawn."),
    Field("models", by_name(TEXT), "Names of the models behind the prediction."),
    Field("planning_s", number_in(), "Seconds of planning and pricing."),
    optional("basis", ANY_TEXT, "Digest of the cluster and of the names of the models that it was simulated with.", ""),
    parts=_point_parts,
)
_SETTINGS: Final = "Tables, planner, models and options that decide what a point costs."
SIMULATION: Final[Document[SweepRecord]] = Document(
    name="simulation",
    meaning="What `autoshard simulate --json` prints and `-o` writes: the points of a sweep.",
    make=lambda *, settings, points: SweepRecord(settings=settings, points=tuple(point for point, _ in points)),
    fields=lambda _: (
        Field("settings", ANY_OBJECT, _SETTINGS),
        Field("points", list_of(_SIMULATED, 0), "Those of the request in its order, then those of earlier requests."),
    ),
    parts=lambda made: {
        "settings": made.settings,
        "points": zip(made.points, scaling_factors(made.points), strict=True),
    },
)


def read_record(path: Path, settings: Mapping[str, object]) -> SweepRecord:
    """Reads what a sweep has found so far; nothing if there is no such file.

    Raises:
        FormatError: If the file holds something else, or was made with other settings; the text names the field.
    """
    if not path.exists():
        return SweepRecord(settings=settings)
    found = SIMULATION.read(path)
    for name, value in settings.items():
        known = found.settings.get(name)
        if known != value:
            raise FormatError(
                f"must be {shown(value)} as in this run, got {shown(known)}; name another file for other settings",
                source=str(path),
                field=f"settings.{name}",
            )
    return replace(found, settings=settings)
