"""Routes that say how the service is, which need no key."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from fastapi import FastAPI, Response
from starlette.concurrency import run_in_threadpool

from autoshard.api import Health
from server.access import Door, opened_to
from server.planning.workers import WorkerPool
from server.problems import StorageError
from server.storage.storage import Storage

#: Seconds for which a check of the database counts: whoever asks has it asked no more often.
_CHECKED_S: Final = 1.0


def add_health(app: FastAPI, pool: WorkerPool, storage: Storage, is_draining: Callable[[], bool]) -> None:
    """Adds the routes.

    Args:
        app: Gets them.
        pool: The planning processes.
        storage: The database.
        is_draining: Whether the service was told to stop.
    """
    readiness = _Readiness(pool, storage)

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
        health = Health(status="draining") if is_draining() else await readiness.now()
        response.status_code = 200 if health.status == "ready" else 503
        return health


class _Readiness:
    """Whether plans can be made and stored; all who ask at the same time wait for one check of the database."""

    def __init__(self, pool: WorkerPool, storage: Storage) -> None:
        self._pool, self._storage = pool, storage
        self._check: asyncio.Task[Health] | None = None
        self._checked_s = 0.0

    async def now(self) -> Health:
        """`ready`, or what is missing.

        A full queue is ready: its requests are answered with `Retry-After`, and without this service they would all go
        to the others, which are as full. A queue that no process takes from is not.
        """
        if not self._pool.is_ready:
            return Health(status="loading")
        if self._pool.num_idle + self._pool.num_running == 0:
            return Health(status="no workers")
        if self._check is None or (self._check.done() and time.monotonic() - self._checked_s >= _CHECKED_S):
            self._check = asyncio.create_task(self._database())
        return await asyncio.shield(self._check)  # who leaves does not end it for the others

    async def _database(self) -> Health:
        try:
            await run_in_threadpool(self._storage.database.check)
            return Health(status="ready")
        except StorageError as error:
            return Health(status="no database", detail=error.message)
        finally:
            self._checked_s = time.monotonic()
