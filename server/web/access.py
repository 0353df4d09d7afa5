"""Access control: every route and verb is closed unless a rule opens it, and to whom the rule says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import structlog
from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from autoshard.api import JobKind
from autoshard.core.errors import AutoshardError
from server import access
from server.access import Principal, scope_of
from server.oidc import TokenIssuer
from server.problems import ForbiddenError, HostError, UnauthenticatedError
from server.settings import ServerSettings
from server.storage.storage import Storage
from server.web.buffers import address_of, client_of
from server.web.errors import error_response
from server.web.rate_limit import RateLimit

_log = structlog.get_logger()

_LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")

#: Cookie with the key of who has signed in on the page, and the header of the page's requests that change something.
PAGE_COOKIE, _PAGE_HEADER = "autoshard_key", "x-autoshard-page"
_SAFE_METHODS: Final = frozenset({"GET", "HEAD"})

#: Routes that need no key. The page's files are those of the package, and its session is how a key is given.
_OPEN: Final = frozenset(
    {
        ("GET", "/livez"),
        ("GET", "/readyz"),
        ("GET", "/"),
        *(("GET", f"/page/{name}") for name in ("app.css", "app.js", "drawing.js", "one.js", "service.js")),
        ("GET", "/page/session"),
        ("POST", "/page/session"),
        ("DELETE", "/page/session"),
    }
)

#: Routes by the scope that they need. One that is in neither table is closed.
_SCOPES: Final[Mapping[tuple[str, str], access.Scope]] = {
    ("POST", "/v1/plans"): access.Scope.PLAN,
    ("GET", "/v1/plans"): access.Scope.PLAN,
    ("GET", "/v1/plans/{plan_id}"): access.Scope.PLAN,
    ("DELETE", "/v1/plans/{plan_id}"): access.Scope.PLAN,
    ("GET", "/v1/plans/{plan_id}/explanation"): access.Scope.PLAN,
    ("GET", "/v1/plans/{plan_id}/improvements"): access.Scope.PLAN,
    ("GET", "/v1/plans/{plan_id}/report"): access.Scope.PLAN,
    ("GET", "/v1/plans/{plan_id}/diff/{other_id}"): access.Scope.PLAN,
    ("POST", "/v1/plans/{plan_id}/replans"): access.Scope.PLAN,
    ("POST", "/v1/plans/{plan_id}/runs"): access.Scope.PLAN,
    ("GET", "/v1/plans/{plan_id}/runs"): access.Scope.PLAN,
    ("POST", "/v1/samples"): access.Scope.TRAIN,
    ("GET", "/v1/samples"): access.Scope.TRAIN,
    ("POST", "/v1/evaluations"): access.Scope.PLAN,
    ("POST", "/v1/comparisons"): access.Scope.PLAN,
    ("POST", "/v1/simulations"): access.Scope.PLAN,
    ("POST", "/v1/validations"): access.Scope.PLAN,
    ("POST", "/v1/models/{kind}/{name}/promotions"): access.Scope.ADMIN,
    ("POST", "/v1/models/{kind}/{name}/rollbacks"): access.Scope.ADMIN,
    ("GET", "/v1/schedules"): access.Scope.TRAIN,
    ("POST", "/v1/schedules"): access.Scope.TRAIN,
    ("GET", "/v1/schedules/{name}"): access.Scope.TRAIN,
    ("DELETE", "/v1/schedules/{name}"): access.Scope.TRAIN,
    ("POST", "/v1/schedules/{name}/pause"): access.Scope.TRAIN,
    ("POST", "/v1/schedules/{name}/resume"): access.Scope.TRAIN,
    **{("POST", f"/v1/jobs/{kind}"): scope_of(kind) for kind in JobKind},
}

#: Routes of jobs and models that any key opens; to change a job, it needs the scope of the job's kind, too.
_OF_ANY_SCOPE: Final = frozenset(
    {
        ("GET", "/v1/jobs"),
        ("GET", "/v1/jobs/{job_id}"),
        ("GET", "/v1/jobs/{job_id}/result"),
        ("POST", "/v1/jobs/{job_id}/cancel"),
        ("POST", "/v1/jobs/{job_id}/retry"),
        ("GET", "/v1/jobs/{job_id}/events"),
        ("GET", "/v1/catalogue"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/{kind}/{name}"),
        ("GET", "/v1/models/{kind}/{name}/versions/{version}"),
    }
)

#: Routes that any key opens: what describes the service.
_DESCRIPTIONS: Final = ("/metrics", "/openapi.json", "/docs", "/docs/oauth2-redirect", "/static-offline-docs")


class AccessControl:
    """Middleware: answers requests that may not be made, and passes on the others with who makes them.

    Args:
        app: What answers.
        routes: Its routes.
        storage: Holds the keys.
        settings: Names of this service.
    """

    def __init__(self, app: ASGIApp, routes: FastAPI, storage: Storage, settings: ServerSettings) -> None:
        self._app = app
        self._routes: Sequence[BaseRoute] = routes.routes
        self._keys = storage.keys
        self._allowed_hosts = tuple(settings.allowed_hosts or ())
        self._rate = RateLimit(settings.rate)
        self._issuer = (
            TokenIssuer(settings.oidc_issuer, settings.oidc_audience, settings.oidc_scopes)
            if settings.oidc_issuer and settings.oidc_audience
            else None
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["state"]["endpoint"] = self._path(scope)
        if (scope["method"], scope["path"]) not in _OPEN:
            try:
                actor = scope["state"]["actor"] = await self._actor(scope)
                self._rate.check(client_of(scope))
                self._check(actor, scope["method"], path)
            except AutoshardError as error:
                _log.warning("refused", reason=str(error))
                await error_response(error)(scope, receive, send)
                return
            structlog.contextvars.bind_contextvars(actor=actor.name)
        await self._app(scope, receive, send)

    async def _actor(self, scope: Scope) -> Principal:
        headers = Headers(scope=scope)
        kind, _, secret = headers.get("authorization", "").partition(" ")
        if "authorization" not in headers and (cookie := _cookie(headers)):
            if scope["method"] not in _SAFE_METHODS and _PAGE_HEADER not in headers:
                raise ForbiddenError(
                    "must be there on requests with a cookie that change something", field=_PAGE_HEADER
                )
            kind, secret = "bearer", cookie
        origin = {"address": address_of(scope), "request_id": scope["state"]["request_id"]}
        if kind.lower() == "bearer" and secret.strip():
            name, scopes = await run_in_threadpool(self._bearer, secret.strip())
            _check_host(headers, self._allowed_hosts)
            return Principal(name=name, scopes=scopes, **origin)
        if self._issuer is not None or await run_in_threadpool(self._keys.exist):
            raise UnauthenticatedError("must be `Bearer KEY`", field="authorization")
        # Without keys the service listens on loopback only; the name keeps out pages of other hosts that a browser
        # on this machine shows.
        _check_host(headers, self._allowed_hosts or _LOOPBACK_HOSTS)
        return Principal(**origin)

    def _bearer(self, secret: str) -> tuple[str, frozenset[access.Scope]]:
        """Name and scopes of who sent a key or a token."""
        if key := self._keys.find(secret):
            return f"key {key.id}", key.scopes
        if self._issuer is None:
            raise UnauthenticatedError("is no key of this service, or one that was revoked", field="authorization")
        identity = self._issuer.identify(secret)
        return f"oidc {identity.name}", identity.scopes

    def _path(self, scope: Scope) -> str | None:
        """Path of the route that answers a request; None if there is none."""
        return next((_path(route) for route in self._routes if route.matches(scope)[0] is Match.FULL), None)

    def _check(self, actor: Principal, method: str, path: str | None) -> None:
        """Checks that the actor may do this; what is nowhere may be asked for by all who have a key."""
        if path is None or path in _DESCRIPTIONS or (method, path) in _OF_ANY_SCOPE:
            return
        needed = _SCOPES.get((method, path))
        if needed is None:
            raise ForbiddenError("is open to nobody", field="path")
        if not actor.may(needed):
            raise ForbiddenError(f"needs a key with the scope {needed}", field="authorization")


def _path(route: BaseRoute) -> str:
    return str(getattr(route, "path", ""))


def _cookie(headers: Headers) -> str:
    """The key of who has signed in on the page; empty if nobody has."""
    cookies = cookie_parser(headers.get("cookie", ""))
    return cookies.get(PAGE_COOKIE, "").strip()


def _check_host(headers: Headers, allowed: Sequence[str]) -> None:
    host = headers.get("host", "")
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if allowed and name.lower() not in allowed:
        raise HostError(f"must be one of {', '.join(allowed)}", field="host")
