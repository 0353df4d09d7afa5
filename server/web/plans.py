"""Routes of plans."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
from typing import Annotated, Any

from fastapi import FastAPI, Header, Path, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from autoshard.core.errors import FormatError
from server.bodies import PlanAnswer, PlanId, PlanList
from server.planning.workers import WorkerPool
from server.problems import MEDIA_TYPE, StorageError
from server.settings import ServerSettings
from server.storage.idempotency import IdempotentRequest, KeptAnswer
from server.storage.plans import PlanFilter
from server.storage.storage import Storage
from server.web.buffers import client_of
from server.web.openapi import IDEMPOTENCY_KEY, PLAN_BODY, problems
from server.web.reading import client_gone, read_body

_KEY = re.compile(r"[!-~]{1,128}")
_MAX_PAGE = 200

_StoredId = Annotated[PlanId, Path(description="The plan's id.")]


def add_plans(app: FastAPI, pool: WorkerPool, storage: Storage, settings: ServerSettings) -> None:
    """Adds the routes."""
    _add_making(app, pool, storage, settings)
    _add_list(app, storage)
    _add_one(app, storage)


def _add_making(app: FastAPI, pool: WorkerPool, storage: Storage, settings: ServerSettings) -> None:
    @app.post(
        "/v1/plans",
        tags=["plans"],
        summary="Make a plan and store it",
        response_model=PlanAnswer,
        responses=problems(400, 408, 409, 413, 415, 422, 429, 500, 503, 504),
        openapi_extra={"requestBody": PLAN_BODY, "parameters": [IDEMPOTENCY_KEY]},
    )
    async def make_plan(request: Request) -> Response:
        pool.check_room(client_of(request.scope))
        body = await read_body(request, settings, request.state.buffer)
        keyed = _keyed(request, body)
        if keyed is not None:
            kept = await run_in_threadpool(storage.requests.begin, keyed)
            if kept is not None:
                return _answered(kept, request)
        try:
            return _answered(await _planned(request, body, keyed, pool, storage), request)
        except BaseException:
            if keyed is not None:
                await asyncio.shield(run_in_threadpool(_give_up, storage, keyed))
            raise


async def _planned(
    request: Request, body: bytes, keyed: IdempotentRequest | None, pool: WorkerPool, storage: Storage
) -> KeptAnswer:
    """Makes a plan, and stores it with the answer before anybody sees it."""
    gone = asyncio.ensure_future(client_gone(request))
    try:
        reply = await pool.plan(body, client_of(request.scope), gone)
    finally:
        gone.cancel()
    answer = KeptAnswer(status=reply.status, body=reply.body)
    if reply.status >= 500 and keyed is not None:
        await run_in_threadpool(_give_up, storage, keyed)
    elif reply.facts is not None or keyed is not None:
        await run_in_threadpool(storage.keep, answer, reply.facts, keyed, request.state.actor)
    return answer


def _give_up(storage: Storage, keyed: IdempotentRequest) -> None:
    with contextlib.suppress(StorageError):  # the key can be used again after a while, even so
        storage.requests.give_up(keyed)


def _answered(answer: KeptAnswer, request: Request) -> Response:
    request.state.buffer.answer(len(answer.body))
    media_type = "application/json" if answer.status == 200 else MEDIA_TYPE
    return Response(answer.body, status_code=answer.status, media_type=media_type)


def _keyed(request: Request, body: bytes) -> IdempotentRequest | None:
    """The request's idempotency key, with what else tells it from other requests.

    Raises:
        FormatError: If the key is none.
    """
    key = request.headers.get(IDEMPOTENCY_KEY["name"])
    if key is None:
        return None
    if not _KEY.fullmatch(key):
        raise FormatError("must be 1 to 128 visible ASCII characters", field=IDEMPOTENCY_KEY["name"])
    content = f"{request.method} {request.url.path}\n".encode() + body
    return IdempotentRequest(client=client_of(request.scope), key=key, fingerprint=hashlib.sha256(content).hexdigest())


def _add_list(app: FastAPI, storage: Storage) -> None:
    @app.get("/v1/plans", tags=["plans"], summary="List stored plans", responses=problems(400, 503))
    def list_plans(
        limit: Annotated[int, Query(ge=1, le=_MAX_PAGE, description="Most plans of a page.")] = 50,
        cursor: Annotated[str | None, Query(max_length=256, description="`next` of the page before.")] = None,
        planner: Annotated[str | None, _searched("Name of the planner.")] = None,
        device: Annotated[str | None, _searched("Key of the device.")] = None,
        num_ranks: Annotated[int | None, Query(ge=1, le=1 << 31, description="Ranks of the topology.")] = None,
        text: Annotated[str | None, _searched("Part of a name: planner, device, level or table.")] = None,
    ) -> PlanList:
        chosen = PlanFilter(planner=planner, device=device, num_ranks=num_ranks, text=text)
        return storage.plans.list(chosen, limit=limit, cursor=cursor)


def _searched(description: str) -> Any:
    """A parameter with a text to look for: without the character that PostgreSQL's texts cannot have."""
    return Query(max_length=512, pattern=r"^[^\x00]*$", description=description)


def _add_one(app: FastAPI, storage: Storage) -> None:
    @app.get(
        "/v1/plans/{plan_id}",
        tags=["plans"],
        summary="Read a plan",
        response_model=PlanAnswer,
        responses={304: {"description": "The client has this plan."}, **problems(400, 404, 503)},
    )
    def read_plan(
        plan_id: _StoredId,
        request: Request,
        if_none_match: Annotated[str | None, Header(description="ETags of plans that the client has.")] = None,
    ) -> Response:
        answer = storage.plans.read(plan_id)
        headers = {"ETag": f'"{plan_id}"', "Cache-Control": "private, no-cache"}
        if if_none_match is not None and _names(if_none_match, plan_id):
            return Response(status_code=304, headers=headers)
        request.state.buffer.answer(len(answer))
        return Response(answer, media_type="application/json", headers=headers)

    @app.delete(
        "/v1/plans/{plan_id}",
        tags=["plans"],
        summary="Delete a plan",
        status_code=204,
        responses=problems(400, 404, 503),
    )
    def delete_plan(plan_id: _StoredId, request: Request) -> None:
        storage.delete_plan(plan_id, request.state.actor)


def _names(if_none_match: str, plan_id: str) -> bool:
    """Whether a list of ETags names a plan; weak ones do too, since an id is that of the content."""
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return "*" in tags or f'"{plan_id}"' in tags
