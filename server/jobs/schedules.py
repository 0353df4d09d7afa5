"""Schedules as those of DBOS, in the service's database: each firing is a workflow that makes one job."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import structlog
from croniter import CroniterError, croniter
from dbos import DBOS, StepOptions
from dbos._error import DBOSException  # raised where a name is taken, and where DBOS is not launched
from sqlalchemy.exc import DBAPIError

from autoshard.api import JobKind, ScheduleAnswer, ScheduleBody, ScheduleList
from autoshard.core.errors import InputError
from autoshard.core.quoting import shown
from server.access import Principal
from server.problems import (
    BusyError,
    ClientBusyError,
    NotReadyError,
    ScheduleExistsError,
    StorageError,
    UnknownScheduleError,
)
from server.storage.jobs import JobRun
from server.storage.storage import Storage

#: Numbers, names of days and months, and signs; no field that begins with H or R, which would be drawn at random.
_FIELD = r"(?![HhRr])[0-9A-Za-z*/,?#-]+"
_CRON = re.compile(rf"{_FIELD}( {_FIELD}){{4,5}}")
_WORKFLOW = "scheduled-job"
#: Schedules that there may be; each has a thread in each process.
_MAX_SCHEDULES = 64
#: Seconds between two looks at the schedules, after which a change is seen, and after which a firing whose process was
#: killed is resumed: it takes a moment.
POLL_S, _LOST_S = 2.0, 10.0
_log = structlog.get_logger()


class JobSchedules:
    """The schedules of a database; those that fire are done by any of its processes, each firing by one.

    Args:
        storage: Gets the jobs.
        enqueue: Has an attempt of a stored job done.
        retries: How a step is tried again where the database does not answer.
    """

    def __init__(self, storage: Storage, enqueue: Callable[[JobRun], None], retries: StepOptions) -> None:
        self._storage = storage
        self._enqueue = enqueue
        self._retries = retries
        self._workflow: Callable[[datetime, Any], None] | None = None

    def register(self) -> None:
        """Has DBOS know what a firing does; to be called before DBOS is launched."""
        self._workflow = DBOS.workflow(name=_WORKFLOW)(self._firing())

    def create(self, body: ScheduleBody) -> ScheduleAnswer:
        """Makes a schedule, of a job's body that was checked.

        Raises:
            InputError: If its cron expression is none.
            ScheduleExistsError: If there is one of its name.
            BusyError: If there are as many as may be.
            StorageError: If the database does not answer.
        """
        assert self._workflow is not None
        next_time(body.cron)
        context = {"kind": body.kind.value, "body": body.body}
        with _database():
            if len(DBOS.list_schedules()) >= _MAX_SCHEDULES:
                raise BusyError(f"there are {_MAX_SCHEDULES} schedules, the most that may be")
            try:
                DBOS.create_schedule(
                    schedule_name=body.name, workflow_fn=self._workflow, schedule=body.cron, context=context
                )
            except DBOSException as error:
                raise ScheduleExistsError(f"there is a schedule {body.name}", field="name") from error
        return self.read(body.name)

    def list(self) -> ScheduleList:
        """All schedules, by name.

        Raises:
            StorageError: If the database does not answer.
        """
        with _database():
            found = DBOS.list_schedules()
        return ScheduleList(schedules=sorted(map(_answer, found), key=lambda one: one.name))

    def read(self, name: str) -> ScheduleAnswer:
        """One schedule.

        Raises:
            UnknownScheduleError: If it is not there.
            StorageError: If the database does not answer.
        """
        with _database():
            found = DBOS.get_schedule(name)
        if found is None:
            raise UnknownScheduleError(f"there is no schedule {name}")
        return _answer(found)

    def delete(self, name: str) -> None:
        """Deletes a schedule; jobs that it made stay.

        Raises:
            UnknownScheduleError: If it is not there.
            StorageError: If the database does not answer.
        """
        self.read(name)
        with _database():
            DBOS.delete_schedule(name)

    def pause(self, name: str, *, is_paused: bool) -> ScheduleAnswer:
        """Has a schedule make no more jobs, or make them again; errors as of `read`."""
        self.read(name)
        with _database():
            (DBOS.pause_schedule if is_paused else DBOS.resume_schedule)(name)
        return self.read(name)

    def resume_lost(self) -> None:
        """Resumes firings whose process was killed.

        Raises:
            StorageError: If the database does not answer.
        """
        before = (datetime.now(UTC) - timedelta(seconds=_LOST_S)).isoformat()
        with _database():
            for lost in DBOS.list_workflows(name=_WORKFLOW, status="PENDING", end_time=before, load_input=False):
                _log.warning("firing of a schedule resumed", firing=lost.workflow_id)
                DBOS.resume_workflow(lost.workflow_id)

    def _firing(self) -> Callable[[datetime, Any], None]:
        def fire(_: datetime, context: Any) -> None:
            firing = DBOS.workflow_id
            assert firing is not None
            job_id = DBOS.run_step({"name": "make-job", **self._retries}, self._made, firing, context)
            if job_id is not None:
                self._enqueue(JobRun(id=job_id, attempt=1))

        return fire

    def _made(self, firing: str, context: Mapping[str, Any]) -> str | None:
        """Makes the job of a firing, once however often it is called; None if there are too many jobs already."""
        job_id, name = job_of(firing), _schedule_of(firing)
        body = json.dumps(context["body"]).encode()
        try:
            self._storage.add_scheduled_job(job_id, JobKind(context["kind"]), body, Principal(name=f"schedule {name}"))
        except (BusyError, ClientBusyError) as error:
            _log.warning("schedule made no job", schedule=name, reason=str(error))
            return None
        _log.info("schedule made a job", schedule=name, job=job_id)
        return job_id


def next_time(cron: str) -> str:
    """When a cron expression fires next, UTC (ISO 8601).

    Raises:
        InputError: If it is none, or never fires.
    """
    try:
        if not _CRON.fullmatch(cron):
            raise CroniterError
        found: datetime = croniter(cron, datetime.now(UTC), second_at_beginning=True).get_next(datetime)
    except CroniterError as error:
        raise InputError(
            "must be five fields (minute, hour, day of month, month, day of week), or six with the second first, of a "
            f"time that comes, such as `0 3 * * *`; got {shown(cron)}",
            field="cron",
        ) from error
    return found.isoformat(timespec="seconds")


def job_of(firing: str) -> str:
    """Id of the job that a firing makes, by the id of its workflow."""
    return hashlib.sha256(firing.encode()).hexdigest()[:32]


def _schedule_of(firing: str) -> str:
    """Name of the schedule, of DBOS's `sched-NAME-2026-01-01T00:00:00+00:00`."""
    return firing.removeprefix("sched-").rsplit("-", 3)[0]


def _answer(schedule: Mapping[str, Any]) -> ScheduleAnswer:
    context, is_paused = schedule["context"], schedule["status"] != "ACTIVE"
    return ScheduleAnswer(
        name=schedule["schedule_name"],
        cron=schedule["schedule"],
        kind=context["kind"],
        body=context["body"],
        is_paused=is_paused,
        last_fired_at=schedule["last_fired_at"],
        next_fires_at=None if is_paused else next_time(schedule["schedule"]),
    )


@contextmanager
def _database() -> Iterator[None]:
    try:
        yield
    except DBAPIError as error:
        raise StorageError("the database does not answer") from error
    except DBOSException as error:  # it is not launched yet, or no more
        raise NotReadyError("the service starts or stops") from error
