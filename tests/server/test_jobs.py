"""Jobs: done once, also where processes are killed; on SQLite and on PostgreSQL."""

import contextlib
import json
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from sqlalchemy import update

import costmodel
from autoshard.api import JobKind, JobState, JobTask
from autoshard.cli import main
from autoshard.client import Client
from autoshard.core.choices import Alias
from costmodel.registry.versions import SHIPPED_VARIABLE, Registry
from server.access import Principal
from server.jobs.engine import JobEngine
from server.jobs.runner import JobRunner
from server.problems import BusyError, ClientBusyError, JobStateError, StorageError
from server.settings import ServerSettings
from server.storage.database import Database
from server.storage.jobs import LOST_S, JobEnd, JobOrder, JobRun, JobStore, NewJob
from server.storage.location import DATABASE_VARIABLE, parsed_url
from server.storage.schema import JOBS
from server.storage.storage import Storage
from server.storage.upgrading import upgrade
from tests.server.test_service_lifecycle import LONG

TASK = {"tables": "criteo-kaggle", "topology": "cpu-8", "planner": "cost-greedy"}
COMPARED = {"tables": "criteo-kaggle", "topology": "cpu-8", "planners": ["random"]}
WAIT_S = 120
SHIPPED = Path(costmodel.__file__).parent / "shipped"
SAMPLES = Path(__file__).parents[1] / "data" / "samples"


def until(client, job, *states, wait_s=WAIT_S):
    deadline = time.monotonic() + wait_s
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
    answer = client.post("/v1/plans", json=TASK)
    assert re.fullmatch(r"queue;dur=\d+\.\d, work;dur=\d+\.\d", answer.headers["server-timing"])
    plan = answer.json()
    assert job["plan_id"] == plan["id"]
    assert client.get(f"/v1/jobs/{job['id']}/result").json() == plan
    listed = client.get("/v1/jobs", params={"kind": "plan", "state": "succeeded"}).json()["jobs"]
    assert job["id"] in [item["id"] for item in listed]


def test_a_request_for_more_time_than_it_has_makes_a_job(client):
    answer = client.post("/v1/plans", json={**TASK, "time_limit_s": 61}, headers={"Idempotency-Key": "long"})
    assert answer.status_code == 202
    job = answer.json()["id"]
    assert answer.headers["location"] == f"/v1/jobs/{job}"
    again = client.post("/v1/plans", json={**TASK, "time_limit_s": 61}, headers={"Idempotency-Key": "long"})
    assert (again.status_code, again.json()["id"], again.headers["location"]) == (202, job, f"/v1/jobs/{job}")
    assert until(client, job, "succeeded", "failed")["plan_id"] == client.post("/v1/plans", json=TASK).json()["id"]
    # A long body is checked by a planning process.
    padding = b" " * (2 << 20)
    for path, body, status in (
        ("/v1/jobs/plan", {**TASK, "tables": "nothing"}, 422),
        ("/v1/jobs/plan", {**TASK, "nothing": 1}, 400),
        ("/v1/jobs/plan", TASK, 202),
        ("/v1/jobs/compare", {"tables": "criteo-kaggle", "topology": "cpu-8", "planners": ["random"]}, 202),
    ):
        answer = client.post(
            path, content=padding + json.dumps(body).encode(), headers={"content-type": "application/json"}
        )
        assert answer.status_code == status, answer.text
    # What a name or an option says is no time limit.
    named = {**TASK, "planner": "random", "options": {'"time_limit_s": 90': 1}}
    assert client.post("/v1/plans", json=named).status_code == 422


def test_a_job_with_an_idempotency_key_is_made_once(client):
    first = made(client, **{"Idempotency-Key": "one-job"})
    assert made(client, **{"Idempotency-Key": "one-job"}) == first
    until(client, first, "succeeded")


def test_an_idempotency_key_is_that_of_one_preference(client):
    headers = {"Idempotency-Key": "plan-or-job"}
    assert client.post("/v1/plans", json=TASK, headers=headers).status_code == 200
    again = client.post("/v1/plans", json=TASK, headers={**headers, "Prefer": "respond-async"})
    assert (again.status_code, again.json()["type"]) == (422, "urn:autoshard:problem:idempotency-key-reused")


