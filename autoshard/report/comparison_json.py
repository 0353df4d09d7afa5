"""Planners side by side (`autoshard.comparison/1`): what `autoshard compare --json` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from autoshard.formats.documents.document import Document
from autoshard.formats.documents.kinds import ANY_TEXT, TEXT, Field, Kind, list_of, number_in, or_null, record
from autoshard.plugins import ReplayProtocol
from autoshard.report.comparison import BASELINE, floor_ms, within_noise
from autoshard.results.comparison import ComparedPlan, speedups_over

_NUMBER: Final = or_null(number_in())
_SHARE: Final = or_null(number_in(0, 1))


def _row_parts(found: tuple[ComparedPlan, float | None]) -> dict[str, Any]:
    row, speedup = found
    predicted, measured = row.plan.predicted if row.plan else None, row.measured
    return {
        "planner": row.planner,
        "planning_s": row.planning_s,
        "failure": None if row.failure is None else str(row.failure),
        "predicted_step_ms": predicted.step_ms.value if predicted else None,
        "predicted_max_kernel_ms": row.predicted_max_ms,
        "predicted_balance": predicted.balance if predicted else None,
        "cost_model": predicted.cost_model if predicted else None,
        "measured_max_kernel_ms": measured.max_kernel_ms if measured else None,
        "measured_balance": measured.balance if measured else None,
        "measured_kernel_ms": measured.kernel_ms_per_rank if measured else None,
        "speedup_over_random": speedup,
        "prediction_error": row.prediction_error,
    }


_NOT_MEASURED: Final = "; null without --replay"
_ROW: Final[Kind[Any]] = record(
    dict,
    Field("planner", ANY_TEXT, "Name of the planner."),
    Field("planning_s", number_in(), "Wall-clock seconds of planning."),
    Field("failure", or_null(ANY_TEXT), "Why there is no plan; null where there is one."),
    Field("predicted_step_ms", _NUMBER, "Predicted time of a step, in ms, by which plans rank; null without a plan."),
    Field("predicted_max_kernel_ms", _NUMBER, "Predicted kernel time of the slowest rank, in ms; null without a plan."),
    Field("predicted_balance", _SHARE, "Least over most predicted kernel time of a rank (AutoShard); null likewise."),
    Field("cost_model", or_null(TEXT), "The model of kernels; null likewise."),
    Field("measured_max_kernel_ms", _NUMBER, f"Measured kernel time of the slowest rank, in ms{_NOT_MEASURED}."),
    Field("measured_balance", _SHARE, f"Least over most of the ranks' times{_NOT_MEASURED}."),
    Field(
        "measured_kernel_ms",
        or_null(list_of(number_in())),
        f"Measured kernel times of the ranks, in ms{_NOT_MEASURED}.",
    ),
    Field("speedup_over_random", _NUMBER, "Kernel time of random's slowest rank over this plan's; null without both."),
    Field("prediction_error", or_null(number_in(-1)), f"Predicted over measured time, minus 1{_NOT_MEASURED}."),
    parts=_row_parts,
)


def _parts(found: tuple[Sequence[ComparedPlan], ReplayProtocol | None]) -> dict[str, Any]:
    rows, measured = found
    speedups = speedups_over(BASELINE, rows)
    return {
        "floor_kernel_ms": floor_ms(rows),
        "within_noise": within_noise(rows),
        "ceiling_balance": measured.ceiling.balance if measured else None,
        "device_name": measured.device_name if measured else None,
        "planners": [(row, speedups.get(row.planner)) for row in rows],
    }


_FLOOR: Final = "Predicted kernel time of the costliest shard, in ms: a floor for all placements; null without a plan."
_WITHIN: Final = (
    "Planners whose plan may be the fastest: the one with the shortest predicted step (with --replay, with the fastest "
    "slowest rank), and those within noise of it."
)
#: Written from the rows and the replay, if there was one.
COMPARISON: Final[Document[Any]] = Document(
    name="comparison",
    meaning="What `autoshard compare --json` prints: plans of several planners for one task.",
    make=dict,
    fields=lambda _: (
        Field("floor_kernel_ms", _NUMBER, _FLOOR),
        Field("within_noise", list_of(ANY_TEXT, 0), _WITHIN),
        Field("ceiling_balance", _SHARE, f"Balance of ranks with identical work on this machine{_NOT_MEASURED}."),
        Field("device_name", or_null(ANY_TEXT), f"Full name of the processor that measured{_NOT_MEASURED}."),
        Field("planners", list_of(_ROW), "One entry per planner, in the order of --planners."),
    ),
    parts=_parts,
)
