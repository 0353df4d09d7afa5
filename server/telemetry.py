"""Traces of requests by OpenTelemetry, which are sent where `autoshard[otel]` is installed and a collector is named."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from opentelemetry import propagate, trace
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.planning.workers import WorkerPool
from server.tasks.reply import Reply
from server.tasks.work import Work

#: OpenTelemetry's own variables; the others that it has are honoured as well.
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_log = structlog.get_logger()
#: Makes the spans of requests and of work.
tracer = trace.get_tracer("autoshard.server")
_QUIET_PATHS = ("/livez", "/readyz")


@contextmanager
def sent_traces() -> Iterator[None]:
    """Sends the traces that are made meanwhile, if the environment names a collector; at the end, all that are left."""
    if not any(map(os.environ.get, ENDPOINT_VARIABLES)):
        yield
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        _log.warning("no traces are sent", reason="autoshard[otel] is not installed")
        yield
        return
    os.environ.setdefault("OTEL_SERVICE_NAME", "autoshard")
    provider = TracerProvider(resource=Resource.create())
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    try:
        yield
    finally:
        provider.shutdown()


class RequestTraces:
    """Middleware: a span for each request, which has its id; the client's trace goes on, if it sends one.

    Args:
        app: What answers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request (ASGI)."""
        if scope["type"] != "http" or scope["path"] in _QUIET_PATHS:
            await self._app(scope, receive, send)
            return
        attributes = {
            "http.request.method": scope["method"],
            "url.path": scope["path"],
            "autoshard.request_id": scope["state"]["request_id"],
        }
        context = propagate.extract(dict(Headers(scope=scope)))
        with tracer.start_as_current_span(
            scope["method"], context=context, kind=trace.SpanKind.SERVER, attributes=attributes
        ) as span:
            if span.is_recording():
                structlog.contextvars.bind_contextvars(trace_id=format(span.get_span_context().trace_id, "032x"))

            async def send_and_note(message: Message) -> None:
                if message["type"] == "http.response.start":
                    _note(span, scope, message["status"])
                await send(message)

            await self._app(scope, receive, send_and_note)


def _note(span: trace.Span, scope: Scope, status: int) -> None:
    span.set_attribute("http.response.status_code", status)
    if route := scope["state"].get("endpoint"):
        span.set_attribute("http.route", route)
        span.update_name(f"{scope['method']} {route}")
    if status >= 500:
        span.set_status(trace.StatusCode.ERROR)


async def answer_traced(pool: WorkerPool, work: Work, client: str, gone: asyncio.Future[None]) -> Reply:
    """`WorkerPool.answer` in a span of its own: time in the queue and in a planning process."""
    with tracer.start_as_current_span(f"work {work.kind.value}") as span:
        span.set_attribute("autoshard.waiting_requests", pool.num_waiting)
        reply = await pool.answer(work, client, gone)
        span.set_attribute("autoshard.planner", reply.planner)
        span.set_attribute("autoshard.status", reply.status)
    return reply
