"""Routes of schedules."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, FastAPI, Path, Request, Response
from starlette.concurrency import run_in_threadpool

from autoshard.api import JOB_BODIES, JobKind, ScheduleAnswer, ScheduleBody, ScheduleList, ScheduleName
from server.access import Principal
from server.jobs.schedules import JobSchedules
from server.storage.idempotency import IdempotentRequest, KeptAnswer
from server.storage.storage import Storage
from server.web.desk import WorkDesk
from server.web.openapi import problems
from server.web.reading import JsonBody, ReceivedBody

_PATH = "/v1/schedules/{name}"
_Name = Annotated[ScheduleName, Path(description="The schedule's name.")]
_MADE: dict[str, Any] = {"model": ScheduleAnswer, "description": "The schedule; `Location` is its address."}


class ScheduleDesk:
    """Makes and changes schedules, and records who did.

    Args:
        desk: Reads requests, each with an idempotency key once.
        schedules: The schedules.
        storage: Holds the audit log.
    """

    def __init__(self, desk: WorkDesk, schedules: JobSchedules, storage: Storage) -> None:
        self._desk = desk
        self._storage = storage
        self.schedules = schedules

    async def make(self, received: ReceivedBody[ScheduleBody]) -> Response:
        """Makes a schedule.

        Raises:
            AutoshardError: If there is something wrong with it or with the body of its jobs, or its name is taken.
        """

        async def make(text: bytes, keyed: IdempotentRequest | None) -> KeptAnswer:
            body = await received.parse(text)
            return await run_in_threadpool(self._made, body, keyed, received.request.state.actor)

        response = await self._desk.once(received, make)
        made = ScheduleAnswer.model_validate_json(bytes(response.body))
        response.headers["Location"] = f"/v1/schedules/{made.name}"
        return response

    def pause(self, name: str, actor: Principal, *, is_paused: bool) -> ScheduleAnswer:
        """Has a schedule make no more jobs, or make them again.

        Raises:
            UnknownScheduleError: If it is not there.
        """
        answer = self.schedules.pause(name, is_paused=is_paused)
        self._record(answer, None, actor, "schedule.pause" if is_paused else "schedule.resume")
        return answer

    def delete(self, name: str, actor: Principal) -> None:
        """Deletes a schedule.

        Raises:
            UnknownScheduleError: If it is not there.
        """
        answer = self.schedules.read(name)
        self.schedules.delete(name)
        self._record(answer, None, actor, "schedule.delete")

    def _made(self, body: ScheduleBody, keyed: IdempotentRequest | None, actor: Principal) -> KeptAnswer:
        JOB_BODIES[JobKind(body.kind)].parse(body.body)
        return self._record(self.schedules.create(body), keyed, actor, "schedule.make")

    def _record(
        self, schedule: ScheduleAnswer, keyed: IdempotentRequest | None, actor: Principal, action: str
    ) -> KeptAnswer:
        answer = KeptAnswer(status=201, body=schedule.model_dump_json().encode())
        target = f"{schedule.name} {schedule.kind} {schedule.cron}"
        self._storage.keep_change(answer, keyed, actor, action, target)
        return answer


def add_schedules(app: FastAPI, desk: ScheduleDesk) -> None:
    """Adds the routes."""
    _add_reading(app, desk.schedules)
    _add_changing(app, desk)


def _add_reading(app: FastAPI, schedules: JobSchedules) -> None:
    @app.get("/v1/schedules", tags=["schedules"], summary="List schedules", responses=problems(503))
    def list_schedules() -> ScheduleList:
        return schedules.list()

    @app.get(_PATH, tags=["schedules"], summary="Read a schedule", responses=problems(400, 404, 503))
    def read_schedule(name: _Name) -> ScheduleAnswer:
        return schedules.read(name)


def _add_changing(app: FastAPI, desk: ScheduleDesk) -> None:
    @app.post(
        "/v1/schedules",
        operation_id="make_schedule",
        tags=["schedules"],
        summary="Make a job again and again",
        status_code=201,
        response_model=ScheduleAnswer,
        responses={201: _MADE, **problems(400, 408, 409, 413, 415, 422, 429, 500, 503)},
    )
    async def make_schedule(
        received: Annotated[ReceivedBody[ScheduleBody], Depends(JsonBody(ScheduleBody))],
    ) -> Response:
        return await desk.make(received)

    @app.post(f"{_PATH}/pause", tags=["schedules"], summary="Pause a schedule", responses=problems(400, 404, 503))
    def pause_schedule(name: _Name, request: Request) -> ScheduleAnswer:
        return desk.pause(name, request.state.actor, is_paused=True)

    @app.post(f"{_PATH}/resume", tags=["schedules"], summary="Resume a schedule", responses=problems(400, 404, 503))
    def resume_schedule(name: _Name, request: Request) -> ScheduleAnswer:
        return desk.pause(name, request.state.actor, is_paused=False)

    @app.delete(
        _PATH, tags=["schedules"], summary="Delete a schedule", status_code=204, responses=problems(400, 404, 503)
    )
    def delete_schedule(name: _Name, request: Request) -> None:
        desk.delete(name, request.state.actor)
