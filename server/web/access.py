"""Access control: every route and verb is closed unless its declaration opens it, and to whom that says."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import structlog
from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from autoshard import api
from autoshard.core.errors import AutoshardError
from server.access import Door, Principal, door_of
from server.oidc import TokenIssuer
from server.problems import (
    BusyError,
    ClientBusyError,
    ForbiddenError,
    HostError,
    RateLimitError,
    UnauthenticatedError,
)
from server.settings import ServerSettings
from server.storage.schema import now_us
from server.storage.storage import Storage
from server.web.buffers import address_of, client_of, network_of
from server.web.errors import error_response
from server.web.rate_limit import RateLimit

_log = structlog.get_logger()

_LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")

#: Cookie with the session of who has signed in on the page.
PAGE_COOKIE: Final = "autoshard_session"
_SAFE_METHODS: Final = frozenset({"GET", "HEAD"})
#: Longest key or token.
_MAX_SECRET: Final = 8192
#: Secrets that are remembered, by their digests, as those of keys and tokens; the latest.
_MAX_KNOWN: Final = 4096
#: Threads for secrets that are not; readers of good keys have all others.
_STRANGER_THREADS: Final = 2
#: Seconds' worth of wrong secrets that an address may send at once, and seconds for which it waits to be told that
#: these were too many: a client that takes no notice of `Retry-After` sends no more than one in this time.
_STRANGER_BURST_S, _STRANGER_WAIT_S = 25.0, 1.0

#: Routes that any key opens, of functions that are not the service's own: what describes it.
_DESCRIPTIONS: Final = ("/openapi.json", "/docs", "/docs/oauth2-redirect", "/static-offline-docs")
#: Routes that say how the service is: they have a place however many requests there are.
_PROBES: Final = ("/livez", "/readyz", "/metrics")


class AccessControl:
    """Middleware: answers requests that may not be made, and passes on the others with who makes them.

    Of a request that is not known to be allowed, nothing is read but its head, and it costs no thread that others need.

    Args:
        app: What answers.
        routes: Its routes.
        storage: Holds keys and sessions.
        settings: Names of this service, and limits.
    """

    def __init__(self, app: ASGIApp, routes: FastAPI, storage: Storage, settings: ServerSettings) -> None:
        self._app = app
        self._routes: Sequence[BaseRoute] = routes.routes
        self._storage = storage
        self._allowed_hosts = tuple(settings.allowed_hosts or ())
        self._rate = RateLimit(settings.rate)
        self._strangers = RateLimit(settings.stranger_rate, _STRANGER_BURST_S)
        self._stranger_threads = CapacityLimiter(_STRANGER_THREADS)
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._needs_keys = settings.oidc_issuer is not None
        self._open_requests: Counter[str] = Counter()
        self._max_open = settings.max_connections
        self._issuer = (
            TokenIssuer(settings.oidc_issuer, settings.oidc_audience, settings.oidc_scopes, settings.oidc_team)
            if settings.oidc_issuer and settings.oidc_audience
            else None
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, door = self._door(scope)
        scope["state"]["endpoint"] = path
        address = address_of(scope)
        try:
            _check_origin(Headers(scope=scope), scope["method"])
            if door is Door.ANYBODY and path not in _PROBES:
                self._rate.check(network_of(scope))
            elif door is not Door.ANYBODY:
                actor = scope["state"]["actor"] = await self._actor(scope)
                self._rate.check(client_of(scope))
                _check_scope(actor, door)
                structlog.contextvars.bind_contextvars(actor=actor.name)
            if path not in _PROBES:
                self._check_room(address)
        except AutoshardError as error:
            _log.warning("refused", reason=str(error))
            await error_response(error)(scope, receive, send)
            return
        self._open_requests[address] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open_requests[address] -= 1
            if not self._open_requests[address]:
                del self._open_requests[address]

    def _door(self, scope: Scope) -> tuple[str | None, api.Scope | Door | None]:
        """Path of the route that answers a request, and whom it is open to.

        What is nowhere has no path, and may be asked for by all who have a key.
        """
        route = next((one for one in self._routes if one.matches(scope)[0] is Match.FULL), None)
        if route is None:
            return None, Door.ANY_KEY
        path = str(getattr(route, "path", ""))
        otherwise = Door.ANY_KEY if path in _DESCRIPTIONS else None
        return path, door_of(getattr(route, "endpoint", None), otherwise)

    async def _actor(self, scope: Scope) -> Principal:
        headers, network = Headers(scope=scope), network_of(scope)
        kind, _, secret = headers.get("authorization", "").partition(" ")
        cookie = _cookie(headers)
        origin = {"address": address_of(scope), "request_id": scope["state"]["request_id"]}
        found: Principal | None = None
        has_ended = self._storage.keys.exist
        if "authorization" not in headers and cookie:
            if scope["method"] not in _SAFE_METHODS and not {"origin", "sec-fetch-site"} & set(headers):
                raise ForbiddenError("must be there on requests with a cookie that change something", field="origin")
            found, has_ended = await self._identified(cookie, self._storage.sessions.find, None, network)
        elif kind.lower() == "bearer" and secret.strip():
            keys = self._storage.keys
            found, has_ended = await self._identified(secret.strip(), keys.principal, self._issuer, network)
        elif await self._needs_key():
            await self._count_stranger(network)
            raise UnauthenticatedError("must be `Bearer KEY`", field="authorization")
        # Without keys the service listens on loopback only; the name keeps out pages of other hosts that a browser
        # on this machine shows.
        _check_host(headers, self._allowed_hosts or (() if found else _LOOPBACK_HOSTS))
        scope["state"]["has_ended"] = has_ended  # for answers that go on for minutes
        return replace(found or Principal(), **origin)

    async def _needs_key(self) -> bool:
        """Whether there is a key or an issuer of tokens: once there is, this stays so."""
        self._needs_keys = self._needs_keys or await run_in_threadpool(self._storage.keys.exist)
        return self._needs_keys

    async def _identified(
        self, secret: str, find: Callable[[str], Principal | None], issuer: TokenIssuer | None, network: str
    ) -> tuple[Principal, Callable[[], bool]]:
        """Who sent a secret, and what says later whether it has ended.

        One that was none when it was last seen is counted before it is looked for.
        """
        digest = hashlib.sha256(secret.encode("utf-8", errors="surrogatepass")).digest()
        is_known = digest in self._known
        if not is_known:
            await self._count_stranger(network)
        if len(secret) > _MAX_SECRET:
            raise UnauthenticatedError(f"must have at most {_MAX_SECRET:,} characters", field="authorization")
        found = await to_thread.run_sync(find, secret, limiter=None if is_known else self._stranger_threads)
        has_ended: Callable[[], bool] = partial(_is_nobodys, find, secret)
        if found is None and issuer is not None:
            found = await issuer.identify(secret)
            has_ended = partial(_has_expired, found)
        if found is None:
            self._known.pop(digest, None)
            raise UnauthenticatedError("is no key of this service, or one that has ended", field="authorization")
        if not is_known:
            self._strangers.give_back(network)
        self._known[digest] = None
        self._known.move_to_end(digest)
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return found, has_ended

    async def _count_stranger(self, network: str) -> None:
        try:
            self._strangers.check(network)
        except RateLimitError:
            await asyncio.sleep(_STRANGER_WAIT_S)
            raise

    def _check_room(self, address: str) -> None:
        """Checks that a request may be answered beside those that are."""
        if self._open_requests[address] >= max(1, self._max_open // 2):
            raise ClientBusyError(f"{max(1, self._max_open // 2)} requests of this address are open, the most that may")
        if self._open_requests.total() >= self._max_open:
            raise BusyError(f"{self._max_open} requests are open, the most that may be")


def _is_nobodys(find: Callable[[str], Principal | None], secret: str) -> bool:
    return find(secret) is None


def _has_expired(actor: Principal | None) -> bool:
    return actor is None or (actor.expires_us is not None and actor.expires_us <= now_us())


def _check_scope(actor: Principal, door: api.Scope | Door | None) -> None:
    if door is None:
        raise ForbiddenError("is open to nobody", field="path")
    if door is Door.OPERATOR and not actor.is_operator:
        raise ForbiddenError("needs a key with the scope admin, of no team", field="authorization")
    if isinstance(door, api.Scope) and not actor.may(door):
        raise ForbiddenError(f"needs a key with the scope {door}", field="authorization")


def _cookie(headers: Headers) -> str:
    """The session of who has signed in on the page; empty if nobody has."""
    return cookie_parser(headers.get("cookie", "")).get(PAGE_COOKIE, "").strip()


def _check_origin(headers: Headers, method: str) -> None:
    """Checks that a request which changes something was not sent by another site's page that a browser shows."""
    if method in _SAFE_METHODS:
        return
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is None and origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower():
        raise ForbiddenError("must be that of this service", field="origin")
    if site not in (None, "same-origin", "none"):
        raise ForbiddenError("must be same-origin or none", field="sec-fetch-site")


def _check_host(headers: Headers, allowed: Sequence[str]) -> None:
    host = headers.get("host", "")
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    if allowed and name.lower() not in allowed:
        raise HostError(f"must be one of {', '.join(allowed)}", field="host")
