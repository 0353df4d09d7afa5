"""API keys."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, select, update

from autoshard.core.errors import InvalidOptionError, UnknownNameError
from autoshard.core.quoting import shown
from server.access import Principal, Scope
from server.storage.audit import record
from server.storage.database import Database
from server.storage.schema import API_KEYS, iso_time, now_us

_PREFIX = "autoshard_"
MIN_SECRET_CHARACTERS, _MAX_SECRET_CHARACTERS = 32, 512
_MAX_NAME = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key, without its secret, which is not stored.

    Attributes:
        id: Names the key in logs and commands.
        name: Whom or what it was made for.
        scopes: What it may do.
        created_at: When, UTC (ISO 8601).
        revoked_at: When it ended, or None.
    """

    id: str
    name: str
    scopes: frozenset[Scope]
    created_at: str
    revoked_at: str | None

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "id": self.id,
            "name": self.name,
            "scopes": sorted(self.scopes),
            "created_at": self.created_at,
            "revoked_at": self.revoked_at,
        }


class KeyStore:
    """The keys of a service.

    Args:
        database: Where they are.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, name: str, scopes: Collection[Scope], actor: Principal) -> tuple[ApiKey, str]:
        """Makes a key.

        Args:
            name: Whom or what it is for.
            scopes: What it may do.
            actor: Who makes it.

        Returns:
            The key and its secret, which nobody can be told again.

        Raises:
            InvalidOptionError: If the name is none, or there is no scope.
            StorageError: If the database does not answer.
        """
        secret = _PREFIX + secrets.token_urlsafe(32)
        key = self.add(secret, name, scopes, actor)
        assert key is not None
        return key, secret

    def add(self, secret: str, name: str, scopes: Collection[Scope], actor: Principal) -> ApiKey | None:
        """Adds a key whose secret was made elsewhere; returns None if it is there, revoked or not.

        Raises:
            InvalidOptionError: If the secret is too short, the name is none, or there is no scope.
            StorageError: If the database does not answer.
        """
        if not 0 < len(name) <= _MAX_NAME or not name.isprintable():
            raise InvalidOptionError(f"must be 1 to {_MAX_NAME} printable characters, got {shown(name)}", field="name")
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
            "scopes": ",".join(sorted(scopes)),
            "created_us": now_us(),
        }
        with self._database.writing() as connection:
            if not self._database.insert_new(connection, API_KEYS, row):
                return None
            record(connection, actor, "key.create", str(row["id"]))
            return _key(connection.execute(select(API_KEYS).where(API_KEYS.c.id == row["id"])).one())

    def list(self) -> tuple[ApiKey, ...]:
        """All keys, the oldest first.

        Raises:
            StorageError: If the database does not answer.
        """
        with self._database.reading() as connection:
            rows = connection.execute(select(API_KEYS).order_by(API_KEYS.c.created_us, API_KEYS.c.id)).all()
        return tuple(_key(row) for row in rows)

    def revoke(self, key_id: str, actor: Principal) -> ApiKey:
        """Ends a key; one that has ended stays as it is.

        Raises:
            UnknownNameError: If there is no such key.
            StorageError: If the database does not answer.
        """
        named = API_KEYS.c.id == key_id
        with self._database.writing() as connection:
            changed = connection.execute(
                update(API_KEYS).where(named, API_KEYS.c.revoked_us.is_(None)).values(revoked_us=now_us())
            )
            if changed.rowcount:
                record(connection, actor, "key.revoke", key_id)
            found = connection.execute(select(API_KEYS).where(named)).first()
        if found is None:
            raise UnknownNameError(f"no key is {shown(key_id)}; `autoshard keys list` lists them", field="key")
        return _key(found)

    def find(self, secret: str) -> ApiKey | None:
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
        return None if key is None else Principal(name=f"key {key.id}", scopes=key.scopes)

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


def _key(row: Row[*tuple[Any, ...]]) -> ApiKey:
    return ApiKey(
        id=row.id,
        name=row.name,
        scopes=frozenset(map(Scope, row.scopes.split(","))),
        created_at=iso_time(row.created_us),
        revoked_at=None if row.revoked_us is None else iso_time(row.revoked_us),
    )
