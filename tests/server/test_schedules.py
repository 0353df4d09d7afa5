"""Schedules: each time makes one job, whichever process fires; on SQLite and on PostgreSQL."""

import signal
import threading
import time
from contextlib import ExitStack, closing

import pytest
from sqlalchemy import create_engine, delete, text, update

from autoshard.api import JobKind, ScheduleBody
from autoshard.cli import main
from server.access import Principal
from server.storage.database import Database
from server.storage.location import DATABASE_VARIABLE, parsed_url
from server.storage.schema import JOBS, SCHEDULES, now_us
from server.storage.storage import Storage
from server.storage.upgrading import upgrade

NIGHTLY = {"name": "nightly", "cron": "0 3 * * *", "kind": "collect", "body": {"seconds": 600.0}}
#: Jobs that end at once: there is nothing to train from.
EACH_SECOND = {"name": "each-second", "cron": "* * * * * *", "kind": "train-cost", "body": {"device": "nothing-here"}}
WAIT_S = 240


def test_a_schedule_is_made_paused_and_deleted(client):
    made = client.post("/v1/schedules", json=NIGHTLY)
    address = "/v1/schedules/nightly"
    assert (made.status_code, made.headers["location"]) == (201, address)
    found = client.get(address).json()
    assert (
        found
        == made.json()
        == {**NIGHTLY, **{name: found[name] for name in ("owner", "is_paused", "last_fired_at", "next_fires_at")}}
    )
    assert (found["is_paused"], found["last_fired_at"], found["next_fires_at"][10:]) == (
        False,
        None,
        "T03:00:00.000+00:00",
    )
    again = client.post("/v1/schedules", json=NIGHTLY)
    assert (again.status_code, again.json()["type"]) == (409, "urn:autoshard:problem:schedule-exists")
    assert client.get("/v1/schedules").json() == {"schedules": [found]}
    paused = client.post(f"{address}/pause").json()
    assert (paused["is_paused"], paused["next_fires_at"]) == (True, None)
    assert client.post(f"{address}/resume").json() == found
    assert client.delete(address).status_code == 204
    for answer in (client.get(address), client.delete(address), client.post(f"{address}/pause")):
        assert (answer.status_code, answer.json()["type"]) == (404, "urn:autoshard:problem:unknown-schedule")


@pytest.mark.parametrize(
    "cron", ["", "nightly", "@daily", "61 * * * *", "* * * *", "0 0 30 2 *", "R * * * *", "h * * * *", "* * * * * * *"]
)
def test_a_cron_expression_that_is_none_is_refused_in_one_line(client, cron):
    answer = client.post("/v1/schedules", json={**NIGHTLY, "cron": cron})
    assert answer.status_code == 422, answer.text
    problem = answer.json()
    assert problem["field"] == "cron"
    assert problem["detail"].startswith("cron: must be five fields")
    assert "\n" not in problem["detail"]


@pytest.mark.parametrize(
    "change",
    [
        {"name": "../x"},
        {"name": "a" * 65},
        {"kind": "plan"},
        {"body": {"seconds": -1}},
        {"body": {"x": 1}},
        {"more": 1},
    ],
)
def test_a_wrong_schedule_is_refused(client, change):
    assert client.post("/v1/schedules", json={**NIGHTLY, **change}).status_code == 400
    assert client.get("/v1/schedules").json() == {"schedules": []}


@pytest.mark.slow
def test_each_firing_makes_one_job_also_where_a_process_is_killed(database_address, own_service, tmp_path, monkeypatch):
    monkeypatch.setenv(DATABASE_VARIABLE, database_address)
    assert main(["db", "upgrade"]) == 0
    one_process = database_address.startswith("sqlite")  # versions before 3.51.3 corrupt files of several
    services = [
        own_service(folder=tmp_path / f"replica-{number}", database=database_address)
        for number in range(1 if one_process else 2)
    ]
    with ExitStack() as opened:
        first, last = services[0], services[-1]
        client = opened.enter_context(last.client())
        begun = time.time()
        assert client.post("/v1/schedules", json=EACH_SECOND).status_code == 201
        made = until(lambda: found if len(found := jobs(client)) >= 4 else None)
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
        if one_process:
            last = own_service(folder=tmp_path / "replica-0", database=database_address)
            client = opened.enter_context(last.client())
        until(lambda: len(jobs(client)) > len(made) + 2)
        assert client.post("/v1/schedules/each-second/pause").json()["is_paused"]
        assert until(lambda: audited(database_address) == jobs(client))
        assert len(jobs(client)) <= time.time() - begun + 2  # at most one each second, of both processes
        assert last.stop() == 0


