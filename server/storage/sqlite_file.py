"""SQLite in one file: how it is opened, and by how many processes."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event

from autoshard.core.errors import InvalidOptionError
from server.storage.location import DATABASE_VARIABLE

#: The first version without the fault of write-ahead logs that can corrupt a database which several connections
#: write (https://sqlite.org/wal.html, "The WAL-reset bug").
SAFE_VERSION = (3, 51, 3)
_BUSY_S = 10.0

#: Execution option of transactions that write: they lock the file at their start, else two could wait for each other.
WRITES = "autoshard_writes"


def sqlite_engine(path: Path, version: tuple[int, ...] = sqlite3.sqlite_version_info) -> Engine:
    """The engine of a database file, which is made if it is missing.

    From `SAFE_VERSION` on, the file has a write-ahead log, and any number of processes may use it. Before, it has a
    rollback journal, and one process may use it at a time.

    Args:
        path: The file; it is free for others when the engine is disposed of, which is then of no more use.
        version: Of SQLite.

    Raises:
        InvalidOptionError: If the file cannot be made, or another process uses it and must not.
    """
    lock = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if version < SAFE_VERSION:
            lock = _lock(path, version)
        os.close(os.open(path, os.O_CREAT | os.O_RDONLY, 0o600))  # plans and digests of keys are its owner's
    except OSError as error:
        raise InvalidOptionError(
            f"{path}: {(error.strerror or str(error)).lower()}", field=DATABASE_VARIABLE
        ) from error
    engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": _BUSY_S})
    journal = "WAL" if version >= SAFE_VERSION else "DELETE"

    @event.listens_for(engine, "connect")
    def set_up(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # Python's module would begin transactions on its own
        for pragma in (f"journal_mode={journal}", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get(WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    if lock is not None:
        event.listen(engine, "engine_disposed", lambda _: os.close(lock), once=True)
    return engine


def _lock(path: Path, version: tuple[int, ...]) -> int:
    """Locks the file for this process, until the descriptor that is returned is closed."""
    descriptor = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        used, safe = (".".join(map(str, numbers)) for numbers in (version, SAFE_VERSION))
        raise InvalidOptionError(
            f"{path} is in use by another process, and SQLite {used} can corrupt a database that several use: stop "
            f"the other one, set {DATABASE_VARIABLE} to a PostgreSQL database, or use a Python with SQLite {safe} or "
            "newer",
            field=DATABASE_VARIABLE,
        ) from None
    return descriptor
