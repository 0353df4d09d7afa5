"""A database whose disk is full or read-only, or whose server is away, and is there again."""

import contextlib
import os
import stat
import subprocess
import time
from pathlib import Path

import psycopg
import pytest

from server.access import COMMAND_LINE
from server.problems import StorageError, UnknownPlanError
from server.storage.database import Database
from server.storage.location import DATABASE_VARIABLE, parsed_url
from server.storage.storage import open_storage
from server.storage.upgrading import upgrade
from studies.service.processes import postgresql_server
from tests.server.test_jobs import TASK, made, until
from tests.server.test_storage import add, facts, forget_deleted, listed


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "none", folder]).returncode:
        pytest.skip("only root mounts a small disk")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@contextlib.contextmanager
def read_only(folder):
    """Has a folder be what a disk is that its system has made read-only: files that are open can be written still."""
    subprocess.run(["mount", "--bind", folder, folder], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def unready(client):
    """What `/readyz` says is missing, within 10 s: it asks the database once a second."""
    deadline = time.monotonic() + 10
    while (answer := client.get("/readyz")).status_code != 503:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert answer.json()["status"] == "no database"
    return answer.json()["detail"]


def fill(file):
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as writer:
        while True:
            writer.write(bytes(4096))


@pytest.mark.slow
def test_a_full_disk_is_named_and_no_job_is_lost(own_service, small_disk):
    file = small_disk / "service.sqlite"
    service = own_service("--workers", "1", database=f"sqlite:///{file}")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    ballast = small_disk / "ballast"
    with service.client() as client:
        kept = client.post("/v1/plans", json=TASK)
        job = made(client, body={**TASK, "topology": "a100-8", "planner": "auto", "time_limit_s": 3})
        until(client, job, "running")
        fill(ballast)
        refused = client.post("/v1/plans", json={**TASK, "topology": "a100-8"})
        assert (refused.status_code, refused.json()["detail"]) == (503, "the disk of the database is full")
        assert unready(client) == "the disk of the database is full"
        causes = [line["cause"] for line in service.log() if line["event"] == "database fault"]
        assert any("database or disk is full" in cause for cause in causes)
        ballast.unlink()
        ready_again(client)
        assert until(client, job, "succeeded", "failed")["state"] == "succeeded"
        assert client.get(f"/v1/plans/{kept.json()['id']}").json() == kept.json()


@pytest.mark.slow
def test_what_is_deleted_on_a_full_disk_makes_room_at_once(own_service, small_disk):
    service = own_service(
        "--workers", "1", database=f"sqlite:///{small_disk}/service.sqlite", folder=small_disk.parent / "service"
    )
    with service.client() as client:
        plans = [client.post("/v1/plans", json={**TASK, "seed": seed}).json()["id"] for seed in range(40)]
        assert client.delete(f"/v1/plans/{plans[0]}").status_code == 204
        assert client.post(f"/v1/plans/{plans[0]}/restore").status_code == 204
        fill(small_disk / "ballast")
        assert client.post("/v1/plans", json={**TASK, "seed": 99}).status_code == 503
        for plan_id in plans[:30]:
            assert client.delete(f"/v1/plans/{plan_id}").status_code == 204
        kept = client.post("/v1/plans", json={**TASK, "seed": 99})
        assert kept.status_code == 200, kept.text
        assert client.post(f"/v1/plans/{plans[0]}/restore").status_code == 404
        left = [plan["id"] for plan in client.get("/v1/plans").json()["plans"]]
        assert sorted(left) == sorted([kept.json()["id"], *plans[30:]])


@pytest.mark.parametrize("safe_version", [(3, 51, 3), pytest.param((3, 0, 0), marks=pytest.mark.slow)])
def test_nothing_else_gets_the_room_that_is_kept_for_deletions(small_disk, monkeypatch, safe_version):
    """With a rollback journal, and with a write-ahead log."""
    monkeypatch.setattr("server.storage.sqlite_file.SAFE_VERSION", safe_version)
    monkeypatch.setenv(DATABASE_VARIABLE, f"sqlite:///{small_disk}/service.sqlite")
    with contextlib.closing(open_storage()) as storage:
        for number in range(400):
            add(storage, facts(number), os.urandom(5000))
        fill(small_disk / "ballast")
        for number in range(400):
            if number % 4 == 0:
                storage.plans.delete(facts(number).id, COMMAND_LINE)
                continue
            with contextlib.suppress(StorageError):
                add(storage, facts(1000 + number), os.urandom(300_000))
        found = listed(storage, limit=200)
        assert found
        assert all(storage.plans.read(plan_id, "") for plan_id in found)
    with contextlib.closing(open_storage()) as storage:  # a full disk does not keep a service from starting
        for number in range(0, 400, 4):
            with pytest.raises(UnknownPlanError):
                storage.plans.read(facts(number).id, "")


def test_a_file_gives_the_room_of_deleted_plans_back(tmp_path, monkeypatch):
    file = tmp_path / "service.sqlite"
    monkeypatch.setenv(DATABASE_VARIABLE, f"sqlite:///{file}")
    with contextlib.closing(open_storage()) as storage:
        for number in range(40):
            add(storage, facts(number), os.urandom(50_000))
        size = file.stat().st_size
        for number in range(40):
            storage.plans.delete(facts(number).id, COMMAND_LINE)
        while forget_deleted(storage, kept_us=0) or storage.database.shrink():
            pass
        assert file.stat().st_size < size / 2


LONG_JOB = {**TASK, "topology": "a100-8", "planner": "auto", "time_limit_s": 3}


def ready_again(client):
    deadline = time.monotonic() + 60
    while (answer := client.get("/readyz").json()) != {"status": "ready"}:
        assert time.monotonic() < deadline, answer
        time.sleep(0.1)


@pytest.mark.slow
def test_a_disk_that_becomes_read_only_is_named_and_read(own_service, small_disk):
    service = own_service(
        "--workers", "1", database=f"sqlite:///{small_disk}/service.sqlite", folder=small_disk.parent / "service"
    )
    with service.client() as client:
        plans = [client.post("/v1/plans", json={**TASK, "seed": seed}).json() for seed in range(2)]
        job = made(client, body=LONG_JOB)
        until(client, job, "running")
        with read_only(small_disk):
            for refused in (
                client.post("/v1/plans", json={**TASK, "seed": 99}),
                client.post("/v1/jobs/plan", json=TASK),
                client.delete(f"/v1/plans/{plans[0]['id']}"),
            ):
                assert (refused.status_code, refused.json()["detail"]) == (503, "the database is read-only")
            assert unready(client) == "the database is read-only"
            assert client.get(f"/v1/plans/{plans[0]['id']}").json() == plans[0]
            assert len(client.get("/v1/plans").json()["plans"]) == 2
            time.sleep(5)  # in which the job ends
            assert client.get(f"/v1/jobs/{job}").json()["state"] == "running"
        ready_again(client)
        assert until(client, job, "succeeded", "failed")["state"] == "succeeded"
        assert client.delete(f"/v1/plans/{plans[0]['id']}").status_code == 204
    reasons = {line["reason"] for line in service.log() if line["event"] == "database fault"}
    assert reasons == {"the database is read-only"}


@pytest.mark.slow
def test_a_server_of_databases_that_goes_away_is_named_and_nothing_is_lost(own_service):
    with server_that_ends() as (address, stop, start):
        service = own_service("--workers", "1", database=address)
        with service.client() as client:
            kept = client.post("/v1/plans", json=TASK).json()
            job = made(client, body=LONG_JOB)
            until(client, job, "running")
            stop()
            for refused in (client.post("/v1/plans", json=LONG_JOB), client.get(f"/v1/plans/{kept['id']}")):
                assert (refused.status_code, refused.json()["detail"]) == (503, "the database does not answer")
                assert refused.headers["retry-after"] == "1"
            assert unready(client) == "the database does not answer"
            assert client.get("/livez").status_code == 200
            time.sleep(5)  # in which the job ends
            start()
            ready_again(client)
            assert client.get(f"/v1/plans/{kept['id']}").json() == kept
            assert until(client, job, "succeeded", "failed")["state"] == "succeeded"
            assert client.post("/v1/plans", json=LONG_JOB).status_code == 200
        causes = [line["cause"] for line in service.log() if line["event"] == "database fault"]
        assert any("refused" in cause or "closed" in cause or "terminating" in cause for cause in causes), causes
        assert service.stop() == 0


@contextlib.contextmanager
def server_that_ends():
    """The address of a PostgreSQL database, and what stops and starts its server."""
    if not any(Path("/usr/lib/postgresql").glob("*/bin")):
        pytest.skip("this machine has no PostgreSQL server (Debian: postgresql-15)")
    with postgresql_server("fsync=off") as address:
        with psycopg.connect(f"{address}/postgres") as connection:
            row = connection.execute("SELECT current_setting('data_directory'), current_setting('port')").fetchone()
        with contextlib.closing(Database(parsed_url(f"{address}/postgres"))) as database:
            upgrade(database)
        folder, program = Path(row[0]), next(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"))

        def control(*arguments):
            user = "postgres" if os.geteuid() == 0 else None
            told = subprocess.run(
                [program, "-D", folder, "-w", *arguments], user=user, group=user, cwd=folder, stdout=subprocess.DEVNULL
            )
            assert told.returncode == 0 or arguments[0] == "stop"  # which has stopped already

        def stop():
            control("stop", "-m", "immediate")

        def start():
            control("start", "-o", f"-p {row[1]} -h 127.0.0.1 -k {folder.parent}")

        try:
            yield f"{address}/postgres", stop, start
        finally:
            stop()


@pytest.mark.slow
def test_a_job_that_finds_no_room_for_its_files_says_so(own_service, small_disk):
    service = own_service("--workers", "1", "--data", str(small_disk), folder=small_disk.parent / "service")
    fill(small_disk / "ballast")
    with service.client() as client:
        planned = until(client, made(client), "succeeded", "failed")
        assert planned["state"] == "succeeded"
        measured = until(client, made(client, "collect", {"device": "cpu", "seconds": 2}), "succeeded", "failed")
        assert measured["problem"]["detail"] == "its files cannot be written: no space left on device"
