"""Starts the processes of a benchmark of collectives, passes on what they report, and leaves none behind."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from autoshard.core.errors import ExecutionError
from autoshard.formats import atomic_write
from autoshard.runtime.job import JOB_FILE

# One launcher for all process groups of the project: what it knows of orphans and of errors holds here, too.
from autoshard.runtime.launch import _end, _environment, _failure, _read_lines

#: Processes import torch and find each other before their first report; on a busy machine that takes a minute.
START_S = 300.0
_WORKER = "bench.collectives.worker"
_POLL_S = 0.1
_DRAIN_S = 2.0


def run_workers(job: dict[str, Any], nproc: int, stall_timeout_s: float) -> Generator[dict[str, Any], None, None]:
    """Starts the processes and passes their reports on; whatever happens, none is left when this is closed.

    Args:
        job: What `bench.collectives.worker` reads.
        nproc: Number of processes.
        stall_timeout_s: Longest silence between two reports.

    Raises:
        AutoshardError: The error of the process that failed first.
        ExecutionError: If a process was killed, or none reports for too long.
    """
    with tempfile.TemporaryDirectory(prefix="autoshard-collectives-") as name:
        folder = Path(name)
        atomic_write(folder / JOB_FILE, json.dumps(job))
        with _start(folder, nproc) as launcher:
            try:
                yield from _reports(launcher, stall_timeout_s)
            finally:
                _end(launcher, folder, nproc)
        if launcher.returncode != 0:
            raise _failure(folder, nproc, launcher.returncode)


def _start(folder: Path, nproc: int) -> subprocess.Popen[bytes]:
    environment = _environment(folder)
    # `bench` is a generic name: the one beside this file has to come first.
    location = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = ":".join([location, *filter(None, [environment.get("PYTHONPATH")])])
    elastic = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "--shutdown-timeout=5"]
    command = [sys.executable, "-m", "torch.distributed.run", *elastic, f"--nproc-per-node={nproc}"]
    with (folder / "stderr").open("wb") as stderr:
        return subprocess.Popen(
            [*command, "-m", _WORKER, str(folder)],
            stdin=subprocess.PIPE,  # workers end when this process does
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
            start_new_session=True,
        )


def _reports(launcher: subprocess.Popen[bytes], stall_timeout_s: float) -> Iterator[dict[str, Any]]:
    """Reports of the workers, until the launcher ends.

    Raises:
        ExecutionError: If there is none for too long.
    """
    assert launcher.stdout is not None
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    reader = threading.Thread(target=_read_lines, args=(launcher.stdout, lines), daemon=True)
    reader.start()
    heard, limit_s = time.monotonic(), max(START_S, stall_timeout_s)
    while launcher.poll() is None or reader.is_alive() or not lines.empty():
        try:
            line = lines.get(timeout=_POLL_S)
        except queue.Empty:
            if launcher.poll() is not None and time.monotonic() - heard > _DRAIN_S:
                return  # somebody else holds the other end of its output
            if time.monotonic() - heard > limit_s:
                raise ExecutionError(
                    f"no process has answered for {limit_s:g} s; one of them hangs, and all were stopped"
                ) from None
            continue
        heard = time.monotonic()
        try:
            event = json.loads(line)
        except ValueError:
            continue  # libraries print to standard output, too
        if isinstance(event, dict) and "event" in event:
            limit_s = stall_timeout_s
            yield event
