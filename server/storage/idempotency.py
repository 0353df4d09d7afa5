"""Idempotency keys: a request that a client sends again is answered as it was, and done once."""

from __future__ import annotations

import hashlib
import uuid
import zlib
from dataclasses import dataclass, field

from sqlalchemy import ColumnElement, Connection, and_, delete, select, update

from server.problems import KeyInUseError, KeyReusedError
from server.storage.database import Database
from server.storage.schema import IDEMPOTENT_REQUESTS as REQUESTS
from server.storage.schema import now_us

#: An answer is kept for a day. A request whose process died may be begun again after a time that none takes: 30 s
#: for its body, 30 s in the queue, 60 s of planning, 30 s beyond.
_KEPT_US = 24 * 3600 * 1_000_000
_ABANDONED_US = 300 * 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class IdempotentRequest:
    """A request with a key.

    Attributes:
        client: Whose key it is.
        key: The key.
        fingerprint: Digest of the request's method, path and body.
        owner: Name of this attempt, made anew.
    """

    client: str
    key: str
    fingerprint: str
    owner: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def digest(self) -> str:
        """Name of the request outside of the database, the same of all attempts."""
        return hashlib.sha256(f"{self.client}\n{self.key}\n{self.fingerprint}".encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAnswer:
    """Answer to an earlier request with the same key."""

    status: int
    body: bytes


class IdempotencyStore:
    """Requests with keys, and their answers.

    Args:
        database: Where they are.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, request: IdempotentRequest) -> KeptAnswer | None:
        """Begins a request.

        Returns:
            The answer of the same request before; None if there was none, and this one is to be answered.

        Raises:
            KeyReusedError: If another request had this key.
            KeyInUseError: If the same request is being answered now.
            StorageError: If the database does not answer.
        """
        now = now_us()
        values = {"client": request.client, "key": request.key, "fingerprint": request.fingerprint}
        with self._database.writing() as connection:
            connection.execute(delete(REQUESTS).where(REQUESTS.c.started_us < now - _KEPT_US))
            abandoned = and_(REQUESTS.c.status.is_(None), REQUESTS.c.started_us < now - _ABANDONED_US)
            connection.execute(delete(REQUESTS).where(_named(request), abandoned))
            row = {**values, "owner": request.owner, "started_us": now}
            if self._database.insert_new(connection, REQUESTS, row):
                return None
            found = connection.execute(select(REQUESTS).where(_named(request))).one()
        if found.fingerprint != request.fingerprint:
            raise KeyReusedError("was used for another request", field="Idempotency-Key")
        if found.status is None:
            raise KeyInUseError("names a request that is still being answered", field="Idempotency-Key")
        return KeptAnswer(status=found.status, body=zlib.decompress(found.answer))

    def keep(self, connection: Connection, request: IdempotentRequest | None, answer: KeptAnswer) -> None:
        """Keeps the answer of a request that was begun, if it has a key.

        Args:
            connection: A transaction that writes.
            request: The request; None for one without a key.
            answer: Its answer.

        Raises:
            KeyInUseError: If the request was given up, or begun again by another process: the transaction must fail.
        """
        if request is None:
            return
        kept = {"status": answer.status, "answer": zlib.compress(answer.body)}
        if connection.execute(update(REQUESTS).where(_is_begun(request)).values(kept)).rowcount == 0:
            raise KeyInUseError("names a request that was given up or begun again", field="Idempotency-Key")

    def give_up(self, request: IdempotentRequest) -> None:
        """Forgets a request that was begun and not answered, so that it may be sent again; a kept answer stays.

        Raises:
            StorageError: If the database does not answer.
        """
        with self._database.writing(uses_reserve=True) as connection:
            connection.execute(delete(REQUESTS).where(_is_begun(request)))


def _named(request: IdempotentRequest) -> ColumnElement[bool]:
    return and_(REQUESTS.c.client == request.client, REQUESTS.c.key == request.key)


def _is_begun(request: IdempotentRequest) -> ColumnElement[bool]:
    """That this attempt is being answered."""
    return and_(_named(request), REQUESTS.c.owner == request.owner, REQUESTS.c.status.is_(None))
