"""The table of a comparison, as texts that the terminal and the page show alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.report.wording import write_ms, write_percent
from autoshard.results.comparison import ComparedPlan, speedups_over

#: The planner that speed-ups are counted from (AutoShard Sec. 4.1).
BASELINE = "random"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonLine:
    """One planner's line: a cell for each column but the first, or the reason why there is no plan."""

    planner: str
    cells: tuple[str, ...]
    failure: str | None
    is_best: bool

    def across(self, columns: Sequence[str], reason: str) -> tuple[str, ...]:
        """A value for each column; without a plan, the reason in the second."""
        cells = self.cells or (reason, *("" for _ in columns[2:]))
        return (self.planner, *cells)


def comparison_columns(rows: Sequence[ComparedPlan]) -> tuple[str, ...]:
    """Headings of the table."""
    measured = ("measured max kernel ms", "measured balance") if _any_measured(rows) else ()
    error = ("predicted against measured",) if _any_measured(rows) else ()
    speedup = (f"speed-up over {BASELINE}",) if speedups_over(BASELINE, rows) else ()
    return (
        *("planner", "predicted step ms", "predicted max kernel ms", "predicted balance"),
        *(*measured, *speedup, *error, "planning, s"),
    )


def comparison_lines(rows: Sequence[ComparedPlan]) -> tuple[ComparisonLine, ...]:
    """The table's lines, the fastest plan first: by the predicted step, or by the slowest rank that was measured.

    The first plan is marked as best, unless others are within noise of it.
    """
    speedups = speedups_over(BASELINE, rows)
    measured = _any_measured(rows)
    best = within_noise(rows)
    return tuple(
        ComparisonLine(
            planner=row.planner,
            cells=_cells(row, measured, speedups.get(row.planner) if speedups else None),
            failure=None if row.failure is None else str(row.failure),
            is_best=best == (row.planner,),
        )
        for row in ranked(rows)
    )


def ranked(rows: Sequence[ComparedPlan]) -> list[ComparedPlan]:
    """The rows, the fastest plan first: by the predicted step, or by the slowest rank that was measured."""
    measured = _any_measured(rows)
    return sorted(rows, key=lambda row: _rank_by(row, measured))


def comparison_order(rows: Sequence[ComparedPlan]) -> str:
    """The sentence that says by what the lines are ordered."""
    by = "measured kernels of the slowest rank" if _any_measured(rows) else "predicted step"
    return f"Plans are ordered by the {by}; the first is marked, unless others are within noise of it."


def within_noise(rows: Sequence[ComparedPlan]) -> tuple[str, ...]:
    """Planners whose plan may be the fastest: the best one, and those that noise hides behind it.

    Plans rank by their predicted step, or by their slowest rank where kernels were measured. Noise of measured times is
    what ranks with identical work differ by, that of predicted steps the upper half of the best one's 90% interval.

    Returns:
        Names in the order of the rows; a single one has clearly won, and none means that there is no plan.
    """
    measured = _any_measured(rows)
    times_ms = {row.planner: _rank_by(row, measured) for row in rows if row.plan is not None}
    best = min((row for row in rows if row.planner in times_ms), key=lambda row: times_ms[row.planner], default=None)
    if best is None or math.isinf(times_ms[best.planner]):
        return ()
    limit_ms = times_ms[best.planner] * _noise_factor(best)
    return tuple(planner for planner, time_ms in times_ms.items() if time_ms <= limit_ms)


def floor_ms(rows: Sequence[ComparedPlan]) -> float | None:
    """Predicted kernel time below which no placement of whole shards gets, if a plan has it."""
    floors = [row.plan.predicted.floor_kernel_ms for row in rows if row.plan and row.plan.predicted]
    return min(floors, default=None)


def _any_measured(rows: Sequence[ComparedPlan]) -> bool:
    return any(row.measured for row in rows)


def _rank_by(row: ComparedPlan, measured: bool) -> float:
    if measured:
        return row.measured.max_kernel_ms if row.measured else math.inf
    return row.plan.predicted.step_ms.value if row.plan and row.plan.predicted else math.inf


def _noise_factor(row: ComparedPlan) -> float:
    """Largest ratio of another row's time to this one's that noise explains."""
    if row.measured is not None:
        return 1 / (1 - row.measured_noise) if row.measured_noise < 1 else math.inf
    assert row.plan is not None
    estimate = row.plan.prices.step_ms
    return estimate.high / estimate.value if estimate.value else 1.0


def _cells(row: ComparedPlan, measured: bool, speedup: float | None) -> tuple[str, ...]:
    if row.plan is None:
        return ()
    predicted = row.plan.predicted
    cells = ["", "", ""]
    if predicted is not None:
        times_ms = (predicted.step_ms.value, predicted.max_kernel_ms)
        cells = [*map(write_ms, times_ms), write_percent(predicted.balance)]
    if measured:
        cells += (
            [write_ms(row.measured.max_kernel_ms), write_percent(row.measured.balance)] if row.measured else ["", ""]
        )
    if speedup is not None:
        cells.append(f"{speedup:.3f}×")
    if measured:
        cells.append("" if row.prediction_error is None else write_percent(row.prediction_error, signed=True))
    return (*cells, f"{row.planning_s:.2f}")
