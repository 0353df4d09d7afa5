"""Errors of all requests, answered as `application/problem+json`."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from autoshard.api import Problem
from autoshard.core.errors import AutoshardError, FormatError
from server.problems import MEDIA_TYPE, UNEXPECTED, InternalError, UnauthenticatedError, problem_of, retry_after_s


class RefusedError(AutoshardError):
    """What a planning process refused, with its answer.

    Args:
        status: HTTP status.
        body: JSON text of the problem.
    """

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__("a planning process refused it")
        self.status = status
        self.body = body


def add_error_handlers(app: FastAPI) -> None:
    """Has the application answer every error with a problem document."""

    @app.exception_handler(AutoshardError)
    async def on_error(_: Request, error: AutoshardError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def on_bad_parameter(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        message = str(first["msg"])
        return error_response(FormatError(message[:1].lower() + message[1:], field=str(first["loc"][-1])[:100]))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        problem = Problem(
            type="about:blank", title=str(error.detail), status=error.status_code, detail=str(error.detail)
        )
        headers = dict(error.headers or {})
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:  # Starlette names those of the path's first route alone
            headers["Allow"] = ", ".join(sorted(_methods(request)))
        return _response(problem, headers)

    @app.exception_handler(Exception)
    async def on_fault(_: Request, __: Exception) -> Response:
        # The exception itself is raised on, and logged with its traceback.
        return error_response(InternalError(UNEXPECTED))


def error_response(error: AutoshardError) -> Response:
    """The answer to a request that failed so."""
    if isinstance(error, RefusedError):
        return Response(error.body, status_code=error.status, media_type=MEDIA_TYPE)
    headers, retry = {}, retry_after_s(error)
    if retry is not None:
        headers["Retry-After"] = str(retry)
    if isinstance(error, UnauthenticatedError):
        headers["WWW-Authenticate"] = "Bearer"
    return _response(problem_of(error), headers)


def _methods(request: Request) -> set[str]:
    """What all routes of a request's path answer."""
    routes = (route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE)
    return set().union(*(route.methods or () for route in routes if isinstance(route, Route)))


def _response(problem: Problem, headers: Mapping[str, str] | None) -> Response:
    body = problem.model_dump_json(exclude_none=True)
    return Response(body, status_code=problem.status, headers=dict(headers or {}), media_type=MEDIA_TYPE)