def test_a_job_that_fails_says_why_and_can_be_tried_again(client, service):
    job = made(client, "train-cost", {"device": "nothing-here"})
    failed = until(client, job, "failed", "succeeded")
    assert failed["state"] == "failed"
    assert "DATA/samples: is no folder" in failed["problem"]["detail"]
    assert str(service.log_file.parent) not in json.dumps(failed)
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


def test_a_search_that_is_stopped_keeps_its_best_plan(client):
    job, waiting = (made(client, body={**LONG, "time_limit_s": 3600}) for _ in range(2))
    until(client, job, "running")
    refused = client.post(f"/v1/jobs/{waiting}/stop")
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:autoshard:problem:job-state")
    client.post(f"/v1/jobs/{waiting}/cancel")
    wait_for_log(client, job, "best ")
    assert client.post(f"/v1/jobs/{job}/stop").json()["is_stopped"]
    found = until(client, job, "succeeded", "failed", "cancelled", wait_s=30)
    assert (found["state"], found["is_stopped"]) == ("succeeded", True)
    answer = client.get(f"/v1/jobs/{job}/result").json()
    assert "stopped by request" in answer["plan"]["provenance"]["models"]["search"]
    assert "the search was stopped after" in answer["warnings"][0]
    assert client.get(f"/v1/plans/{found['plan_id']}").json() == answer
    assert client.post(f"/v1/jobs/{job}/stop").json()["state"] == "succeeded"


def wait_for_log(client, job, text):
    deadline = time.monotonic() + WAIT_S
    while text not in client.get(f"/v1/jobs/{job}").json()["log"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_the_client_makes_and_follows_jobs(client):
    with Client(str(client.base_url)) as typed:
        job = typed.make_job("plan", TASK)
        until(client, job.id, "succeeded")
        done = typed.read_job(job.id)
        assert (done.kind, done.state, done.attempt, done.failure) == ("plan", "succeeded", 1, None)
        assert typed.read_job_result(job.id)["id"] == done.plan_id
        assert job.id in [one.id for one in typed.list_jobs(kind="plan", state="succeeded").jobs]
        assert [one.id for one in typed.list_jobs(plan_id=done.plan_id).jobs] == [job.id]
        failed = typed.make_job("train-cost", {"device": "nothing-here"})
        until(client, failed.id, "failed")
        assert "samples: is no folder" in str(typed.read_job(failed.id).failure)
        assert typed.retry_job(failed.id).attempt == 2
        until(client, failed.id, "failed")
        assert typed.cancel_job(failed.id).state == "failed"  # it had ended


@pytest.mark.slow
def test_a_calibrated_model_becomes_the_candidate(own_service, tmp_path, monkeypatch):
    monkeypatch.setenv(SHIPPED_VARIABLE, str(SHIPPED))
    registry = tmp_path / "registry"
    registry.mkdir()
    service = own_service("--registry", str(registry), "--data", str(tmp_path / "data"))
    with service.client() as client:
        job = made(client, "calibrate", {"device": "cpu", "seconds": 2, "updates": 20})
        found = until(client, job, "succeeded", "failed", wait_s=5 * WAIT_S)
        assert found["state"] == "succeeded", found
        result = client.get(f"/v1/jobs/{job}/result").json()
        state = client.get(f"/v1/models/cost/{result['name']}").json()
        assert (state["candidate"], result["alias"]) == (result["id"], "candidate")
        assert state["production"] == Registry(SHIPPED).production_id("cost", result["name"])
        assert result["num_measured"] > 0
        assert list((tmp_path / "data" / "calibration").rglob("*.parquet"))
        long = made(client, "calibrate", {"device": "cpu", "seconds": 3600})
        until(client, long, "running")
        client.post(f"/v1/jobs/{long}/cancel")
        assert until(client, long, "cancelled", "succeeded", "failed")["state"] == "cancelled"
        assert client.get(f"/v1/models/cost/{result['name']}").json()["candidate"] == result["id"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "body", "model"),
    [
        (JobKind.TRAIN_COST, {"updates": 20}, ("cost", "cpu")),
        (JobKind.TRAIN_POLICY, {"num_tasks": 2, "search_seconds": 0.2, "updates": 2}, ("policy", "any")),
    ],
)
def test_what_a_team_trains_becomes_the_candidate(tmp_path, kind, body, model):
    shutil.copytree(SAMPLES, tmp_path / "data" / "teams" / "ads" / "samples")
    settings = ServerSettings(registry=tmp_path / "registry", data=tmp_path / "data")
    with contextlib.closing(Database(parsed_url(f"sqlite:///{tmp_path}/service.sqlite"))) as database:
        upgrade(database)
        storage = Storage(database)
        job = NewJob(kind=kind, request=json.dumps(body).encode(), task="{}", client="key of ads", team="ads")
        storage.add_job(job, None, Principal(team="ads"))
        reply = JobRunner(storage, settings).do(storage.jobs.claim())
    result = json.loads(reply.body)
    assert (reply.status, result.get("alias"), result.get("promoted")) == (200, "candidate", False), result
    against = {one["against"] for one in result["comparisons"]}
    assert ("cost-greedy" in against) == (kind is JobKind.TRAIN_POLICY)
    models = Registry(settings.registry)
    assert [change.id for change in models.history(*model, Alias.CANDIDATE)] == [result["id"]]
    assert models.history(*model) == ()


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("plan", {}),
        ("calibrate", {"seconds": -1}),
        ("collect", {"seconds": 0}),
        ("train-cost", {"x": 1}),
        ("compare", {**COMPARED, "planners": ["auto", "auto"]}),
        ("compare", {**COMPARED, "options": {"neo": {}}}),
    ],
)
def test_a_job_with_a_wrong_body_is_refused(client, kind, body):
    assert client.post(f"/v1/jobs/{kind}", json=body).status_code == 400


