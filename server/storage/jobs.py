"""Stored jobs."""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, and_, delete, func, insert, or_, select, tuple_, update

from autoshard.api import JobAnswer, JobKind, JobList, JobState, JobSummary, JobTask, Problem
from server.access import Principal
from server.problems import BusyError, ClientBusyError, JobStateError, UnknownJobError
from server.storage.audit import record
from server.storage.database import Database
from server.storage.job_queue import Client, JobQueue, holder_of
from server.storage.paging import cursor_of, position_of
from server.storage.schema import JOBS, now_us, told

_IDS = "[0-9a-f]{32}"
_OWNER = JOBS.c.client.label("owner")
_LISTED = (
    *(JOBS.c[name] for name in ("id", "kind", "state", "attempt", "created_us", "task", "priority", "progress")),
    _OWNER,
)
_UNFINISHED = tuple(state for state in JobState if not state.is_final)
_SEARCHING = (JobKind.PLAN, JobKind.COMPARE)
_AGAIN = (JobState.FAILED, JobState.CANCELLED)
#: Jobs that may wait or run, of all clients; one client may have half of them.
_MAX_UNFINISHED = 100
_MAX_PROGRESS = 512
#: Seconds without a sign from a job's run after which another one begins it again.
LOST_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """A job that is to be stored.

    Attributes:
        kind: What it does.
        request: JSON text of the request.
        task: The request in few words, as JSON of `JobTask`.
        client: Whose share of its team's jobs it counts to.
        team: Whose it is.
        priority: Those of a higher one begin first.
    """

    kind: JobKind
    request: bytes
    task: str
    client: str
    team: str
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRun:
    """One attempt of a job.

    Attributes:
        id: The job.
        attempt: Which one, from 1.
    """

    id: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedJob:
    """A job that one run may do, as long as it says so often enough.

    Attributes:
        run: Job and attempt.
        owner: Name of the run.
        kind: What it does.
        request: JSON text of the request.
        team: Whose it is.
        client: Who asked for it.
        num_starts: Times that it was claimed in this attempt: more than once where a run was ended.
    """

    run: JobRun
    owner: str
    kind: JobKind
    request: bytes
    team: str
    client: str
    num_starts: int


class JobOrder(Enum):
    """What is to become of a job that runs."""

    GO_ON = auto()
    STOP = auto()
    """It is to end soon, with what it has found."""
    CANCEL = auto()
    LEAVE = auto()
    """Another run has it, or it has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How an attempt ended.

    Attributes:
        state: A final one.
        plan_id: The plan that it made.
        result: JSON text of what else it made.
        problem: Why it failed.
    """

    state: JobState
    plan_id: str | None = None
    result: bytes | None = None
    problem: Problem | None = None


