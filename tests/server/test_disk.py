"""A database whose disk is full, and has room again."""

import contextlib
import os
import sqlite3
import stat
import subprocess

import pytest

from server.access import COMMAND_LINE
from server.problems import StorageError, UnknownPlanError
from server.storage.location import DATABASE_VARIABLE
from server.storage.storage import open_storage
from tests.server.test_jobs import TASK, made, until
from tests.server.test_storage import add, facts, listed


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "none", folder]).returncode:
        pytest.skip("only root mounts a small disk")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(file):
    with contextlib.suppress(OSError), file.open("wb", buffering=0) as writer:
        while True:
            writer.write(bytes(4096))


def test_a_full_disk_is_named_and_no_job_is_lost(own_service, small_disk):
    file = small_disk / "service.sqlite"
    service = own_service(database=f"sqlite:///{file}")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    ballast = small_disk / "ballast"
    with service.client() as client:
        kept = client.post("/v1/plans", json=TASK)
        job = made(client, body={**TASK, "topology": "a100-8", "planner": "auto", "time_limit_s": 3})
        until(client, job, "running")
        fill(ballast)
        refused = client.post("/v1/plans", json={**TASK, "topology": "a100-8"})
        assert (refused.status_code, refused.json()["detail"]) == (503, "the disk of the database is full")
        unready = client.get("/readyz")
        told = {"status": "no database", "detail": "the disk of the database is full"}
        assert (unready.status_code, unready.json()) == (503, told)
        causes = [line["cause"] for line in service.log() if line["event"] == "database fault"]
        assert any("database or disk is full" in cause for cause in causes)
        ballast.unlink()
        assert client.get("/readyz").json()["status"] == "ready"
        assert until(client, job, "succeeded", "failed")["state"] == "succeeded"
        assert client.get(f"/v1/plans/{kept.json()['id']}").json() == kept.json()


def test_what_is_deleted_on_a_full_disk_makes_room_at_once(own_service, small_disk):
    service = own_service(database=f"sqlite:///{small_disk}/service.sqlite", folder=small_disk.parent / "service")
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


@pytest.mark.parametrize("safe_version", [(3, 51, 3), (3, 0, 0)])
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
                storage.delete_plan(facts(number).id, COMMAND_LINE)
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


def test_a_file_of_earlier_versions_gives_room_back_too(tmp_path, monkeypatch):
    file = tmp_path / "service.sqlite"
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
    monkeypatch.setenv(DATABASE_VARIABLE, f"sqlite:///{file}")
    with contextlib.closing(open_storage()) as storage:
        for number in range(40):
            add(storage, facts(number), os.urandom(50_000))
        size = file.stat().st_size
        for number in range(40):
            storage.delete_plan(facts(number).id, COMMAND_LINE)
        while storage.forget_deleted_plans(kept_us=0) or storage.database.shrink():
            pass
        assert file.stat().st_size < size / 2