def test_planners_that_a_job_compares_have_their_time_each(client):
    job = made(client, "compare", {**COMPARED, "planners": ["random", "size-greedy", "dim-greedy"], "time_limit_s": 30})
    found = until(client, job, "succeeded", "failed")
    assert (found["state"], found["limit_s"]) == ("succeeded", 90)
    compared = client.get(f"/v1/jobs/{job}/result").json()["comparison"]["planners"]
    assert [row["failure"] for row in compared] == [None] * 3


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
def test_a_killed_services_job_is_done_by_another_one(own_service, tmp_path, monkeypatch, postgresql):
    address = postgresql.new_database()
    monkeypatch.setenv(DATABASE_VARIABLE, address)
    assert main(["db", "upgrade"]) == 0
    data = ("--data", str(tmp_path / "data"))
    services = [own_service(*data, folder=tmp_path / f"replica-{number}", database=address) for number in range(2)]
    with services[0].client() as client:
        job = made(client, body={**LONG, "time_limit_s": 6})
        until(client, job, "running")
    victim, other = sorted(services, key=lambda one: not any(line["event"] == "job begun" for line in one.log()))
    victim.process.send_signal(signal.SIGKILL)
    victim.process.wait()
    with other.client() as client:
        found = until(client, job, "succeeded", "failed", "cancelled")
        assert (found["state"], found["attempt"]) == ("succeeded", 1)
    assert [line["start"] for line in other.log() if line["event"] == "job begun"] == [2]
    assert other.stop() == 0


@pytest.fixture
def stored(database_address):
    """The stores of a new database."""
    database = Database(parsed_url(database_address))
    upgrade(database)
    yield Storage(database)
    database.close()


def new(client="client", task=None, *, limit_s=1, priority=0):
    task = task or JobTask(limit_s=limit_s).model_dump_json()
    request = json.dumps(TASK).encode()
    return NewJob(kind=JobKind.PLAN, request=request, task=task, client=client, team="", priority=priority)


def add(stored, client="client", **fields):
    return json.loads(stored.add_job(new(client, **fields), None, Principal()).body)["id"]


def silence(stored, job_id):
    """Has a job's run be silent for as long as lost ones are."""
    with stored.database.writing() as connection:
        older = JOBS.c.seen_us - int(1e6 * LOST_S) - 1
        connection.execute(update(JOBS).where(JOBS.c.id == job_id).values(seen_us=older))


def test_clients_take_turns_and_each_has_its_oldest_job_done(stored):
    first, second, third = (add(stored, "a") for _ in range(3))
    other, later = add(stored, "b"), add(stored, "b")
    claimed = []
    while job := stored.jobs.claim():
        claimed.append(job.run.id)
    assert claimed == [first, other, second, later, third]


