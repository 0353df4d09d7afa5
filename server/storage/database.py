"""One database: its connections and transactions."""

from __future__ import annotations

import os
import sqlite3
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import structlog
from sqlalchemy import URL, ColumnElement, Connection, Engine, Table, create_engine, delete, insert, select, tuple_
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import InterfaceError, InternalError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from server.problems import StorageError
from server.storage.schema import IDEMPOTENT_REQUESTS, now_us
from server.storage.sqlite_file import WRITES, Reserve, empty_log, shrink, sqlite_engine

_log = structlog.get_logger()
#: What faults of databases mean, by a part of what these say.
_CAUSES = {
    "is full": "the disk of the database is full",
    "No space left": "the disk of the database is full",
    "readonly": "the database is read-only",
    "read-only": "the database is read-only",
    "disk I/O error": "the disk of the database fails",
    "is locked": "another process has locked the database",
}
#: What a disk has to take that is ready again.
_PROBE_BYTES = 64 << 10
#: Rows that one transaction deletes: others wait for it, and on a full disk it has little room.
_FEW_ROWS, _MANY_ROWS = 10, 100
_POOL_SIZE = 8
_POOL_WAIT_S = 5
_CONNECT_S = 5
_STATEMENT_MS = 30_000


class Database:
    """The database of the service.

    Args:
        url: Its address, of SQLite or PostgreSQL.

    Raises:
        InvalidOptionError: If it is a file of SQLite that this process must not use.
    """

    def __init__(self, url: URL) -> None:
        self._has_failed = False
        self.url = url
        """Its address."""
        self.is_sqlite = url.get_backend_name() == "sqlite"
        path = Path(url.database or "")
        self._engine = sqlite_engine(path) if self.is_sqlite else _postgresql_engine(url)
        self._reserve = Reserve(path) if self.is_sqlite else None

    def close(self) -> None:
        """Closes the connections."""
        self._engine.dispose()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that reads.

        Raises:
            StorageError: If the database does not answer.
        """
        with self._errors_named(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def writing(self, *, uses_reserve: bool = False, is_needed: bool = True) -> Iterator[Connection]:
        """A transaction that writes: all of it is kept when it ends, or nothing.

        Args:
            uses_reserve: Whether it may use the room on SQLite's disk that is kept for this: it deletes, or changes
                little without which nobody could delete.
            is_needed: Whether a service that cannot do so is not ready.

        Raises:
            StorageError: If the database does not answer, or its disk takes no more.
        """
        try:
            with self._errors_named(), self._engine.execution_options(**{WRITES: True}).begin() as connection:
                if self._reserve is not None and uses_reserve:
                    self._reserve.give_back()
                elif self._reserve is not None:
                    self._reserve.take()
                yield connection
        except StorageError:
            self._has_failed |= is_needed
            raise
        finally:
            if uses_reserve:
                self._take_reserve()

    def _take_reserve(self) -> None:
        """Keeps the room again that a deletion had; what is missing, the next transaction takes, or the one after."""
        if self._reserve is None:
            return
        with suppress(OSError, sqlite3.OperationalError, SQLAlchemyError):
            if self._reserve.is_needed:
                empty_log(self._engine)
            self._reserve.take()

    @property
    def is_full(self) -> bool:
        """Whether SQLite's disk has no room; how full a server's disk is, this service is not told."""
        return self._reserve is not None and self._reserve.is_needed

    def shrink(self) -> bool:
        """Gives some of the room that rows have left back to SQLite's disk; whether there was any.

        Raises:
            StorageError: If the database does not answer.
        """
        if not self.is_sqlite:
            return False
        with self.writing(uses_reserve=True) as connection:
            return shrink(connection)

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except (OperationalError, InterfaceError, InternalError, PoolTimeoutError, OSError) as error:
            cause = str(getattr(error, "orig", None) or error)
            folder = Path(self.url.database or "").parent
            if self.is_sqlite and folder.is_dir() and not os.access(folder, os.W_OK):
                cause = f"{cause}; its folder is read-only"  # SQLite says that it cannot open a file there
            reason = next((said for part, said in _CAUSES.items() if part in cause), "the database does not answer")
            _log.warning("database fault", reason=reason, cause=cause)
            raise StorageError(reason) from error

    def insert_new(self, connection: Connection, table: Table, values: dict[str, Any]) -> bool:
        """Inserts a row unless one has its primary key; returns whether it did."""
        insert = sqlite.insert if self.is_sqlite else postgresql.insert
        statement = insert(table).values(values).on_conflict_do_nothing().returning(*table.primary_key)
        return connection.execute(statement).first() is not None

    def delete_some(
        self, connection: Connection, table: Table, which: ColumnElement[bool], by: ColumnElement[int]
    ) -> int:
        """Deletes some rows, those first that come first; others in several processes delete others.

        Args:
            connection: A transaction that writes.
            table: Their table.
            which: Which rows.
            by: What they are sorted by.

        Returns:
            How many.
        """
        key, most = tuple(table.primary_key), _FEW_ROWS if self.is_full else _MANY_ROWS
        found = select(*key).where(which).order_by(by).limit(most).with_for_update(skip_locked=True)
        return connection.execute(delete(table).where(tuple_(*key).in_(found))).rowcount

    def check(self) -> None:
        """Checks that the database answers; once a write has failed, that it takes one of a plan's size.

        Raises:
            StorageError: If it does not.
        """
        with self.reading() as connection:
            connection.execute(select(1))
        if self._has_failed:
            row = {"client": "", "key": uuid.uuid4().hex, "fingerprint": "", "owner": "", "started_us": now_us()}
            with self.writing() as connection:
                connection.execute(insert(IDEMPOTENT_REQUESTS).values(**row, answer=os.urandom(_PROBE_BYTES)))
            with self.writing(uses_reserve=True) as connection:
                connection.execute(delete(IDEMPOTENT_REQUESTS).where(IDEMPOTENT_REQUESTS.c.key == row["key"]))
            self._has_failed = False


def _postgresql_engine(url: URL) -> Engine:
    return create_engine(
        url,
        pool_size=_POOL_SIZE,
        max_overflow=_POOL_SIZE,
        pool_timeout=_POOL_WAIT_S,
        pool_pre_ping=True,
        connect_args={"connect_timeout": _CONNECT_S, "options": f"-c statement_timeout={_STATEMENT_MS}"},
    )
