"""The audit log: who changed what."""

from __future__ import annotations

from sqlalchemy import Connection, insert, or_, select

from autoshard.api import AuditEntry, AuditList, AuditSearch
from server.access import Principal
from server.storage.database import Database
from server.storage.schema import AUDIT_LOG, iso_time, now_us


def record(connection: Connection, actor: Principal, action: str, target: str) -> None:
    """Adds a row.

    Args:
        connection: The transaction of the change, so that neither is kept without the other.
        actor: Who.
        action: What was done, such as `plan.make`.
        target: Id of what it was done to.
    """
    row = {
        "at_us": now_us(),
        "actor": actor.name,
        "team": actor.team,
        "address": actor.address,
        "request_id": actor.request_id,
        "action": action,
        "target": target,
    }
    connection.execute(insert(AUDIT_LOG).values(row))


class AuditStore:
    """What was done.

    Args:
        database: Where it is.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, actor: Principal, action: str, target: str) -> None:
        """Adds an entry of a change that is made outside of the database; arguments as of `record`.

        Raises:
            StorageError: If the database does not answer.
        """
        with self._database.writing() as connection:
            record(connection, actor, action, target)

    def list(self, search: AuditSearch, team: str | None) -> AuditList:
        """One page of the log, the latest first.

        Args:
            search: Which entries.
            team: Whose; None for those of all.

        Raises:
            StorageError: If the database does not answer.
        """
        log = AUDIT_LOG.c
        query = select(AUDIT_LOG).order_by(log.id.desc()).limit(search.limit + 1)
        for column, value in ((log.team, team), (log.actor, search.actor), (log.target, search.target)):
            if value is not None:
                query = query.where(column == value)
        if search.action is not None:
            of_kind = log.action.startswith(f"{search.action}.", autoescape=True)
            query = query.where(or_(log.action == search.action, of_kind))
        if search.before is not None:
            query = query.where(log.id < search.before)
        with self._database.reading() as connection:
            rows = connection.execute(query).all()
        entries = [AuditEntry(done_at=iso_time(row.at_us), **row._mapping) for row in rows[: search.limit]]
        return AuditList(entries=entries, next=entries[-1].id if len(rows) > search.limit else None)
