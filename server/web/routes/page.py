"""The page at `/`: its files, its session, and what it asks beside the rest of the service.

The page is a client of the REST service like any other. Its files hold nothing of anybody's and are open to all; with
keys, it signs in with a key or a token, and gets a session: a cookie that scripts cannot read and other sites' requests
do not carry.
"""

from __future__ import annotations

import asyncio
import importlib.resources
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Annotated, Final

from fastapi import FastAPI, Path, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from autoshard.api import (
    AuditEntry,
    Catalogue,
    JobAnswer,
    JobId,
    JobSummary,
    KeySummary,
    ModelSummary,
    PlannerSummary,
    PlanSummary,
    ScheduleAnswer,
    list_columns,
)
from autoshard.core.errors import AutoshardError
from autoshard.formats import bundled_table_sets, bundled_topologies
from autoshard.formats.imports.table_lists import FIELDS
from autoshard.planners.registry import describe_planners
from server.access import Door, opened_to
from server.problems import UnauthenticatedError
from server.storage.storage import Storage
from server.web.access import PAGE_COOKIE
from server.web.openapi import problems, shared_schema
from server.web.routes.jobs import JobHandler

#: Nothing but the service's own files runs or is loaded, and no other site may show the page.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "frame-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
#: What lists hold.
_LISTED: Final[Mapping[str, type[BaseModel]]] = {
    "plans": PlanSummary,
    "jobs": JobSummary,
    "models": ModelSummary,
    "schedules": ScheduleAnswer,
    "keys": KeySummary,
    "audit": AuditEntry,
}
_SCRIPTS: Final = ("admin.js", "app.js", "drawing.js", "jobs.js", "one.js", "planning.js", "plans.js", "service.js")
#: Files by path, with their media types.
PAGE_FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    **{f"/page/{name}": (name, "text/javascript; charset=utf-8") for name in _SCRIPTS},
    "/page/app.css": ("app.css", "text/css; charset=utf-8"),
}
#: One event of those that say what becomes of a job, as OpenAPI has it.
_JOB_EVENT: Final = {
    "type": "object",
    "required": ["event", "data"],
    "properties": {
        "event": {"const": "job"},
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": shared_schema(JobAnswer.__name__),
        },
    },
}
#: Seconds between two looks at a job, and the longest time that one request watches it: the browser asks again.
_LOOK_S, _WATCH_S = 0.5, 600.0
#: Seconds after which a line is sent although nothing has changed, so that nobody takes the connection for dead.
_ALIVE_S = 10.0
#: Seconds between two looks at whether the key, session or token that began to watch has ended.
_KEY_S = 5.0


def add_pages(app: FastAPI, storage: Storage, jobs: JobHandler) -> None:
    """Adds the routes."""
    for path, (name, media_type) in PAGE_FILES.items():
        _add_file(app, path, name, media_type)
    _add_session(app, storage)
    _add_catalogue(app)
    _add_events(app, jobs)


def _add_file(app: FastAPI, path: str, name: str, media_type: str) -> None:
    content = importlib.resources.files("server").joinpath("static", name).read_bytes()

    @app.get(path, include_in_schema=False)
    @opened_to(Door.ANYBODY)
    async def read_file() -> Response:
        return Response(content, headers={**_HEADERS, "Content-Type": media_type})


def _add_session(app: FastAPI, storage: Storage) -> None:
    @app.post("/page/session", include_in_schema=False)
    @opened_to(Door.ANY_KEY)
    def sign_in(request: Request) -> Response:
        if request.state.actor.is_anybody:
            raise UnauthenticatedError("is no key: this service has none", field="authorization")
        response = Response(status_code=204)
        secret, is_secure = storage.sessions.begin(request.state.actor), request.url.scheme == "https"
        response.set_cookie(PAGE_COOKIE, secret, httponly=True, samesite="strict", secure=is_secure)
        return response

    @app.get("/page/session", include_in_schema=False)
    @opened_to(Door.ANYBODY)
    async def read_session(request: Request) -> dict[str, bool]:
        return {"signed_in": PAGE_COOKIE in request.cookies}

    @app.delete("/page/session", include_in_schema=False)
    @opened_to(Door.ANY_KEY)
    def sign_out(request: Request) -> Response:
        storage.sessions.end(request.cookies.get(PAGE_COOKIE, ""), request.state.actor)
        response = Response(status_code=204)
        response.delete_cookie(PAGE_COOKIE, httponly=True, samesite="strict")
        return response


def _add_catalogue(app: FastAPI) -> None:
    @app.get("/v1/catalogue", tags=["plans"], summary="List what tasks may name", responses=problems())
    @opened_to(Door.ANY_KEY)
    def read_catalogue() -> Catalogue:
        return Catalogue(
            tables=list(bundled_table_sets()),
            topologies=list(bundled_topologies()),
            planners=[
                PlannerSummary(
                    name=one.name,
                    summary=one.summary,
                    options=[option.name for option in one.options],
                    takes_start=one.takes_start,
                    is_compared=one.is_compared,
                )
                for one in describe_planners()
            ],
            table_fields=list(FIELDS),
            columns={name: list_columns(model) for name, model in _LISTED.items()},
        )


def _add_events(app: FastAPI, jobs: JobHandler) -> None:
    @app.get(
        "/v1/jobs/{job_id}/events",
        operation_id="watch_job",
        tags=["jobs"],
        summary="Watch a job",
        response_class=StreamingResponse,
        responses={
            200: {
                "description": "Server-sent events `job`: the job whenever it has changed, until it has ended.",
                "content": {"text/event-stream": {"schema": _JOB_EVENT}},
            },
            **problems(400, 404, 503),
        },
    )
    @opened_to(Door.ANY_KEY)
    async def watch_job(
        job_id: Annotated[JobId, Path(description="The job's id.")], request: Request
    ) -> StreamingResponse:
        look = partial(jobs.read, job_id, request.state.actor)
        return StreamingResponse(
            _events(look, await run_in_threadpool(look), request.state.has_ended),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store"},
        )


async def _events(look: Callable[[], JobAnswer], job: JobAnswer, has_ended: Callable[[], bool]) -> AsyncIterator[str]:
    sent, quiet_s, watched_s = "", 0.0, 0.0
    while True:
        text = job.model_copy(update={"seen_at": job.created_at}).model_dump_json()
        if text != sent:
            yield f"event: job\ndata: {job.model_dump_json()}\n\n"
            sent, quiet_s = text, 0.0
        elif quiet_s >= _ALIVE_S:
            yield ": alive\n\n"
            quiet_s = 0.0
        if job.state.is_final or watched_s >= _WATCH_S:
            return
        await asyncio.sleep(_LOOK_S)
        quiet_s, watched_s = quiet_s + _LOOK_S, watched_s + _LOOK_S
        try:
            if watched_s % _KEY_S == 0 and await run_in_threadpool(has_ended):
                return
            job = await run_in_threadpool(look)
        except AutoshardError:  # the database is away: the browser asks again
            return
