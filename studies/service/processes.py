"""A real process of the service, and the memory that it and its planning processes hold."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from autoshard.core.errors import AutoshardError
from server.storage.location import DATABASE_VARIABLE

_START_S: Final = 120.0
_POLL_S: Final = 0.1


class ServiceEndedError(AutoshardError):
    """The service ended while it was measured; its log says why."""


@dataclass(frozen=True, slots=True)
class ServiceProcess:
    """A running service.

    Attributes:
        process: Its process.
        url: Where it listens.
        log_file: Its log.
    """

    process: subprocess.Popen[bytes]
    url: str
    log_file: Path

    @property
    def resident_bytes(self) -> int:
        """Memory of the service and all processes below it that is theirs alone, and their shares of what is not."""
        return sum(_proportional_bytes(pid) for pid in _tree(self.process.pid))

    def stop(self) -> None:
        """Ends it as a service manager does."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()


@contextmanager
def running_service(folder: Path, database: str | None, *arguments: str) -> Iterator[ServiceProcess]:
    """A service of its own, without keys, until the block ends.

    Args:
        folder: For its log, and its database if that is a file.
        database: Address of its database; None for a file of SQLite.
        arguments: More words for `autoshard serve`.

    Raises:
        ServiceEndedError: If it does not start.
    """
    log_file = folder / "service.log"
    program = Path(sys.executable).with_name("autoshard")
    command = [str(program), "serve", "--port", "0", "--rate", "1000000", *arguments]
    environment = {**os.environ, "HOME": str(folder), DATABASE_VARIABLE: database or sqlite_in(folder)}
    with log_file.open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment)
    try:
        yield _started(process, log_file)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait()


def sqlite_in(folder: Path) -> str:
    """Address of the database of a service in a folder."""
    return f"sqlite:///{folder}/service.sqlite"


def _started(process: subprocess.Popen[bytes], log_file: Path) -> ServiceProcess:
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        url = _address_in(log_file)
        if url is not None and _is_ready(url):
            return ServiceProcess(process, url, log_file)
        time.sleep(_POLL_S)
    raise ServiceEndedError(f"the service did not start; its log is {log_file}")


def _address_in(log_file: Path) -> str | None:
    for line in log_file.read_text(encoding="utf-8").splitlines():
        if line.startswith("{") and line.endswith("}") and json.loads(line).get("event") == "starting":
            return str(json.loads(line)["url"])
    return None


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            below = children.read_text().split()
        except OSError:  # the thread has ended
            continue
        for child in below:
            yield from _tree(int(child))


def _proportional_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # the process has ended
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
