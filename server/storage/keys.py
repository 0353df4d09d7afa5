"""API keys."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, Row, select, true, update

from autoshard.api import KeySummary, Scope
from autoshard.core.errors import InvalidOptionError
from autoshard.core.quoting import shown
from server.access import TEAM_NAME, Principal
from server.problems import ForbiddenError, UnknownKeyError
from server.storage.audit import record
from server.storage.database import Database
from server.storage.schema import API_KEYS, now_us, told

_PREFIX = "autoshard_"
MIN_SECRET_CHARACTERS, _MAX_SECRET_CHARACTERS = 32, 512
_MAX_NAME = 128


class KeyStore:
    """The keys of a service.

    Args:
        database: Where they are.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, name: str, scopes: Collection[Scope], actor: Principal, team: str = "") -> tuple[KeySummary, str]:
        """Makes a key.

        Args:
            name: Whom or what it is for.
            scopes: What it may do.
            actor: Who makes it.
            team: Whose plans, jobs and samples it sees.

        Returns:
            The key and its secret, which nobody can be told again.

        Raises:
            InvalidOptionError: If the name or the team is none, or there is no scope.
            ForbiddenError: If the actor is of another team.
            StorageError: If the database does not answer.
        """
        secret = _PREFIX + secrets.token_urlsafe(32)
        key = self.add(secret, name, scopes, actor, team)
        assert key is not None
        return key, secret

    def add(
        self, secret: str, name: str, scopes: Collection[Scope], actor: Principal, team: str = ""
    ) -> KeySummary | None:
        """Adds a key whose secret was made elsewhere; returns None if it is there, revoked or not.

        Raises:
            InvalidOptionError: If the secret is too short, the name is none, or there is no scope.
            StorageError: If the database does not answer.
        """
        if not 0 < len(name) <= _MAX_NAME or not name.isprintable():
            raise InvalidOptionError(f"must be 1 to {_MAX_NAME} printable characters, got {shown(name)}", field="name")
        if not TEAM_NAME.fullmatch(team):
            raise InvalidOptionError(
                f"must be 1 to 64 small letters, digits and hyphens, or empty, got {shown(team)}", field="team"
            )
        if actor.team not in ("", team):
            raise ForbiddenError(f"must be {actor.team}, that of the key which makes it", field="team")
        if not scopes:
            raise InvalidOptionError(f"must be one of {', '.join(Scope)}, or several", field="scope")
        if not MIN_SECRET_CHARACTERS <= len(secret) <= _MAX_SECRET_CHARACTERS:
            raise InvalidOptionError(
                f"must have {MIN_SECRET_CHARACTERS} to {_MAX_SECRET_CHARACTERS} characters", field="secret"
            )
        row = {
            "id": secrets.token_hex(6),
            "secret_hash": secret_hash(secret),
            "name": name,
            "team": team,
            "scopes": ",".join(sorted(scopes)),
            "created_us": now_us(),
        }
        with self._database.writing(uses_reserve=True) as connection:
            if not self._database.insert_new(connection, API_KEYS, row):
                return None
            record(connection, actor, "key.create", str(row["id"]))
            return _key(connection.execute(select(API_KEYS).where(API_KEYS.c.id == row["id"])).one())

    def list(self, actor: Principal) -> tuple[KeySummary, ...]:
        """All keys that an actor sees to, the oldest first.

        Raises:
            StorageError: If the database does not answer.
        """
        with self._database.reading() as connection:
            rows = connection.execute(
                select(API_KEYS).where(_seen_by(actor)).order_by(API_KEYS.c.created_us, API_KEYS.c.id)
            ).all()
        return tuple(_key(row) for row in rows)

    def revoke(self, key_id: str, actor: Principal) -> KeySummary:
        """Ends a key; one that has ended stays as it is.

        Raises:
            UnknownKeyError: If there is no such key, or none of the actor's team.
            StorageError: If the database does not answer.
        """
        named = (API_KEYS.c.id == key_id) & _seen_by(actor)
        with self._database.writing(uses_reserve=True) as connection:
            changed = connection.execute(
                update(API_KEYS).where(named, API_KEYS.c.revoked_us.is_(None)).values(revoked_us=now_us())
            )
            if changed.rowcount:
                record(connection, actor, "key.revoke", key_id)
            found = connection.execute(select(API_KEYS).where(named)).first()
        if found is None:
            raise UnknownKeyError(f"no key is {shown(key_id)}; `autoshard keys list` lists them", field="key")
        return _key(found)

    def find(self, secret: str) -> KeySummary | None:
        """The key with this secret, unless it has ended.

        Raises:
            StorageError: If the database does not answer.
        """
        query = select(API_KEYS).where(API_KEYS.c.secret_hash == secret_hash(secret), API_KEYS.c.revoked_us.is_(None))
        with self._database.reading() as connection:
            found = connection.execute(query).first()
        return None if found is None else _key(found)

    def principal(self, secret: str) -> Principal | None:
        """Who has the key with this secret, unless it has ended.

        Raises:
            StorageError: If the database does not answer.
        """
        key = self.find(secret)
        return None if key is None else Principal(name=f"key {key.id}", team=key.team, scopes=frozenset(key.scopes))

    def exist(self) -> bool:
        """Whether a key was ever made: from then on, all requests need one, even when all have ended.

        Raises:
            StorageError: If the database does not answer.
        """
        with self._database.reading() as connection:
            return connection.execute(select(API_KEYS.c.id).limit(1)).first() is not None


def secret_hash(secret: str) -> str:
    """What is stored of a secret."""
    return hashlib.sha256(secret.encode("utf-8", errors="surrogatepass")).hexdigest()


def _seen_by(actor: Principal) -> ColumnElement[bool]:
    return API_KEYS.c.team == actor.team if actor.team else true()


def _key(row: Row[*tuple[Any, ...]]) -> KeySummary:
    return KeySummary.model_validate({**told(row), "scopes": list(map(Scope, row.scopes.split(",")))})
