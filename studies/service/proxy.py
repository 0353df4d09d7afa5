"""A small proxy before several replicas of the service, as a load balancer is.

It asks each replica for `/readyz` and sends requests to those that are ready. One whose connection ends before an
answer is whole is sent to the next replica, if it can be done twice: reads, and writes with an idempotency key.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import httpx

_HEALTH_EVERY_S, _HEALTH_TIMEOUT_S = 0.2, 2.0
_ANSWER_S: Final = 60.0
_MAX_HEAD, _HOST = 1 << 16, "127.0.0.1"
_BAD_GATEWAY: Final = b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


@dataclass(eq=False, slots=True)
class Replica:
    """A replica.

    Attributes:
        port: Its port on loopback.
        is_ready: Whether it said so when it was last asked.
    """

    port: int
    is_ready: bool = False


@dataclass(frozen=True, slots=True)
class _Request:
    content: bytes
    can_be_repeated: bool

    @classmethod
    async def read(cls, reader: asyncio.StreamReader) -> _Request:
        """A request, which asks for its connection to be closed after the answer.

        Raises:
            IncompleteReadError: If the client leaves.
            LimitOverrunError: If its head is too long.
        """
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head[:-4].split(b"\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (one.partition(b":") for one in lines[1:])}
        body = await reader.readexactly(int(headers.get(b"content-length", b"0")))
        kept = [line for line in lines if not line.lower().startswith(b"connection:")]
        content = b"\r\n".join([*kept, b"connection: close", b"", body])
        return cls(content, lines[0].startswith(b"GET ") or b"idempotency-key" in headers)


class Proxy:
    """Sends requests to replicas that are ready, in turn.

    Attributes:
        num_repeated: Requests that were sent to another replica, since the first did not answer.
    """

    def __init__(self) -> None:
        self.replicas: list[Replica] = []
        self._turn = itertools.count()
        self._serving: set[asyncio.Task[None]] = set()
        self.num_repeated = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serves until the end of the block; gives its address."""
        server = await asyncio.start_server(self._serve, _HOST, 0, limit=_MAX_HEAD)
        health = asyncio.create_task(self._watch())
        try:
            yield f"http://{_HOST}:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in (health, *self._serving):
                task.cancel()
            await asyncio.gather(health, *self._serving, server.wait_closed(), return_exceptions=True)

    async def _watch(self) -> None:
        async with httpx.AsyncClient(timeout=_HEALTH_TIMEOUT_S, trust_env=False) as client:
            while True:
                for replica in list(self.replicas):
                    replica.is_ready = await _says_ready(client, replica)
                await asyncio.sleep(_HEALTH_EVERY_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                request = await _Request.read(reader)
                writer.write(await self._answer(request))
                await writer.drain()
        finally:
            await _closed(writer)

    async def _answer(self, request: _Request) -> bytes:
        turn = next(self._turn)
        ready = [replica for replica in self.replicas if replica.is_ready]
        for number in range(len(ready)):
            replica = ready[(turn + number) % len(ready)]
            try:
                return await asyncio.wait_for(_exchanged(request, replica), _ANSWER_S)
            except ConnectionRefusedError:
                replica.is_ready = False  # nothing was sent
            except (OSError, TimeoutError, asyncio.IncompleteReadError):
                if not request.can_be_repeated:
                    break
            self.num_repeated += 1
        return _BAD_GATEWAY


async def _says_ready(client: httpx.AsyncClient, replica: Replica) -> bool:
    try:
        return (await client.get(f"http://{_HOST}:{replica.port}/readyz")).status_code == 200
    except httpx.TransportError:
        return False


async def _exchanged(request: _Request, replica: Replica) -> bytes:
    """The answer of a replica.

    Raises:
        OSError: If the connection fails.
        IncompleteReadError: If it ends before the answer does.
    """
    reader, writer = await asyncio.open_connection(_HOST, replica.port)
    try:
        writer.write(request.content)
        await writer.drain()
        answer = await reader.read(-1)
    finally:
        await _closed(writer)
    head, end, body = answer.partition(b"\r\n\r\n")
    lengths = [int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    if not end or (lengths and len(body) < lengths[0]):
        raise asyncio.IncompleteReadError(answer, None)
    return answer


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
