"""Clients of the REST service: how each sends requests and waits."""

from __future__ import annotations

import asyncio
import time
from typing import Self, TypeVar

import httpx

from autoshard.client.endpoints import Exchange, Outcome, ServiceEndpoints
from autoshard.client.retries import Retries

T = TypeVar("T")
#: Longest wait for an answer: in the queue, for the planner's limit, and beyond it.
_TIMEOUT_S = 180.0


class Client(ServiceEndpoints):
    """A client that waits for its answers; its methods are those of `ServiceEndpoints`.

    Args:
        url: Address of the service, such as `http://localhost:8000`.
        key: Secret of a key; None for a service without keys.
        retries: When a request is sent again.
        transport: What carries requests; None for the network.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        retries: Retries | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__(url, retries)
        self._http = httpx.Client(base_url=url, headers=_headers(key), timeout=_TIMEOUT_S, transport=transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def _run(self, exchange: Exchange[T]) -> T:
        outcome: Outcome = None
        while True:
            try:
                step = exchange.send(outcome)
            except StopIteration as end:
                answer: T = end.value
                return answer
            if isinstance(step, float):
                time.sleep(step)
                outcome = None
                continue
            try:
                outcome = self._http.request(**step)
            except httpx.TransportError as error:
                outcome = error


class AsyncClient(ServiceEndpoints):
    """A client for asyncio; arguments and methods are those of `Client`, to be awaited."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        retries: Retries | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(url, retries)
        self._http = httpx.AsyncClient(base_url=url, headers=_headers(key), timeout=_TIMEOUT_S, transport=transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """As `Client.close`."""
        await self._http.aclose()

    async def _run(self, exchange: Exchange[T]) -> T:
        outcome: Outcome = None
        while True:
            try:
                step = exchange.send(outcome)
            except StopIteration as end:
                answer: T = end.value
                return answer
            if isinstance(step, float):
                await asyncio.sleep(step)
                outcome = None
                continue
            try:
                outcome = await self._http.request(**step)
            except httpx.TransportError as error:
                outcome = error


def _headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}
