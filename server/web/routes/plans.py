"""Routes of plans."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Header, Path, Query, Request, Response

from autoshard.api import PlanAnswer, PlanId, PlanList
from server.storage.plans import PlanFilter
from server.storage.storage import Storage
from server.web.openapi import IDEMPOTENCY_KEY, body_of, plan_answer, problems
from server.web.routes.jobs import JOB_MADE, PREFER, JobDesk

_MAX_PAGE = 200

_StoredId = Annotated[PlanId, Path(description="The plan's id.")]


def add_plans(app: FastAPI, jobs: JobDesk, storage: Storage) -> None:
    """Adds the routes."""
    _add_making(app, jobs)
    _add_list(app, storage)
    _add_one(app, storage)


def _add_making(app: FastAPI, jobs: JobDesk) -> None:
    @app.post(
        "/v1/plans",
        tags=["plans"],
        summary="Make a plan and store it",
        response_model=PlanAnswer,
        responses={**plan_answer(), 202: JOB_MADE, **problems(400, 408, 409, 413, 415, 422, 429, 500, 503, 504)},
        openapi_extra={"requestBody": body_of("PlanJobBody"), "parameters": [IDEMPOTENCY_KEY, PREFER]},
    )
    async def make_plan(request: Request) -> Response:
        return await jobs.plan(request)


def _add_list(app: FastAPI, storage: Storage) -> None:
    @app.get("/v1/plans", tags=["plans"], summary="List stored plans", responses=problems(400, 503))
    def list_plans(
        limit: Annotated[int, Query(ge=1, le=_MAX_PAGE, description="Most plans of a page.")] = 50,
        cursor: Annotated[str | None, Query(max_length=256, description="`next` of the page before.")] = None,
        planner: Annotated[str | None, _searched("Name of the planner.")] = None,
        device: Annotated[str | None, _searched("Key of the device.")] = None,
        num_ranks: Annotated[int | None, Query(ge=1, le=1 << 31, description="Ranks of the topology.")] = None,
        text: Annotated[str | None, _searched("Part of a name: planner, device, level or table.")] = None,
    ) -> PlanList:
        chosen = PlanFilter(planner=planner, device=device, num_ranks=num_ranks, text=text)
        return storage.plans.list(chosen, limit=limit, cursor=cursor)


def _searched(description: str) -> Any:
    """A parameter with a text to look for: without the character that PostgreSQL's texts cannot have."""
    return Query(max_length=512, pattern=r"^[^\x00]*$", description=description)


def _add_one(app: FastAPI, storage: Storage) -> None:
    @app.get(
        "/v1/plans/{plan_id}",
        operation_id="read_plan",
        tags=["plans"],
        summary="Read a plan",
        response_model=PlanAnswer,
        responses={304: {"description": "The client has this plan."}, **problems(400, 404, 503)},
    )
    def read_plan(
        plan_id: _StoredId,
        request: Request,
        if_none_match: Annotated[str | None, Header(description="ETags of plans that the client has.")] = None,
    ) -> Response:
        answer = storage.plans.read(plan_id)
        headers = {"ETag": f'"{plan_id}"', "Cache-Control": "private, no-cache"}
        if if_none_match is not None and _names(if_none_match, plan_id):
            return Response(status_code=304, headers=headers)
        request.state.buffer.answer(len(answer))
        return Response(answer, media_type="application/json", headers=headers)

    @app.delete(
        "/v1/plans/{plan_id}",
        operation_id="delete_plan",
        tags=["plans"],
        summary="Delete a plan",
        status_code=204,
        responses=problems(400, 404, 503),
    )
    def delete_plan(plan_id: _StoredId, request: Request) -> None:
        storage.delete_plan(plan_id, request.state.actor)


def _names(if_none_match: str, plan_id: str) -> bool:
    """Whether a list of ETags names a plan; weak ones do too, since an id is that of the content."""
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return "*" in tags or f'"{plan_id}"' in tags
