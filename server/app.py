"""The REST service: its routes, its limits, its answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from autoshard import __version__
from autoshard.core.errors import AutoshardError
from server.bodies import Health, PlanAnswer, Problem
from server.openapi import PLAN_BODY, PROBLEM, add_published_schemas
from server.problems import MEDIA_TYPE, BodyTimeoutError, BodyTooLargeError, InternalError, MediaTypeError, problem_of
from server.requests import RequestLog
from server.settings import ServerSettings
from server.workers import WorkerPool

_RETRY_AFTER_S = "1"
_PROBLEMS = {
    400: "The body is not JSON, or does not follow its schema.",
    408: "The body took too long to arrive.",
    413: "The body is too large.",
    415: "The body is not declared as application/json.",
    422: "The body makes no sense, or (type `urn:autoshard:problem:infeasible`) no plan fits the memory.",
    500: "A fault of the service.",
    503: "All planning processes are at work, or models are still being loaded: try again.",
    504: "The planner did not keep its time limit by far, and was ended.",
}


def create_app(settings: ServerSettings, on_failure: Callable[[str], None]) -> ASGIApp:
    """The service as an ASGI application.

    Args:
        settings: Limits and models.
        on_failure: Called with a line of text when the service cannot go on.
    """
    pool = WorkerPool(settings, on_failure)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        pool.start()
        try:
            yield
        finally:
            await pool.stop()

    app = FastAPIOffline(
        redoc_url=None,
        title="autoshard",
        version=__version__,
        summary="Plans how the embedding tables of recommendation models are sharded.",
        lifespan=lifespan,
    )
    _add_error_handlers(app)
    _add_health(app, pool)
    _add_plans(app, pool, settings)
    add_published_schemas(app)
    return RequestLog(app)


def _add_health(app: FastAPI, pool: WorkerPool) -> None:
    @app.get("/livez", tags=["health"], summary="Whether the process is alive")
    async def livez() -> Health:
        return Health(status="alive")

    @app.get(
        "/readyz",
        tags=["health"],
        summary="Whether the models are loaded and plans can be made",
        responses={503: {"model": Health, "description": "Models are still being loaded."}},
    )
    async def readyz(response: Response) -> Health:
        if pool.is_ready:
            return Health(status="ready")
        response.status_code = 503
        return Health(status="loading")


def _add_plans(app: FastAPI, pool: WorkerPool, settings: ServerSettings) -> None:
    @app.post(
        "/v1/plans",
        tags=["plans"],
        summary="Make a plan",
        response_model=PlanAnswer,
        responses={status: {"description": text, **PROBLEM} for status, text in _PROBLEMS.items()},
        openapi_extra={"requestBody": PLAN_BODY},
    )
    async def make_plan(request: Request) -> Response:
        pool.check_free()
        body = await read_body(request, settings)
        reply = await pool.plan(body)
        media_type = "application/json" if reply.status == 200 else MEDIA_TYPE
        return Response(reply.body, status_code=reply.status, media_type=media_type)


async def read_body(request: Request, settings: ServerSettings) -> bytes:
    """The body of a request, of which no more than the limit is ever held.

    Raises:
        MediaTypeError: If it is not declared as JSON.
        BodyTooLargeError: If its length, or the length in its header, is above the limit.
        BodyTimeoutError: If it does not arrive in time.
    """
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != "application/json":
        raise MediaTypeError(f"must be application/json, got {media_type[:100]!r}", field="content-type")
    too_large = BodyTooLargeError(f"must have at most {settings.max_body_bytes:,} bytes", field="body")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > settings.max_body_bytes:
        raise too_large
    chunks = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for chunk in request.stream():
                chunks += chunk
                if len(chunks) > settings.max_body_bytes:
                    raise too_large
    except TimeoutError:
        raise BodyTimeoutError(f"must arrive within {settings.body_timeout_s:g} s", field="body") from None
    return bytes(chunks)


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(AutoshardError)
    async def on_error(_: Request, error: AutoshardError) -> Response:
        return _problem_response(problem_of(error))

    @app.exception_handler(HTTPException)
    async def on_http_error(_: Request, error: HTTPException) -> Response:
        problem = Problem(
            type="about:blank", title=str(error.detail), status=error.status_code, detail=str(error.detail)
        )
        return _problem_response(problem, error.headers)

    @app.exception_handler(Exception)
    async def on_fault(_: Request, __: Exception) -> Response:
        # The exception itself is raised on, and logged with its traceback.
        return _problem_response(problem_of(InternalError("an unexpected fault; the service's log says more")))


def _problem_response(problem: Problem, headers: Any = None) -> Response:
    response = Response(
        problem.model_dump_json(exclude_none=True), status_code=problem.status, headers=headers, media_type=MEDIA_TYPE
    )
    if problem.status == 503:
        response.headers["Retry-After"] = _RETRY_AFTER_S
    return response
