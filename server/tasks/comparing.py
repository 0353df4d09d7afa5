"""Several planners on one task."""

from __future__ import annotations

from dataclasses import replace

from autoshard.api import ComparisonAnswer, ComparisonBody, JobTask
from autoshard.formats import TableList, plan_to_json
from autoshard.planning import compare
from autoshard.report.comparison_json import COMPARISON
from server.problems import fault_of
from server.tasks.context import TaskContext
from server.tasks.inputs import request_of, task_of
from server.tasks.reply import ACCEPTED, Reply
from server.tasks.size import check_total_time


def answer_short_comparison(body: ComparisonBody, context: TaskContext) -> Reply:
    """As `answer_compare`, of a request: all planners together have as much time as one may have."""
    check_total_time(len(body.planners), "planners", body.time_limit_s)
    return answer_compare(body, context)


def answer_compare(body: ComparisonBody, context: TaskContext) -> Reply:
    """Plans with each planner; one that finds no plan has a row with the reason."""
    context.allow_s(len(body.planners) * body.time_limit_s)
    lists: list[TableList] = []
    tables, topology = task_of(body.tables, body.topology, context.settings, lists.append)
    request = request_of(
        tables,
        topology,
        seed=body.seed,
        time_limit_s=body.time_limit_s,
        payload=body.payload,
        registry=context.registry,
        risk=body.risk,
    )
    rows = compare(body.planners, replace(request, is_stopped=context.is_stopped), options=body.options)
    answer = ComparisonAnswer(
        comparison=COMPARISON.to_json((rows, None)),
        plans={row.planner: plan_to_json(row.plan) for row in rows if row.plan is not None},
        failures={row.planner: fault_of(row.failure) for row in rows if row.failure is not None},
        notes=[note for read in lists for note in (read.mapping, *read.notes)],
    )
    return Reply(status=200, body=answer.model_dump_json().encode())


def answer_check_comparison(body: ComparisonBody, context: TaskContext) -> Reply:
    """Checks a task that a job is to compare planners on; the answer is a `JobTask`."""
    task_of(body.tables, body.topology, context.settings, lambda _: None)
    return Reply(status=ACCEPTED, body=JobTask.of(body).model_dump_json().encode())
