"""Tokens of OpenID Connect, which the service takes beside its own keys."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import httpx
import jwt
import structlog
from pydantic import BaseModel

from autoshard.api import Scope
from autoshard.core.quoting import shown
from server.access import TEAM_NAME, Principal
from server.problems import ForbiddenError, NotReadyError, UnauthenticatedError
from server.settings import check_secure

_log = structlog.get_logger()

#: Signatures by a key that the issuer alone has: secrets shared with the service could be used to make tokens.
_ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
_REQUIRED: Final = ("exp", "iss", "aud", "sub")
#: Seconds by which the clocks of issuer and service may differ.
_LEEWAY_S: Final = 30.0
#: Seconds for which keys are taken as they are, and after which they are asked for again because of an unknown one.
_FRESH_S, _BETWEEN_FETCHES_S = 600.0, 10.0
_TIMEOUT_S, _MAX_BYTES = 5.0, 256 << 10
#: Characters of a subject: the database has 128 for it, with the word before.
_MAX_SUBJECT = 120


class TokenIssuer:
    """Reads the tokens of one issuer, by the keys that it publishes.

    Args:
        url: Of the issuer, as its tokens name it; `/.well-known/openid-configuration` below it names the keys.
        audience: Name of this service in tokens.
        scopes_claim: Claim with the scopes: a list, or one text with spaces between.
        team_claim: Claim with the team; without one, tokens are of none.
        clock: The time in seconds, by which keys age.
    """

    def __init__(
        self,
        url: str,
        audience: str,
        scopes_claim: str,
        team_claim: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url
        self._audience = audience
        self._scopes_claim = scopes_claim
        self._team_claim = team_claim
        self._clock = clock
        self._keys: Mapping[str, jwt.PyJWK] = {}
        self._fetched_s = self._tried_s = -float("inf")
        self._fetching: asyncio.Task[None] | None = None

    async def identify(self, token: str) -> Principal:
        """Whom a token was issued to. An issuer that hangs keeps those waiting who have a token, and no thread.

        Raises:
            UnauthenticatedError: If it is none of this issuer for this service, or has expired.
            ForbiddenError: If it has no scope of this service.
            NotReadyError: If the issuer's keys are not known yet.
        """
        try:
            key = await self._key(str(jwt.get_unverified_header(token).get("kid", "")))
            claims = jwt.decode(
                token,
                key,
                algorithms=_ALGORITHMS,
                audience=self._audience,
                issuer=self._url,
                leeway=_LEEWAY_S,
                options={"require": list(_REQUIRED)},
            )
        except (jwt.PyJWTError, ValueError, TypeError, RecursionError):
            raise _unknown() from None
        name = claims["sub"]
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_SUBJECT or not name.isprintable():
            raise _unknown()
        return Principal(
            name=f"oidc {name}",
            team=self._team(claims),
            scopes=self._scopes(claims),
            expires_us=int(claims["exp"]) * 1_000_000,
        )

    def _scopes(self, claims: Mapping[str, Any]) -> frozenset[Scope]:
        named = claims.get(self._scopes_claim)
        names = named.split() if isinstance(named, str) else named if isinstance(named, list) else ()
        scopes = frozenset(scope for scope in Scope if scope.value in names)
        if not scopes:
            raise ForbiddenError(
                f"the token's {self._scopes_claim} has none of {', '.join(Scope)}", field="authorization"
            )
        return scopes

    def _team(self, claims: Mapping[str, Any]) -> str:
        team = "" if self._team_claim is None else claims.get(self._team_claim)
        if not isinstance(team, str) or not TEAM_NAME.fullmatch(team) or (self._team_claim is not None and not team):
            raise ForbiddenError(
                f"the token's {self._team_claim} is no team: 1 to 64 small letters, digits and hyphens",
                field="authorization",
            )
        return team

    async def _key(self, key_id: str) -> jwt.PyJWK:
        is_known = key_id in self._keys
        if not is_known or self._clock() - self._fetched_s > _FRESH_S:
            await self._fetch(is_awaited=not is_known)
        if not self._keys:
            raise NotReadyError("the issuer of tokens does not answer")
        if key_id not in self._keys:
            raise _unknown()
        return self._keys[key_id]

    async def _fetch(self, *, is_awaited: bool) -> None:
        """Asks for the keys, once at a time and now and then: tokens that name unknown keys cost nothing to make."""
        if self._fetching is None or self._fetching.done():
            if self._clock() - self._tried_s < _BETWEEN_FETCHES_S:
                return
            self._tried_s = self._clock()
            self._fetching = asyncio.create_task(self._take_keys())
        if is_awaited:
            await asyncio.shield(self._fetching)

    async def _take_keys(self) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                self._keys = await _published_keys(self._url)
            self._fetched_s = self._clock()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, TimeoutError) as error:
            _log.warning("keys of the issuer of tokens unreadable", issuer=self._url, reason=str(error) or repr(error))


class _Configuration(BaseModel):
    issuer: str
    jwks_uri: str


class _KeySet(BaseModel):
    keys: list[dict[str, Any]]


async def _published_keys(issuer: str) -> dict[str, jwt.PyJWK]:
    async with httpx.AsyncClient() as client:
        text = await _read(client, f"{issuer.rstrip('/')}/.well-known/openid-configuration")
        configuration = _Configuration.model_validate_json(text)
        if configuration.issuer != issuer:
            raise ValueError(f"the configuration is that of {shown(configuration.issuer)}")
        check_secure(configuration.jwks_uri, "jwks_uri")
        published = _KeySet.model_validate_json(await _read(client, configuration.jwks_uri))
    keys = {}
    for described in published.keys:
        if described.get("kty") == "oct" or described.get("use", "sig") != "sig" or "kid" not in described:
            continue
        try:
            keys[str(described["kid"])] = jwt.PyJWK.from_dict(described)
        except jwt.PyJWTError:
            continue  # of a kind that this service does not know
    return keys


async def _read(client: httpx.AsyncClient, url: str) -> bytes:
    content = b""
    async with client.stream("GET", url) as answer:
        answer.raise_for_status()
        async for part in answer.aiter_bytes():
            content += part
            if len(content) > _MAX_BYTES:
                raise ValueError(f"{url} has more than {_MAX_BYTES} bytes")
    return content


def _unknown() -> UnauthenticatedError:
    return UnauthenticatedError("is no key or valid token of this service", field="authorization")
