"""Signs of life: what tells every process of a run that another one is gone or hangs, and which."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from autoshard.core.errors import AutoshardError, ExecutionError
from autoshard.runtime.processes.job import STOP_FILE, worker_pids

#: A process says that it lives this often, and is lost once it has not for so long; sooner if collectives failed, which
#: they do where a process died. torchrun needs `launch._GRACE_S` after that to end a stopped process.
_BEAT_S, _LOST_S, _LOST_AFTER_FAILURE_S = 1.0, 15.0, 5.0
#: How long a process whose collective failed waits to hear whose fault it was.
_HEAR_S = 10.0
_ANSWER = timedelta(seconds=10)
#: How gloo, NCCL and torch's store speak of a peer that is gone.
_OF_PEERS = re.compile(r"gloo|nccl|connection|broken pipe|socket|recvvalue|sendbytes", re.IGNORECASE)


class Watch:
    """Watches the process of the next rank, and hears of what befell any.

    Processes tell each other through torchrun's store, by a connection of their own: a thread of each sets a count
    there, and reads that of its neighbour. What it says when one is lost, or failed, reaches all others within two
    beats, on other machines as well. torchrun ends its processes by SIGTERM where one of them was killed; the thread
    says which, and ends this one. SIGTERM has to be blocked before any thread starts, or it would be ended by it.

    Args:
        folder: Of the job, in which this machine's launcher leaves its wish to stop.
        rank: Of this process.
        world_size: All processes.
        end: Ends this process with an error, from the thread.

    Attributes:
        wants_stop: Whether the launcher wants the job to save and end.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, end: Callable[[AutoshardError], None]) -> None:
        self._folder, self._rank, self._next, self._end = folder, rank, (rank + 1) % world_size, end
        self.wants_stop = False
        self._ended = threading.Event()
        self._store: Store | None = None
        if world_size > 1:
            store = TCPStore(
                os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=_ANSWER
            )
            self._store = PrefixStore(f"watch/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def close(self) -> None:
        """Says that this process has done its work and ends."""
        self._ended.set()
        if self._store is not None:
            self._store.set(f"alive/{self._rank}", "ended")

    def explained(self, error: BaseException) -> BaseException:
        """Why this process failed: the error, or that of the process which failed first, if that is why.

        Args:
            error: What was raised in this process.
        """
        if self._store is None:
            return error
        self._ended.set()
        if not _OF_PEERS.search(str(error)):
            text = str(error).strip().splitlines() or [type(error).__name__]
            self._tell(error.message if isinstance(error, AutoshardError) else f"process {self._rank}: {text[0]}")
            return error
        self._store.set("suspect", str(self._rank))
        self._ended.clear()  # The thread goes on: the neighbour may be the one.
        deadline = time.monotonic() + _HEAR_S
        while time.monotonic() < deadline:
            if (told := self._told()) is not None:
                return told
            time.sleep(_BEAT_S / 4)
        return error

    def _tell(self, what: str) -> None:
        """Tells all what happened, unless another process was first."""
        assert self._store is not None, "nobody to tell"
        self._store.compare_set("failed", "", what)

    def _told(self) -> ExecutionError | None:
        assert self._store is not None, "nobody tells"
        return ExecutionError(self._store.get("failed").decode()) if self._store.check(["failed"]) else None

    def _watch(self) -> None:
        """The thread."""
        beats, heard, heard_at = 0, b"", time.monotonic()
        while not self._ended.is_set():
            if signal.sigtimedwait([signal.SIGTERM], _BEAT_S) is not None:
                self._leave()
            self.wants_stop |= (self._folder / STOP_FILE).exists()
            if self._store is None:
                continue
            try:
                beats += 1
                self._store.set(f"alive/{self._rank}", str(beats))
                if (told := self._told()) is not None and not self._ended.is_set():
                    self._end(told)
                # A neighbour that has not yet begun is torchrun's business.
                now = self._store.get(f"alive/{self._next}") if self._store.check([f"alive/{self._next}"]) else b""
                if now != heard or now in (b"", b"ended"):
                    heard, heard_at = now, time.monotonic()
                limit_s = _LOST_AFTER_FAILURE_S if self._store.check(["suspect"]) else _LOST_S
                silent_s = time.monotonic() - heard_at
            except (dist.DistError, RuntimeError):  # the store's machine is gone, or about to end
                silent_s, limit_s = time.monotonic() - heard_at, _LOST_S
            if silent_s > limit_s and not self._ended.is_set():
                lost = ExecutionError(f"process {self._next} has given no sign of life for {silent_s:.0f} s")
                with contextlib.suppress(dist.DistError, RuntimeError):  # Each process then finds it by itself.
                    self._tell(lost.message)
                self._end(lost)

    def _leave(self) -> NoReturn:
        """Ends this process, as torchrun wants it; says which process of this machine was killed, if one was."""
        killed = [rank for rank, pid in worker_pids(self._folder).items() if not _is_alive(pid)]
        if killed and self._store is not None:
            with contextlib.suppress(dist.DistError, RuntimeError):
                self._tell(f"process {killed[0]} was killed")
        os._exit(128 + signal.SIGTERM)


def _is_alive(pid: int) -> bool:
    """Whether a process runs: it is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
