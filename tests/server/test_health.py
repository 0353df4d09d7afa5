"""Whether the service says that it is ready: when it is, and what is missing when it is not."""

import contextlib
import os
import signal
import time

import httpx
import pytest
from starlette.testclient import TestClient

from server.planning.workers import WorkerPool
from server.settings import ServerSettings
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
