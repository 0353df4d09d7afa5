"""The REST service as an application: its routes, and what stands around them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Response
from fastapi_offline import FastAPIOffline
from starlette.types import ASGIApp

from autoshard import __version__
from server.bodies import Health
from server.planning.workers import WorkerPool
from server.settings import ServerSettings
from server.web.buffers import BufferBudget, BufferLimit
from server.web.errors import add_error_handlers
from server.web.openapi import add_published_schemas
from server.web.plans import add_plans
from server.web.request_log import RequestLog


def create_app(settings: ServerSettings, pool: WorkerPool) -> ASGIApp:
    """The service as an ASGI application.

    Args:
        settings: Limits.
        pool: What makes plans; it is started and stopped with the application.
    """

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
    add_error_handlers(app)
    _add_health(app, pool)
    add_plans(app, pool, settings)
    add_published_schemas(app)
    return RequestLog(BufferLimit(app, BufferBudget(settings)))


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
