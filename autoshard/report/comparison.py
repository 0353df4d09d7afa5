"""The table of a comparison, which terminal, page and notebook show alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autoshard.core import CostBreakdown
from autoshard.report.wording import write_ms, write_percent
from autoshard.results.comparison import ComparedPlan, MeasuredPlan, speedups_over
from autoshard.table import Table

#: The planner that speed-ups are counted from (AutoShard Sec. 4.1).
BASELINE = "random"


def planners_table(rows: Sequence[ComparedPlan]) -> Table:
    """Planners side by side, the fastest plan first: by the predicted step, or by the slowest rank that was measured.

    The first plan is marked, unless others are within noise of it. `failure_lines` say why planners have none.
    """
    shown, best, speedups = ranked(rows), within_noise(rows), speedups_over(BASELINE, rows)

    def predicted(write: Callable[[CostBreakdown], str]) -> Callable[[ComparedPlan], str]:
        return lambda row: write(row.plan.predicted) if row.plan and row.plan.predicted else ""

    def measured(write: Callable[[MeasuredPlan], str]) -> Callable[[ComparedPlan], str]:
        return lambda row: write(row.measured) if row.measured else ""

    step_ms = predicted(lambda one: write_ms(one.step_ms.value))
    columns: list[tuple[str, Callable[[ComparedPlan], str]]] = [
        ("planner", lambda row: row.planner),
        ("predicted step ms", lambda row: "no plan" if row.plan is None else step_ms(row)),
        ("predicted max kernel ms", predicted(lambda one: write_ms(one.max_kernel_ms))),
        ("predicted balance", predicted(lambda one: write_percent(one.balance))),
    ]
    if _any_measured(rows):
        columns += [
            ("measured max kernel ms", measured(lambda one: write_ms(one.max_kernel_ms))),
            ("measured balance", measured(lambda one: write_percent(one.balance))),
        ]
    if speedups:
        name = f"speed-up over {BASELINE}"
        columns.append((name, lambda row: f"{speedups[row.planner]:.3f}×" if row.planner in speedups else ""))
    if _any_measured(rows):
        columns.append(("predicted against measured", _write_error))
    columns.append(("planning, s", lambda row: f"{row.planning_s:.2f}"))
    return Table.of(shown, columns, marked=[place for place, row in enumerate(shown) if best == (row.planner,)])


def failure_lines(rows: Sequence[ComparedPlan]) -> list[str]:
    """Why planners have no plan, a line for each."""
    return [f"{row.planner}: {row.failure}" for row in rows if row.failure is not None]


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


def _write_error(row: ComparedPlan) -> str:
    return "" if row.prediction_error is None else write_percent(row.prediction_error, signed=True)
