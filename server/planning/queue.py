"""Requests that wait for a planning process: few, for a limited time, and no client with more than its share."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from server.problems import BusyError, ClientBusyError, ClientGoneError

W = TypeVar("W")

#: Share of what one is worked on, on average, that a request may have waited in a standing queue; its least seconds;
#: weight of the latest work in that average.
_PATIENCE_SHARE, _LEAST_PATIENCE_S, _LATEST_WEIGHT = 0.5, 0.05, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Bounds of a queue.

    Attributes:
        max_waiting: Requests that wait, of all clients.
        max_waiting_per_client: Requests that wait, of one client.
        max_running_per_client: Workers that one client holds.
        max_wait_s: Seconds that a request waits.
        max_burst_s: Seconds for which there may be waiting requests without a pause; a queue that stands for longer is
            kept short.
    """

    max_waiting: int
    max_waiting_per_client: int
    max_running_per_client: int
    max_wait_s: float
    max_burst_s: float


@dataclass(eq=False, slots=True)
class _Ticket(Generic[W]):
    client: str
    since_s: float = field(default_factory=time.monotonic)
    turn: asyncio.Future[W] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class WorkerQueue(Generic[W]):
    """Hands idle workers to waiting requests.

    Of the clients below their share, the one that holds the fewest workers is next; among its requests, and among
    such clients, the oldest.

    A burst waits. Where more come than can be answered, waiting helps nobody: once requests have waited without a pause
    for `max_burst_s`, each worker goes to one that has waited for less than half of the time that one is worked on, and
    those that have waited for longer are refused (as CoDel does with packets: Nichols and Jacobson, ACM Queue 10(5),
    2012). A worker is never idle for that: where all have waited for longer, the latest is next.

    Args:
        limits: Bounds.
        is_usable: Whether an idle worker can still work; one that cannot is dropped.
    """

    def __init__(self, limits: QueueLimits, is_usable: Callable[[W], bool]) -> None:
        self._limits = limits
        self._is_usable = is_usable
        self._idle: list[W] = []
        self._waiting: list[_Ticket[W]] = []
        self._running: Counter[str] = Counter()
        self._standing_since_s = 0.0
        self._mean_work_s = 0.0

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Workers that clients hold."""
        return self._running.total()

    @property
    def num_idle(self) -> int:
        """Workers that nobody holds."""
        return len(self._idle)

    def check_room(self, client: str) -> None:
        """Checks that a request would be taken in now.

        Raises:
            ClientBusyError: If as many requests of this client wait as may.
            BusyError: If as many requests wait as may.
        """
        own = sum(ticket.client == client for ticket in self._waiting)
        if own >= self._limits.max_waiting_per_client:
            raise ClientBusyError(f"{own} requests of this client wait already, the most that may")
        if len(self._waiting) >= self._limits.max_waiting:
            raise BusyError(f"{len(self._waiting)} requests wait already, the most that may")

    async def turn(self, client: str, gone: asyncio.Future[None] | None = None) -> W:
        """Waits for a worker, which the client holds until `leave`.

        Args:
            client: Whose share it counts to.
            gone: Is done when the client has left, and the request need not be answered.

        Raises:
            ClientBusyError: As `check_room`.
            BusyError: As `check_room`, and if the wait took too long.
            ClientGoneError: If the client left first.
        """
        self.check_room(client)
        ticket: _Ticket[W] = _Ticket(client)
        if not self._waiting:
            self._standing_since_s = ticket.since_s
        self._waiting.append(ticket)
        self._hand_out()
        events: set[asyncio.Future[Any]] = {ticket.turn} if gone is None else {ticket.turn, gone}
        try:
            await asyncio.wait(events, timeout=self._limits.max_wait_s, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if (
                ticket.turn.done() and ticket.turn.exception() is None
            ):  # handed out in the same moment: nobody will use it
                self.leave(client, self._mean_work_s)
                self.put(ticket.turn.result())
            raise
        finally:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
        if ticket.turn.done():
            return ticket.turn.result()
        if gone is not None and gone.done():
            raise ClientGoneError("the client left before its turn")
        raise BusyError(f"waited {self._limits.max_wait_s:g} s for a planning process")

    def leave(self, client: str, work_s: float) -> None:
        """Ends a client's hold of one worker after so many seconds; `put` makes the worker idle."""
        self._mean_work_s += _LATEST_WEIGHT * (work_s - self._mean_work_s)
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]

    def put(self, worker: W) -> None:
        """Adds an idle worker."""
        self._idle.append(worker)
        self._hand_out()

    def _hand_out(self) -> None:
        while (ready := self._ready()) and (worker := self._take_idle()) is not None:
            ticket = min(self._fresh(ready), key=lambda ticket: self._running[ticket.client])
            self._waiting.remove(ticket)
            self._running[ticket.client] += 1
            ticket.turn.set_result(worker)

    def _ready(self) -> list[_Ticket[W]]:
        """Those of clients below their share, the oldest first."""
        return [
            ticket for ticket in self._waiting if self._running[ticket.client] < self._limits.max_running_per_client
        ]

    def _fresh(self, ready: list[_Ticket[W]]) -> list[_Ticket[W]]:
        """Those of which one is next; in a standing queue, others that have waited for too long are refused."""
        now_s = time.monotonic()
        if now_s - self._standing_since_s <= self._limits.max_burst_s:
            return ready
        patience_s = max(_LEAST_PATIENCE_S, _PATIENCE_SHARE * self._mean_work_s)
        fresh = [ticket for ticket in ready if now_s - ticket.since_s <= patience_s]
        if not fresh:
            return ready[-1:]
        for ticket in ready[: -len(fresh)]:
            self._waiting.remove(ticket)
            ticket.turn.set_exception(BusyError("more requests come than can be answered"))
        return fresh

    def _take_idle(self) -> W | None:
        while self._idle:
            worker = self._idle.pop()
            if self._is_usable(worker):
                return worker
        return None
