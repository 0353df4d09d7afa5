"""Processes that make plans, so that planning neither holds up the service nor outlives its time.

The service and a worker exchange bytes only: a request body one way, a status and an answer body the other.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import structlog

from server.problems import BusyError, InternalError, NotReadyError, OvertimeError
from server.settings import ServerSettings
from server.worker import READY, run_worker

_log = structlog.get_logger()
# A fork would copy the service's threads and sockets.
_context = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer of a worker."""

    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class _Worker:
    process: BaseProcess
    pipe: Connection

    def exchange(self, body: bytes) -> bytes:
        self.pipe.send_bytes(body)
        return self.pipe.recv_bytes()

    def end(self) -> None:
        # The pipe is not closed here: a thread may be waiting on it, and now reads its end.
        self.process.kill()
        self.process.join()


class WorkerPool:
    """A fixed number of planning processes; one that dies is replaced.

    Args:
        settings: Limits and models.
        on_failure: Called with a line of text when a worker cannot start, for instance for a damaged model.
    """

    def __init__(self, settings: ServerSettings, on_failure: Callable[[str], None]) -> None:
        self._settings = settings
        self._on_failure = on_failure
        self._threads = ThreadPoolExecutor(settings.num_workers, thread_name_prefix="worker-pipe")
        self._starting: set[asyncio.Task[None]] = set()
        self._alive: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._is_stopped = False
        self.is_ready = False
        """Whether all workers have loaded their models once; a replacement does not count."""

    def start(self) -> None:
        """Starts the processes."""
        for _ in range(self._settings.num_workers):
            self._start_worker()

    async def stop(self) -> None:
        """Ends the processes, whatever they are doing."""
        self._is_stopped = True
        self.is_ready = False
        for worker in self._alive:
            worker.end()
        await asyncio.gather(*self._starting)
        self._threads.shutdown()

    def check_free(self) -> None:
        """Raises what `plan` would raise now, before a body has been read.

        Raises:
            NotReadyError: If the models are not loaded yet.
            BusyError: If no worker is free.
        """
        if not self.is_ready:
            raise NotReadyError("the models are still being loaded")
        for worker in [worker for worker in self._idle if not worker.process.is_alive()]:
            _log.error("idle worker died", exit_code=worker.process.exitcode)
            self._idle.remove(worker)
            self._replace(worker)
        if not self._idle:
            raise BusyError(f"all {self._settings.num_workers} planning processes are at work")

    async def plan(self, body: bytes) -> Reply:
        """Has a free worker answer a request.

        Raises:
            NotReadyError: If the models are not loaded yet, or the service is stopped.
            BusyError: If no worker is free.
            OvertimeError: If the planner did not keep its time limit by far.
            InternalError: If the worker died.
        """
        self.check_free()
        worker = self._idle.pop()
        try:
            answer = await self._in_thread(worker.exchange, body)
        except (EOFError, OSError):
            worker.process.join()
            self._replace(worker)
            if worker.process.exitcode == -signal.SIGALRM:
                raise OvertimeError("the planner went on long after its time limit, and was ended") from None
            _log.error("worker died", exit_code=worker.process.exitcode)
            raise InternalError("the planning process ended before it answered") from None
        except asyncio.CancelledError:  # only the end of the service cancels requests
            worker.end()
            self._alive.discard(worker)
            raise NotReadyError("the service is being stopped") from None
        self._idle.append(worker)
        return Reply(status=int(answer[:3]), body=answer[3:])

    def _replace(self, worker: _Worker) -> None:
        self._alive.discard(worker)
        if not self._is_stopped:
            self._start_worker()

    def _start_worker(self) -> None:
        ours, theirs = _context.Pipe()
        process = _context.Process(target=run_worker, args=(theirs, self._settings), daemon=True)
        process.start()
        theirs.close()  # else its end would stay open when the worker dies
        worker = _Worker(process, ours)
        self._alive.add(worker)
        task = asyncio.get_running_loop().create_task(self._await_ready(worker))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _await_ready(self, worker: _Worker) -> None:
        try:
            message = await self._in_thread(worker.pipe.recv_bytes)
        except (EOFError, OSError):
            message = b"a planning process ended while it started"
        if self._is_stopped:
            return
        if message != READY:
            self._on_failure(message.decode("utf-8", errors="replace"))
            return
        self._idle.append(worker)
        self.is_ready = self.is_ready or len(self._idle) == self._settings.num_workers

    async def _in_thread(self, function: Callable[..., bytes], *arguments: bytes) -> bytes:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
