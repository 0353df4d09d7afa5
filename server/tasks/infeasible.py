"""Tasks without a feasible plan: what keeps them from having one, and what would help."""

from __future__ import annotations

import time
from dataclasses import replace

from autoshard.api import RemedyAnswer
from autoshard.core import ShardingPlan
from autoshard.core.errors import InfeasiblePlanError
from autoshard.planners.planner import PlanRequest
from autoshard.planning import make_plan
from autoshard.whatif.remedies import find_remedies, find_shortage
from server.problems import UnplannableTaskError
from server.tasks.context import TaskContext
from server.tasks.size import most_ranks

#: Longest time for trials, and share of a request's overtime that they may take, its own planning included.
_BUDGET_S, _OVERTIME_SHARE = 5.0, 0.5


def plan_or_remedies(planner: str, request: PlanRequest, context: TaskContext) -> ShardingPlan:
    """A planner's plan; a task that has none is told what is missing, and changes with which it has one.

    Raises:
        UnplannableTaskError: If there is no feasible plan.
        AutoshardError: As `make_plan`.
    """
    started = time.perf_counter()
    try:
        return make_plan(planner, replace(request, is_stopped=context.is_stopped))
    except InfeasiblePlanError as error:
        failed_s = time.perf_counter() - started
        room_s = _OVERTIME_SHARE * context.settings.overtime_of(request.time_limit_s) - failed_s
        remedies = find_remedies(
            planner,
            request,
            budget_s=min(_BUDGET_S, room_s),
            trial_s=failed_s,
            max_ranks=most_ranks(request.tables, context.settings),
        )
        shortage = find_shortage(request.tables, request.topology)
        raise UnplannableTaskError(
            error.message,
            shortage=shortage,
            remedies=[
                RemedyAnswer(field=one.field, value=one.value, text=one.text, step_ms=one.step_ms) for one in remedies
            ],
        ) from error
