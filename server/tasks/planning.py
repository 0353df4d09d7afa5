"""Plans: made for a task, and made anew where a stored plan's task has changed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from autoshard.api import MAX_TIME_LIMIT_S, JobTask, PlanAnswer, PlanBody, PlanJobBody, ReplanBody
from autoshard.core import ShardingPlan
from autoshard.core.errors import InputError
from autoshard.formats import TableList, bundled_name, digest, plan_to_json
from autoshard.planners.planner import options_kept
from autoshard.planning import get_planner
from server.tasks.context import TaskContext
from server.tasks.infeasible import plan_or_remedies
from server.tasks.inputs import plan_of, request_of, stored_plan, task_of, topology_of
from server.tasks.reply import ACCEPTED, PlanFacts, Reply
from server.tasks.running import with_pooling
from server.tasks.size import check_task

#: Of the names by which a plan is searched: lists of 100,000 plans read all of them.
_SEARCHED_CHARACTERS = 256
#: Planner of plans that do not say who made them.
UNKNOWN_PLANNER = "unknown"
#: Share of its limit after which a search has ended because of it: the plan is checked and priced in the rest.
_IN_FULL = 0.9


def answer_plan_or_accept(body: PlanJobBody, context: TaskContext) -> Reply:
    """Makes a plan; checks the task only, if it asks for more time than a request has."""
    return (answer_plan if body.time_limit_s <= MAX_TIME_LIMIT_S else answer_check_plan)(body, context)


def answer_check_plan(body: PlanJobBody, context: TaskContext) -> Reply:
    """Checks a task that a job is to plan, and its start; the answer is a `JobTask`."""
    task_of(body.tables, body.topology, context.settings, lambda _: None, body.constraints)
    if body.start is not None:
        plan_of(body.start, context.settings, "start")
    return Reply(status=ACCEPTED, body=JobTask.of(body).model_dump_json().encode())


def answer_plan(body: PlanBody, context: TaskContext) -> Reply:
    """Makes a plan."""
    context.allow_s(body.time_limit_s)
    begun_s = time.perf_counter()
    lists: list[TableList] = []
    tables, topology = task_of(body.tables, body.topology, context.settings, lists.append, body.constraints)
    request = request_of(
        tables,
        topology,
        seed=body.seed,
        time_limit_s=body.time_limit_s,
        payload=body.payload,
        registry=context.registry,
        options=body.options,
        risk=body.risk,
        started_s=context.started_s,
    )
    if body.start is not None:
        request = replace(request, start=plan_of(body.start, context.settings, "start"))
    notes = [note for read in lists for note in (read.mapping, *read.notes)]
    plan = plan_or_remedies(body.planner, request, context)
    return plan_reply(plan, body.planner, notes, _warnings(plan, body.time_limit_s, begun_s, context))


def answer_replan(body: ReplanBody, context: TaskContext, stored: bytes) -> Reply:
    """Makes a plan for a stored plan's tables, with the same planner, where nothing else is asked for."""
    context.allow_s(body.time_limit_s)
    begun_s = time.perf_counter()
    before = stored_plan(stored)
    tables = with_pooling(before.tables, body.pooling_factors)
    tables = tables if body.batch_size is None else replace(tables, batch_size=body.batch_size)
    topology = before.topology if body.topology is None else topology_of(body.topology)
    check_task(tables, topology, context.settings)
    source = before.provenance
    planner = body.planner or (source.planner if source else UNKNOWN_PLANNER)
    if planner == UNKNOWN_PLANNER:
        raise InputError("must be given, for the plan does not say what planner made it", field="planner")
    made_with = source.options if source and body.planner is None else {}
    kept = options_kept(get_planner(planner).options_type, made_with)
    request = request_of(
        tables,
        topology,
        seed=(source.seed if source else 0) if body.seed is None else body.seed,
        time_limit_s=body.time_limit_s,
        payload=body.payload or str(before.payload),
        registry=context.registry,
        options=kept if body.options is None else body.options,
        risk=body.risk or before.risk,
        started_s=context.started_s,
    )
    plan = plan_or_remedies(planner, request, context)
    return plan_reply(plan, planner, warnings=_warnings(plan, body.time_limit_s, begun_s, context))


def _warnings(plan: ShardingPlan, limit_s: float, begun_s: float, context: TaskContext) -> list[str]:
    """What a plan's search did not have of its time, if the planner searches for as long as it may."""
    if plan.provenance is None or "search" not in plan.provenance.models:
        return []
    waited_s = 0.0 if context.started_s is None else begun_s - context.started_s
    searched_s = time.perf_counter() - begun_s
    if context.is_stopped():
        return [f"the search was stopped after {searched_s:.1f} s of its {limit_s:g} s: this is the best plan found"]
    if waited_s > limit_s / 2 and waited_s + searched_s >= _IN_FULL * limit_s:
        return [
            f"the search had {searched_s:.1f} s of its {limit_s:g} s, for it waited {waited_s:.1f} s for a planning "
            "process; as a job (`Prefer: respond-async`) it has them all"
        ]
    return []


def plan_reply(plan: ShardingPlan, planner: str, notes: Sequence[str] = (), warnings: Sequence[str] = ()) -> Reply:
    """The answer that holds a plan, which is stored, notes on how its tables were read, and warnings of its search."""
    document = plan_to_json(plan)
    answer = PlanAnswer(id=digest(document), plan=document, notes=list(notes), warnings=list(warnings))
    return Reply(
        status=200,
        body=answer.model_dump_json().encode(),
        facts=_facts(answer.id, planner, plan),
        planner=planner,
        floor_gap=_floor_gap(plan),
    )


def _facts(plan_id: str, planner: str, plan: ShardingPlan) -> PlanFacts:
    tables, topology = plan.tables.tables, plan.topology
    words = [planner, topology.device, *(level.name for level in topology.levels), *(table.name for table in tables)]
    return PlanFacts(
        id=plan_id,
        planner=planner,
        device=topology.device,
        num_tables=len(tables),
        num_ranks=topology.world_size,
        topology=bundled_name(topology),
        step_ms=plan.prices.step_ms.value,
        # PostgreSQL holds every character but this one.
        search_text=" ".join(words)[:_SEARCHED_CHARACTERS].casefold().replace("\0", " "),
    )


def _floor_gap(plan: ShardingPlan) -> float | None:
    predicted = plan.predicted
    if predicted is None or predicted.floor_kernel_ms <= 0:
        return None
    return predicted.max_kernel_ms / predicted.floor_kernel_ms - 1
