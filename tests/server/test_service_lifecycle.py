"""The service under load, when its parts die, and when it is told to stop."""

import asyncio
import concurrent.futures
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from autoshard.cli import main
from autoshard.core.errors import InvalidOptionError
from costmodel.registry.versions import SHIPPED_VARIABLE, Registry
from server.planning.workers import WorkerPool
from server.problems import OvertimeError
from server.settings import ServerSettings
from server.tasks.work import Body, Work, WorkKind

TASK = {"tables": "criteo-kaggle", "topology": "cpu-8", "planner": "cost-greedy"}
#: Nine equal tables are never even on eight ranks, so that the search goes on for as long as it may.
LONG = {
    "tables": {
        "schema": "autoshard.tables/1",
        "batch_size": 65536,
        "tables": [
            {
                "name": f"t{index}",
                "num_embeddings": 100_000,
                "embedding_dim": 64,
                "dtype": "fp32",
                "pooling": "sum",
                "features": [{"name": f"f{index}", "pooling_factor": 10.0}],
                "access": {"kind": "uniform"},
            }
            for index in range(83)
        ],
    },
    "topology": "a100-8",
    "planner": "auto",
    "options": {"policy": False},
    "time_limit_s": 2.0,
}


def test_a_burst_waits_for_its_turn_and_health_still_answers(service):
    with service.client() as client, concurrent.futures.ThreadPoolExecutor(3) as threads:
        posted = [threads.submit(client.post, "/v1/plans", json={**LONG, "time_limit_s": 0.5}) for _ in range(3)]
        assert client.get("/livez").status_code == 200
        assert [future.result().status_code for future in posted] == [200] * 3


@pytest.mark.parametrize("planner", [pytest.param("auto", marks=pytest.mark.slow), "sleeper"])
def test_a_client_that_leaves_stops_its_search(own_service, planner, tmp_path, monkeypatch):
    """One that heeds it ends of itself; the process of another one is replaced."""
    (tmp_path / "sleeping.py").write_text(SLEEPER)
    distribution = tmp_path / "sleeping-1.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: sleeping\nVersion: 1\n")
    (distribution / "entry_points.txt").write_text("[autoshard.planners]\nsleeper = sleeping:Sleeper\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    service = own_service("--workers", "1")
    options = LONG["options"] if planner == "auto" else {}
    body = {**LONG, "planner": planner, "options": options, "time_limit_s": 60}
    with service.client() as client:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/plans", json=body, timeout=3)
        left = time.monotonic()
        while not (ended := [line for line in service.log() if line.get("status") == 408]):
            assert time.monotonic() < left + 20
            time.sleep(0.05)
        assert ended[0]["duration_ms"] < 3000 + 1500
        assert client.get("/v1/plans").json()["plans"] == []
        assert client.post("/v1/plans", json=TASK).status_code == 200
    replaced = [line for line in service.log() if line["event"] == "worker died"]
    assert replaced == []


SLEEPER = """
import time
from autoshard.planners.planner import NoOptions

class Sleeper:
    name, summary, options_type = "sleeper", "Heeds nothing.", NoOptions

    def plan(self, request):
        time.sleep(request.time_limit_s)
"""


@pytest.mark.slow
def test_what_does_not_fit_the_queue_is_turned_away(own_service):
    service = own_service("--workers", "2", "--per-client", "2", "--queue", "1")
    with service.client() as client, concurrent.futures.ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda _: client.post("/v1/plans", json=LONG), range(6)))
    assert sorted(answer.status_code for answer in answers) == [200] * 3 + [429] * 3
    for answer in answers:
        if answer.status_code == 429:
            assert answer.json()["type"] == "urn:autoshard:problem:too-many-requests"
            assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.slow
