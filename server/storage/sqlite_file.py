"""SQLite in one file: how it is opened, by how many processes, and on a disk that is full."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine, create_engine, event

from autoshard.core.errors import InvalidOptionError
from server.storage.location import DATABASE_VARIABLE

#: The first version without the fault of write-ahead logs that can corrupt a database which several connections
#: write (https://sqlite.org/wal.html, "The WAL-reset bug").
SAFE_VERSION = (3, 51, 3)
_BUSY_S = 10.0
#: Room that is kept for deletions, and the steps in which it is taken. The journal of a deletion of ten plans, or of
#: the removal of `_SHRUNK_PAGES`, has at most 0.5 MiB (pages of 4 KiB, SQLite 3.40, November 2026).
_RESERVE_BYTES: Final = 2 << 20
_RESERVE_STEP: Final = 64 << 10
#: Pages that one transaction gives back to the disk.
_SHRUNK_PAGES: Final = 64

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
        # The journal of a deletion does not have what is deleted, and what it leaves can be given back to the disk.
        room = ("auto_vacuum=INCREMENTAL", "secure_delete=FAST")
        for pragma in (*room, f"journal_mode={journal}", "synchronous=FULL", "foreign_keys=ON"):
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


class Reserve:
    """Room on the disk of a database, in a file beside it, that only deletions may use: SQLite writes to delete.

    A transaction that adds rows checks it while it holds the database's lock, so that none gets what a deletion in
    another thread or process has given back for a moment.

    Args:
        path: The database.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.with_name(f"{path.name}.reserve")

    @property
    def is_needed(self) -> bool:
        """Whether the disk has less room, beside what is kept or to be kept, than is kept."""
        disk = os.statvfs(self._file.parent)
        return disk.f_bavail * disk.f_frsize < _RESERVE_BYTES + self._missing_bytes

    @property
    def _missing_bytes(self) -> int:
        with suppress(FileNotFoundError):
            return max(0, _RESERVE_BYTES - self._file.stat().st_size)
        return _RESERVE_BYTES

    def take(self) -> None:
        """Takes what is missing.

        Raises:
            OSError: If the disk has no room for it; what there is has been taken.
        """
        if not self._missing_bytes:
            return
        descriptor = os.open(self._file, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            for offset in range(os.fstat(descriptor).st_size, _RESERVE_BYTES, _RESERVE_STEP):
                os.posix_fallocate(descriptor, offset, _RESERVE_STEP)
        finally:
            os.close(descriptor)

    def give_back(self) -> None:
        """Lets the transaction that holds the database's lock use it."""
        with suppress(OSError):  # what cannot be given back was not taken
            os.truncate(self._file, 0)


def shrink(connection: Connection) -> bool:
    """Gives some of the room that rows have left back to the disk; whether there was any."""

    def pragma(name: str) -> int:
        return int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())

    before = pragma("page_count")
    for _ in range(min(pragma("freelist_count"), _SHRUNK_PAGES)):
        connection.exec_driver_sql("PRAGMA incremental_vacuum(1)")  # Python's module takes one step of each statement
    return pragma("page_count") < before


def empty_log(engine: Engine) -> None:
    """Has the write-ahead log, if there is one, take no room; another process may use it, then it is left."""
    with closing(engine.raw_connection()) as connection, closing(connection.cursor()) as cursor:
        cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
