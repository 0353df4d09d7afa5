"""What the service stores."""

from __future__ import annotations

import json
from collections.abc import Collection

import structlog
from sqlalchemy import Connection

from autoshard.api import JOB_BODIES, JobKind, JobTask, RunAnswer, ScheduleBody
from autoshard.core.errors import InputError
from autoshard.core.quoting import write_bytes
from server.access import Principal
from server.problems import BusyError, ClientBusyError, QuotaError
from server.storage.audit import AuditStore, record
from server.storage.database import Database
from server.storage.idempotency import IdempotencyStore, IdempotentRequest, KeptAnswer
from server.storage.jobs import ClaimedJob, JobEnd, JobStore, NewJob
from server.storage.keys import KeyStore
from server.storage.location import database_url
from server.storage.plans import PlanStore
from server.storage.runs import RunStore
from server.storage.schedules import ScheduleStore
from server.storage.sessions import SessionStore
from server.storage.shadow import ShadowStore
from server.storage.upgrading import check_schema, upgrade
from server.tasks.reply import PlanFacts

_log = structlog.get_logger()


class Storage:
    """The stores of one database, and the transactions of several of them.

    Args:
        database: Its schema is that of this version.
        num_places: Jobs that run at the same time, by which it is estimated when others begin.
        max_client_bytes: Bytes that plans and jobs of one client may take; None for any number.
    """

    def __init__(self, database: Database, num_places: int = 1, max_client_bytes: int | None = None) -> None:
        self.database = database
        self._max_client_bytes = max_client_bytes
        self.plans = PlanStore(database)
        self.requests = IdempotencyStore(database)
        self.keys = KeyStore(database)
        self.sessions = SessionStore(database)
        self.jobs = JobStore(database, num_places)
        self.shadow = ShadowStore(database)
        self.runs = RunStore(database)
        self.schedules = ScheduleStore(database)
        self.audit = AuditStore(database)

    def close(self) -> None:
        """Closes the connections of the database."""
        self.database.close()

    def check_quota(self, clients: Collection[str], team: str) -> None:
        """Checks that a client may store more; plans that it has deleted go for good where this makes room.

        Args:
            clients: Names under which its plans and jobs are stored.
            team: Whose these are.

        Raises:
            QuotaError: If it may not.
            StorageError: If the database does not answer.
        """
        if self._max_client_bytes is not None:
            with self.database.writing() as connection:
                self._check_quota(connection, clients, team)

    def _check_quota(self, connection: Connection, clients: Collection[str], team: str) -> None:
        most = self._max_client_bytes
        while most is not None:
            plans, jobs = (store.num_bytes(connection, clients, team) for store in (self.plans, self.jobs))
            if plans + jobs < most:
                return
            if not self.plans.forget_deleted(connection, 0, clients, team):
                taken = f"plans take {write_bytes(plans)} and jobs {write_bytes(jobs)}"
                raise QuotaError(
                    f"this client's {taken}, at most {write_bytes(most)} are allowed: delete plans or jobs",
                    field="client",
                )

    def keep(
        self, answer: KeptAnswer, facts: PlanFacts | None, request: IdempotentRequest | None, actor: Principal
    ) -> None:
        """Stores an answer in one transaction: its plan, and the answer to later requests with the same key.

        Args:
            answer: The answer.
            facts: Of the plan that it holds; None without a plan.
            request: The request, if it has a key.
            actor: Who sent it.

        Raises:
            StorageError: If the database does not answer.
        """
        with self.database.writing() as connection:
            if facts is not None:
                self.plans.add(connection, facts, answer.body, actor.team, actor.name)
                record(connection, actor, "plan.make", facts.id)
            self.requests.keep(connection, request, answer)

    def keep_run(
        self, plan_id: str, run: RunAnswer, answer: KeptAnswer, request: IdempotentRequest | None, actor: Principal
    ) -> None:
        """Stores a run of a plan, with the answer to later requests with the same key, in one transaction.

        Args:
            plan_id: The plan, which is there.
            run: What is said of it.
            answer: The same, as the answer.
            request: The request, if it has a key.
            actor: Who sent it.

        Raises:
            StorageError: If the database does not answer.
        """
        with self.database.writing() as connection:
            self.runs.add(connection, plan_id, actor.team, run)
            record(connection, actor, "run.report", plan_id)
            self.requests.keep(connection, request, answer)

    def add_job(self, job: NewJob, request: IdempotentRequest | None, actor: Principal) -> KeptAnswer:
        """Stores a job, with the answer to later requests with the same key, in one transaction.

        Args:
            job: The job.
            request: The request, if it has a key.
            actor: Who sent it.

        Raises:
            QuotaError: If the client stores as much as it may.
            RetryError: If there are as many jobs as may be, or the database does not answer.
        """
        with self.database.writing() as connection:
            self._check_quota(connection, {job.client, actor.name}, job.team)
            job_id = self.jobs.add(connection, job)
            record(connection, actor, "job.make", job_id)
            answer = KeptAnswer(
                status=202, body=self.jobs.described(connection, job_id, actor.team).model_dump_json().encode()
            )
            self.requests.keep(connection, request, answer)
        return answer

    def fire_schedules(self) -> list[str]:
        """Makes the jobs of schedules that are due, each once; returns the names of these schedules.

        A schedule makes none where there are as many jobs as may be, those that it made take as much as they may, or
        this version does not know its body.

        Raises:
            StorageError: If the database does not answer.
        """
        if not self.schedules.are_due():
            return []
        made = []
        with self.database.writing() as connection:
            for due in self.schedules.take_due(connection):
                schedule, team = due.schedule, due.team
                actor, kind = Principal(name=f"schedule {schedule.name}", team=team), JobKind(schedule.kind)
                request = json.dumps(schedule.body).encode()
                try:
                    task = JobTask.of(JOB_BODIES[kind].parse(schedule.body)).model_dump_json()
                    job = NewJob(kind=kind, request=request, task=task, client=actor.name, team=team)
                    self._check_quota(connection, {actor.name}, team)
                    job_id = self.jobs.add(connection, job)
                except (BusyError, ClientBusyError, InputError) as error:
                    _log.warning("schedule made no job", schedule=schedule.name, team=team, reason=str(error))
                    continue
                self.schedules.note_fired(connection, due)
                record(connection, actor, "job.make", job_id)
                made.append(schedule.name)
        return made

    def make_schedule(self, body: ScheduleBody, request: IdempotentRequest | None, actor: Principal) -> KeptAnswer:
        """Stores a schedule, as `ScheduleStore.add`, with the answer to later requests with the same key.

        Raises:
            StorageError: If the database does not answer.
        """
        with self.database.writing() as connection:
            made = self.schedules.add(connection, body, actor)
            answer = KeptAnswer(status=201, body=made.model_dump_json().encode())
            self.requests.keep(connection, request, answer)
        return answer

    def finish_job(self, job: ClaimedJob, end: JobEnd, plan: tuple[PlanFacts, bytes] | None) -> bool:
        """Ends an attempt of a job and stores its plan, in one transaction, once.

        Args:
            job: The job.
            end: How it ended.
            plan: Facts and JSON text of the answer that holds it; None without a plan.

        Returns:
            Whether it was unfinished: else nothing has changed.

        Raises:
            StorageError: If the database does not answer.
        """
        with self.database.writing() as connection:
            is_ended = self.jobs.finish(connection, job.run, end)
            if is_ended:
                if plan is not None:
                    self.plans.add(connection, *plan, job.team, job.client)
                record(connection, Principal(name="job", team=job.team), f"job.{end.state}", job.run.id)
        return is_ended


def open_storage(num_places: int = 1, max_client_bytes: int | None = None) -> Storage:
    """The storage of the database that AUTOSHARD_DATABASE_URL names.

    A file of SQLite is made, and its schema upgraded. A PostgreSQL database serves several processes, and its schema
    is upgraded by `autoshard db upgrade` before they start.

    Args:
        num_places: As of `Storage`.
        max_client_bytes: Likewise.

    Raises:
        InvalidOptionError: If there is no such database, or its schema is older than this version.
        StorageError: If the database does not answer.
    """
    database = Database(database_url())
    try:
        if database.is_sqlite:
            upgrade(database)
        else:
            check_schema(database)
    except BaseException:
        database.close()
        raise
    return Storage(database, num_places, max_client_bytes)