def jobs(client):
    return [job["id"] for job in client.get("/v1/jobs", params={"kind": "train-cost", "limit": 200}).json()["jobs"]]


def until(condition):
    deadline = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return found


def audited(address):
    """Jobs that the audit log says the schedule made, the latest first."""
    query = "SELECT target FROM audit_log WHERE action = 'job.make' AND actor = 'schedule each-second' ORDER BY id DESC"
    engine = create_engine(parsed_url(address))
    try:
        with engine.connect() as connection:
            return list(connection.execute(text(query)).scalars())
    finally:
        engine.dispose()


def test_a_time_of_a_schedule_makes_one_job_however_many_processes_fire(database_address):
    storages = [
        Storage(Database(parsed_url(database_address))) for _ in range(1 if "sqlite" in database_address else 2)
    ]
    upgrade(storages[0].database)
    storages[0].make_schedule(ScheduleBody.parse(NIGHTLY), None, Principal())
    made = []
    for late_s in (1, 59, 61):  # the last one passed while no service ran
        with storages[0].database.writing() as connection:
            connection.execute(update(SCHEDULES).values(next_us=now_us() - late_s * 1_000_000))
        threads = [threading.Thread(target=lambda one=one: made.extend(one.fire_schedules())) for one in storages * 3]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if late_s == 59:
            fired_at = storages[0].schedules.read("nightly", "").last_fired_at
    assert made == ["nightly", "nightly"]
    found = storages[0].jobs.list("", list(JobKind), limit=10, state=None, cursor=None).jobs
    assert [job.kind for job in found] == ["collect", "collect"]
    assert storages[0].schedules.read("nightly", "").last_fired_at == fired_at is not None
    for storage in storages:
        storage.close()


@pytest.fixture
def storage(database_address):
    with closing(Database(parsed_url(database_address))) as database:
        upgrade(database)
        yield Storage(database)


def fire(storage, team):
    """Has the schedules of a team be due, and fires; the names of those that made a job."""
    with storage.database.writing() as connection:
        connection.execute(update(SCHEDULES).where(SCHEDULES.c.team == team).values(next_us=now_us() - 1_000_000))
    return storage.fire_schedules()


def jobs_of(storage, team):
    return storage.jobs.list(team, list(JobKind), limit=200, cursor=None, state=None).jobs


def test_schedules_of_two_teams_share_nothing_but_their_name(storage, monkeypatch):
    monkeypatch.setattr("server.storage.jobs._MAX_UNFINISHED", 6)
    for team in ("ads", "search"):
        storage.make_schedule(ScheduleBody.parse(NIGHTLY), None, Principal(team=team))
    assert [fire(storage, "ads") for _ in range(4)] == [["nightly"]] * 3 + [[]]
    assert fire(storage, "search") == ["nightly"]
    assert [job.owner for job in jobs_of(storage, "search")] == ["schedule nightly"]
    turns = [storage.jobs.claim().team for _ in range(3)]
    assert turns == ["ads", "search", "ads"]
    limited = Storage(storage.database, max_client_bytes=1)
    assert fire(limited, "ads") == []
    with storage.database.writing() as connection:
        connection.execute(delete(JOBS).where(JOBS.c.team == "search"))
    assert fire(limited, "search") == ["nightly"]


def test_a_schedule_that_makes_no_job_has_not_fired_and_holds_up_no_other(storage, monkeypatch):
    for name in ("nightly", "unknown"):
        storage.make_schedule(ScheduleBody.parse(NIGHTLY | {"name": name}), None, Principal())
    with storage.database.writing() as connection:  # of another version
        connection.execute(update(SCHEDULES).where(SCHEDULES.c.name == "unknown").values(body='{"hours": 1}'))
    assert fire(storage, "") == ["nightly"]
    with storage.database.writing() as connection:  # so long ago that another time would be told as another one
        connection.execute(update(SCHEDULES).values(fired_us=SCHEDULES.c.fired_us - 10_000_000))
    fired = storage.schedules.read("nightly", "")
    assert fired.last_fired_at is not None
    monkeypatch.setattr("server.storage.jobs._MAX_UNFINISHED", 1)
    assert fire(storage, "") == []
    assert storage.schedules.read("nightly", "") == fired
    assert storage.schedules.read("unknown", "").last_fired_at is None
    assert len(jobs_of(storage, "")) == 1
