"""What is kept no longer is removed, and what clients store is limited; on SQLite and on PostgreSQL."""

import contextlib
import os
import threading
import time
from collections import Counter

import pytest
from sqlalchemy import insert, select, update

from autoshard.api import JobKind, PlanLabels
from autoshard.client import Client
from autoshard.core.errors import InvalidOptionError
from server.access import COMMAND_LINE, Principal
from server.jobs.sweep import Sweep
from server.problems import QuotaError, StorageError
from server.settings import ServerSettings
from server.storage.database import Database
from server.storage.jobs import JobEnd, JobState, NewJob
from server.storage.location import DATABASE_VARIABLE, parsed_url
from server.storage.plans import plan_row
from server.storage.schema import JOBS, PLANS, now_us
from server.storage.storage import Storage, open_storage
from server.storage.upgrading import upgrade
from tests.server.test_jobs import TASK, made, until
from tests.server.test_metrics import samples, value
from tests.server.test_service_lifecycle import LONG
from tests.server.test_storage import add, facts, listed

DAY_S = 24 * 3600
CLIENT = Principal(name="key a")


@pytest.fixture
def storage(database_address):
    with contextlib.closing(Database(parsed_url(database_address))) as database:
        upgrade(database)
        yield Storage(database)


def age(storage, table, days, *names):
    """Makes all rows of a table older."""
    with storage.database.writing() as connection:
        connection.execute(update(table).values({name: table.c[name] - days * DAY_S * 1_000_000 for name in names}))


def swept(storage, folder, **settings):
    found = Counter()
    for name, number in Sweep(storage, ServerSettings(data=folder, **settings)).steps():
        found[name] += number
    return {name: number for name, number in found.items() if number}


def ended(storage, client="key a", result=None):
    job = NewJob(kind=JobKind.PLAN, request=b"{}", task="{}", client=client, team="")
    storage.add_job(job, None, Principal(name=client))
    claimed = storage.jobs.claim()
    assert storage.finish_job(claimed, JobEnd(state=JobState.SUCCEEDED, result=result), None)
    return claimed.run.id


def touched(file, days):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(b"x")
    os.utime(file, (time.time() - days * DAY_S,) * 2)


def test_plans_that_nobody_asks_for_are_removed(storage, tmp_path):
    for number in range(250):
        add(storage, facts(number))
    age(storage, PLANS, 31, "created_us")
    add(storage, facts(7))  # again
    add(storage, facts(300))
    assert swept(storage, tmp_path) == {}
    assert swept(storage, tmp_path, keep_plans="32d") == {}
    assert swept(storage, tmp_path, keep_plans="30d") == {"plans": 249}
    assert listed(storage) == [facts(300).id, facts(7).id]
    storage.plans.delete(facts(7).id, COMMAND_LINE)
    assert swept(storage, tmp_path) == {}
    age(storage, PLANS, 2, "deleted_us")
    assert swept(storage, tmp_path) == {"deleted plans": 1}


def test_plans_that_are_read_named_or_restored_are_kept(storage, tmp_path, monkeypatch):
    for number in range(6):
        add(storage, facts(number))
    storage.plans.delete(facts(3).id, COMMAND_LINE)
    age(storage, PLANS, 31, "created_us")
    storage.plans.read(facts(0).id, "")
    storage.plans.check(facts(1).id, "")
    storage.plans.label(facts(2).id, COMMAND_LINE, PlanLabels(name="ranker"))
    storage.plans.restore(facts(3).id, COMMAND_LINE)

    def unwritable(**_):
        raise StorageError("the disk of the database is full")

    with monkeypatch.context() as patched:
        patched.setattr(storage.database, "writing", unwritable)
        assert storage.plans.read(facts(4).id, "") == b"{}"
    assert swept(storage, tmp_path, keep_plans="30d") == {"plans": 2}
    assert set(listed(storage)) == {facts(number).id for number in range(4)}


def test_reading_a_plan_again_within_the_hour_writes_nothing(storage, monkeypatch):
    add(storage, facts(0))
    monkeypatch.setattr(storage.database, "writing", None)
    assert [storage.plans.read(facts(0).id, "") for _ in range(2)] == [b"{}"] * 2


def test_jobs_go_with_their_folders_and_refused_samples(storage, tmp_path):
    old = ended(storage)
    age(storage, JOBS, 15, "finished_us")
    waits = NewJob(kind=JobKind.PLAN, request=b"{}", task="{}", client="key a", team="")
    storage.add_job(waits, None, CLIENT)
    age(storage, JOBS, 15, "created_us")
    young = ended(storage)
    for job_id in (old, young, "0" * 32):
        touched(tmp_path / "jobs" / job_id / "log", 15)
        os.utime(tmp_path / "jobs" / job_id, (time.time() - 15 * DAY_S,) * 2)
    for team in ("", "teams/ads"):
        for days in (1, 15):
            for suffix in ("parquet", "json"):
                touched(tmp_path / team / "quarantine" / f"{days}.{suffix}", days)
        touched(tmp_path / team / "quarantine" / "half.parquet", 2)
    assert swept(storage, tmp_path) == {"quarantined files": 2}  # the halves
    found = swept(storage, tmp_path, keep_jobs="2w")
    assert found == {"jobs": 1, "job folders": 2, "quarantined files": 2}
    assert [folder.name for folder in (tmp_path / "jobs").iterdir()] == [young]
    assert sorted(file.name for file in (tmp_path / "teams/ads/quarantine").iterdir()) == ["1.json", "1.parquet"]
    with storage.database.reading() as connection:
        assert len(connection.execute(select(JOBS.c.id)).all()) == 2


