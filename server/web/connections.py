"""Connections: how many there are, for how long one may do nothing, and how much one may have done at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
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
#: Seconds after which a connection is cut whose body nobody reads, and bytes of it that are thrown away meanwhile:
#: clients that send all before they read find the answer, those of long bodies when they cannot send any more.
_LEAVING_S, _LEFT_BYTES = 2.0, 1 << 20


def limited_protocol(settings: ServerSettings) -> type[asyncio.Protocol]:
    """The protocol class of connections with these limits, for uvicorn."""

    class Limited(_LimitedProtocol):
        limits, places = settings, _Places(settings)

    return Limited


class _Places:
    """Who has a place, by address and in the order in which they came.

    Args:
        settings: Limits.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._of_one = max(1, settings.max_connections // 2)
        self._of_all = settings.max_connections + settings.spare_connections
        self._taken: dict[str, dict[_LimitedProtocol, None]] = {}
        self._num_taken = 0

    def take(self, connection: _LimitedProtocol) -> bool:
        """Gives a connection a place, if need be that of another one; returns whether there is one."""
        own = self._taken.get(connection.address, {})
        has_room = True
        if connection.address and len(own) >= self._of_one:
            has_room = self._close_oldest([own])
        elif self._num_taken >= self._of_all:
            has_room = self._close_oldest(sorted(self._taken.values(), key=len, reverse=True))
        if has_room:
            self._taken.setdefault(connection.address, {})[connection] = None
            self._num_taken += 1
        return has_room

    def leave(self, connection: _LimitedProtocol) -> None:
        """Takes a connection's place back, if it has one."""
        own = self._taken.get(connection.address, {})
        if connection in own:
            del own[connection]
            self._num_taken -= 1
        if not own:
            self._taken.pop(connection.address, None)

    def _close_oldest(self, groups: Iterable[dict[_LimitedProtocol, None]]) -> bool:
        """Closes the first connection without a request that is known to be allowed; returns whether there is one."""
        for connection in (one for group in groups for one in group if not one.is_allowed):
            self.leave(connection)
            connection.transport.abort()
            return True
        return False


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
    places: _Places
    #: Address of the client; empty for a proxy, whose clients' requests are counted by their own.
    address = ""
    conn: _PacedConnection
    flow: _PacedFlow
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _is_leaving, _num_left = False, 0

    @property
    def is_allowed(self) -> bool:
        """Whether a request is being answered that is known to be allowed."""
        return self.cycle is not None and not self.cycle.response_complete and "actor" in self.cycle.scope["state"]

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow, self.conn = _PacedFlow(transport), _PacedConnection(h11.SERVER)
        if self.client and not self.limits.is_proxy(self.client[0]):
            self.address = self.client[0]
        if not self.places.take(self):
            most = max(1, self.limits.max_connections // 2)
            self._answer_and_close(
                ClientBusyError(f"{most} connections of this address are open, the most that may be")
            )
            return
        self._watch_head()

    @override
    def data_received(self, data: bytes) -> None:
        if not self._is_leaving:
            super().data_received(data)
            self._watch_head()
            return
        self._num_left += len(data)
        if self._num_left > _LEFT_BYTES:
            self.transport.pause_reading()

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
        self.places.leave(self)
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

    def _leave(self) -> None:
        """Ends this side of the connection, and throws away some of what the other one still sends."""
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