def test_one_clients_long_jobs_leave_a_place_for_others(stored):
    long = [add(stored, "a", limit_s=3600) for _ in range(50)]
    assert stored.jobs.claim().run.id == long[0]
    assert stored.jobs.claim(is_last_place=True) is None
    short = add(stored, "b")
    assert stored.jobs.claim(is_last_place=True).run.id == short
    with stored.database.writing() as connection:
        stored.jobs.finish(connection, JobRun(id=long[0], attempt=1), JobEnd(state=JobState.SUCCEEDED))
    assert stored.jobs.claim(is_last_place=True).run.id == long[1]


def test_a_priority_comes_first_even_in_the_last_place(stored):
    first, urgent, late = add(stored, "a"), add(stored, "a", priority=1), add(stored, "b", priority=-1)
    assert stored.jobs.claim().run.id == urgent
    assert [job.position for job in stored.jobs.list("", list(JobKind), limit=9, state=None, cursor=None).jobs] == [
        2,
        None,
        1,
    ]
    assert stored.jobs.claim().run.id == first
    other = add(stored, "a", priority=2)
    assert stored.jobs.claim(is_last_place=True).run.id == other
    assert stored.jobs.claim(is_last_place=True).run.id == late


def test_a_job_that_waits_is_moved(stored):
    first, second, third = (add(stored, "a") for _ in range(3))
    assert stored.jobs.prioritise(third, Principal(), 5).position == 1
    assert stored.jobs.prioritise(first, Principal(), -1).position == 3
    assert [stored.jobs.claim().run.id for _ in range(3)] == [third, second, first]
    with pytest.raises(JobStateError, match="the job is running; one that waits can be given another priority"):
        stored.jobs.prioritise(third, Principal(), 0)


def test_a_list_says_what_jobs_plan_for_whom_and_when_they_begin(database_address):
    database = Database(parsed_url(database_address))
    upgrade(database)
    stored = Storage(database, num_places=2)
    task = JobTask(tables="criteo-kaggle", topology="cpu-8", planner="auto", limit_s=97).model_dump_json()
    jobs = [json.loads(stored.add_job(new("a", task), None, Principal()).body) for _ in range(3)]
    stored.jobs.claim()
    short = add(stored, "b", limit_s=7)
    add(stored, "c")
    found = {job.id: job for job in stored.jobs.list("", list(JobKind), limit=9, state=None, cursor=None).jobs}
    assert [(job.owner, job.position, job.begins_in_s) for job in found.values()] == [
        ("c", 2, 10),
        ("b", 1, 0),
        ("a", 4, 200),
        ("a", 3, 100),  # the place that c leaves before is kept for others
        ("a", None, None),
    ]
    told = found[jobs[0]["id"]]
    assert (told.tables, told.topology, told.planner, told.limit_s) == ("criteo-kaggle", "cpu-8", "auto", 97)
    assert stored.jobs.read(short, "").position == 1
    database.close()


def test_retries_and_cancelled_attempts_count_to_a_clients_limit(stored):
    jobs = [add(stored, limit_s=3600) for _ in range(50)]
    running = stored.jobs.claim()
    with pytest.raises(ClientBusyError, match="50 jobs of this client") as error:
        add(stored)
    assert 3600 < error.value.retry_after_s < 3605
    assert stored.jobs.cancel(running.run.id, Principal()).is_cancelling
    with pytest.raises(ClientBusyError):  # until its process has ended
        add(stored)
    assert stored.finish_job(running, JobEnd(state=JobState.CANCELLED), None)
    assert stored.jobs.cancel(jobs[1], Principal()).state is JobState.CANCELLED
    again = [add(stored) for _ in range(2)]
    for job in jobs[:2]:
        with pytest.raises(ClientBusyError):
            stored.jobs.retry(job, Principal())
    stored.jobs.cancel(again[0], Principal())
    assert stored.jobs.retry(jobs[0], Principal()).state is JobState.QUEUED
    for number in range(50):
        add(stored, f"client-{number}")
    with pytest.raises(BusyError, match="100 jobs are unfinished"):
        add(stored, "another")