def test_services_that_sweep_at_the_same_time_share_the_work(storage, database_address, tmp_path):
    with storage.database.writing() as connection:
        for number in range(1000):
            connection.execute(insert(PLANS).values(plan_row(facts(number), 1 + number)))
    removed, failures = [], []

    def sweep():
        try:
            with contextlib.closing(Database(parsed_url(database_address))) as database:
                removed.append(swept(Storage(database), tmp_path, keep_plans="1h").get("plans", 0))
        except Exception as error:
            failures.append(error)
            raise

    storage.database.close()  # an old SQLite serves one process at a time
    threads = [threading.Thread(target=sweep) for _ in range(1 if "sqlite" in database_address else 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sum(removed) == 1000


def test_a_client_stores_no_more_than_its_share(storage):
    limited = Storage(storage.database, max_client_bytes=100_000)
    for number in range(2):
        limited.check_quota({"key a"}, "")
        with storage.database.writing() as connection:
            storage.plans.add(connection, facts(number), os.urandom(40_000), "", "key a")
    job = ended(storage, result=os.urandom(40_000))
    refused = r"plans take 78\.\d KiB and jobs 39\.\d KiB, at most 97\.7 KiB are allowed: delete plans or jobs$"
    with pytest.raises(QuotaError, match=refused):
        limited.check_quota({"key a"}, "")
    with pytest.raises(QuotaError, match=refused):
        limited.add_job(NewJob(kind=JobKind.PLAN, request=b"{}", task="{}", client="key a", team=""), None, CLIENT)
    limited.check_quota({"key b"}, "")
    limited.check_quota({"key a"}, "another team")
    limited.plans.delete(facts(0).id, CLIENT)
    assert listed(storage, is_deleted=True) == [facts(0).id]
    limited.check_quota({"key a"}, "")  # for which the deleted plan has to go
    assert listed(storage, is_deleted=True) == []
    limited.jobs.delete(job, CLIENT)
    limited.check_quota({"key a"}, "")


@pytest.mark.parametrize(
    ("option", "text", "accepted"),
    [
        ("keep_plans", "30", "h, d, w"),
        ("keep_plans", "0d", "h, d, w"),
        ("keep_jobs", "1.5d", "h, d, w"),
        ("client_bytes", "10GB", "MiB, GiB, TiB"),
    ],
)
def test_what_is_no_amount_is_refused(option, text, accepted):
    flag = f"--{option.replace('_', '-')}"
    with pytest.raises(
        InvalidOptionError, match=rf"^{flag}: must be a whole number from 1 to 999999 with one of {accepted}, got "
    ):
        ServerSettings(**{option: text})


def test_a_service_sweeps_when_it_starts_and_refuses_who_stores_too_much(own_service, tmp_path, monkeypatch):
    address = f"sqlite:///{tmp_path}/service.sqlite"
    monkeypatch.setenv(DATABASE_VARIABLE, address)
    with contextlib.closing(open_storage()) as opened, opened.database.writing() as connection:
        for number in range(2):
            opened.plans.add(connection, facts(number), os.urandom(1 << 20), "", "anybody")
        connection.execute(update(PLANS).where(PLANS.c.id == facts(0).id).values(created_us=now_us() - 10**12))
    service = own_service("--workers", "1", "--keep-plans", "11d", "--client-bytes", "1MiB", database=address)
    with service.client() as client:
        deadline = time.monotonic() + 30
        while value(samples(client), "autoshard_swept_total", kind="plans") != 1:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert [line["plans"] for line in service.log() if line["event"].startswith("removed what")] == [1]
        for path in ("/v1/plans", "/v1/jobs/plan"):
            refused = client.post(path, json=TASK)
            assert (refused.status_code, refused.json()["type"]) == (403, "urn:autoshard:problem:quota")
            assert refused.json()["detail"].startswith(
                "client: this client's plans take 1.00 MiB and jobs 0 B, at most"
            )
        assert client.get("/v1/plans").json()["plans"][0]["id"] == facts(1).id
        assert client.delete(f"/v1/plans/{facts(1).id}").status_code == 204
        assert client.post("/v1/plans", json=TASK).status_code == 200


def test_a_job_that_has_ended_can_be_deleted(service):
    with service.client() as client, Client(service.url) as typed:
        job = made(client, body={**LONG, "time_limit_s": 3600})
        until(client, job, "running")
        refused = client.delete(f"/v1/jobs/{job}")
        assert (refused.status_code, refused.json()["type"]) == (409, "urn:autoshard:problem:job-state")
        client.post(f"/v1/jobs/{job}/cancel")
        until(client, job, "cancelled")
        typed.delete_job(job)
        assert client.get(f"/v1/jobs/{job}").status_code == client.delete(f"/v1/jobs/{job}").status_code == 404
        assert not (service.log_file.parent / ".local" / "share" / "autoshard" / "jobs" / job).exists()
