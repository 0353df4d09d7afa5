"""Routes of samples from other machines."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response

from autoshard.api import PARQUET, SampleList, SamplesAnswer, Scope
from server.access import opened_to
from server.tasks.work import WorkKind
from server.web.openapi import problems
from server.web.work_handler import WorkHandler

_FILE: dict[str, Any] = {
    "required": True,
    "content": {PARQUET: {"schema": {"type": "string", "format": "binary"}}},
    "description": "A file of a store of samples, as `autoshard collect` writes them.",
}


def add_samples(app: FastAPI, handler: WorkHandler) -> None:
    """Adds the routes."""

    @app.post(
        "/v1/samples",
        tags=["models"],
        summary="Send samples of another machine",
        response_model=SamplesAnswer,
        responses=problems(400, 408, 413, 415, 422, 429, 500, 503, 504),
        openapi_extra={"requestBody": _FILE},
    )
    @opened_to(Scope.TRAIN)
    async def send_samples(request: Request) -> Response:
        return await handler.add_samples(request)

    @app.get(
        "/v1/samples",
        tags=["models"],
        summary="Count the samples that there are",
        response_model=SampleList,
        responses=problems(400, 422, 429, 500, 503, 504),
    )
    @opened_to(Scope.TRAIN)
    async def list_samples(request: Request) -> Response:
        return await handler.read(request, WorkKind.LIST_SAMPLES)
