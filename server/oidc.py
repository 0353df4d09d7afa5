"""Tokens of OpenID Connect, which the service takes beside its own keys."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import httpx
import jwt
import structlog
from pydantic import BaseModel

from autoshard.core.quoting import shown
from server.access import Scope
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
_TIMEOUT_S, _MAX_BYTES = 5.0, 1 << 20
#: Characters of a subject: the database has 128 for it, with the word before.
_MAX_SUBJECT = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whom a token was issued to.

    Attributes:
        name: The token's subject.
        scopes: What its bearer may do.
    """

    name: str
    scopes: frozenset[Scope]


class TokenIssuer:
    """Reads the tokens of one issuer, by the keys that it publishes.

    Args:
        url: Of the issuer, as its tokens name it; `/.well-known/openid-configuration` below it names the keys.
        audience: Name of this service in tokens.
        scopes_claim: Claim with the scopes: a list, or one text with spaces between.
        clock: The time in seconds, by which keys age.
    """

    def __init__(self, url: str, audience: str, scopes_claim: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = url
        self._audience = audience
        self._scopes_claim = scopes_claim
        self._clock = clock
        self._keys: Mapping[str, jwt.PyJWK] = {}
        self._fetched_s = self._tried_s = -float("inf")
        self._fetching = threading.Lock()

    def identify(self, token: str) -> Identity:
        """Whom a token was issued to.

        Raises:
            UnauthenticatedError: If it is none of this issuer for this service, or has expired.
            ForbiddenError: If it has no scope of this service.
            NotReadyError: If the issuer's keys are not known yet.
        """
        try:
            key = self._key(str(jwt.get_unverified_header(token).get("kid", "")))
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
        return Identity(name=name, scopes=self._scopes(claims))

    def _scopes(self, claims: Mapping[str, Any]) -> frozenset[Scope]:
        named = claims.get(self._scopes_claim)
        names = named.split() if isinstance(named, str) else named if isinstance(named, list) else ()
        scopes = frozenset(scope for scope in Scope if scope.value in names)
        if not scopes:
            raise ForbiddenError(
                f"the token's {self._scopes_claim} has none of {', '.join(Scope)}", field="authorization"
            )
        return scopes

    def _key(self, key_id: str) -> jwt.PyJWK:
        age_s = self._clock() - self._fetched_s
        if age_s > _FRESH_S or key_id not in self._keys:
            self._fetch()
        if not self._keys:
            raise NotReadyError("the issuer of tokens does not answer")
        if key_id not in self._keys:
            raise _unknown()
        return self._keys[key_id]

    def _fetch(self) -> None:
        """Asks for the keys, in one thread and now and then: tokens that name unknown keys cost nothing to make."""
        if not self._fetching.acquire(blocking=not self._keys, timeout=-1 if self._keys else _TIMEOUT_S):
            return
        try:
            if self._clock() - self._tried_s < _BETWEEN_FETCHES_S:
                return
            self._tried_s = self._clock()
            self._keys = _published_keys(self._url)
            self._fetched_s = self._clock()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            _log.warning("keys of the issuer of tokens unreadable", issuer=self._url, reason=str(error) or repr(error))
        finally:
            self._fetching.release()


class _Configuration(BaseModel):
    issuer: str
    jwks_uri: str


class _KeySet(BaseModel):
    keys: list[dict[str, Any]]


def _published_keys(issuer: str) -> dict[str, jwt.PyJWK]:
    with httpx.Client(timeout=_TIMEOUT_S) as client:
        text = _read(client, f"{issuer.rstrip('/')}/.well-known/openid-configuration")
        configuration = _Configuration.model_validate_json(text)
        if configuration.issuer != issuer:
            raise ValueError(f"the configuration is that of {shown(configuration.issuer)}")
        check_secure(configuration.jwks_uri, "jwks_uri")
        published = _KeySet.model_validate_json(_read(client, configuration.jwks_uri))
    keys = {}
    for described in published.keys:
        if described.get("kty") == "oct" or described.get("use", "sig") != "sig" or "kid" not in described:
            continue
        try:
            keys[str(described["kid"])] = jwt.PyJWK.from_dict(described)
        except jwt.PyJWTError:
            continue  # of a kind that this service does not know
    return keys


def _read(client: httpx.Client, url: str) -> bytes:
    content = b""
    with client.stream("GET", url) as answer:
        answer.raise_for_status()
        for part in answer.iter_bytes():
            content += part
            if len(content) > _MAX_BYTES:
                raise ValueError(f"{url} has more than {_MAX_BYTES} bytes")
    return content


def _unknown() -> UnauthenticatedError:
    return UnauthenticatedError("is no key or valid token of this service", field="authorization")
