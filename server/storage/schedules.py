"""Stored schedules: jobs that are made again and again, at times that a cron expression says."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from croniter import CroniterError, croniter
from sqlalchemy import ColumnElement, Connection, Row, and_, delete, func, select, update

from autoshard.api import ScheduleAnswer, ScheduleBody, ScheduleList
from autoshard.core.errors import InputError
from autoshard.core.quoting import shown
from server.access import Principal
from server.problems import BusyError, ScheduleExistsError, UnknownScheduleError
from server.storage.audit import record
from server.storage.database import Database
from server.storage.schema import SCHEDULES, now_us, told

#: Numbers, names of days and months, and signs; no field that begins with H or R, which would be drawn at random.
_FIELD = r"(?![HhRr])[0-9A-Za-z*/,?#-]+"
_CRON = re.compile(rf"{_FIELD}( {_FIELD}){{4,5}}")
_MAX_SCHEDULES, _LATE_US = 64, 60_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DueSchedule:
    """A schedule whose job is to be made.

    Attributes:
        team: Whose it is.
        at_us: The time that has come, in microseconds since 1970.
        schedule: As it was before.
    """

    team: str
    at_us: int
    schedule: ScheduleAnswer


class ScheduleStore:
    """Schedules by name.

    Args:
        database: Where they are.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, connection: Connection, body: ScheduleBody, actor: Principal) -> ScheduleAnswer:
        """Stores a schedule, of a job's body that was checked.

        Args:
            connection: A transaction that writes.
            body: The schedule.
            actor: Who makes it, and whose team's it is.

        Raises:
            InputError: If its cron expression is none.
            ScheduleExistsError: If there is one of its name.
            BusyError: If there are as many as may be.
        """
        row: dict[str, Any] = {"name": body.name, "cron": body.cron, "kind": body.kind, "body": json.dumps(body.body)}
        row |= {"is_paused": False, "next_us": _next_us(body.cron), "team": actor.team, "owner": actor.name}
        if (connection.scalar(select(func.count()).select_from(SCHEDULES)) or 0) >= _MAX_SCHEDULES:
            raise BusyError(f"there are {_MAX_SCHEDULES} schedules, the most that may be")
        if not self._database.insert_new(connection, SCHEDULES, row):
            raise ScheduleExistsError(f"there is a schedule {body.name}", field="name")
        answer = _answer(_row(connection, body.name, actor.team))
        _record(connection, actor, "make", answer)
        return answer

    def list(self, team: str) -> ScheduleList:
        """All schedules of a team, by name.

        Raises:
            StorageError: If the database does not answer.
        """
        with self._database.reading() as connection:
            rows = connection.execute(
                select(SCHEDULES).where(SCHEDULES.c.team == team).order_by(SCHEDULES.c.name)
            ).all()
        return ScheduleList(schedules=list(map(_answer, rows)))

    def read(self, name: str, team: str) -> ScheduleAnswer:
        """One schedule.

        Raises:
            UnknownScheduleError: If it is not there.
            StorageError: If the database does not answer.
        """
        with self._database.reading() as connection:
            return _answer(_row(connection, name, team))

    def pause(self, name: str, actor: Principal, *, is_paused: bool) -> ScheduleAnswer:
        """Has a schedule make no more jobs, or make them again from its next time on.

        Args:
            name: Its name.
            actor: Who changes it, of the schedule's team.
            is_paused: Whether it makes no more jobs.

        Raises:
            UnknownScheduleError: If it is not there.
            StorageError: If the database does not answer.
        """
        with self._database.writing() as connection:
            values = {"is_paused": is_paused, "next_us": _next_us(_row(connection, name, actor.team).cron)}
            connection.execute(update(SCHEDULES).where(_is(name, actor.team)).values(values))
            answer = _answer(_row(connection, name, actor.team))
            _record(connection, actor, "pause" if is_paused else "resume", answer)
        return answer

    def delete(self, name: str, actor: Principal) -> None:
        """Deletes a schedule; jobs that it made stay. Arguments and errors as of `pause`."""
        with self._database.writing(uses_reserve=True) as connection:
            answer = _answer(_row(connection, name, actor.team))
            connection.execute(delete(SCHEDULES).where(_is(name, actor.team)))
            _record(connection, actor, "delete", answer)

    def are_due(self) -> bool:
        """Whether a schedule is to make a job.

        Raises:
            StorageError: If the database does not answer.
        """
        with self._database.reading() as connection:
            return connection.execute(select(SCHEDULES.c.name).where(_is_due()).limit(1)).first() is not None

    def take_due(self, connection: Connection) -> Sequence[DueSchedule]:
        """Schedules whose jobs the caller is to make in the same transaction; no other one gets these times.

        A time that passed more than a minute ago, while no service ran, is left out.

        Args:
            connection: A transaction that writes.
        """
        taken = []
        for row in connection.execute(select(SCHEDULES).where(_is_due())).all():
            is_as_read = _is(row.name, row.team) & (SCHEDULES.c.next_us == row.next_us)
            moved = update(SCHEDULES).where(is_as_read, _is_due()).values(next_us=_next_us(row.cron))
            is_taken = connection.execute(moved).rowcount == 1
            if is_taken and row.next_us >= now_us() - _LATE_US:
                taken.append(DueSchedule(team=row.team, at_us=row.next_us, schedule=_answer(row)))
        return taken

    def note_fired(self, connection: Connection, due: DueSchedule) -> None:
        """Notes that the job of a schedule's time was made.

        Args:
            connection: The transaction that took the schedule.
            due: The schedule.
        """
        named = _is(due.schedule.name, due.team)
        connection.execute(update(SCHEDULES).where(named).values(fired_us=due.at_us))


def _record(connection: Connection, actor: Principal, change: str, schedule: ScheduleAnswer) -> None:
    record(connection, actor, f"schedule.{change}", f"{schedule.name} {schedule.kind} {schedule.cron}")


def _is_due() -> Any:
    return ~SCHEDULES.c.is_paused & (SCHEDULES.c.next_us <= now_us())


def _is(name: str, team: str) -> ColumnElement[bool]:
    return and_(SCHEDULES.c.team == team, SCHEDULES.c.name == name)


def _row(connection: Connection, name: str, team: str) -> Row[*tuple[Any, ...]]:
    row = connection.execute(select(SCHEDULES).where(_is(name, team))).first()
    if row is None:
        raise UnknownScheduleError(f"there is no schedule {name}")
    return row


def _answer(row: Row[*tuple[Any, ...]]) -> ScheduleAnswer:
    values = told(row)
    next_at = None if row.is_paused else values["next_at"]
    named = {"body": json.loads(row.body), "last_fired_at": values["fired_at"], "next_fires_at": next_at}
    return ScheduleAnswer.model_validate(values | named)


def _next_us(cron: str) -> int:
    """When a cron expression fires next.

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
    return int(found.timestamp()) * 1_000_000
