"""The table of a comparison, as texts that the terminal and the page show alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.evaluation.measured import ComparedPlan, speedups_over
from autoshard.report.wording import write_ms, write_percent

#: The planner that speed-ups are counted from (AutoShard Sec. 4.1).
BASELINE = "random"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonLine:
    """One planner's line: a cell for each column but the first, or the reason why there is no plan."""

    planner: str
    cells: tuple[str, ...]
    failure: str | None
    is_best: bool


def comparison_columns(rows: Sequence[ComparedPlan]) -> tuple[str, ...]:
    """Headings of the table."""
    measured = ("measured max ms", "measured balance") if _any_measured(rows) else ()
    error = ("predicted against measured",) if _any_measured(rows) else ()
    speedup = (f"speed-up over {BASELINE}",) if speedups_over(BASELINE, rows) else ()
    return ("planner", "predicted max ms", "predicted balance", *measured, *speedup, *error, "planning, s")


def comparison_lines(rows: Sequence[ComparedPlan]) -> tuple[ComparisonLine, ...]:
    """The table's lines, in the order of the rows; the plan with the fastest slowest rank is marked as best."""
    speedups = speedups_over(BASELINE, rows)
    measured = _any_measured(rows)
    best_ms = min((_rank_by(row, measured) for row in rows), default=0.0)
    return tuple(
        ComparisonLine(
            planner=row.planner,
            cells=_cells(row, measured, speedups.get(row.planner) if speedups else None),
            failure=None if row.failure is None else str(row.failure),
            is_best=row.plan is not None and _rank_by(row, measured) == best_ms,
        )
        for row in rows
    )


def floor_ms(rows: Sequence[ComparedPlan]) -> float | None:
    """Predicted kernel time below which no placement of whole shards gets, if a plan says it."""
    floors = [row.plan.predicted.floor_kernel_ms for row in rows if row.plan and row.plan.predicted]
    return min(floors, default=None)


def _any_measured(rows: Sequence[ComparedPlan]) -> bool:
    return any(row.measured for row in rows)


def _rank_by(row: ComparedPlan, measured: bool) -> float:
    value = row.measured.max_kernel_ms if measured and row.measured else row.predicted_max_ms
    return float("inf") if value is None else value


def _cells(row: ComparedPlan, measured: bool, speedup: float | None) -> tuple[str, ...]:
    if row.plan is None:
        return ()
    predicted = row.plan.predicted
    cells = [write_ms(predicted.max_kernel_ms), write_percent(predicted.balance)] if predicted else ["", ""]
    if measured:
        cells += (
            [write_ms(row.measured.max_kernel_ms), write_percent(row.measured.balance)] if row.measured else ["", ""]
        )
    if speedup is not None:
        cells.append(f"{speedup:.3f}×")
    if measured:
        cells.append("" if row.prediction_error is None else write_percent(row.prediction_error, signed=True))
    return (*cells, f"{row.planning_s:.2f}")
