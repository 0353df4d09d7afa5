"""Connections: how many there are, and for how long one may do nothing."""

from __future__ import annotations

import asyncio
from typing import Any

from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol

from autoshard.core.errors import AutoshardError, FormatError
from server.problems import MEDIA_TYPE, BusyError, ClientBusyError, problem_of, retry_after_s
from server.settings import ServerSettings

_REASONS = {400: "Bad Request", 429: "Too Many Requests", 503: "Service Unavailable"}


def limited_protocol(settings: ServerSettings) -> type[asyncio.Protocol]:
    """The protocol class of connections with these limits, for uvicorn."""

    class Limited(_LimitedProtocol):
        limits = settings

    return Limited


class _LimitedProtocol(H11Protocol):
    """HTTP/1.1 on one connection, which is refused beyond the limits and closed when its client stands still."""

    limits: ServerSettings
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if (refusal := self._refusal()) is not None:
            self._answer_and_close(refusal)
            return
        self._watch_head()

    @override
    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

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

    def _refusal(self) -> AutoshardError | None:
        most = self.limits.max_connections
        if len(self.connections) > most:
            return BusyError(f"{most} connections are open, the most that may be")
        address = self.client and self.client[0]
        if sum(_address(other) == address for other in self.connections) > max(1, most // 2):
            return ClientBusyError(f"{max(1, most // 2)} connections of this address are open, the most that may be")
        return None

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


def _address(connection: Any) -> str | None:
    client = connection.client
    return client[0] if client else None
