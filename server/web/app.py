"""The REST service as an application: its routes, and what stands around them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from autoshard import __version__
from costmodel.registry.objects import RegistryObjects
from costmodel.registry.versions import default_registry
from server.health import add_health
from server.jobs.engine import JobEngine
from server.models.catalogue import ModelCatalogue
from server.models.following import follow
from server.models.shadow import ShadowPricer
from server.planning.workers import WorkerPool
from server.settings import ServerSettings
from server.storage.storage import Storage
from server.telemetry import RequestTraces
from server.web.access import AccessControl
from server.web.buffers import BufferBudget, BufferLimit
from server.web.errors import add_error_handlers
from server.web.metrics import Metrics, add_metrics
from server.web.openapi import complete_description
from server.web.reading import BodyRoute
from server.web.request_log import RequestLog
from server.web.routes.analyses import add_analyses
from server.web.routes.jobs import JobHandler, add_jobs
from server.web.routes.keys import add_keys
from server.web.routes.models import ModelHandler, add_models
from server.web.routes.page import add_pages
from server.web.routes.plans import add_plans
from server.web.routes.runs import add_runs
from server.web.routes.samples import add_samples
from server.web.routes.schedules import add_schedules
from server.web.work_handler import WorkHandler


def create_app(
    settings: ServerSettings, pool: WorkerPool, storage: Storage, is_draining: Callable[[], bool] = lambda: False
) -> ASGIApp:
    """The service as an ASGI application.

    Args:
        settings: Limits.
        pool: What makes plans; it is started and stopped with the application.
        storage: What keeps them, and the keys.
        is_draining: Whether the service was told to stop.
    """
    return guarded(make_routes(settings, pool, storage, is_draining), storage, settings)


def guarded(routes: FastAPI, storage: Storage, settings: ServerSettings) -> ASGIApp:
    """Routes behind what every request passes: who sent it, its id, log line and trace, access control, its bytes."""
    limited = BufferLimit(routes, BufferBudget(settings))
    logged: Any = RequestLog(RequestTraces(AccessControl(limited, routes, storage, settings)), routes.state.metrics)
    forwarded: Any = ProxyHeadersMiddleware(logged, list(settings.trusted_proxies or ()))
    return cast("ASGIApp", forwarded)


def make_routes(
    settings: ServerSettings, pool: WorkerPool, storage: Storage, is_draining: Callable[[], bool] = lambda: False
) -> FastAPI:
    """The routes of the service; arguments as of `create_app`."""
    metrics = Metrics(pool, settings)
    engine = JobEngine(storage, settings, metrics.count_swept)
    catalogue = ModelCatalogue(settings.registry)
    shadow = ShadowPricer(pool, storage, catalogue, settings.shadow)
    metrics.show_shadow(shadow)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        pool.start()
        loop = asyncio.get_running_loop()
        following = asyncio.create_task(follow(registry)) if registry.address is not None else None
        try:
            await run_in_threadpool(engine.start, lambda made: loop.call_soon_threadsafe(shadow.consider, made))
            yield
        finally:
            if following is not None:
                following.cancel()
            await run_in_threadpool(engine.stop)
            await pool.stop()

    registry = RegistryObjects.of(settings.registry or default_registry())
    app = FastAPIOffline(
        redoc_url=None,
        title="autoshard",
        version=__version__,
        summary="Plans how the embedding tables of recommendation models are sharded.",
        servers=[{"url": "/", "description": "The service that this document comes from."}],
        lifespan=lifespan,
        generate_unique_id_function=lambda route: route.name,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # see server.telemetry, which sees all requests
    )
    app.router.route_class = BodyRoute
    add_error_handlers(app)
    add_health(app, pool, storage, is_draining)
    app.state.metrics = metrics
    add_metrics(app, metrics)
    handler = WorkHandler(pool, storage, settings, metrics, on_plan=shadow.consider)
    jobs = JobHandler(handler, engine, storage)
    add_plans(app, jobs, handler, storage)
    add_jobs(app, jobs)
    add_keys(app, handler, storage)
    add_schedules(app, handler, storage)
    add_analyses(app, handler)
    add_runs(app, handler, storage, metrics)
    add_samples(app, handler)
    add_models(app, ModelHandler(handler, pool, storage, catalogue, shadow))
    add_pages(app, storage, jobs)
    complete_description(app)
    return app