class JobStore:
    """Jobs by id.

    Args:
        database: Where they are.
        num_places: Jobs that run at the same time, by which it is estimated when others begin.
    """

    def __init__(self, database: Database, num_places: int = 1) -> None:
        self._database, self._num_places = database, num_places

    def add(self, connection: Connection, job: NewJob) -> str:
        """Stores a job; returns its id.

        Args:
            connection: A transaction that writes.
            job: The job.

        Raises:
            ClientBusyError: If the client has as many jobs as one may have.
            BusyError: If there are as many jobs as may be.
        """
        self._check_room(connection, (job.team, job.client))
        job_id, now = uuid.uuid4().hex, now_us()
        row = {name: getattr(job, name) for name in ("kind", "client", "team", "priority")}
        row |= {"id": job_id, "state": JobState.QUEUED, "attempt": 1, "num_starts": 0, "task": job.task}
        empty = {"progress": "", "log": "", "request": zlib.compress(job.request)}
        connection.execute(insert(JOBS).values({**row, **empty, "created_us": now, "seen_us": now}))
        return job_id

    def _check_room(self, connection: Connection, client: Client) -> None:
        """Checks that one more job of a client may wait; those count that are cancelled and have not ended yet."""
        queue = self._queue(connection)
        most, own = _MAX_UNFINISHED // 2, queue.ends_in_s(client)
        if len(own) >= most:
            raise ClientBusyError(f"{most} jobs of this client are unfinished, the most that may be", min(own))
        if len(queue) >= _MAX_UNFINISHED:
            raise BusyError(f"{_MAX_UNFINISHED} jobs are unfinished, the most that may be", min(queue.ends_in_s()))

    def _queue(self, connection: Connection) -> JobQueue:
        """The jobs that wait and run now, of all teams."""
        columns = (JOBS.c[name] for name in JobQueue.COLUMNS)
        rows = connection.execute(select(*columns).where(JOBS.c.state.in_(_UNFINISHED))).all()
        clients = {row.client for row in rows if row.state == JobState.QUEUED}
        begun = select(JOBS.c.team, JOBS.c.client, func.max(JOBS.c.started_us)).where(JOBS.c.client.in_(clients))
        found = connection.execute(begun.group_by(JOBS.c.team, JOBS.c.client))
        last_us = {(team, client): us or 0 for team, client, us in found}
        return JobQueue(rows, last_us, self._num_places, now_us())

    def read(self, job_id: str, team: str) -> JobAnswer:
        """What is known of a job of a team.

        Raises:
            UnknownJobError: If it is not there.
            StorageError: If the database does not answer.
        """
        with self._database.reading() as connection:
            return self.described(connection, job_id, team)

    def described(self, connection: Connection, job_id: str, team: str) -> JobAnswer:
        """As `read`, in a transaction.

        Raises:
            UnknownJobError: If it is not there.
        """
        row = _row(connection, job_id, team)
        return _answer(row, self._queue(connection) if row.state == JobState.QUEUED else None)

    def result(self, job_id: str, team: str) -> tuple[str | None, bytes | None]:
        """What a job made: the id of a plan, or a JSON text.

        Raises:
            UnknownJobError: If it is not there.
            JobStateError: If it has not succeeded.
            StorageError: If the database does not answer.
        """
        with self._database.reading() as connection:
            row = _row(connection, job_id, team)
        if row.state != JobState.SUCCEEDED:
            raise JobStateError(f"the job is {row.state}, and has no result")
        return row.plan_id, None if row.result is None else zlib.decompress(row.result)

    def list(
        self,
        team: str,
        kinds: Collection[JobKind],
        *,
        limit: int,
        cursor: str | None,
        state: JobState | None,
        plan_id: str | None = None,
    ) -> JobList:
        """One page of jobs, the latest first.

        Args:
            team: Whose jobs.
            kinds: Only those of these kinds.
            limit: Most jobs of a page.
            cursor: `next` of the page before; None for the first.
            state: Only those in this state.
            plan_id: Only those that made this plan.

        Raises:
            FormatError: If the cursor is not one.
            StorageError: If the database does not answer.
        """
        query = select(*_LISTED).where(JOBS.c.team == team, JOBS.c.kind.in_(kinds))
        query = query.order_by(JOBS.c.created_us.desc(), JOBS.c.id.desc()).limit(limit + 1)
        wanted = {"state": state, "plan_id": plan_id}
        query = query.where(*(JOBS.c[name] == value for name, value in wanted.items() if value is not None))
        if cursor is not None:
            query = query.where(tuple_(JOBS.c.created_us, JOBS.c.id) < tuple_(*position_of(cursor, _IDS)))
        with self._database.reading() as connection:
            rows = connection.execute(query).all()
            queue = self._queue(connection) if any(row.state == JobState.QUEUED for row in rows) else None
        following = cursor_of(rows[limit - 1].created_us, rows[limit - 1].id) if len(rows) > limit else None
        return JobList(jobs=[JobSummary.model_validate(_told(row, queue)) for row in rows[:limit]], next=following)

    def claim(self, *, is_last_place: bool = False) -> ClaimedJob | None:
        """Gives the next job to the caller; None if none waits that may begin.

        Jobs come first whose run has been silent for `LOST_S`. For the others see `JobQueue`.

        Args:
            is_last_place: Whether the caller's process has no other place free.

        Raises:
            StorageError: If the database does not answer.
        """
        while True:
            now, owner = now_us(), uuid.uuid4().hex
            is_lost = and_(JOBS.c.state == JobState.RUNNING, JOBS.c.seen_us < now - int(LOST_S * 1e6))
            is_free = or_(JOBS.c.state == JobState.QUEUED, is_lost)
            with self._database.reading() as connection:
                found = connection.execute(select(JOBS.c.id, JOBS.c.attempt).where(is_lost).limit(1)).first()
                found = found or self._queue(connection).next(is_last_place=is_last_place)
            if found is None:
                return None
            run = _run(found)
            values = {"state": JobState.RUNNING, "owner": owner, "seen_us": now, "started_us": now}
            statement = update(JOBS).where(_is(run), is_free).values({**values, "num_starts": JOBS.c.num_starts + 1})
            with self._database.writing() as connection:
                if connection.execute(statement).rowcount == 0:
                    continue  # another one was quicker
                row = connection.execute(select(JOBS).where(JOBS.c.id == run.id)).one()
            return ClaimedJob(
                run=run,
                owner=owner,
                kind=JobKind(row.kind),
                request=zlib.decompress(row.request),
                team=row.team,
                client=row.client,
                num_starts=row.num_starts,
            )

    def report(self, job: ClaimedJob, log: str) -> JobOrder:
        """Says that a job is being done.

        Args:
            job: The job.
            log: The end of its log.

        Returns:
            What is to become of it.

        Raises:
            StorageError: If the database does not answer.
        """
        text = log.replace("\0", " ")
        lines = text.strip().splitlines()
        values = {"seen_us": now_us(), "log": text, "progress": lines[-1][:_MAX_PROGRESS] if lines else ""}
        with self._database.writing() as connection:
            found = update(JOBS).where(_is(job.run), JOBS.c.owner == job.owner, JOBS.c.state == JobState.RUNNING)
            row = connection.execute(found.values(values).returning(JOBS.c.cancelled_us, JOBS.c.stopped_us)).first()
        if row is None:
            return JobOrder.LEAVE
        if row.cancelled_us is not None:
            return JobOrder.CANCEL
        return JobOrder.GO_ON if row.stopped_us is None else JobOrder.STOP

    def release(self, job: ClaimedJob) -> None:
        """Gives a job back that is not done, for others to resume at once.

        Raises:
            StorageError: If the database does not answer.
        """
        with self._database.writing() as connection:
            connection.execute(update(JOBS).where(_is(job.run), JOBS.c.owner == job.owner).values(seen_us=0))

    def finish(self, connection: Connection, run: JobRun, end: JobEnd) -> bool:
        """Ends an attempt, once.

        Args:
            connection: A transaction that writes.
            run: The attempt.
            end: How it ended.

        Returns:
            Whether it was unfinished: else nothing has changed.
        """
        result = None if end.result is None else zlib.compress(end.result)
        problem = None if end.problem is None else end.problem.model_dump_json(exclude_none=True)
        now = now_us()
        values = {"state": end.state, "finished_us": now, "seen_us": now, "owner": None}
        statement = update(JOBS).where(_is(run), JOBS.c.state.in_(_UNFINISHED))
        made = {"plan_id": end.plan_id, "result": result, "problem": problem}
        return connection.execute(statement.values({**values, **made})).rowcount == 1

    @contextmanager
    def _changing(
        self, change: str, job_id: str, actor: Principal, *, uses_reserve: bool = False
    ) -> Iterator[tuple[Connection, Row[*tuple[Any, ...]]]]:
        """A transaction that changes a job of the actor's team, with its row, and notes so in the audit log."""
        with self._database.writing(uses_reserve=uses_reserve) as connection:
            yield connection, _row(connection, job_id, actor.team)
            record(connection, actor, f"job.{change}", job_id)

    def cancel(self, job_id: str, actor: Principal) -> JobAnswer:
        """Ends a job that waits, and has one that runs end soon; one that has ended stays as it is.

        Args:
            job_id: The job.
            actor: Who changes it, of the job's team.

        Raises:
            UnknownJobError: If it is not there.
            StorageError: If the database does not answer.
        """
        with self._changing("cancel", job_id, actor, uses_reserve=True) as (connection, row):
            if row.state == JobState.QUEUED:
                self.finish(connection, _run(row), JobEnd(state=JobState.CANCELLED))
            elif row.state == JobState.RUNNING and row.cancelled_us is None:
                connection.execute(update(JOBS).where(_is(_run(row))).values(cancelled_us=now_us()))
            return self.described(connection, job_id, actor.team)

    def stop(self, job_id: str, actor: Principal) -> JobAnswer:
        """Has the search of a job end soon, with the best plan found; of one that has ended, nothing changes.

        Arguments and errors as of `cancel`.

        Raises:
            JobStateError: If it does not search, or waits still.
        """
        with self._changing("stop", job_id, actor, uses_reserve=True) as (connection, row):
            if row.kind not in _SEARCHING or row.state == JobState.QUEUED:
                raise JobStateError(f"the {row.kind} job is {row.state}; a plan or comparison that runs can be stopped")
            running = and_(_is(_run(row)), JOBS.c.state == JobState.RUNNING)
            connection.execute(update(JOBS).where(running, JOBS.c.stopped_us.is_(None)).values(stopped_us=now_us()))
            return self.described(connection, job_id, actor.team)

    def prioritise(self, job_id: str, actor: Principal, priority: int) -> JobAnswer:
        """Gives a job that waits another priority.

        Arguments and errors as of `cancel`.

        Args:
            job_id: The job.
            actor: Who changes it.
            priority: Jobs of a higher one begin first.

        Raises:
            JobStateError: If it does not wait.
        """
        with self._changing("prioritise", job_id, actor) as (connection, row):
            waiting = and_(_is(_run(row)), JOBS.c.state == JobState.QUEUED)
            if connection.execute(update(JOBS).where(waiting).values(priority=priority)).rowcount == 0:
                raise JobStateError(f"the job is {row.state}; one that waits can be given another priority")
            return self.described(connection, job_id, actor.team)

    def retry(self, job_id: str, actor: Principal) -> JobAnswer:
        """Begins another attempt of a job that failed or was cancelled.

        Arguments and errors as of `cancel`.

        Raises:
            JobStateError: If it is in another state.
            RetryError: As `add`.
        """
        with self._changing("retry", job_id, actor) as (connection, row):
            if row.state in _AGAIN:
                self._check_room(connection, holder_of(row))
            values = {"state": JobState.QUEUED, "attempt": row.attempt + 1, "seen_us": now_us(), "num_starts": 0}
            cleared = dict.fromkeys(("owner", "problem", "started_us", "finished_us", "cancelled_us", "stopped_us"))
            statement = update(JOBS).where(_is(_run(row)), JOBS.c.state.in_(_AGAIN)).values({**values, **cleared})
            if connection.execute(statement).rowcount == 0:
                raise JobStateError(f"the job is {row.state}; one that failed or was cancelled can be tried again")
            return self.described(connection, job_id, actor.team)

    def delete(self, job_id: str, actor: Principal) -> None:
        """Deletes a job that has ended; a plan that it made stays.

        Arguments and errors as of `cancel`.

        Raises:
            JobStateError: If it has not ended.
        """
        with self._changing("delete", job_id, actor, uses_reserve=True) as (connection, row):
            statement = delete(JOBS).where(JOBS.c.id == job_id, JOBS.c.state.not_in(_UNFINISHED))
            if connection.execute(statement).rowcount == 0:
                raise JobStateError(f"the job is {row.state}; one that has ended can be deleted")

    def forget_old(self, connection: Connection, kept_us: int) -> int:
        """Removes some of the jobs that ended so long ago, those first that ended first; returns how many."""
        has_ended = and_(JOBS.c.state.not_in(_UNFINISHED), JOBS.c.finished_us <= now_us() - kept_us)
        return self._database.delete_some(connection, JOBS, has_ended, JOBS.c.finished_us)

    def is_stored(self, job_id: str) -> bool:
        """Whether there is a job, of whatever team.

        Raises:
            StorageError: If the database does not answer.
        """
        with self._database.reading() as connection:
            return connection.execute(select(JOBS.c.id).where(JOBS.c.id == job_id)).first() is not None

    def num_bytes(self, connection: Connection, clients: Collection[str], team: str) -> int:
        """Bytes that requests, logs and results of jobs take; plans that they made are counted by themselves."""
        parts = (func.coalesce(func.length(JOBS.c[name]), 0) for name in ("request", "log", "result"))
        query = select(func.coalesce(func.sum(sum(parts)), 0)).where(JOBS.c.team == team, JOBS.c.client.in_(clients))
        return int(connection.execute(query).scalar_one())


