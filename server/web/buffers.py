"""Bytes of bodies and answers that the service holds for its clients, limited in total and for each client."""

from __future__ import annotations

import ipaddress
from collections import Counter

from starlette.types import ASGIApp, Receive, Scope, Send

from server.access import Principal
from server.problems import BusyError, ClientBusyError
from server.settings import ServerSettings

#: Characters of an address that a proxy says.
_MAX_ADDRESS = 64


class BufferBudget:
    """Counts the bytes that are held, by client.

    Args:
        settings: Limits.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._held: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """Bytes held for all clients."""
        return self._held.total()

    def open(self, client: str) -> Buffer:
        """A buffer of one request, which has to be closed."""
        return Buffer(self, client)

    def check(self, client: str, more: int) -> None:
        """Checks that more bytes may be held for a client.

        Raises:
            ClientBusyError: If that were more than one client may hold.
            BusyError: If that were more than all may hold.
        """
        most = self._settings.max_buffered_bytes
        if self._held[client] + more > most // 2:
            raise ClientBusyError(f"requests of this client would hold more than {most // 2:,} bytes")
        if self.total + more > most:
            raise BusyError(f"requests would hold more than {most:,} bytes")

    def add(self, client: str, more: int) -> None:
        """Counts bytes, of which a negative number is no longer held."""
        self._held[client] += more
        if not self._held[client]:
            del self._held[client]

    @property
    def free_body_bytes(self) -> int:
        """First bytes of each body, which are not counted."""
        return self._settings.free_body_bytes


class Buffer:
    """The bytes of one request: its body, and its answer until that is sent."""

    def __init__(self, budget: BufferBudget, client: str) -> None:
        self._budget = budget
        self._client = client
        self._num_bytes = 0
        self._counted = 0

    def receive(self, num_bytes: int) -> None:
        """Counts bytes of the body.

        Raises:
            ClientBusyError: If the client holds as many as it may.
            BusyError: If all together hold as many as they may.
        """
        self._num_bytes += num_bytes
        more = self._num_bytes - self._budget.free_body_bytes - self._counted
        if more > 0:
            self._budget.check(self._client, more)
            self._count(more)

    def answer(self, num_bytes: int) -> None:
        """Counts an answer, which is there already: it is sent, and later bodies have to wait for it."""
        self._count(num_bytes)

    def close(self) -> None:
        """Ends the count."""
        self._count(-self._counted)

    def _count(self, more: int) -> None:
        self._counted += more
        self._budget.add(self._client, more)


class BufferLimit:
    """Middleware: gives each request a buffer (`request.state.buffer`), and closes it when its answer is sent.

    Args:
        app: What answers.
        budget: What buffers count to.
    """

    def __init__(self, app: ASGIApp, budget: BufferBudget) -> None:
        self._app = app
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        buffer = self._budget.open(client_of(scope))
        scope["state"]["buffer"] = buffer
        try:
            await self._app(scope, receive, send)
        finally:
            buffer.close()


def client_of(scope: Scope) -> str:
    """Whom a request's share is counted to: its key, or the address that it comes from where no keys are needed."""
    actor: Principal | None = scope["state"].get("actor")
    return actor.name if actor is not None and not actor.is_anybody else address_of(scope)


def address_of(scope: Scope) -> str:
    """The address that a request comes from."""
    client = scope.get("client")
    return client[0][:_MAX_ADDRESS] if client else ""


def network_of(scope: Scope) -> str:
    """The address that a request comes from; of IPv6 its network, in which a machine takes addresses as it likes."""
    address = address_of(scope)
    try:
        return str(ipaddress.ip_network(f"{address}/64", strict=False)) if ":" in address else address
    except ValueError:  # a proxy may say what is none
        return address
