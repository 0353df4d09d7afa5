"""Routes of models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Path, Query, Request, Response
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool

from autoshard.api import ModelAnswer, ModelList, ModelState
from autoshard.formats import parse_json
from costmodel.registry.aliases import Alias
from server.bodies.models import KEY_PATTERN, PromotionBody, RollbackBody
from server.bodies.plans import parse_body
from server.models.catalogue import COST, ModelCatalogue, summary_of
from server.models.shadow import LEAST_PLANS, ShadowPricer
from server.planning.workers import WorkerPool
from server.problems import NotComparedError
from server.storage.idempotency import IdempotentRequest, KeptAnswer
from server.storage.storage import Storage
from server.tasks.models import ModelCheck
from server.tasks.work import Work, WorkKind
from server.web.buffers import client_of
from server.web.desk import WorkDesk
from server.web.openapi import IDEMPOTENCY_KEY, body_of, problems

B = TypeVar("B", bound=BaseModel)

_Kind = Annotated[str, Path(pattern=KEY_PATTERN, description="What the model is for, such as cost or policy.")]
_Name = Annotated[str, Path(pattern=KEY_PATTERN, description="Which one of its kind: the device.")]
_Version = Annotated[str, Path(pattern="^[0-9a-f]{16}$", description="Id of a version.")]
_IF_MATCH: dict[str, Any] = {
    "name": "If-Match",
    "in": "header",
    "required": False,
    "description": "ETag of the model's state that the change is decided by: if it is another by now, nothing changes.",
    "schema": {"type": "string", "maxLength": 512},
}
_CHANGES = (400, 404, 408, 409, 412, 413, 415, 422, 429, 500, 503, 504)


class ModelDesk:
    """Shows models, and changes which are used.

    Args:
        desk: Reads requests, each with an idempotency key once.
        pool: Loads versions before they are used.
        storage: Holds the audit log and the candidates' prices.
        catalogue: The models.
        shadow: What candidates were compared on.
    """

    def __init__(
        self, desk: WorkDesk, pool: WorkerPool, storage: Storage, catalogue: ModelCatalogue, shadow: ShadowPricer
    ) -> None:
        self._desk = desk
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
        told = summary_of(item).model_dump(exclude={"card"})
        return ModelAnswer(**told, card=item.version.card, shadow=shadow, history=history)

    async def promote(self, request: Request, kind: str, name: str) -> Response:
        """Has an alias name a version, after a planning process has loaded it.

        Raises:
            AutoshardError: If it cannot be used, or the aliases were changed meanwhile: they stay as they are.
        """

        async def change(body: PromotionBody) -> ModelState:
            await run_in_threadpool(self.catalogue.find, kind, name, body.version)
            await self._check(request, kind, name, body)
            return await run_in_threadpool(
                self.catalogue.promote, kind, name, body.version, body.alias, request.state.actor, _expected(request)
            )

        return await self._changed(request, PromotionBody, change, "model.promote")

    async def roll_back(self, request: Request, kind: str, name: str) -> Response:
        """Gives an alias back to the version that had it before.

        Raises:
            AutoshardError: If there is none, or the aliases were changed meanwhile.
        """

        async def change(body: RollbackBody) -> ModelState:
            return await run_in_threadpool(
                self.catalogue.roll_back, kind, name, body.alias, request.state.actor, _expected(request)
            )

        return await self._changed(request, RollbackBody, change, "model.roll-back")

    async def _check(self, request: Request, kind: str, name: str, body: PromotionBody) -> None:
        if kind == COST and body.alias is Alias.PRODUCTION and not body.force:
            seen = await run_in_threadpool(self._shadow.summary, name, body.version)
            if seen.num_plans < LEAST_PLANS:
                raise NotComparedError(
                    f"its prices were compared with the production model's on {seen.num_plans} plans, of the "
                    f"{LEAST_PLANS} that are needed: make it the candidate and wait, or send force",
                    field="version",
                )
        asked = ModelCheck(kind=kind, name=name, version=body.version).model_dump_json().encode()
        work = Work(kind=WorkKind.CHECK_MODEL, body=asked, request_id=request.state.request_id)
        reply = await self._pool.answer(work, client_of(request.scope))
        if reply.status != 200:
            raise _RefusedError(KeptAnswer(status=reply.status, body=reply.body))

    async def _changed(
        self, request: Request, kind: type[B], change: Callable[[B], Awaitable[ModelState]], action: str
    ) -> Response:
        async def do(text: bytes, keyed: IdempotentRequest | None) -> KeptAnswer:
            try:
                state = await change(parse_body(kind, parse_json(text)))
            except _RefusedError as refused:
                return refused.answer
            answer = KeptAnswer(status=200, body=state.model_dump_json().encode())
            target = f"{state.kind}/{state.name} production={state.production} candidate={state.candidate}"
            await run_in_threadpool(self._storage.keep_change, answer, keyed, request.state.actor, action, target[:512])
            return answer

        response = await self._desk.once(request, do)
        if response.status_code == 200:
            response.headers["ETag"] = ModelState.model_validate_json(bytes(response.body)).etag
        return response


class _RefusedError(Exception):
    """A version that a planning process could not load."""

    def __init__(self, answer: KeptAnswer) -> None:
        super().__init__()
        self.answer = answer


def add_models(app: FastAPI, models: ModelDesk) -> None:
    """Adds the routes."""
    _add_reading(app, models)
    _add_changing(app, models)


def _add_reading(app: FastAPI, models: ModelDesk) -> None:
    @app.get("/v1/models", tags=["models"], summary="List trained models", responses=problems(400, 422, 503))
    def list_models(
        kind: Annotated[str | None, Query(pattern=KEY_PATTERN, description="Only models of this kind.")] = None,
        name: Annotated[str | None, Query(pattern=KEY_PATTERN, description="Only models of this device.")] = None,
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
    def read_state(kind: _Kind, name: _Name, response: Response) -> ModelState:
        state = models.catalogue.state(kind, name)
        response.headers["ETag"] = state.etag
        return state

    @app.get(
        "/v1/models/{kind}/{name}/versions/{version}",
        operation_id="read_model",
        tags=["models"],
        summary="Read a version's card",
        responses=problems(400, 404, 422, 503),
    )
    def read_model(kind: _Kind, name: _Name, version: _Version) -> ModelAnswer:
        return models.read(kind, name, version)


def _add_changing(app: FastAPI, models: ModelDesk) -> None:
    @app.post(
        "/v1/models/{kind}/{name}/promotions",
        operation_id="promote_model",
        tags=["models"],
        summary="Use a version, or try it",
        response_model=ModelState,
        responses=problems(*_CHANGES),
        openapi_extra={"requestBody": body_of("PromotionBody"), "parameters": [IDEMPOTENCY_KEY, _IF_MATCH]},
    )
    async def promote(request: Request, kind: _Kind, name: _Name) -> Response:
        return await models.promote(request, kind, name)

    @app.post(
        "/v1/models/{kind}/{name}/rollbacks",
        operation_id="roll_back_model",
        tags=["models"],
        summary="Use the version before again",
        response_model=ModelState,
        responses=problems(*_CHANGES),
        openapi_extra={"requestBody": body_of("RollbackBody"), "parameters": [IDEMPOTENCY_KEY, _IF_MATCH]},
    )
    async def roll_back(request: Request, kind: _Kind, name: _Name) -> Response:
        return await models.roll_back(request, kind, name)


def _expected(request: Request) -> str | None:
    return request.headers.get("if-match")
