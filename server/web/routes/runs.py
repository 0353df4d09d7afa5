"""Routes of measured runs of plans."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool

from autoshard.api import RunAnswer, RunBody, RunList, Scope
from server.access import opened_to
from server.storage.idempotency import IdempotentRequest, KeptAnswer
from server.storage.storage import Storage
from server.tasks.work import Body, WorkKind
from server.web.metrics import Metrics
from server.web.openapi import StoredPlanId, problems
from server.web.reading import JsonBody, ReceivedBody
from server.web.work_handler import WorkHandler


def add_runs(app: FastAPI, handler: WorkHandler, storage: Storage, metrics: Metrics) -> None:
    """Adds the routes."""

    @app.post(
        "/v1/plans/{plan_id}/runs",
        tags=["plans"],
        summary="Report what a training job measured",
        response_model=RunAnswer,
        responses=problems(400, 404, 408, 409, 413, 415, 422, 429, 500, 503, 504),
    )
    @opened_to(Scope.PLAN)
    async def report_run(
        received: Annotated[ReceivedBody[RunBody], Depends(JsonBody(RunBody))], plan_id: StoredPlanId
    ) -> Response:
        request = received.request
        handler.check_room(request)

        async def do(body: Body, keyed: IdempotentRequest | None) -> KeptAnswer:
            answer = await handler.worked(request, WorkKind.RUN, body, None, (plan_id,))
            if answer.status == 200:
                run = RunAnswer.model_validate_json(answer.body)
                await run_in_threadpool(storage.keep_run, plan_id, run, answer, keyed, request.state.actor)
                metrics.count_run(run)
            elif keyed is not None:
                await run_in_threadpool(storage.requests.give_up, keyed)
            return answer

        return await handler.once(received, do)

    @app.get(
        "/v1/plans/{plan_id}/runs",
        tags=["plans"],
        summary="List a plan's runs",
        responses=problems(400, 404, 503),
    )
    @opened_to(Scope.READ)
    def list_runs(plan_id: StoredPlanId, request: Request) -> RunList:
        storage.plans.check(plan_id, request.state.actor.team)
        return storage.runs.list(plan_id, request.state.actor.team)