def _run(row: Row[*tuple[Any, ...]]) -> JobRun:
    """A row's attempt."""
    return JobRun(id=row.id, attempt=row.attempt)


def _is(run: JobRun) -> ColumnElement[bool]:
    return and_(JOBS.c.id == run.id, JOBS.c.attempt == run.attempt)


def _row(connection: Connection, job_id: str, team: str) -> Row[*tuple[Any, ...]]:
    row = connection.execute(select(JOBS).where(JOBS.c.team == team, JOBS.c.id == job_id)).first()
    if row is None:
        raise UnknownJobError(f"no job {job_id} is stored")
    return row


def _told(row: Row[*tuple[Any, ...]], queue: JobQueue | None) -> dict[str, Any]:
    """What lists say of a job; without the queue for one that does not wait."""
    turn = None if queue is None else queue.turns.get(row.id)
    task = JobTask.model_validate_json(row.task or "{}").model_dump()
    waits = {} if turn is None else {"position": turn.position, "begins_in_s": turn.begins_in_s}
    return {**told(row), **task, **waits, "priority": row.priority or 0}


def _answer(row: Row[*tuple[Any, ...]], queue: JobQueue | None) -> JobAnswer:
    is_cancelling = row.state == JobState.RUNNING and row.cancelled_us is not None
    problem = None if row.problem is None else Problem.model_validate_json(row.problem)
    return JobAnswer.model_validate(
        {
            **_told(row, queue),
            "owner": row.client,
            "is_cancelling": is_cancelling,
            "is_stopped": row.stopped_us is not None,
            "problem": problem,
        }
    )
