"""Routes that say how the service is, which need no key."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI, Response
from starlette.concurrency import run_in_threadpool

from autoshard.api import Health
from server.access import Door, opened_to
from server.planning.workers import WorkerPool
from server.problems import StorageError
from server.storage.storage import Storage


def add_health(app: FastAPI, pool: WorkerPool, storage: Storage, is_draining: Callable[[], bool]) -> None:
    """Adds the routes.

    Args:
        app: Gets them.
        pool: The planning processes.
        storage: The database.
        is_draining: Whether the service was told to stop.
    """

    @app.get("/livez", tags=["health"], summary="Whether the process is alive", response_model_exclude_none=True)
    @opened_to(Door.ANYBODY)
    async def livez() -> Health:
        return Health(status="alive")

    @app.get(
        "/readyz",
        tags=["health"],
        summary="Whether plans can be made and stored",
        response_model_exclude_none=True,
        responses={
            503: {
                "model": Health,
                "description": "`loading` (of models), `no workers`, `no database`, or `draining` before it stops.",
            }
        },
    )
    @opened_to(Door.ANYBODY)
    async def readyz(response: Response) -> Health:
        health = Health(status="draining") if is_draining() else await readiness(pool, storage)
        response.status_code = 200 if health.status == "ready" else 503
        return health


async def readiness(pool: WorkerPool, storage: Storage) -> Health:
    """`ready`, or what is missing.

    A full queue is ready: its requests are answered with `Retry-After`, and without this service they would all go to
    the others, which are as full. A queue that no process takes from is not.
    """
    if not pool.is_ready:
        return Health(status="loading")
    if pool.num_idle + pool.num_running == 0:
        return Health(status="no workers")
    try:
        await run_in_threadpool(storage.database.check)
    except StorageError as error:
        return Health(status="no database", detail=error.message)
    return Health(status="ready")