def test_a_dead_worker_is_an_error_and_is_replaced(own_service):
    service = own_service("--workers", "2")
    with service.client() as client, concurrent.futures.ThreadPoolExecutor(1) as threads:
        posted = threads.submit(client.post, "/v1/plans", json={**LONG, "time_limit_s": 60.0})
        eventually(lambda: num_running(client) == 1)
        pids = worker_pids(service.process.pid)
        assert len(pids) == 2
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        answer = posted.result()
        assert answer.status_code == 500
        assert answer.json()["type"] == "urn:autoshard:problem:internal"
        deadline = time.monotonic() + 60
        while (answer := client.post("/v1/plans", json=TASK)).status_code != 200:
            assert answer.status_code in (500, 503)
            assert time.monotonic() < deadline
            time.sleep(0.2)


def worker_pids(parent):
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
            command = status.with_name("cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == parent and b"spawn_main" in command:
            found.append(int(status.parent.name))
    return found


def test_sigterm_lets_a_running_request_end_and_exits_with_0(own_service):
    service = own_service("--workers", "1")
    with service.client() as client, concurrent.futures.ThreadPoolExecutor(1) as threads:
        posted = threads.submit(client.post, "/v1/plans", json=LONG)
        eventually(lambda: num_running(client) == 1)
        pids = worker_pids(service.process.pid)
        assert len(pids) == 1
        assert service.stop() == 0
        assert posted.result().status_code == 200
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.slow
def test_sigterm_to_all_processes_lets_running_and_waiting_requests_end(own_service):
    service = own_service("--workers", "1")
    with service.client() as client, concurrent.futures.ThreadPoolExecutor(2) as threads:
        posted = [threads.submit(client.post, "/v1/plans", json=LONG) for _ in range(2)]
        eventually(lambda: (num_running(client), num_waiting(client)) == (1, 1))
        for pid in worker_pids(service.process.pid):  # as service managers do, who know only a group of processes
            os.kill(pid, signal.SIGTERM)
        assert service.stop() == 0
        assert [future.result().status_code for future in posted] == [200, 200]


@pytest.mark.slow
def test_a_worker_that_dies_while_it_starts_is_replaced_later_each_time(own_service):
    service = own_service("--workers", "1", until_ready=False)
    killed = set()
    for _ in range(2):
        (pid,) = eventually(lambda: set(worker_pids(service.process.pid)) - killed)
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)
    with service.client() as client:
        eventually(lambda: client.get("/readyz").status_code == 200)
        assert client.post("/v1/plans", json=TASK).status_code == 200
    events = [line["event"] for line in service.log()]
    assert events.index("worker ended while it started") < events.index("listening")
    assert [line["next_start_s"] for line in service.log() if "next_start_s" in line] == [0.5, 1.0]


@pytest.mark.slow
def test_a_client_that_takes_all_it_may_leaves_a_worker_to_others(own_service):
    service = own_service("--workers", "2")
    other = httpx.HTTPTransport(local_address="127.0.0.2")  # clients without keys are told apart by their addresses
    with (
        service.client() as client,
        httpx.Client(base_url=service.url, timeout=60, transport=other) as second,
        concurrent.futures.ThreadPoolExecutor(2) as threads,
    ):
        posted = [threads.submit(client.post, "/v1/plans", json={**LONG, "time_limit_s": 10.0}) for _ in range(2)]
        eventually(lambda: num_waiting(client) == 1)
        assert second.post("/v1/plans", json=TASK).status_code == 200
        assert not any(future.done() for future in posted)
        assert [future.result().status_code for future in posted] == [200, 200]


def num_running(client):
    return gauge(client, "autoshard_running_requests")


def num_waiting(client):
    return gauge(client, "autoshard_waiting_requests")


