"""Routes of jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Path, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from autoshard.api import (
    JOB_BODIES,
    MAX_PAGE,
    JobAnswer,
    JobChange,
    JobId,
    JobKind,
    JobList,
    JobState,
    PlanId,
    PlanJobBody,
    Priority,
    Scope,
)
from server.access import Door, Principal, opened_to, scope_of
from server.jobs.engine import JobEngine
from server.problems import ForbiddenError
from server.storage.idempotency import IdempotentRequest, KeptAnswer
from server.storage.jobs import JobStore, NewJob
from server.storage.storage import Storage
from server.tasks.reply import ACCEPTED
from server.tasks.work import Body, WorkKind
from server.web.buffers import client_of
from server.web.openapi import problems
from server.web.reading import JsonBody, ReceivedBody, SecretBody
from server.web.work_handler import WorkHandler

T = TypeVar("T")

#: What checks the bodies that may be long.
_CHECKS = {JobKind.PLAN: WorkKind.CHECK_PLAN, JobKind.COMPARE: WorkKind.CHECK_COMPARISON}
_SUMMARIES = {
    JobKind.PLAN: "Make a plan as a job",
    JobKind.COMPARE: "Compare planners as a job",
    JobKind.COLLECT: "Measure kernels of the service's machine",
    JobKind.CALIBRATE: "Fit a cost model to the service's machine",
    JobKind.TRAIN_COST: "Train a cost model",
    JobKind.TRAIN_POLICY: "Train a policy",
}

#: The answer to requests that make a job.
JOB_MADE: dict[str, Any] = {"model": JobAnswer, "description": "A job; `Location` is its address."}
#: The header of requests that may be answered by a job.
PREFER: dict[str, Any] = {
    "name": "Prefer",
    "in": "header",
    "required": False,
    "description": "`respond-async` for a job, which has up to an hour; so has a `time_limit_s` above 60.",
    "schema": {"type": "string"},
}

_StoredId = Annotated[JobId, Path(description="The job's id.")]


def prefers_job(request: Request) -> bool:
    """Whether a client would rather have a job than wait (RFC 7240)."""
    preferences = ",".join(request.headers.getlist("prefer")).lower().split(",")
    return any(preference.split(";")[0].strip() == "respond-async" for preference in preferences)


class JobHandler:
    """Takes and changes jobs.

    Args:
        handler: Reads requests, each with an idempotency key once.
        engine: Does jobs.
        storage: Holds them.
    """

    def __init__(self, handler: WorkHandler, engine: JobEngine, storage: Storage) -> None:
        self._handler = handler
        self._engine = engine
        self._storage = storage

    async def make(self, received: ReceivedBody[Any], kind: JobKind, priority: int = 0) -> Response:
        """Answers a request for a job.

        Args:
            received: The request's body.
            kind: What the job is to do.
            priority: Jobs of a higher one begin first.

        Raises:
            ForbiddenError: If the priority is for admins, and an admin did not send it.
            AutoshardError: If there is something wrong with it, or no room for more jobs.
        """

        async def make(body: Body, keyed: IdempotentRequest | None) -> KeptAnswer:
            task = await self._handler.check(received, body, _CHECKS.get(kind))
            return await run_in_threadpool(self._made, kind, body, task, keyed, received.request, priority)

        _check_priority(priority, received.request.state.actor)
        return _with_location(await self._handler.once(received, make))

    async def plan(self, received: ReceivedBody[PlanJobBody]) -> Response:
        """Answers a request for a plan: by a job where the client would rather have one, or asks for so much time.

        Args:
            received: The request's body.

        Raises:
            AutoshardError: If it cannot be answered.
        """
        request = received.request
        if prefers_job(request):
            return await self.make(received, JobKind.PLAN)
        self._handler.check_room(request)

        async def do(body: Body, keyed: IdempotentRequest | None) -> KeptAnswer:
            answer = await self._handler.worked(request, WorkKind.PLAN, body, keyed)
            if answer.status != ACCEPTED:
                return answer
            return await run_in_threadpool(self._made, JobKind.PLAN, body, answer.body.decode(), keyed, request)

        response = await self._handler.once(received, do)
        return _with_location(response) if response.status_code == ACCEPTED else response

    def read(self, job_id: str, actor: Principal) -> JobAnswer:
        """What is known of a job.

        Raises:
            UnknownJobError: If it is not there, or of another team.
            ForbiddenError: If the actor must not see jobs of its kind.
        """
        job = self._storage.jobs.read(job_id, actor.team)
        if not actor.may_read(job.kind):
            raise ForbiddenError(f"needs a key with the scope {scope_of(job.kind)}", field="authorization")
        return job

    def result(self, job_id: str, actor: Principal) -> bytes:
        """The JSON text of what a job made; errors as of `read`.

        Raises:
            JobStateError: If it has not succeeded.
        """
        self.read(job_id, actor)
        plan_id, text = self._storage.jobs.result(job_id, actor.team)
        return (text or b"{}") if plan_id is None else self._storage.plans.read(plan_id, actor.team)

    def list(self, actor: Principal, kind: JobKind | None, **page: Any) -> JobList:
        """One page of the jobs that an actor may see.

        Raises:
            FormatError: If the cursor is not one.
        """
        kinds = [one for one in JobKind if actor.may_read(one) and kind in (None, one)]
        return self._storage.jobs.list(actor.team, kinds, **page)

    def change(self, change: Callable[[JobStore, str, Principal], T], job_id: str, actor: Principal) -> T:
        """Changes a job.

        Args:
            change: What to do with it.
            job_id: Its id.
            actor: Who does it.

        Returns:
            What is known of it then.

        Raises:
            UnknownJobError: If it is not there.
            ForbiddenError: If the actor must not do jobs of its kind.
            JobStateError: If jobs in its state are not changed like that.
        """
        self._check(job_id, actor)
        answer = change(self._storage.jobs, job_id, actor)
        self._engine.wake()
        return answer

    def delete(self, job_id: str, actor: Principal) -> None:
        """Deletes a job that has ended, and its files; errors as of `change`."""
        self.change(JobStore.delete, job_id, actor)
        self._engine.forget(job_id)

    async def prioritise(self, received: ReceivedBody[JobChange], job_id: str) -> JobAnswer:
        """Gives a job that waits another priority.

        Raises:
            UnknownJobError: If it is not there.
            ForbiddenError: If the actor must not do jobs of its kind, or the priority is for admins.
            JobStateError: If it does not wait.
            AutoshardError: If there is something wrong with the body.
        """
        actor = received.request.state.actor
        await run_in_threadpool(self._check, job_id, actor)
        change = await received.parse(await received.read(self._handler.settings))
        _check_priority(change.priority, actor)
        answer = await run_in_threadpool(self._storage.jobs.prioritise, job_id, actor, change.priority)
        self._engine.wake()
        return answer

    def _made(
        self,
        kind: JobKind,
        body: Body,
        task: str,
        keyed: IdempotentRequest | None,
        request: Request,
        priority: int = 0,
    ) -> KeptAnswer:
        client, actor = client_of(request.scope), request.state.actor
        job = NewJob(kind=kind, request=body.text, task=task, client=client, team=actor.team, priority=priority)
        answer = self._storage.add_job(job, keyed, actor)
        self._engine.wake()
        return answer

    def _check(self, job_id: str, actor: Principal) -> None:
        scope = scope_of(self._storage.jobs.read(job_id, actor.team).kind)
        if not actor.may(scope):
            raise ForbiddenError(f"needs a key with the scope {scope}", field="authorization")


def _check_priority(priority: int, actor: Principal) -> None:
    if priority > 0 and not actor.may(Scope.ADMIN):
        raise ForbiddenError("needs a key with the scope admin where it is above 0", field="priority")


def _with_location(response: Response) -> Response:
    job = JobAnswer.model_validate_json(bytes(response.body))
    response.headers["Location"] = f"/v1/jobs/{job.id}"
    return response


def add_jobs(app: FastAPI, jobs: JobHandler) -> None:
    """Adds the routes."""
    for kind in JobKind:
        _add_making(app, jobs, kind)
    _add_reading(app, jobs)
    _add_changing(app, jobs)


def _add_making(app: FastAPI, jobs: JobHandler, kind: JobKind) -> None:
    body = Depends(JsonBody(JOB_BODIES[kind]))

    @app.post(
        f"/v1/jobs/{kind}",
        operation_id=f"make_{kind.replace('-', '_')}_job",
        tags=["jobs"],
        summary=_SUMMARIES[kind],
        status_code=202,
        response_model=JobAnswer,
        responses={202: JOB_MADE, **problems(400, 408, 409, 413, 415, 422, 429, 500, 503)},
    )
    @opened_to(scope_of(kind))
    async def make_job(
        received: ReceivedBody[Any] = body,
        priority: Annotated[
            Priority, Query(description="Jobs of a higher one begin first; above 0, of the scope admin.")
        ] = 0,
    ) -> Response:
        return await jobs.make(received, kind, priority)


def _add_reading(app: FastAPI, jobs: JobHandler) -> None:
    @app.get("/v1/jobs", tags=["jobs"], summary="List jobs", responses=problems(400, 503))
    @opened_to(Door.ANY_KEY)
    def list_jobs(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description="Most jobs of a page.")] = 50,
        cursor: Annotated[str | None, Query(max_length=256, description="`next` of the page before.")] = None,
        kind: Annotated[JobKind | None, Query(description="Only jobs of this kind.")] = None,
        state: Annotated[JobState | None, Query(description="Only jobs in this state.")] = None,
        plan_id: Annotated[PlanId | None, Query(description="Only jobs that made this plan.")] = None,
    ) -> JobList:
        return jobs.list(request.state.actor, kind, limit=limit, cursor=cursor, state=state, plan_id=plan_id)

    @app.get("/v1/jobs/{job_id}", tags=["jobs"], summary="Read a job's state", responses=problems(400, 404, 503))
    @opened_to(Door.ANY_KEY)
    def read_job(job_id: _StoredId, request: Request) -> JobAnswer:
        return jobs.read(job_id, request.state.actor)

    @app.get(
        "/v1/jobs/{job_id}/result",
        tags=["jobs"],
        summary="Read what a job made",
        response_model=dict[str, Any],
        responses=problems(400, 404, 409, 503),
    )
    @opened_to(Door.ANY_KEY)
    def read_result(job_id: _StoredId, request: Request) -> Response:
        body = jobs.result(job_id, request.state.actor)
        request.state.buffer.answer(len(body))
        return Response(body, media_type="application/json")


def _add_changing(app: FastAPI, jobs: JobHandler) -> None:
    @app.post(
        "/v1/jobs/{job_id}/cancel",
        tags=["jobs"],
        summary="Cancel a job",
        status_code=202,
        responses=problems(400, 404, 503),
    )
    @opened_to(Door.ANY_KEY)
    def cancel_job(job_id: _StoredId, request: Request) -> JobAnswer:
        return jobs.change(JobStore.cancel, job_id, request.state.actor)

    @app.delete(
        "/v1/jobs/{job_id}",
        tags=["jobs"],
        summary="Delete a job that has ended; a plan that it made stays",
        status_code=204,
        responses=problems(400, 404, 409, 503),
    )
    @opened_to(Door.ANY_KEY)
    def delete_job(job_id: _StoredId, request: Request) -> None:
        jobs.delete(job_id, request.state.actor)

    @app.patch(
        "/v1/jobs/{job_id}",
        tags=["jobs"],
        summary="Give a job that waits another priority",
        responses=problems(400, 404, 408, 409, 413, 415, 422, 503),
    )
    @opened_to(Door.ANY_KEY)
    async def prioritise_job(
        job_id: _StoredId, received: Annotated[ReceivedBody[JobChange], Depends(SecretBody(JobChange))]
    ) -> JobAnswer:
        return await jobs.prioritise(received, job_id)

    @app.post(
        "/v1/jobs/{job_id}/stop",
        tags=["jobs"],
        summary="Stop a job's search, and keep the best plan found",
        status_code=202,
        responses=problems(400, 404, 409, 503),
    )
    @opened_to(Door.ANY_KEY)
    def stop_job(job_id: _StoredId, request: Request) -> JobAnswer:
        return jobs.change(JobStore.stop, job_id, request.state.actor)

    @app.post(
        "/v1/jobs/{job_id}/retry",
        tags=["jobs"],
        summary="Try a job again that failed or was cancelled",
        status_code=202,
        responses=problems(400, 404, 409, 503),
    )
    @opened_to(Door.ANY_KEY)
    def retry_job(job_id: _StoredId, request: Request) -> JobAnswer:
        return jobs.change(JobStore.retry, job_id, request.state.actor)
