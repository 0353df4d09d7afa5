"""Middleware of every request: an id, a line in the log, and an answer even when the service has a fault."""

from __future__ import annotations

import re
import time
import uuid

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.web.buffers import address_of
from server.web.metrics import Metrics

_log = structlog.get_logger()
_ACCEPTED_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
ID_HEADER = "X-Request-ID"
_QUIET_PATHS = ("/livez", "/readyz")


class RequestLog:
    """Wraps the whole application: names each request by the client's id or a new one, logs and counts how it ended.

    Args:
        app: What answers.
        metrics: Counts requests.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(ID_HEADER, "")
        request_id = given if _ACCEPTED_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=request_id)
        started = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[ID_HEADER] = request_id
                headers["X-Content-Type-Options"] = "nosniff"
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - started
            self._metrics.count_request(scope["method"], scope["state"].get("endpoint"), status, seconds)
            if scope["path"] not in _QUIET_PATHS:
                _log.info(
                    "request",
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    duration_ms=round(1000 * seconds, 1),
                    address=address_of(scope),
                )
