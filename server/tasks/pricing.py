"""What is read off a plan: its price, the alternatives to it, its report, and how another differs."""

from __future__ import annotations

import json
import time
from dataclasses import replace

from pydantic import TypeAdapter

from autoshard.api import EvaluationBody, ExplanationBody, NoBody
from autoshard.planners.hybrid.explanation import explain
from autoshard.planning import plan_costs, repriced
from autoshard.report import plan_page
from autoshard.report.plan_diff import diff_plans
from autoshard.results.explanation import EXPLANATION, Explanation
from autoshard.results.plan_diff import DIFF
from autoshard.whatif.improvements import find_improvements, trials_budget_s
from server.tasks.context import TaskContext
from server.tasks.inputs import plan_of, stored_plan
from server.tasks.planning import UNKNOWN_PLANNER, plan_reply
from server.tasks.reply import Reply

#: An explanation without changes, as JSON.
_EXPLANATION = TypeAdapter(Explanation)


def answer_evaluate(body: EvaluationBody, context: TaskContext) -> Reply:
    """Prices a plan that the client sends."""
    plan = plan_of(body.plan, context.settings)
    costs = plan_costs(plan, context.registry, risk=body.risk or plan.risk)
    priced = repriced(plan, costs, overlap=body.overlap)
    reply = plan_reply(priced, plan.provenance.planner if plan.provenance else UNKNOWN_PLANNER)
    return replace(reply, planner="", floor_gap=None)  # nothing was planned


def answer_explain(body: ExplanationBody, context: TaskContext, stored: bytes) -> Reply:
    """Compares the sharding of a stored plan's tables with its alternatives."""
    plan = stored_plan(stored)
    costs = plan_costs(plan, context.registry, risk=body.risk or plan.risk)
    found = explain(plan, costs, body.tables, most=body.most)
    return Reply(status=200, body=_EXPLANATION.dump_json(found))


def answer_improve(body: ExplanationBody, context: TaskContext, stored: bytes) -> Reply:
    """Explains a stored plan, and plans with single changes of its task."""
    plan = stored_plan(stored)
    costs = plan_costs(plan, context.registry, risk=body.risk or plan.risk)
    started_s = time.perf_counter()
    found = explain(plan, costs, body.tables, most=body.most)
    improvements = find_improvements(plan, costs, found, budget_s=trials_budget_s(time.perf_counter() - started_s))
    document = EXPLANATION.to_json((found, improvements))
    return Reply(status=200, body=json.dumps(document, allow_nan=False).encode())


def answer_diff(_: NoBody, __: TaskContext, before: bytes, after: bytes) -> Reply:
    """Compares two stored plans."""
    found = DIFF.to_json(diff_plans(stored_plan(before), stored_plan(after)))
    return Reply(status=200, body=json.dumps(found, allow_nan=False).encode())


def answer_report(_: NoBody, __: TaskContext, stored: bytes) -> Reply:
    """Draws the page of a stored plan."""
    return Reply(status=200, body=plan_page(stored_plan(stored)).encode())