def gauge(client, name):
    (value,) = re.findall(rf"^{name} (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return float(value)


def eventually(condition):
    deadline = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


@pytest.mark.slow
def test_sigterm_ends_what_takes_longer_than_the_grace(own_service):
    service = own_service("--workers", "1", "--grace", "0")
    with service.client() as client, concurrent.futures.ThreadPoolExecutor(1) as threads:
        posted = threads.submit(client.post, "/v1/plans", json={**LONG, "time_limit_s": 60.0})
        eventually(lambda: num_running(client) == 1)
        assert service.stop() == 0
        answer = posted.result()
        assert answer.status_code == 503
        assert answer.json()["detail"] == "the service is being stopped"


@pytest.mark.slow
def test_sigterm_while_models_are_loaded_exits_with_0(own_service):
    service = own_service(until_ready=False)
    with service.client() as client:
        answer = client.get("/readyz")
        assert answer.status_code in (200, 503)  # whichever was first
        if answer.status_code == 503:
            assert answer.json() == {"status": "loading"}
            assert client.post("/v1/plans", json=TASK).json()["type"] == "urn:autoshard:problem:not-ready"
    assert service.stop() == 0


@pytest.mark.slow
def test_a_planner_that_does_not_keep_its_time_limit_is_ended():
    settings = ServerSettings(num_workers=1, overtime_s=0.5)
    body = {"tables": "metasyn", "topology": "a100-32", "planner": "torchrec", "time_limit_s": 0.1}

    async def plan_twice():
        failures = []
        pool = WorkerPool(settings, on_ready=lambda: None, on_failure=failures.append)
        pool.start()
        try:
            while not pool.is_ready:
                await asyncio.sleep(0.05)
            with pytest.raises(OvertimeError):
                await pool.answer(Work(kind=WorkKind.PLAN, body=Body(json.dumps(body).encode())), "client")
            # Waits until another process has taken the place of the one that was ended.
            return failures, await pool.answer(Work(kind=WorkKind.PLAN, body=Body(json.dumps(TASK).encode())), "client")
        finally:
            await pool.stop()

    failures, reply = asyncio.run(asyncio.wait_for(plan_twice(), 60))
    assert failures == []
    assert reply.status == 200


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "shipped"), [("cost", False), ("policy", True)])
def test_a_damaged_model_stops_the_service(kind, shipped, tmp_path, monkeypatch):
    registry = tmp_path / "registry"
    version = Registry(registry).publish(kind, "cpu", {"weights": np.zeros(1)}, {"device": "cpu"})
    (registry / kind / "cpu" / version / "card.json").write_text("{")
    command = [Path(sys.executable).with_name("autoshard"), "serve", "--port", "0"]
    if shipped:
        monkeypatch.setenv(SHIPPED_VARIABLE, str(registry))
    else:
        command += ["--registry", registry]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    *_, last = result.stderr.splitlines()
    assert last.startswith("error: ")
    assert "card.json" in last
    assert '"event": "listening"' not in result.stderr


@pytest.mark.slow
def test_a_planner_that_cannot_be_loaded_fails_its_own_requests_only(own_service, tmp_path, monkeypatch):
    installed = tmp_path / "plugins" / "broken-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("[autoshard.planners]\nbroken = nowhere_at_all:Planner\n")
    monkeypatch.setenv("PYTHONPATH", str(installed.parent))
    service = own_service("--workers", "1")
    with service.client() as client:
        answer = client.post("/v1/plans", json={**TASK, "planner": "broken"})
        assert answer.status_code == 500
        assert "planner broken: nowhere_at_all:Planner cannot be loaded: ModuleNotFound" in answer.json()["detail"]
        assert client.post("/v1/plans", json=TASK).status_code == 200
    assert any(line["event"] == "planner unavailable" for line in service.log())


def test_a_port_in_use_is_one_line(capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert capfd.readouterr().err == f"error: --port: cannot listen on 127.0.0.1:{port}: port {port} is in use\n"


@pytest.mark.parametrize("grace_s", [float("inf"), float("nan"), -1.0, 1e300])
def test_a_grace_period_is_a_number_of_seconds(grace_s):
    with pytest.raises(InvalidOptionError, match=r"grace_s: must be in \[0, 3600\]"):
        ServerSettings(grace_s=grace_s)
