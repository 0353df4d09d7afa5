"""Routes of models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from autoshard.api import (
    ModelAnswer,
    ModelKind,
    ModelList,
    ModelName,
    ModelState,
    PromotionBody,
    RequestBody,
    RollbackBody,
    VersionId,
)
from autoshard.core.errors import AutoshardError
from costmodel.registry.aliases import Alias
from server.access import Door, Principal, opened_to
from server.models.catalogue import COST, ModelCatalogue
from server.models.shadow import LEAST_PLANS, ShadowPricer
from server.planning.workers import WorkerPool
from server.problems import NotComparedError, StorageError
from server.storage.idempotency import IdempotentRequest, KeptAnswer
from server.storage.storage import Storage
from server.tasks.models import ModelCheck
from server.tasks.work import Body, Work, WorkKind
from server.web.buffers import client_of
from server.web.errors import RefusedError
from server.web.openapi import problems
from server.web.reading import JsonBody, ReceivedBody
from server.web.work_handler import WorkHandler

B = TypeVar("B", bound=RequestBody)

_IF_MATCH: dict[str, Any] = {
    "name": "If-Match",
    "in": "header",
    "required": False,
    "description": "ETag of the model's state that the change is decided by: if it is another by now, nothing changes.",
    "schema": {"type": "string", "maxLength": 512},
}
_CHANGES = (400, 404, 408, 409, 412, 413, 415, 422, 429, 500, 503, 504)


class ModelHandler:
    """Shows models, and changes which are used.

    Args:
        handler: Reads requests, each with an idempotency key once.
        pool: Loads versions before they are used.
        storage: Holds the audit log and the candidates' prices.
        catalogue: The models.
        shadow: What candidates were compared on.
    """

    def __init__(
        self, handler: WorkHandler, pool: WorkerPool, storage: Storage, catalogue: ModelCatalogue, shadow: ShadowPricer
    ) -> None:
        self._handler = handler
        self._pool = pool
        self._storage = storage
        self.catalogue = catalogue
        self._shadow = shadow

    def read(self, kind: str, name: str, version: str) -> ModelAnswer:
        """A version with its card and its prices in the shadow.

        Raises:
            UnknownModelError: If there is none.
        """
        item = self.catalogue.find(kind, name, version)
        shadow = self._shadow.summary(name, version)
        history = self.catalogue.history(item)
        return ModelAnswer(**item.model_dump(), shadow=shadow, history=history)

    async def promote(self, received: ReceivedBody[PromotionBody], kind: str, name: str) -> Response:
        """Has an alias name a version, after a planning process has loaded it.

        Raises:
            AutoshardError: If it cannot be used, or the aliases were changed meanwhile: they stay as they are.
        """
        request = received.request

        async def change(body: PromotionBody, named: str) -> ModelState:
            asked = (kind, name, body.version, body.alias, request.state.actor, _expected(request), named)
            promote = partial(self.catalogue.promote, *asked)
            if await run_in_threadpool(self.catalogue.has_changed, kind, name, body.alias, named):
                return await run_in_threadpool(promote)
            await run_in_threadpool(self.catalogue.find, kind, name, body.version)
            await self._check(request, kind, name, body)
            target = f"{kind}/{name} {body.alias}={body.version}"
            return await self._audited(request.state.actor, "model.promote", target, promote)

        return await self._changed(received, change)

    async def roll_back(self, received: ReceivedBody[RollbackBody], kind: str, name: str) -> Response:
        """Gives an alias back to the version that had it before.

        Raises:
            AutoshardError: If there is none, or the aliases were changed meanwhile.
        """
        request = received.request

        async def change(body: RollbackBody, named: str) -> ModelState:
            asked = (kind, name, body.alias, request.state.actor, _expected(request), named)
            roll_back = partial(self.catalogue.roll_back, *asked)
            if await run_in_threadpool(self.catalogue.has_changed, kind, name, body.alias, named):
                return await run_in_threadpool(roll_back)
            state = await run_in_threadpool(self.catalogue.state, kind, name)
            current = state.production if body.alias is Alias.PRODUCTION else state.candidate
            target = f"{kind}/{name} {body.alias}={current}"
            return await self._audited(request.state.actor, "model.roll-back", target, roll_back)

        return await self._changed(received, change)

    async def _audited(
        self, actor: Principal, action: str, target: str, change: Callable[[], ModelState]
    ) -> ModelState:
        """Makes a change of the registry, after the audit log has it: no change is made that the log lacks.

        One that then fails has a second entry that says so.
        """
        await run_in_threadpool(self._storage.audit.add, actor, action, target)
        try:
            return await run_in_threadpool(change)
        except AutoshardError:
            with suppress(StorageError):
                await run_in_threadpool(self._storage.audit.add, actor, f"{action}.failed", target)
            raise

    async def _check(self, request: Request, kind: str, name: str, body: PromotionBody) -> None:
        if body.alias is Alias.PRODUCTION and not body.force:
            await run_in_threadpool(self.catalogue.check_not_worse, kind, name, body.version)
            await run_in_threadpool(self._check_compared, kind, name, body.version)
        asked = ModelCheck(kind=kind, name=name, version=body.version).model_dump_json().encode()
        work = Work(kind=WorkKind.CHECK_MODEL, body=Body(asked), request_id=request.state.request_id)
        reply = await self._pool.answer(work, client_of(request.scope))
        if reply.status != 200:
            raise RefusedError(reply.status, reply.body)

    def _check_compared(self, kind: str, name: str, version: str) -> None:
        """Checks that a cost model was tried in the shadow."""
        if kind == COST and (seen := self._shadow.summary(name, version)).num_plans < LEAST_PLANS:
            raise NotComparedError(
                f"its prices were compared with the production model's on {seen.num_plans} different plans, of "
                f"the {LEAST_PLANS} that are needed: make it the candidate and wait, or send force",
                field="version",
            )

    async def _changed(self, received: ReceivedBody[B], change: Callable[[B, str], Awaitable[ModelState]]) -> Response:
        async def do(body: Body, keyed: IdempotentRequest | None) -> KeptAnswer:
            state = await change(await received.parse(body), "" if keyed is None else keyed.digest)
            answer = KeptAnswer(status=200, body=state.model_dump_json().encode())
            if keyed is not None:
                await run_in_threadpool(self._storage.keep, answer, None, keyed, received.request.state.actor)
            return answer

        response = await self._handler.once(received, do)
        if response.status_code == 200:
            response.headers["ETag"] = ModelState.model_validate_json(bytes(response.body)).etag
        return response


def add_models(app: FastAPI, models: ModelHandler) -> None:
    """Adds the routes."""
    _add_reading(app, models)
    _add_changing(app, models)


def _add_reading(app: FastAPI, models: ModelHandler) -> None:
    @app.get("/v1/models", tags=["models"], summary="List trained models", responses=problems(400, 422, 503))
    @opened_to(Door.ANY_KEY)
    def list_models(
        kind: Annotated[ModelKind | None, Query(description="Only models of this kind.")] = None,
        name: Annotated[ModelName | None, Query(description="Only models of this device.")] = None,
        cards: Annotated[bool, Query(description="Whether with their cards.")] = False,
    ) -> ModelList:
        return models.catalogue.list(kind, name, cards=cards)

    @app.get(
        "/v1/models/{kind}/{name}",
        operation_id="read_model_state",
        tags=["models"],
        summary="Read which versions of a model are used and tried",
        responses=problems(400, 404, 422, 503),
    )
    @opened_to(Door.ANY_KEY)
    def read_state(kind: ModelKind, name: ModelName, response: Response) -> ModelState:
        state = models.catalogue.state(kind, name)
        response.headers["ETag"] = state.etag
        return state

    @app.get(
        "/v1/models/{kind}/{name}/versions/{version}",
        tags=["models"],
        summary="Read a version's card",
        responses=problems(400, 404, 422, 503),
    )
    @opened_to(Door.ANY_KEY)
    def read_model(kind: ModelKind, name: ModelName, version: VersionId) -> ModelAnswer:
        return models.read(kind, name, version)


def _add_changing(app: FastAPI, models: ModelHandler) -> None:
    @app.post(
        "/v1/models/{kind}/{name}/promotions",
        operation_id="promote_model",
        tags=["models"],
        summary="Use a version, or try it",
        response_model=ModelState,
        responses=problems(*_CHANGES),
        openapi_extra={"parameters": [_IF_MATCH]},
    )
    @opened_to(Door.OPERATOR)
    async def promote(
        received: Annotated[ReceivedBody[PromotionBody], Depends(JsonBody(PromotionBody))],
        kind: ModelKind,
        name: ModelName,
    ) -> Response:
        return await models.promote(received, kind, name)

    @app.post(
        "/v1/models/{kind}/{name}/rollbacks",
        operation_id="roll_back_model",
        tags=["models"],
        summary="Use the version before again",
        response_model=ModelState,
        responses=problems(*_CHANGES),
        openapi_extra={"parameters": [_IF_MATCH]},
    )
    @opened_to(Door.OPERATOR)
    async def roll_back(
        received: Annotated[ReceivedBody[RollbackBody], Depends(JsonBody(RollbackBody))],
        kind: ModelKind,
        name: ModelName,
    ) -> Response:
        return await models.roll_back(received, kind, name)


def _expected(request: Request) -> str | None:
    return request.headers.get("if-match")
