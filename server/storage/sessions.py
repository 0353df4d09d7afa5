"""Sessions of who has signed in on the page."""

from __future__ import annotations

import secrets

from sqlalchemy import delete, insert, or_, select

from autoshard.api import Scope
from server.access import Principal
from server.storage.audit import record
from server.storage.database import Database
from server.storage.keys import secret_hash
from server.storage.schema import API_KEYS, SESSIONS, now_us

#: A session's longest time; one that was begun with a token ends with the token.
_LONGEST_US = 12 * 3600 * 1_000_000


class SessionStore:
    """Sessions by their secret. One that was begun with a key ends with the key.

    Args:
        database: Where they are.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, actor: Principal) -> str:
        """Makes a session of who has signed in; returns its secret. Those that have ended are forgotten.

        Raises:
            StorageError: If the database does not answer.
        """
        secret, now = secrets.token_urlsafe(32), now_us()
        row = {
            "secret_hash": secret_hash(secret),
            "actor": actor.name,
            "team": actor.team,
            "scopes": ",".join(sorted(actor.scopes)),
            "expires_us": min(now + _LONGEST_US, actor.expires_us or now + _LONGEST_US),
        }
        with self._database.writing(uses_reserve=True) as connection:
            connection.execute(delete(SESSIONS).where(SESSIONS.c.expires_us <= now))
            connection.execute(insert(SESSIONS).values(row))
            record(connection, actor, "session.begin", actor.name)
        return secret

    def find(self, secret: str) -> Principal | None:
        """Whose session has this secret, unless it or its key has ended.

        Raises:
            StorageError: If the database does not answer.
        """
        key = "key " + API_KEYS.c.id == SESSIONS.c.actor
        query = (
            select(SESSIONS)
            .outerjoin(API_KEYS, key)
            .where(
                SESSIONS.c.secret_hash == secret_hash(secret),
                SESSIONS.c.expires_us > now_us(),
                or_(API_KEYS.c.id.is_(None), API_KEYS.c.revoked_us.is_(None)),
            )
        )
        with self._database.reading() as connection:
            row = connection.execute(query).first()
        if row is None:
            return None
        scopes = frozenset(map(Scope, row.scopes.split(",")))
        return Principal(name=row.actor, team=row.team, scopes=scopes, expires_us=row.expires_us)

    def end(self, secret: str, actor: Principal) -> None:
        """Ends a session.

        Raises:
            StorageError: If the database does not answer.
        """
        with self._database.writing(uses_reserve=True) as connection:
            connection.execute(delete(SESSIONS).where(SESSIONS.c.secret_hash == secret_hash(secret)))
            record(connection, actor, "session.end", actor.name)
