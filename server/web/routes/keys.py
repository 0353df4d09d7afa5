"""Routes of keys and of the audit log, for admins: those of a team see to its own."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, FastAPI, Path, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from autoshard.api import AuditList, AuditSearch, KeyBody, KeyId, KeyList, KeyMade, Scope
from server.access import opened_to
from server.problems import ForbiddenError
from server.storage.storage import Storage
from server.web.openapi import problems
from server.web.reading import ReceivedBody, SecretBody
from server.web.work_handler import WorkHandler

_MADE: dict[str, Any] = {"model": KeyMade, "description": "The key, with its secret: nobody is told that again."}


def add_keys(app: FastAPI, handler: WorkHandler, storage: Storage) -> None:
    """Adds the routes."""

    @app.get("/v1/keys", tags=["keys"], summary="List keys", responses=problems(503))
    @opened_to(Scope.ADMIN)
    def list_keys(request: Request) -> KeyList:
        return KeyList(keys=list(storage.keys.list(request.state.actor)))

    @app.post(
        "/v1/keys",
        tags=["keys"],
        summary="Make a key",
        status_code=201,
        response_model=KeyMade,
        responses={201: _MADE, **problems(400, 408, 413, 415, 422, 500, 503)},
    )
    @opened_to(Scope.ADMIN)
    async def make_key(received: Annotated[ReceivedBody[KeyBody], Depends(SecretBody(KeyBody))]) -> KeyMade:
        actor = received.request.state.actor
        if actor.is_anybody:  # who would keep all others out
            raise ForbiddenError("needs a key; `autoshard keys create` makes the first one", field="authorization")
        body = await received.parse(await received.read(handler.settings))
        team = actor.team if body.team is None else body.team
        key, secret = await run_in_threadpool(storage.keys.create, body.name, body.scopes, actor, team)
        return KeyMade(key=key, secret=secret)

    @app.delete(
        "/v1/keys/{key_id}",
        tags=["keys"],
        summary="End a key: its next request is refused",
        status_code=204,
        responses=problems(400, 404, 503),
    )
    @opened_to(Scope.ADMIN)
    def revoke_key(key_id: Annotated[KeyId, Path()], request: Request) -> Response:
        storage.keys.revoke(key_id, request.state.actor)
        return Response(status_code=204)

    @app.get(
        "/v1/audit",
        tags=["keys"],
        summary="Read the audit log",
        responses=problems(400, 503),
    )
    @opened_to(Scope.ADMIN)
    def list_audit(search: Annotated[AuditSearch, Query()], request: Request) -> AuditList:
        return storage.audit.list(search, None if request.state.actor.is_operator else request.state.actor.team)
