"""Stored runs of plans."""

from __future__ import annotations

from sqlalchemy import Connection, insert, select

from autoshard.api import RunAnswer, RunFigures, RunList, StoredRun
from server.storage.database import Database
from server.storage.schema import RUNS, now_us, told

#: Runs of one plan that are listed: the latest.
_MOST_READ = 100


class RunStore:
    """Runs by plan; they are deleted with it.

    Args:
        database: Where they are.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, connection: Connection, plan_id: str, team: str, run: RunAnswer) -> None:
        """Stores a run.

        Args:
            connection: A transaction that writes.
            plan_id: Its plan, which is there.
            team: Whose that is.
            run: What is said of it.
        """
        values = run.model_dump(include=set(RunFigures.model_fields))
        connection.execute(insert(RUNS).values(team=team, plan_id=plan_id, reported_us=now_us(), **values))

    def list(self, plan_id: str, team: str) -> RunList:
        """The latest runs of a plan, the latest first.

        Raises:
            StorageError: If the database does not answer.
        """
        columns = RUNS.c
        named = (columns.team == team) & (columns.plan_id == plan_id)
        query = select(RUNS).where(named).order_by(columns.id.desc()).limit(_MOST_READ)
        with self._database.reading() as connection:
            rows = connection.execute(query).all()
        return RunList(runs=[StoredRun.model_validate(told(row)) for row in rows])
