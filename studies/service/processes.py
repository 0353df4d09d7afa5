"""Processes that studies of the service start: the service, and a PostgreSQL server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import httpx
import psycopg

from autoshard.core.errors import ExecutionError
from server.storage.database import Database
from server.storage.location import DATABASE_VARIABLE, parsed_url
from server.storage.upgrading import upgrade

_T = TypeVar("_T")
_START_S, _STOP_S, _POLL_S = 600.0, 60.0, 0.1


class DatabaseKind(StrEnum):
    """A kind of database that the service runs on."""

    SQLITE = "sqlite"
    POSTGRESQL = "postgresql"


@dataclass(slots=True)
class RunningService:
    """A service on a free port of loopback.

    Args of the constructor:
        folder: Its log and its files.
        database: Address of its database.
        arguments: Further options of `autoshard serve`.
    """

    folder: Path
    database: str
    arguments: tuple[str, ...] = ()
    url: str = ""
    """Its address."""
    log: Path = Path()
    """Its log, since it was last started."""
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process, which has been started."""
        assert self._process is not None
        return self._process

    @property
    def is_running(self) -> bool:
        """Whether it was started, and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self, *, until_ready: bool = True) -> None:
        """Starts it, and waits until it listens or is ready.

        Raises:
            ExecutionError: If it ends, or takes too long.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        program = Path(sys.executable).with_name("autoshard")
        log = self.log = self.folder / f"{uuid.uuid4().hex}.log"
        environment = {**os.environ, DATABASE_VARIABLE: self.database, "HOME": str(self.folder)}
        data = str(self.folder / "data")
        command = [str(program), "serve", "--port", "0", "--data", data, *self.arguments]
        with log.open("wb") as opened:
            self._process = subprocess.Popen(command, stdout=opened, stderr=opened, env=environment)
        self.url = self._await(lambda: _address(log))
        if until_ready:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Waits until plans can be made.

        Raises:
            ExecutionError: If it ends, or takes too long.
        """
        self._await(self._is_ready)

    def kill(self) -> None:
        """Ends it by SIGKILL; its planning processes end by themselves, for nobody asks them any more."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Ends it by SIGTERM.

        Raises:
            ExecutionError: If it does not exit with 0.
        """
        self.process.send_signal(signal.SIGTERM)
        if (code := self.process.wait(_STOP_S)) != 0:
            raise ExecutionError(f"the service ended with exit code {code}")

    def memory_bytes(self) -> int:
        """Proportional set size of the service and its planning processes."""
        pids = [self.process.pid, *_children(self.process.pid)]
        return sum(map(_pss_bytes, pids))

    def cpu_s(self) -> float:
        """Seconds of processors that the service has taken, without its planning processes."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def _await(self, found: Callable[[], _T]) -> _T:
        latest_s = time.monotonic() + _START_S
        while not (result := found()):
            if self.process.poll() is not None or time.monotonic() > latest_s:
                raise ExecutionError(f"the service did not start; its log ends with: {_last_line(self.log)}")
            time.sleep(_POLL_S)
        return result


@contextmanager
def running(service: RunningService) -> Iterator[RunningService]:
    """A service that runs until the end of the block."""
    service.start()
    try:
        yield service
    finally:
        if service.is_running:
            service.stop()


@contextmanager
def new_database(kind: DatabaseKind, folder: Path) -> Iterator[str]:
    """The address of an empty database with the service's schema; it is gone with the block.

    Raises:
        ExecutionError: If the machine has no PostgreSQL server.
    """
    if kind is DatabaseKind.SQLITE:
        yield _upgraded(f"sqlite:///{folder}/service.sqlite")
        return
    with postgresql_server() as server:
        yield _upgraded(f"{server}/postgres")


def _upgraded(address: str) -> str:
    database = Database(parsed_url(address))
    upgrade(database)
    database.close()
    return address


@contextmanager
def postgresql_server(*settings: str) -> Iterator[str]:
    """A PostgreSQL server of its own, on loopback and a free port; gives its address, without a database's name.

    Args:
        settings: Such as `fsync=off`; without, it writes through to the disk, as in production.

    Raises:
        ExecutionError: If the machine has none.
    """
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda folder: int(folder.parent.name))
    if not programs:
        raise ExecutionError("this machine has no PostgreSQL server (Debian: postgresql-15)")
    user = "postgres" if os.geteuid() == 0 else None  # the server refuses to run as root
    folder = Path(tempfile.mkdtemp(prefix="autoshard-postgresql-"))
    try:
        if user is not None:
            shutil.chown(folder, user, user)
        port = _free_port()
        made_by = ["-U", "autoshard", "-A", "trust", "--no-sync", "-E", "UTF8", "--locale", "C"]
        _run_as(user, folder, [programs[-1] / "initdb", "-D", folder / "data", *made_by]).wait(_STOP_S)
        options = ["-p", str(port), "-h", "127.0.0.1", "-k", str(folder), *(f"--{setting}" for setting in settings)]
        process = _run_as(user, folder, [programs[-1] / "postgres", "-D", folder / "data", *options])
        try:
            address = f"postgresql://autoshard@127.0.0.1:{port}"
            _await_connection(f"{address}/postgres", process)
            yield address
        finally:
            process.send_signal(signal.SIGINT)  # disconnects clients
            process.wait(_STOP_S)
    finally:
        shutil.rmtree(folder)


def _run_as(user: str | None, folder: Path, command: list[str | Path]) -> subprocess.Popen[bytes]:
    nothing = subprocess.DEVNULL
    if user is None:
        return subprocess.Popen(command, cwd=folder, stdout=nothing, stderr=nothing)
    return subprocess.Popen(command, cwd=folder, stdout=nothing, stderr=nothing, user=user, group=user, extra_groups=[])


def _await_connection(address: str, process: subprocess.Popen[bytes]) -> None:
    latest_s = time.monotonic() + _START_S
    while time.monotonic() < latest_s and process.poll() is None:
        try:
            psycopg.connect(address, connect_timeout=1).close()
            return
        except psycopg.OperationalError:
            time.sleep(_POLL_S)
    raise ExecutionError("the PostgreSQL server did not start")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def _last_line(log: Path) -> str:
    return "".join(log.read_text(encoding="utf-8").splitlines()[-1:]) or "nothing"


def _address(log: Path) -> str:
    lines = (json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("{"))
    return next((line["url"] for line in lines if line.get("event") == "starting"), "")


def _children(pid: int) -> list[int]:
    try:
        tasks = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(child) for task in tasks for child in task.read_text().split()]
    except OSError:
        return []


def _pss_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
