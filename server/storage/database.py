"""One database: its connections and transactions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, Table, create_engine, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from server.problems import StorageError
from server.storage.sqlite_file import WRITES, sqlite_engine

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
        self.url = url
        """Its address."""
        self.is_sqlite = url.get_backend_name() == "sqlite"
        self._engine = sqlite_engine(Path(url.database or "")) if self.is_sqlite else _postgresql_engine(url)

    def close(self) -> None:
        """Closes the connections."""
        self._engine.dispose()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that reads.

        Raises:
            StorageError: If the database does not answer.
        """
        with _errors_named(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that writes: all of it is kept when it ends, or nothing.

        Raises:
            StorageError: If the database does not answer.
        """
        with _errors_named(), self._engine.execution_options(**{WRITES: True}).begin() as connection:
            yield connection

    def insert_new(self, connection: Connection, table: Table, values: dict[str, Any]) -> bool:
        """Inserts a row unless one has its primary key; returns whether it did."""
        insert = sqlite.insert if self.is_sqlite else postgresql.insert
        statement = insert(table).values(values).on_conflict_do_nothing().returning(*table.primary_key)
        return connection.execute(statement).first() is not None

    def check(self) -> None:
        """Checks that the database answers.

        Raises:
            StorageError: If it does not.
        """
        with self.reading() as connection:
            connection.execute(select(1))


@contextmanager
def _errors_named() -> Iterator[None]:
    try:
        yield
    except (OperationalError, InterfaceError, PoolTimeoutError) as error:
        raise StorageError("the database does not answer") from error


def _postgresql_engine(url: URL) -> Engine:
    return create_engine(
        url,
        pool_size=_POOL_SIZE,
        max_overflow=_POOL_SIZE,
        pool_timeout=_POOL_WAIT_S,
        pool_pre_ping=True,
        connect_args={"connect_timeout": _CONNECT_S, "options": f"-c statement_timeout={_STATEMENT_MS}"},
    )
