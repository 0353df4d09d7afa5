"""Requests that a planning process answers: read, done once, stored, answered."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import structlog
from fastapi import Request, Response
from starlette.concurrency import run_in_threadpool

from autoshard.api import PARQUET, JobTask, SamplesAnswer
from autoshard.core.errors import FormatError
from server.planning.workers import WorkerPool
from server.problems import MEDIA_TYPE, StorageError
from server.settings import ServerSettings
from server.storage.idempotency import IdempotentRequest, KeptAnswer
from server.storage.storage import Storage
from server.tasks.reply import ACCEPTED, Reply
from server.tasks.work import Body, Work, WorkKind
from server.telemetry import answer_traced
from server.web.buffers import client_of
from server.web.errors import RefusedError
from server.web.metrics import Metrics
from server.web.reading import IDEMPOTENCY_KEY, KEY_PATTERN, MAX_PARSED_BYTES, ReceivedBody, client_gone, read_body

_KEY = re.compile(KEY_PATTERN)
#: Work that makes plans, which are stored.
_STORED = frozenset({WorkKind.PLAN, WorkKind.REPLAN, WorkKind.EVALUATE})


class WorkHandler:
    """Takes requests to the planning processes, and answers with what these reply.

    Args:
        pool: The processes.
        storage: Holds plans and answers to requests with idempotency keys.
        settings: Limits.
        metrics: Counts the work.
        on_plan: Takes note of plans that were made, after they are stored.
    """

    def __init__(
        self,
        pool: WorkerPool,
        storage: Storage,
        settings: ServerSettings,
        metrics: Metrics,
        on_plan: Callable[[Reply], None] = lambda _: None,
    ) -> None:
        self._pool = pool
        self._storage = storage
        self.settings = settings
        self._metrics = metrics
        self._on_plan = on_plan

    async def answer(self, received: ReceivedBody[Any], kind: WorkKind, *plan_ids: str) -> Response:
        """Answers a request that has a body.

        Args:
            received: The body, which a planning process parses and checks.
            kind: What the request asks for.
            plan_ids: Stored plans that it is about.

        Raises:
            AutoshardError: If it cannot be answered.
        """
        self.check_room(received.request)

        async def work(body: Body, keyed: IdempotentRequest | None) -> KeptAnswer:
            return await self.worked(received.request, kind, body, keyed, plan_ids)

        return await self.once(received, work)

    def check_room(self, request: Request) -> None:
        """Checks, before its body is read, that a request would find room.

        Raises:
            RetryError: If it would not.
        """
        self._pool.check_room(client_of(request.scope))

    async def worked(
        self,
        request: Request,
        kind: WorkKind,
        body: Body,
        keyed: IdempotentRequest | None,
        plan_ids: tuple[str, ...] = (),
    ) -> KeptAnswer:
        """What a process makes of a request whose body has been read.

        Raises:
            QuotaError: If it would store a plan, and the client stores as much as it may.
            AutoshardError: If it cannot be answered.
        """
        if kind in _STORED:
            actor = request.state.actor
            await run_in_threadpool(self._storage.check_quota, {client_of(request.scope), actor.name}, actor.team)
        return await self._done(request, await self._work(request, kind, body, plan_ids), keyed)

    async def check(self, received: ReceivedBody[Any], body: Body, kind: WorkKind | None) -> str:
        """Checks a body that is stored as it is; one that is long, by a planning process. Its `JobTask`, as JSON.

        Args:
            received: Parses it.
            body: The body.
            kind: What checks it in a planning process; None where all bodies are short.

        Raises:
            AutoshardError: If there is something wrong with it.
        """
        if len(body) <= MAX_PARSED_BYTES or kind is None:
            return JobTask.of(await received.parse(body)).model_dump_json()
        answer = await self.worked(received.request, kind, body, None)
        if answer.status != ACCEPTED:
            raise RefusedError(answer.status, answer.body)
        return answer.body.decode()

    async def add_samples(self, request: Request) -> Response:
        """Answers a request whose body is a file of samples, which is added once however often it is sent.

        Raises:
            AutoshardError: If it cannot be answered.
        """
        self.check_room(request)
        content = await read_body(request, self.settings, self.settings.max_body_bytes, PARQUET)
        work = replace(await self._work(request, WorkKind.SAMPLES, Body(b"{}"), ()), stored=(content,), received_s=None)
        answer = await self._done(request, work, None)
        if answer.status == 200:
            added = SamplesAnswer.model_validate_json(answer.body)
            target = f"{added.kind} {added.device} {added.id}"
            await run_in_threadpool(self._storage.audit.add, request.state.actor, "samples.add", target)
        return _answered(answer, request)

    async def once(
        self, received: ReceivedBody[Any], do: Callable[[Body, IdempotentRequest | None], Awaitable[KeptAnswer]]
    ) -> Response:
        """Does what a request asks for, or answers as the one before with the same idempotency key.

        Args:
            received: The request's body.
            do: Takes the body and the key, with which it stores the answer.

        Raises:
            AutoshardError: If it cannot be done.
        """
        request, body = received.request, await received.read(self.settings)
        keyed = await run_in_threadpool(_keyed, received, body)
        if keyed is not None:
            kept = await run_in_threadpool(self._storage.requests.begin, keyed)
            if kept is not None:
                return _answered(kept, request)
        try:
            return _answered(await do(body, keyed), request)
        except BaseException:
            if keyed is not None:
                await asyncio.shield(run_in_threadpool(self._give_up, keyed))
            raise

    async def read(
        self,
        request: Request,
        kind: WorkKind,
        *plan_ids: str,
        parameters: Mapping[str, object] | None = None,
        media_type: str = "application/json",
    ) -> Response:
        """Answers a request without a body, about stored plans.

        Args:
            request: The request.
            kind: What it asks for.
            plan_ids: The plans.
            parameters: What would be its body.
            media_type: That of the answer.

        Raises:
            AutoshardError: If it cannot be answered.
        """
        self.check_room(request)
        work = await self._work(request, kind, Body(json.dumps(parameters or {}).encode()), plan_ids)
        return _answered(await self._done(request, work, None), request, media_type)

    async def _work(self, request: Request, kind: WorkKind, body: Body, plan_ids: tuple[str, ...]) -> Work:
        received_s, stored = time.perf_counter(), []
        for plan_id in plan_ids:
            stored.append(await run_in_threadpool(self._storage.plans.read, plan_id, request.state.actor.team))
            request.state.buffer.answer(len(stored[-1]))
        return Work(
            kind=kind,
            body=body,
            stored=tuple(stored),
            request_id=request.state.request_id,
            received_s=received_s,
            actor=request.state.actor.name,
            team=request.state.actor.team,
        )

    async def _done(self, request: Request, work: Work, keyed: IdempotentRequest | None) -> KeptAnswer:
        """Has a process do the work, and stores what it made with the answer before anybody sees it."""
        gone, started = asyncio.ensure_future(client_gone(request)), time.perf_counter()
        try:
            reply = await answer_traced(self._pool, work, client_of(request.scope), gone)
        finally:
            gone.cancel()
        self._metrics.count_work(work.kind, reply, time.perf_counter() - started)
        structlog.contextvars.bind_contextvars(
            work=work.kind.value, **({"planner": reply.planner} if reply.planner else {})
        )
        # Of RFC 8941's lists, as browsers show it.
        times_ms = {"queue": 1000 * reply.waited_s, "work": 1000 * reply.worked_s}
        request.state.timing = ", ".join(f"{name};dur={value:.1f}" for name, value in times_ms.items())
        structlog.contextvars.bind_contextvars(**{f"{name}_ms": round(value, 1) for name, value in times_ms.items()})
        answer = KeptAnswer(status=reply.status, body=reply.body)
        if reply.status >= 500 and keyed is not None:
            await run_in_threadpool(self._give_up, keyed)
        elif reply.facts is not None or (keyed is not None and reply.status != ACCEPTED):
            await run_in_threadpool(self._storage.keep, answer, reply.facts, keyed, request.state.actor)
        if work.kind in (WorkKind.PLAN, WorkKind.REPLAN):
            self._on_plan(reply)
        return answer

    def _give_up(self, keyed: IdempotentRequest) -> None:
        with contextlib.suppress(StorageError):  # the key can be used again after a while, even so
            self._storage.requests.give_up(keyed)


def _answered(answer: KeptAnswer, request: Request, media_type: str = "application/json") -> Response:
    request.state.buffer.answer(len(answer.body))
    timing = getattr(request.state, "timing", None)
    return Response(
        answer.body,
        status_code=answer.status,
        headers=None if timing is None else {"Server-Timing": timing},
        media_type=media_type if answer.status < 400 else MEDIA_TYPE,
    )


def _keyed(received: ReceivedBody[Any], body: Body) -> IdempotentRequest | None:
    """The request's idempotency key, with what else tells it from other requests.

    Raises:
        FormatError: If the key is none.
    """
    request, key = received.request, received.idempotency_key
    if key is None:
        return None
    if not _KEY.fullmatch(key):
        raise FormatError("must be 1 to 128 visible ASCII characters", field=IDEMPOTENCY_KEY)
    preferred = ",".join(request.headers.getlist("prefer"))
    digest = hashlib.sha256(f"{request.method} {request.url.path}?{request.url.query} {preferred}\n".encode())
    digest.update(body.text)
    return IdempotentRequest(client=client_of(request.scope), key=key, fingerprint=digest.hexdigest())
