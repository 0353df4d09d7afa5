"""Routes of schedules."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, FastAPI, Path, Request, Response
from starlette.concurrency import run_in_threadpool

from autoshard.api import JOB_BODIES, JobKind, ScheduleAnswer, ScheduleBody, ScheduleList, ScheduleName, Scope
from server.access import Principal, opened_to
from server.storage.idempotency import IdempotentRequest, KeptAnswer
from server.storage.schedules import ScheduleStore
from server.storage.storage import Storage
from server.tasks.work import Body
from server.web.openapi import problems
from server.web.reading import JsonBody, ReceivedBody
from server.web.work_handler import WorkHandler

_PATH = "/v1/schedules/{name}"
_Name = Annotated[ScheduleName, Path(description="The schedule's name.")]
_MADE: dict[str, Any] = {"model": ScheduleAnswer, "description": "The schedule; `Location` is its address."}


def add_schedules(app: FastAPI, handler: WorkHandler, storage: Storage) -> None:
    """Adds the routes."""
    _add_reading(app, storage.schedules)
    _add_making(app, handler, storage)
    _add_changing(app, storage.schedules)


def _add_reading(app: FastAPI, schedules: ScheduleStore) -> None:
    @app.get("/v1/schedules", tags=["schedules"], summary="List schedules", responses=problems(503))
    @opened_to(Scope.TRAIN)
    def list_schedules(request: Request) -> ScheduleList:
        return schedules.list(request.state.actor.team)

    @app.get(_PATH, tags=["schedules"], summary="Read a schedule", responses=problems(400, 404, 503))
    @opened_to(Scope.TRAIN)
    def read_schedule(name: _Name, request: Request) -> ScheduleAnswer:
        return schedules.read(name, request.state.actor.team)


def _add_making(app: FastAPI, handler: WorkHandler, storage: Storage) -> None:
    @app.post(
        "/v1/schedules",
        tags=["schedules"],
        summary="Make a job again and again",
        status_code=201,
        response_model=ScheduleAnswer,
        responses={201: _MADE, **problems(400, 408, 409, 413, 415, 422, 429, 500, 503)},
    )
    @opened_to(Scope.TRAIN)
    async def make_schedule(
        received: Annotated[ReceivedBody[ScheduleBody], Depends(JsonBody(ScheduleBody))],
    ) -> Response:
        async def make(given: Body, keyed: IdempotentRequest | None) -> KeptAnswer:
            body = await received.parse(given)
            return await run_in_threadpool(made, body, keyed, received.request.state.actor)

        response = await handler.once(received, make)
        answer = ScheduleAnswer.model_validate_json(bytes(response.body))
        response.headers["Location"] = f"/v1/schedules/{answer.name}"
        return response

    def made(body: ScheduleBody, keyed: IdempotentRequest | None, actor: Principal) -> KeptAnswer:
        JOB_BODIES[JobKind(body.kind)].parse(body.body)
        return storage.make_schedule(body, keyed, actor)


def _add_changing(app: FastAPI, schedules: ScheduleStore) -> None:
    @app.post(f"{_PATH}/pause", tags=["schedules"], summary="Pause a schedule", responses=problems(400, 404, 503))
    @opened_to(Scope.TRAIN)
    def pause_schedule(name: _Name, request: Request) -> ScheduleAnswer:
        return schedules.pause(name, request.state.actor, is_paused=True)

    @app.post(f"{_PATH}/resume", tags=["schedules"], summary="Resume a schedule", responses=problems(400, 404, 503))
    @opened_to(Scope.TRAIN)
    def resume_schedule(name: _Name, request: Request) -> ScheduleAnswer:
        return schedules.pause(name, request.state.actor, is_paused=False)

    @app.delete(
        _PATH, tags=["schedules"], summary="Delete a schedule", status_code=204, responses=problems(400, 404, 503)
    )
    @opened_to(Scope.TRAIN)
    def delete_schedule(name: _Name, request: Request) -> None:
        schedules.delete(name, request.state.actor)
