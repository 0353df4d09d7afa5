"""Requests that come when they come, whatever became of those before: an open loop."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

import httpx
import numpy as np

#: Seconds after which nobody waits for an answer any more.
_PATIENCE_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request that can be sent.

    Attributes:
        method: Of HTTP.
        path: With its query.
        body: JSON text; None without a body.
    """

    method: str
    path: str
    body: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What became of the requests of a run.

    Attributes:
        rate: Requests per second, on average.
        seconds: From the first to the last.
        num_sent: Requests.
        statuses: Number of answers by status; 0 stands for none within a minute, or a broken connection.
        num_hasty: Refusals (429 and 503) that do not say when to come again.
        p50_ms: Median time from when a request was due to its whole answer, of the accepted; None without any.
        p95_ms: The same, 95 of 100 are quicker.
        p99_ms: The same, 99 of 100.
        max_ms: The same, all.
    """

    rate: float
    seconds: float
    num_sent: int
    statuses: dict[str, int]
    num_hasty: int
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    max_ms: float | None

    @property
    def num_accepted(self) -> int:
        """Requests that were answered as asked."""
        return sum(number for status, number in self.statuses.items() if status.startswith("2"))

    @property
    def num_refused(self) -> int:
        """Requests that were told to come later."""
        return sum(self.statuses.get(status, 0) for status in ("429", "503"))

    @property
    def num_failed(self) -> int:
        """All other requests."""
        return self.num_sent - self.num_accepted - self.num_refused


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    took_s: float
    is_hasty: bool


def send_at_rate(
    url: str,
    calls: Sequence[Call],
    *,
    rate: float,
    seconds: float,
    num_clients: int = 1,
    seed: int = 0,
    observe: Callable[[], None] = lambda: None,
) -> Answers:
    """Sends requests at times drawn as a Poisson process draws them, and waits for the answers.

    A request's time counts from when it was due: where the sender or the service falls behind, that is in it.

    Args:
        url: The service's.
        calls: What is sent in turn.
        rate: Requests per second, on average.
        seconds: Time in which requests are due.
        num_clients: Addresses on the loopback that send in turn; the service takes them for clients of their own.
        seed: Of the times.
        observe: Called once a second.
    """
    due_s = np.random.default_rng(seed).exponential(1 / rate, round(rate * seconds)).cumsum()
    return asyncio.run(_sent(url, calls, due_s.tolist(), rate, num_clients, observe))


async def _sent(
    url: str, calls: Sequence[Call], due_s: list[float], rate: float, num_clients: int, observe: Callable[[], None]
) -> Answers:
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(_client(url, number)) for number in range(num_clients)]
        watching = asyncio.create_task(_every_second(observe))
        started = time.perf_counter()
        tasks = []
        for number, due in enumerate(due_s):
            await asyncio.sleep(max(0.0, started + due - time.perf_counter()))
            call, client = calls[number % len(calls)], clients[number % num_clients]
            tasks.append(asyncio.create_task(_answer(client, call, started + due)))
        answers = await asyncio.gather(*tasks)
        watching.cancel()
    return summary_of(answers, rate, due_s[-1])


def _client(url: str, number: int) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(
        local_address=f"127.0.0.{number + 1}", limits=httpx.Limits(max_connections=None, max_keepalive_connections=64)
    )
    return httpx.AsyncClient(base_url=url, transport=transport, timeout=_PATIENCE_S, trust_env=False)


async def _every_second(observe: Callable[[], None]) -> None:
    while True:
        observe()
        await asyncio.sleep(1.0)


async def _answer(client: httpx.AsyncClient, call: Call, due: float) -> _Answer:
    try:
        answer = await client.request(
            call.method, call.path, content=call.body, headers={"content-type": "application/json"}
        )
    except httpx.TransportError:
        return _Answer(0, time.perf_counter() - due, is_hasty=False)
    is_hasty = answer.status_code in (429, 503) and "retry-after" not in answer.headers
    return _Answer(answer.status_code, time.perf_counter() - due, is_hasty)


def summary_of(answers: Sequence[_Answer], rate: float, seconds: float) -> Answers:
    """Counts and percentiles."""
    accepted_ms = 1e3 * np.array([one.took_s for one in answers if 200 <= one.status < 300])
    ends = np.percentile(accepted_ms, (50, 95, 99, 100)).tolist() if len(accepted_ms) else (None,) * 4
    p50_ms, p95_ms, p99_ms, max_ms = ends
    return Answers(
        rate=rate,
        seconds=seconds,
        num_sent=len(answers),
        statuses={str(status): number for status, number in sorted(Counter(one.status for one in answers).items())},
        num_hasty=sum(one.is_hasty for one in answers),
        p50_ms=p50_ms,
        p95_ms=p95_ms,
        p99_ms=p99_ms,
        max_ms=max_ms,
    )
