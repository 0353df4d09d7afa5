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

    @app.get("/livez", tags=["health"], summary="Whether the process is alive")
    @opened_to(Door.ANYBODY)
    async def livez() -> Health:
        return Health(status="alive")

    @app.get(
        "/readyz",
        tags=["health"],
        summary="Whether plans can be made and stored",
        responses={
            503: {
                "model": Health,
                "description": "`loading` (of models), `no workers`, `no database`, or `draining` before it stops.",
            }
        },
    )
    @opened_to(Door.ANYBODY)
    async def readyz(response: Response) -> Health:
        status = "draining" if is_draining() else await readiness(pool, storage)
        response.status_code = 200 if status == "ready" else 503
        return Health(status=status)


async def readiness(pool: WorkerPool, storage: Storage) -> str:
    """`ready`, or what is missing.

    A full queue is ready: its requests are answered with `Retry-After`, and without this service they would all go to
    the others, which are as full. A queue that no process takes from is not.
    """
    if not pool.is_ready:
        return "loading"
    if pool.num_idle + pool.num_running == 0:
        return "no workers"
    try:
        await run_in_threadpool(storage.database.check)
    except StorageError:
        return "no database"
    return "ready"
