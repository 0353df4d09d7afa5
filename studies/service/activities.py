"""What clients write while a service is killed, and what must be there afterwards."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import closing
from typing import Any, Protocol

import httpx
from sqlalchemy import func, select

from autoshard.api import JobState
from autoshard.formats import digest
from server.storage.database import Database
from server.storage.location import parsed_url
from server.storage.schema import AUDIT_LOG
from studies.service.bodies import JSON_HEADERS, small_task

_JOBS_S, _POLL_S = 240.0, 0.2
#: Answers that acknowledge nothing.
_BUSY = (429, 503)


class Activity(Protocol):
    """Writes of one kind; promotions of models can be another."""

    name: str
    num_acknowledged: int

    async def act(self, client: httpx.AsyncClient) -> str:
        """Writes once; returns a fault, or nothing.

        Raises:
            TransportError: If the service ended meanwhile: the write is not acknowledged.
        """

    async def check(self, client: httpx.AsyncClient) -> list[str]:
        """Faults of what was acknowledged so far, as the service answers now."""

    async def finish(self, client: httpx.AsyncClient) -> list[str]:
        """Waits until all is done that was acknowledged; returns faults."""

    def check_audit(self, address: str) -> list[str]:
        """Faults of what the database says was done; the service has stopped."""


class PlanWrites:
    """Makes plans with idempotency keys, and deletes every third."""

    name = "plans"

    def __init__(self, first_seed: int) -> None:
        self._seed, self.num_acknowledged = first_seed, 0
        self._kept: dict[str, tuple[str, bytes]] = {}
        self._deleted: set[str] = set()
        self._made: set[str] = set()

    async def act(self, client: httpx.AsyncClient) -> str:
        """Makes a plan, and may delete an older one."""
        self._seed += 1
        key, body = uuid.uuid4().hex, small_task(self._seed)
        answer = await _post(client, key, body)
        if answer.status_code != 200:
            return "" if answer.status_code in _BUSY else f"a plan was answered with {answer.text}"
        plan_id: str = answer.json()["id"]
        self.num_acknowledged += 1
        self._made.add(plan_id)
        self._kept[plan_id] = key, body
        return await self._delete(client) if self._seed % 3 == 0 else ""

    async def check(self, client: httpx.AsyncClient) -> list[str]:
        """Plans that are there have the content that their ids say, and those that were deleted are gone."""
        faults = []
        for plan_id in self._kept:
            answer = await client.get(f"/v1/plans/{plan_id}")
            if answer.status_code != 200 or digest(answer.json()["plan"]) != plan_id:
                faults.append(f"plan {plan_id} was acknowledged, and reading it gives {answer.status_code}")
        for plan_id in self._deleted:
            if (status := (await client.get(f"/v1/plans/{plan_id}")).status_code) != 404:
                faults.append(f"plan {plan_id} was deleted, and reading it gives {status}")
        return faults + await self._check_again(client)

    async def finish(self, client: httpx.AsyncClient) -> list[str]:
        """As `check`: all is done when it is acknowledged."""
        return await self.check(client)

    def check_audit(self, address: str) -> list[str]:
        """Each plan was made once, also those that were asked for again."""
        counts = _audited(address, "plan.make")
        return [f"plan {one} was made {counts.get(one, 0)} times" for one in self._made if counts.get(one) != 1]

    async def _check_again(self, client: httpx.AsyncClient) -> list[str]:
        """The latest request, sent again with its key, is answered as it was."""
        for plan_id, (key, body) in list(self._kept.items())[-1:]:
            answer = await _post(client, key, body)
            if answer.status_code != 200 or answer.json()["id"] != plan_id:
                return [f"the request of plan {plan_id}, sent again, is answered with {answer.text[:200]}"]
        return []

    async def _delete(self, client: httpx.AsyncClient) -> str:
        plan_id = next(iter(self._kept))
        del self._kept[plan_id]  # if the service ends now, it may be there or not
        answer = await client.delete(f"/v1/plans/{plan_id}")
        if answer.status_code == 204:
            self.num_acknowledged += 1
            self._deleted.add(plan_id)
        return "" if answer.status_code in (204, *_BUSY) else f"a deletion was answered with {answer.text}"


class JobWrites:
    """Makes jobs, of which each makes a plan of its own."""

    name = "jobs"

    def __init__(self, first_seed: int) -> None:
        self._seed, self.num_acknowledged = first_seed, 0
        self._ids: list[str] = []

    async def act(self, client: httpx.AsyncClient) -> str:
        """Makes a job, if none waits."""
        if self._ids and (await self._job(client, self._ids[-1]))["state"] == JobState.QUEUED:
            await asyncio.sleep(_POLL_S)
            return ""
        self._seed += 1
        headers = {**JSON_HEADERS, "Idempotency-Key": uuid.uuid4().hex}
        answer = await client.post("/v1/jobs/plan", content=small_task(self._seed), headers=headers)
        if answer.status_code == 202:
            self.num_acknowledged += 1
            self._ids.append(answer.json()["id"])
        return "" if answer.status_code in (202, *_BUSY) else f"a job was answered with {answer.text}"

    async def check(self, client: httpx.AsyncClient) -> list[str]:
        """Jobs that were acknowledged are there, and none has failed."""
        jobs = [await self._job(client, job_id) for job_id in self._ids]
        bad = (JobState.FAILED, JobState.CANCELLED, "")
        return [f"job {one['id']} is {one['state'] or 'lost'}: {one['problem']}" for one in jobs if one["state"] in bad]

    async def finish(self, client: httpx.AsyncClient) -> list[str]:
        """Waits until all jobs are done; each has succeeded at its first attempt, and its plan is there."""
        faults: list[str] = []
        latest_s = time.monotonic() + _JOBS_S
        for job_id in self._ids:
            while not (job := await self._job(client, job_id))["state"] or not JobState(job["state"]).is_final:
                if time.monotonic() > latest_s:
                    return [*faults, f"job {job_id} is {job['state']} after {_JOBS_S:g} s"]
                await asyncio.sleep(_POLL_S)
            plan = await client.get(f"/v1/plans/{job['plan_id']}")
            if (job["state"], job["attempt"], plan.status_code) != (JobState.SUCCEEDED, 1, 200):
                where = f"attempt {job['attempt']}, plan {plan.status_code}, problem {job['problem']}"
                faults.append(f"job {job_id} is {job['state']}, {where}")
        return faults

    def check_audit(self, address: str) -> list[str]:
        """Each job has succeeded once."""
        counts = _audited(address, f"job.{JobState.SUCCEEDED}")
        return [f"job {one} has ended {counts.get(one, 0)} times" for one in self._ids if counts.get(one) != 1]

    async def _job(self, client: httpx.AsyncClient, job_id: str) -> dict[str, Any]:
        answer = await client.get(f"/v1/jobs/{job_id}")
        lost: dict[str, Any] = {"id": job_id, "state": "", "attempt": 0, "plan_id": None, "problem": None}
        return answer.json() if answer.status_code == 200 else lost


async def _post(client: httpx.AsyncClient, key: str, body: bytes) -> httpx.Response:
    return await client.post("/v1/plans", content=body, headers={**JSON_HEADERS, "Idempotency-Key": key})


def _audited(address: str, action: str) -> dict[str, int]:
    """How often an action was done, by what it was done to."""
    log = AUDIT_LOG.c
    query = select(log.target, func.count()).where(log.action == action).group_by(log.target)
    with closing(Database(parsed_url(address))) as database, database.reading() as connection:
        return dict(connection.execute(query).all())
