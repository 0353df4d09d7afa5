"""Routes of plans."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Request, Response

from server.bodies import PlanAnswer
from server.planning.workers import WorkerPool
from server.problems import MEDIA_TYPE
from server.settings import ServerSettings
from server.web.buffers import client_of
from server.web.openapi import PLAN_BODY, problems
from server.web.reading import client_gone, read_body


def add_plans(app: FastAPI, pool: WorkerPool, settings: ServerSettings) -> None:
    """Adds the routes."""

    @app.post(
        "/v1/plans",
        tags=["plans"],
        summary="Make a plan",
        response_model=PlanAnswer,
        responses=problems(400, 408, 413, 415, 422, 429, 500, 503, 504),
        openapi_extra={"requestBody": PLAN_BODY},
    )
    async def make_plan(request: Request) -> Response:
        client, buffer = client_of(request.scope), request.state.buffer
        pool.check_room(client)
        body = await read_body(request, settings, buffer)
        gone = asyncio.ensure_future(client_gone(request))
        try:
            reply = await pool.plan(body, client, gone)
        finally:
            gone.cancel()
        buffer.answer(len(reply.body))
        media_type = "application/json" if reply.status == 200 else MEDIA_TYPE
        return Response(reply.body, status_code=reply.status, media_type=media_type)
