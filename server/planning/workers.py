"""Processes that make plans, so that planning neither holds up the service nor outlives its time.

The service and a worker exchange bytes only: a request's body and stored plans one way, a status and an answer's body
the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import structlog

from server.planning.queue import QueueLimits, WorkerQueue
from server.planning.worker import READY, STOP_SIGNAL, run_worker
from server.problems import ClientGoneError, InternalError, NotReadyError, OvertimeError
from server.settings import ServerSettings
from server.tasks.reply import Reply
from server.tasks.work import KEEPING, Work

_log = structlog.get_logger()
# A fork would copy the service's threads and sockets.
_context = multiprocessing.get_context("spawn")

#: Seconds before a process that ended while it started is replaced, and before the next one after it, and so on.
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 30.0
#: Seconds that a search has to end of itself, once its client has left.
_STOP_S = 0.5
_GONE = "the client left before it was answered"


@dataclass(frozen=True, slots=True, eq=False)
class _Worker:
    process: BaseProcess
    pipe: Connection

    def exchange(self, work: Work) -> Reply:
        work.send(self.pipe)
        return Reply.receive(self.pipe)

    def stop_search(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, STOP_SIGNAL)

    def end(self) -> None:
        # The pipe is not closed here: a thread may be waiting on it, and now reads its end.
        self.process.kill()
        self.process.join()


class WorkerPool:
    """A fixed number of planning processes; one that dies is replaced.

    One that dies while it starts is replaced too, after a delay that doubles each time. Only models that cannot be
    loaded are a failure of the service: they are the same for every process.

    Args:
        settings: Limits and models.
        on_ready: Called when all processes have loaded their models once; a replacement does not count.
        on_failure: Called with a line of text when a worker's models cannot be loaded.
    """

    def __init__(
        self, settings: ServerSettings, *, on_ready: Callable[[], None], on_failure: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._on_ready = on_ready
        self._on_failure = on_failure
        self._threads = ThreadPoolExecutor(settings.num_workers, thread_name_prefix="worker-pipe")
        self._queue = WorkerQueue(_queue_limits(settings), self._is_usable)
        self._starting: set[asyncio.Task[None]] = set()
        self._alive: set[_Worker] = set()
        self._num_started = 0
        self._num_failed_starts = 0
        self._is_stopped = False
        self.is_ready = False
        """Whether all workers have loaded their models once."""

    def start(self) -> None:
        """Starts the processes."""
        for _ in range(self._settings.num_workers):
            self._start_worker()

    async def stop(self) -> None:
        """Ends the processes, whatever they are doing."""
        self.kill()
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        self._threads.shutdown()

    def kill(self) -> None:
        """Ends the processes without waiting for what waits for them."""
        self._is_stopped = True
        self.is_ready = False
        for worker in self._alive:
            worker.end()

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a process."""
        return self._queue.num_waiting

    @property
    def num_running(self) -> int:
        """Requests that a process works on."""
        return self._queue.num_running

    @property
    def num_idle(self) -> int:
        """Processes that have nothing to do."""
        return self._queue.num_idle

    def check_room(self, client: str) -> None:
        """Raises what `answer` would raise now, before a body has been read.

        Raises:
            NotReadyError: If the models are not loaded yet.
            ClientBusyError: If as many requests of this client wait as may.
            BusyError: If as many requests wait as may.
        """
        if not self.is_ready:
            raise NotReadyError("the models are still being loaded")
        self._queue.check_room(client)

    async def answer(self, work: Work, client: str, gone: asyncio.Future[None] | None = None) -> Reply:
        """Has a worker answer a request, as soon as one is free and it is the client's turn.

        Args:
            work: The request.
            client: Whose share of the workers it counts to.
            gone: Is done when the client has left: a search ends then, at once or with its process.

        Raises:
            NotReadyError: If the models are not loaded yet, or the service is stopped.
            ClientBusyError: As `check_room`.
            BusyError: As `check_room`, and if no worker was free for long.
            ClientGoneError: If the client left before it was answered.
            OvertimeError: If the planner did not keep its time limit by far.
            InternalError: If the worker died.
        """
        self.check_room(client)
        try:
            worker = await self._queue.turn(client, gone)
        except asyncio.CancelledError:
            raise NotReadyError("the service is being stopped") from None
        try:
            reply = await self._answer(worker, work, None if work.kind in KEEPING else gone)
        finally:
            self._queue.leave(client)
        self._queue.put(worker)
        if reply is None:
            raise ClientGoneError(_GONE)
        return reply

    async def _answer(self, worker: _Worker, work: Work, gone: asyncio.Future[None] | None) -> Reply | None:
        """The answer; None for a client that left before."""
        exchange = asyncio.get_running_loop().run_in_executor(self._threads, worker.exchange, work)
        has_left = False
        try:
            if gone is not None:
                either: set[asyncio.Future[Any]] = {exchange, gone}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                has_left = not exchange.done()
            if has_left:
                worker.stop_search()
                await asyncio.wait({exchange}, timeout=_STOP_S)
                if not exchange.done():
                    worker.end()
            reply = await exchange
            return None if has_left else reply
        except (EOFError, OSError):
            worker.process.join()
            self._replace(worker)
            if self._is_stopped:
                raise NotReadyError("the service is being stopped") from None
            if has_left:
                raise ClientGoneError(_GONE) from None
            if worker.process.exitcode == -signal.SIGALRM:
                raise OvertimeError("the planner went on long after its time limit, and was ended") from None
            _log.error("worker died", exit_code=worker.process.exitcode)
            raise InternalError("the planning process ended before it answered") from None
        except asyncio.CancelledError:  # only the end of the service cancels requests
            exchange.cancel()
            worker.end()
            self._alive.discard(worker)
            raise NotReadyError("the service is being stopped") from None

    def _is_usable(self, worker: _Worker) -> bool:
        if worker.process.is_alive():
            return True
        _log.error("idle worker died", exit_code=worker.process.exitcode)
        self._replace(worker)
        return False

    def _replace(self, worker: _Worker) -> None:
        self._alive.discard(worker)
        if not self._is_stopped:
            self._start_worker()

    def _start_worker(self, delay_s: float = 0.0) -> None:
        task = asyncio.get_running_loop().create_task(self._start(delay_s))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        ours, theirs = _context.Pipe()
        process = _context.Process(target=run_worker, args=(theirs, self._settings), daemon=True)
        process.start()
        theirs.close()  # else its end would stay open when the worker dies
        worker = _Worker(process, ours)
        self._alive.add(worker)
        try:
            message = await asyncio.get_running_loop().run_in_executor(self._threads, worker.pipe.recv_bytes)
        except (EOFError, OSError):
            self._start_again(worker)
            return
        if self._is_stopped:
            return
        if message != READY:
            self._on_failure(message.decode("utf-8", errors="replace"))
            return
        self._count_started()
        self._queue.put(worker)

    def _start_again(self, worker: _Worker) -> None:
        """Replaces a worker that ended while it started."""
        worker.process.join()
        self._alive.discard(worker)
        if self._is_stopped:
            return
        delay_s = min(_FIRST_DELAY_S * 2**self._num_failed_starts, _LONGEST_DELAY_S)
        self._num_failed_starts += 1
        _log.error("worker ended while it started", exit_code=worker.process.exitcode, next_start_s=delay_s)
        self._start_worker(delay_s)

    def _count_started(self) -> None:
        self._num_failed_starts = 0
        self._num_started += 1
        if not self.is_ready and self._num_started >= self._settings.num_workers:
            self.is_ready = True
            self._on_ready()


def _queue_limits(settings: ServerSettings) -> QueueLimits:
    return QueueLimits(
        max_waiting=settings.max_waiting,
        max_waiting_per_client=max(1, settings.max_waiting // 2),
        max_running_per_client=settings.max_running_per_client,
        max_wait_s=settings.max_wait_s,
    )
