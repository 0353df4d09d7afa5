"""Whether the service says that it is ready: when it is, and what is missing when it is not."""

import asyncio
import contextlib
import itertools
import os
import signal
import time

import httpx
import pytest
from starlette.testclient import TestClient

from server.planning.workers import WorkerPool
from server.settings import ServerSettings
from server.storage.database import Database
from server.storage.location import DATABASE_VARIABLE
from server.storage.storage import open_storage
from server.web.app import create_app

TASK = {"tables": "criteo-kaggle", "topology": "cpu-8", "planner": "cost-greedy"}


class Draining:
    now = False

    def __call__(self):
        return self.now


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    file = tmp_path / "service.sqlite"
    monkeypatch.setenv(DATABASE_VARIABLE, f"sqlite:///{file}")
    pool = WorkerPool(ServerSettings(), on_ready=lambda: None, on_failure=lambda _: None)
    draining = Draining()
    monkeypatch.setattr("server.health._CHECKED_S", 0.0)
    with contextlib.closing(open_storage()) as storage:
        client = TestClient(create_app(ServerSettings(), pool, storage, draining))

        def answer():
            found = client.get("/readyz")
            return found.status_code, found.json()["status"]

        assert answer() == (503, "loading")
        pool.is_ready = True  # and no process is left
        assert answer() == (503, "no workers")
        monkeypatch.setattr(WorkerPool, "num_idle", 1)
        assert answer() == (200, "ready")
        file.rename(tmp_path / "moved")
        file.mkdir()
        storage.database.close()
        assert answer() == (503, "no database")
        draining.now = True
        assert answer() == (503, "draining")
        assert client.get("/livez").status_code == 200


def test_who_asks_again_and_again_has_the_database_asked_once_a_second(tmp_path, monkeypatch):
    monkeypatch.setenv(DATABASE_VARIABLE, f"sqlite:///{tmp_path}/service.sqlite")
    monkeypatch.setattr(WorkerPool, "num_idle", 1)
    pool = WorkerPool(ServerSettings(), on_ready=lambda: None, on_failure=lambda _: None)
    pool.is_ready, checks, check = True, [], Database.check

    def counted(database):
        checks.append(time.monotonic())
        check(database)

    monkeypatch.setattr(Database, "check", counted)

    async def ask(app):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            for _ in range(2):
                answers = await asyncio.gather(*(client.get("/readyz") for _ in range(100)))
                assert {answer.json()["status"] for answer in answers} == {"ready"}
            await asyncio.sleep(1)
            await client.get("/readyz")

    with contextlib.closing(open_storage()) as storage:
        asyncio.run(ask(create_app(ServerSettings(), pool, storage)))
    assert len(checks) <= 3
    assert all(later - earlier >= 1 for earlier, later in itertools.pairwise(checks))


@pytest.mark.slow
def test_a_service_that_drains_takes_requests_in_and_says_so(own_service):
    service = own_service("--workers", "1", "--drain", "3")
    service.process.send_signal(signal.SIGTERM)
    with service.client() as client:
        deadline = time.monotonic() + 3
        while client.get("/readyz").json() != {"status": "draining"}:
            assert time.monotonic() < deadline
        assert httpx.post(f"{service.url}/v1/plans", json=TASK, trust_env=False).status_code == 200
    assert service.process.wait(30) == 0


@pytest.mark.slow
def test_a_second_signal_ends_the_draining(own_service):
    service = own_service("--workers", "1", "--drain", "600")
    service.process.send_signal(signal.SIGTERM)
    with service.client() as client:
        while client.get("/readyz").json() != {"status": "draining"}:
            time.sleep(0.05)
    os.kill(service.process.pid, signal.SIGTERM)
    assert service.process.wait(30) == 0