def test_cancelled_attempts_take_no_time_from_others(stored):
    for _ in range(40):
        stored.jobs.cancel(add(stored, "a"), Principal())
    other = add(stored, "b")
    assert stored.jobs.claim().run.id == other


def test_a_job_whose_run_is_silent_is_done_by_another_one_and_ended_once(stored):
    job_id, waiting = add(stored), add(stored)
    lost = stored.jobs.claim()
    assert (lost.run.id, lost.num_starts) == (job_id, 1)
    silence(stored, job_id)
    found = stored.jobs.claim()
    assert (found.run, found.num_starts) == (lost.run, 2)
    assert stored.jobs.claim().run.id == waiting
    assert stored.jobs.claim() is None
    assert stored.jobs.report(lost, "late") is JobOrder.LEAVE
    assert stored.jobs.report(found, "on time") is JobOrder.GO_ON
    end = JobEnd(state=JobState.SUCCEEDED, result=b"{}")
    assert [stored.finish_job(job, end, None) for job in (found, lost)] == [True, False]


def test_of_threads_that_claim_at_the_same_time_each_gets_a_job_of_its_own(stored):
    jobs = {add(stored) for _ in range(4)}
    claimed = []
    threads = [threading.Thread(target=lambda: claimed.append(stored.jobs.claim())) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {job.run.id for job in claimed if job is not None} == jobs
    assert claimed.count(None) == 2


def test_a_job_that_ended_its_service_each_time_fails(stored, tmp_path):
    job_id = add(stored)
    for _ in range(21):
        job = stored.jobs.claim()
        silence(stored, job_id)
    JobRunner(stored, ServerSettings(data=tmp_path)).do(job)
    failed = stored.jobs.read(job_id, "")
    assert failed.state is JobState.FAILED
    assert "was ended 20 times while it ran" in failed.problem.detail
    assert stored.jobs.retry(job_id, Principal()).state is JobState.QUEUED
    assert stored.jobs.claim().num_starts == 1


def test_a_job_without_a_folder_fails_and_says_so(stored, tmp_path):
    (tmp_path / "jobs").touch()
    job_id = add(stored)
    JobRunner(stored, ServerSettings(data=tmp_path)).do(stored.jobs.claim())
    assert stored.jobs.read(job_id, "").problem.detail == "the job's folder cannot be made: Not a directory"


def test_a_fault_ends_no_thread_of_jobs(stored, tmp_path, monkeypatch):
    faults = [ZeroDivisionError("a fault"), StorageError("away")]
    claim = JobStore.claim

    def faulty(self, **place):
        if faults:
            raise faults.pop()
        return claim(self, **place)

    monkeypatch.setattr(JobStore, "claim", faulty)
    (tmp_path / "jobs").touch()
    job_id, engine = add(stored), JobEngine(stored, ServerSettings(data=tmp_path), retry_s=0.0)
    told = []
    engine.start(told.append)
    try:
        deadline = time.monotonic() + 60
        while not stored.jobs.read(job_id, "").state.is_final:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        engine.stop()
    assert faults == []
    assert [reply.status for reply in told] == [500]


@pytest.mark.slow
def test_a_database_that_does_not_answer_for_a_moment_fails_no_job(tmp_path, monkeypatch):
    database = Database(parsed_url(f"sqlite:///{tmp_path}/service.sqlite"))
    upgrade(database)
    storage, failures = Storage(database), [StorageError("away")] * 2
    claim, report = JobStore.claim, JobStore.report

    def claimed(self, **place):
        if failures:
            raise failures.pop()
        return claim(self, **place)

    def reported(self, job, log):
        if log:  # what is told once the work has been done
            raise StorageError("away")
        return report(self, job, log)

    monkeypatch.setattr(JobStore, "claim", claimed)
    monkeypatch.setattr(JobStore, "report", reported)
    engine = JobEngine(storage, ServerSettings(data=tmp_path))
    engine.start()
    try:
        made = storage.add_job(new(), None, Principal())
        engine.wake()
        deadline = time.monotonic() + 60
        while not (job := storage.jobs.read(json.loads(made.body)["id"], "")).state.is_final:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        engine.stop()
        storage.close()
    assert (job.state, job.attempt) == (JobState.SUCCEEDED, 1)
    assert failures == []
