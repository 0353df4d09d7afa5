"""Routes of plans."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, FastAPI, Header, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from autoshard.api import PlanAnswer, PlanFilter, PlanJobBody, PlanLabels, PlanList, Scope
from server.access import opened_to
from server.storage.storage import Storage
from server.web.openapi import StoredPlanId, plan_answer, problems
from server.web.reading import JsonBody, ReceivedBody, SecretBody
from server.web.routes.jobs import JOB_MADE, PREFER, JobHandler
from server.web.work_handler import WorkHandler


def add_plans(app: FastAPI, jobs: JobHandler, handler: WorkHandler, storage: Storage) -> None:
    """Adds the routes."""
    _add_making(app, jobs)
    _add_list(app, storage)
    _add_one(app, storage)
    _add_changing(app, handler, storage)


def _add_making(app: FastAPI, jobs: JobHandler) -> None:
    @app.post(
        "/v1/plans",
        tags=["plans"],
        summary="Make a plan and store it",
        response_model=PlanAnswer,
        responses={**plan_answer(), 202: JOB_MADE, **problems(400, 408, 409, 413, 415, 422, 429, 500, 503, 504)},
        openapi_extra={"parameters": [PREFER]},
    )
    @opened_to(Scope.PLAN)
    async def make_plan(received: Annotated[ReceivedBody[PlanJobBody], Depends(JsonBody(PlanJobBody))]) -> Response:
        return await jobs.plan(received)


def _add_list(app: FastAPI, storage: Storage) -> None:
    @app.get("/v1/plans", tags=["plans"], summary="List stored plans", responses=problems(400, 503))
    @opened_to(Scope.READ)
    def list_plans(search: Annotated[PlanFilter, Query()], request: Request) -> PlanList:
        return storage.plans.list(search, request.state.actor.team)


def _add_one(app: FastAPI, storage: Storage) -> None:
    @app.get(
        "/v1/plans/{plan_id}",
        tags=["plans"],
        summary="Read a plan",
        response_model=PlanAnswer,
        responses={304: {"description": "The client has this plan."}, **problems(400, 404, 503)},
    )
    @opened_to(Scope.READ)
    def read_plan(
        plan_id: StoredPlanId,
        request: Request,
        if_none_match: Annotated[str | None, Header(description="ETags of plans that the client has.")] = None,
    ) -> Response:
        answer = storage.plans.read(plan_id, request.state.actor.team)
        headers = {"ETag": f'"{plan_id}"', "Cache-Control": "private, no-cache"}
        if if_none_match is not None and _names(if_none_match, plan_id):
            return Response(status_code=304, headers=headers)
        request.state.buffer.answer(len(answer))
        return Response(answer, media_type="application/json", headers=headers)


def _add_changing(app: FastAPI, handler: WorkHandler, storage: Storage) -> None:
    @app.patch(
        "/v1/plans/{plan_id}",
        tags=["plans"],
        summary="Name and tag a plan",
        status_code=204,
        responses=problems(400, 404, 408, 413, 415, 422, 503),
    )
    @opened_to(Scope.PLAN)
    async def label_plan(
        plan_id: StoredPlanId, received: Annotated[ReceivedBody[PlanLabels], Depends(SecretBody(PlanLabels))]
    ) -> Response:
        labels = await received.parse(await received.read(handler.settings))
        await run_in_threadpool(storage.plans.label, plan_id, received.request.state.actor, labels)
        return Response(status_code=204)

    @app.post(
        "/v1/plans/{plan_id}/restore",
        tags=["plans"],
        summary="Bring back a plan that was deleted within a day",
        status_code=204,
        responses=problems(400, 404, 503),
    )
    @opened_to(Scope.PLAN)
    def restore_plan(plan_id: StoredPlanId, request: Request) -> None:
        storage.plans.restore(plan_id, request.state.actor)

    @app.delete(
        "/v1/plans/{plan_id}",
        tags=["plans"],
        summary="Delete a plan, which can be restored for a day",
        status_code=204,
        responses=problems(400, 404, 503),
    )
    @opened_to(Scope.PLAN)
    def delete_plan(plan_id: StoredPlanId, request: Request) -> None:
        storage.plans.delete(plan_id, request.state.actor)


def _names(if_none_match: str, plan_id: str) -> bool:
    """Whether a list of ETags names a plan; weak ones do too, since an id is that of the content."""
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return "*" in tags or f'"{plan_id}"' in tags
