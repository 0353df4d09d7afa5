"""Requests that wait for a planning process: few, for a limited time, and no client with more than its share."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from server.problems import BusyError, ClientBusyError, ClientGoneError

W = TypeVar("W")

#: Weight of the latest time that a worker was held, in the mean of all.
_LATEST = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Bounds of a queue.

    Attributes:
        max_waiting: Requests that wait, of all clients.
        max_waiting_per_client: Requests that wait, of one client.
        max_running_per_client: Workers that one client holds.
        max_wait_s: Seconds that a request waits, unless there are too many.
        calm_s: Seconds without a refusal after which an overload is over.
    """

    max_waiting: int
    max_waiting_per_client: int
    max_running_per_client: int
    max_wait_s: float
    calm_s: float = 5.0


@dataclass(eq=False, slots=True)
class _Ticket(Generic[W]):
    client: str
    turn: asyncio.Future[W] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    came: float = field(default_factory=time.monotonic)


class WorkerQueue(Generic[W]):
    """Hands idle workers to waiting requests.

    Of the clients below their share, the one that holds the fewest workers is next; among its requests, and among
    such clients, the oldest.

    Bursts wait. Once the queue is full, the service is overloaded, until it has refused nobody for some seconds: half
    as many requests then wait as there are workers, and no longer than workers are held in the mean, so that those
    that are answered are answered soon, and the others are refused before their bodies are read.

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
        self._since: dict[int, float] = {}
        self._mean_held_s: float | None = None
        self._overloaded_until = -math.inf

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
        if len(self._waiting) >= self._most_waiting:
            self._hurry()
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
        self._waiting.append(ticket)
        self._hand_out()
        if self._is_overloaded and not ticket.turn.done():
            self._limit(ticket)
        events: set[asyncio.Future[Any]] = {ticket.turn} if gone is None else {ticket.turn, gone}
        try:
            await asyncio.wait(events, timeout=self._limits.max_wait_s, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if ticket.turn.done() and ticket.turn.exception() is None:  # handed out now, and nobody will use it
                self.leave(client)
                self.put(ticket.turn.result())
            raise
        finally:
            self._drop(ticket)
        if ticket.turn.done():
            return ticket.turn.result()
        if gone is not None and gone.done():
            raise ClientGoneError("the client left before its turn")
        raise BusyError(f"waited {self._limits.max_wait_s:g} s for a planning process")

    def leave(self, client: str) -> None:
        """Ends a client's hold of one worker; `put` makes the worker idle."""
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]

    def put(self, worker: W) -> None:
        """Adds an idle worker."""
        since = self._since.pop(id(worker), None)
        if since is not None:
            held_s = time.monotonic() - since
            mean_s = held_s if self._mean_held_s is None else self._mean_held_s
            self._mean_held_s = (1 - _LATEST) * mean_s + _LATEST * held_s
        self._idle.append(worker)
        self._hand_out()

    def _hand_out(self) -> None:
        while (ticket := self._next()) is not None and (worker := self._take_idle()) is not None:
            self._drop(ticket)
            self._running[ticket.client] += 1
            self._since[id(worker)] = time.monotonic()
            ticket.turn.set_result(worker)

    def _drop(self, ticket: _Ticket[W]) -> None:
        if ticket in self._waiting:
            self._waiting.remove(ticket)

    @property
    def _is_overloaded(self) -> bool:
        return time.monotonic() < self._overloaded_until

    @property
    def _most_waiting(self) -> int:
        """Requests that may wait now."""
        num_workers = self.num_running + self.num_idle
        return max(1, num_workers // 2) if self._is_overloaded else self._limits.max_waiting

    def _hurry(self) -> None:
        """Takes note of a refusal; at the first one, limits the wait of all that wait."""
        was_overloaded = self._is_overloaded
        self._overloaded_until = time.monotonic() + self._limits.calm_s
        if not was_overloaded:
            for ticket in self._waiting:
                self._limit(ticket)

    def _limit(self, ticket: _Ticket[W]) -> None:
        longest_s = self._limits.max_wait_s if self._mean_held_s is None else self._mean_held_s
        left_s = ticket.came + longest_s - time.monotonic()
        asyncio.get_running_loop().call_later(max(0.0, left_s), self._send_away, ticket)

    def _send_away(self, ticket: _Ticket[W]) -> None:
        if ticket in self._waiting:
            self._drop(ticket)
            self._hurry()
            ticket.turn.set_exception(BusyError("there are more requests than the planning processes can answer"))

    def _next(self) -> _Ticket[W] | None:
        share = self._limits.max_running_per_client
        below = [ticket for ticket in self._waiting if self._running[ticket.client] < share]
        return min(below, key=lambda ticket: self._running[ticket.client], default=None)

    def _take_idle(self) -> W | None:
        while self._idle:
            worker = self._idle.pop()
            if self._is_usable(worker):
                return worker
        return None
