"""Connections: how many there are, for how long one may do nothing, and how much one may have done at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, Final

import h11
from typing_extensions import override
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from autoshard.core.errors import AutoshardError, FormatError
from server.problems import MEDIA_TYPE, ClientBusyError, problem_of, retry_after_s
from server.settings import ServerSettings

_REASONS = {400: "Bad Request", 429: "Too Many Requests"}
#: Parts of a body, such as chunks of a byte, that are read of a connection before it is the others' turn. Each takes
#: about 15 us of a core.
_MOST_EVENTS: Final = 32
#: Seconds for which the rest of a body is thrown away that nobody reads, so that its client reads the answer.
_LEAVING_S: Final = 2.0


def limited_protocol(settings: ServerSettings) -> type[asyncio.Protocol]:
    """The protocol class of connections with these limits, for uvicorn."""

    class Limited(_LimitedProtocol):
        limits = settings

    return Limited


class _PacedConnection(h11.Connection):
    """Needs data, as it says, after some events."""

    events_left = _MOST_EVENTS

    @override
    def next_event(self) -> Any:
        if self.events_left == 0:
            return h11.NEED_DATA
        self.events_left -= 1
        return super().next_event()


class _PacedFlow(FlowControl):
    """Reads no more while what was read waits."""

    is_behind = False

    @override
    def resume_reading(self) -> None:
        if not self.is_behind:
            super().resume_reading()


class _LimitedProtocol(H11Protocol):
    """HTTP/1.1 on one connection, which is closed when its client stands still.

    A connection without a request that is known to be allowed gives its place to a new one: of the address with most of
    them, the oldest.
    """

    limits: ServerSettings
    opened_s: float
    conn: _PacedConnection
    flow: _PacedFlow
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _is_leaving = False

    @property
    def address(self) -> str:
        """Of the client; empty for a proxy, whose clients' requests are counted by their own."""
        address = self.client[0] if self.client else ""
        return "" if self.limits.is_proxy(address) else address

    @property
    def is_allowed(self) -> bool:
        """Whether a request is being answered that is known to be allowed."""
        return self.cycle is not None and not self.cycle.response_complete and "actor" in self.cycle.scope["state"]

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow, self.conn = _PacedFlow(transport), _PacedConnection(h11.SERVER)
        self.opened_s = self.loop.time()
        if (refusal := self._take_place()) is not None:
            self._answer_and_close(refusal)
            return
        self._watch_head()

    @override
    def data_received(self, data: bytes) -> None:
        if not self._is_leaving:
            super().data_received(data)
            self._watch_head()

    @override
    def handle_events(self) -> None:
        if self.transport.is_closing():
            return
        self.conn.events_left = _MOST_EVENTS
        super().handle_events()
        if self.conn.events_left == 0 and not self._is_leaving:
            self.flow.pause_reading()
            self.flow.is_behind = True
            self.loop.call_soon(self.handle_events)
        elif self.flow.is_behind:
            self.flow.is_behind = False
            if self.cycle is None or len(self.cycle.body) <= HIGH_WATER_LIMIT:
                self.flow.resume_reading()

    @override
    def on_response_complete(self) -> None:
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._leave()
        super().on_response_complete()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.limits.write_timeout_s, self.transport.abort)

    @override
    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    @override
    def send_400_response(self, msg: str) -> None:
        self._answer_and_close(FormatError("is no HTTP/1.1 request", field="request"))

    def _take_place(self) -> AutoshardError | None:
        """Closes a connection that has to give its place to this one; why there is no place if there is none."""
        most = max(1, self.limits.max_connections // 2)
        others = [one for one in self.connections if isinstance(one, _LimitedProtocol) and one is not self]
        if not self.address or (own := sum(one.address == self.address for one in others)) < most:
            if len(others) < self.limits.max_connections + self.limits.spare_connections:
                return None
            own = 0
        waiting = [one for one in others if not one.is_allowed and (own == 0 or one.address == self.address)]
        if not waiting:
            return ClientBusyError(f"{most} connections of this address are open, the most that may be")
        counts = Counter(one.address for one in waiting)
        given = max(waiting, key=lambda one: (counts[one.address], -one.opened_s))
        self.connections.discard(given)
        given.transport.abort()
        return None

    def _leave(self) -> None:
        """Ends this side of the connection, and throws away what the other one still sends."""
        self._is_leaving = True
        self.flow.is_behind = False
        self.transport.write_eof()
        self.loop.call_later(_LEAVING_S, self.transport.abort)

    def _answer_and_close(self, error: AutoshardError) -> None:
        problem, retry = problem_of(error), retry_after_s(error)
        body = problem.model_dump_json(exclude_none=True).encode()
        lines = [
            f"HTTP/1.1 {problem.status} {_REASONS[problem.status]}",
            f"content-type: {MEDIA_TYPE}",
            f"content-length: {len(body)}",
            "connection: close",
            *([f"retry-after: {retry}"] if retry is not None else []),
        ]
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()

    def _watch_head(self) -> None:
        """Starts the time for a request's head where none is being answered, and ends it where one is."""
        if self.cycle is not None and not self.cycle.response_complete:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.limits.head_timeout_s, self._end_without_request)

    def _end_without_request(self) -> None:
        self._head_timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()
