"""A database whose disk is full, and has room again."""

import contextlib
import os
import stat
import subprocess

import pytest

from tests.server.test_jobs import TASK, made, until


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", folder]).returncode:
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
