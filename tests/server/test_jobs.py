"""Jobs: done once, also where processes are killed; on SQLite and on PostgreSQL."""

import json
import signal
import time

import pytest

from autoshard.cli import main
from server.access import Actor
from server.job_bodies import JobKind, JobState
from server.jobs.engine import JobEngine
from server.problems import StorageError
from server.settings import ServerSettings
from server.storage.database import Database
from server.storage.jobs import JobStore
from server.storage.location import DATABASE_VARIABLE, parsed_url
from server.storage.storage import Storage
from server.storage.upgrading import upgrade
from tests.server.test_service_lifecycle import LONG

TASK = {"tables": "criteo-kaggle", "topology": "cpu-8", "planner": "cost-greedy"}
WAIT_S = 120


def until(client, job, *states):
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        found = client.get(f"/v1/jobs/{job}").json()
        if found["state"] in states:
            return found
        time.sleep(0.1)
    raise AssertionError(found)


def made(client, kind="plan", body=TASK, **headers):
    answer = client.post(f"/v1/jobs/{kind}", json=body, headers=headers)
    assert answer.status_code == 202, answer.text
    assert answer.headers["location"] == f"/v1/jobs/{answer.json()['id']}"
    return answer.json()["id"]


def test_a_plan_of_a_job_is_that_of_a_request(client):
    answer = client.post("/v1/plans", json=TASK, headers={"Prefer": "respond-async"})
    assert answer.status_code == 202
    job = until(client, answer.json()["id"], "succeeded", "failed")
    plan = client.post("/v1/plans", json=TASK).json()
    assert job["plan_id"] == plan["id"]
    assert client.get(f"/v1/jobs/{job['id']}/result").json() == plan
    listed = client.get("/v1/jobs", params={"kind": "plan", "state": "succeeded"}).json()["jobs"]
    assert job["id"] in [item["id"] for item in listed]


def test_a_job_with_an_idempotency_key_is_made_once(client):
    first = made(client, **{"Idempotency-Key": "one-job"})
    assert made(client, **{"Idempotency-Key": "one-job"}) == first
    until(client, first, "succeeded")


def test_a_job_that_fails_says_why_and_can_be_tried_again(client):
    job = made(client, "train-cost", {"device": "nothing-here"})
    failed = until(client, job, "failed", "succeeded")
    assert failed["state"] == "failed"
    assert "samples: is no folder" in failed["problem"]["detail"]
    assert client.get(f"/v1/jobs/{job}/result").status_code == 409
    assert client.post(f"/v1/jobs/{job}/retry").json()["attempt"] == 2
    assert until(client, job, "failed")["attempt"] == 2


def test_a_job_that_is_cancelled_ends(client):
    job = made(client, body={**LONG, "time_limit_s": 3600})
    waiting = made(client)
    until(client, job, "running")
    assert client.post(f"/v1/jobs/{waiting}/cancel").json()["state"] == "cancelled"
    assert client.post(f"/v1/jobs/{job}/cancel").json()["is_cancelling"]
    assert until(client, job, "cancelled", "succeeded")["state"] == "cancelled"
    assert client.post(f"/v1/jobs/{job}/cancel").json()["state"] == "cancelled"


@pytest.mark.parametrize(("kind", "body"), [("plan", {}), ("collect", {"seconds": 0}), ("train-cost", {"x": 1})])
def test_a_job_with_a_wrong_body_is_refused(client, kind, body):
    assert client.post(f"/v1/jobs/{kind}", json=body).status_code == 400


def test_a_job_that_is_not_there_is_not_found(client):
    for request in (client.get, lambda path: client.post(f"{path}/cancel"), lambda path: client.post(f"{path}/retry")):
        answer = request(f"/v1/jobs/{'0' * 32}")
        assert (answer.status_code, answer.json()["type"]) == (404, "urn:autoshard:problem:unknown-job")


@pytest.mark.slow
def test_a_killed_services_job_is_resumed_and_done_once(database_address, own_service, tmp_path, monkeypatch):
    monkeypatch.setenv(DATABASE_VARIABLE, database_address)
    assert main(["db", "upgrade"]) == 0
    service = own_service("--data", str(tmp_path / "data"), database=database_address)
    with service.client() as client:
        job = made(client, body={**LONG, "time_limit_s": 6})
        until(client, job, "running")
    service.process.send_signal(signal.SIGKILL)
    service.process.wait()
    again = own_service("--data", str(tmp_path / "data"), database=database_address)
    with again.client() as client:
        found = until(client, job, "succeeded", "failed", "cancelled")
        assert (found["state"], found["attempt"]) == ("succeeded", 1)
        assert [plan["id"] for plan in client.get("/v1/plans").json()["plans"]] == [found["plan_id"]]
    assert again.stop() == 0


@pytest.mark.slow
def test_a_database_that_does_not_answer_for_a_moment_fails_no_job(tmp_path, monkeypatch):
    database = Database(parsed_url(f"sqlite:///{tmp_path}/service.sqlite"))
    upgrade(database)
    storage, failures = Storage(database), [StorageError("away")] * 2
    claim, report = JobStore.claim, JobStore.report

    def claimed(self, run):
        if failures:
            raise failures.pop()
        return claim(self, run)

    def reported(self, job, log):
        if log:  # what is told once the work has been done
            raise StorageError("away")
        return report(self, job, log)

    monkeypatch.setattr(JobStore, "claim", claimed)
    monkeypatch.setattr(JobStore, "report", reported)
    engine = JobEngine(storage, ServerSettings(data=tmp_path))
    engine.start()
    try:
        run, _ = storage.add_job(JobKind.PLAN, json.dumps(TASK).encode(), "client", None, Actor())
        engine.enqueue(run)
        deadline = time.monotonic() + 60
        while not (job := storage.jobs.read(run.id)).state.is_final:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        engine.stop()
        storage.close()
    assert (job.state, job.attempt) == (JobState.SUCCEEDED, 1)
    assert failures == []
