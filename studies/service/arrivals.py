"""Requests that arrive at their own times, however long the answers take (an open loop)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import httpx
import numpy as np

_BUSY = (429, 503)
_TIMEOUT_S = 60.0


class Spacing(StrEnum):
    """How arrivals are spaced."""

    POISSON = "poisson"
    EVEN = "even"


def arrival_times(rate_per_s: float, seconds: float, spacing: Spacing, seed: int) -> list[float]:
    """Times of arrivals, in seconds from the start."""
    if spacing is Spacing.EVEN:
        return [number / rate_per_s for number in range(round(rate_per_s * seconds))]
    rng, times, now_s = random.Random(seed), [], 0.0
    while (now_s := now_s + rng.expovariate(rate_per_s)) < seconds:
        times.append(now_s)
    return times


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a request ended.

    Attributes:
        arrived_s: When it was to be sent, from the start.
        latency_ms: From then to the end of its answer, so that a late start counts.
        status: Of the answer; 0 where there was none.
        says_when: Whether the answer has a Retry-After.
        fault: Why there was no answer.
    """

    arrived_s: float
    latency_ms: float
    status: int
    says_when: bool = False
    fault: str = ""


async def send_at(
    times_s: Sequence[float], send: Callable[[int], Awaitable[httpx.Response]], *, max_open: int
) -> list[Outcome]:
    """Sends requests at their times, of which no more than `max_open` are under way.

    Args:
        times_s: Arrivals, rising.
        send: Sends the request of a number.
        max_open: Requests under way; further ones start late, which counts to their latency.
    """
    room, start_s = asyncio.Semaphore(max_open), time.perf_counter()

    async def one(number: int) -> Outcome:
        async with room:
            response, fault = None, ""
            try:
                response = await send(number)
            except httpx.TransportError as error:
                fault = f"{type(error).__name__}: {error}"
        return Outcome(
            arrived_s=times_s[number],
            latency_ms=1e3 * (time.perf_counter() - start_s - times_s[number]),
            status=0 if response is None else response.status_code,
            says_when=response is not None and "retry-after" in response.headers,
            fault=fault,
        )

    tasks = []
    for number, at_s in enumerate(times_s):
        await asyncio.sleep(max(0.0, start_s + at_s - time.perf_counter()))
        tasks.append(asyncio.create_task(one(number)))
    return list(await asyncio.gather(*tasks))


def clients_of(url: str, num_clients: int) -> list[httpx.AsyncClient]:
    """Clients with addresses of their own, each of which the service counts as one."""
    limits = httpx.Limits(max_connections=100)
    return [
        httpx.AsyncClient(
            base_url=url,
            timeout=_TIMEOUT_S,
            transport=httpx.AsyncHTTPTransport(local_address=f"127.0.0.{number + 2}", limits=limits),
        )
        for number in range(num_clients)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Counts and latencies of requests; those of the answered ones are counted from their scheduled arrival.

    Attributes:
        name: What was sent.
        num_requests: Requests.
        num_answered: Answered with a status below 400.
        num_refused: Answered with 429 or 503.
        num_refused_without_time: Of these, without a Retry-After.
        num_failed: Answered with anything else, or not at all.
        faults: Reasons of failures, each once.
        p50_ms: Median latency of the answered.
        p95_ms: 95th percentile.
        p99_ms: 99th percentile.
        max_ms: Largest.
    """

    name: str
    num_requests: int
    num_answered: int
    num_refused: int
    num_refused_without_time: int
    num_failed: int
    faults: tuple[str, ...]
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, name: str, outcomes: Sequence[Outcome]) -> Latencies:
        """Of some requests; percentiles are latencies that occurred, 0 where none was answered."""
        answered = [one.latency_ms for one in outcomes if 0 < one.status < 400]
        refused = [one for one in outcomes if one.status in _BUSY]
        failed = [one for one in outcomes if one.status == 0 or (one.status >= 400 and one.status not in _BUSY)]
        levels = np.percentile(answered or [0.0], [50, 95, 99, 100], method="higher").round(2).tolist()
        p50_ms, p95_ms, p99_ms, max_ms = levels
        return cls(
            name=name,
            num_requests=len(outcomes),
            num_answered=len(answered),
            num_refused=len(refused),
            num_refused_without_time=sum(not one.says_when for one in refused),
            num_failed=len(failed),
            faults=tuple(sorted({one.fault or f"status {one.status}" for one in failed})),
            p50_ms=p50_ms,
            p95_ms=p95_ms,
            p99_ms=p99_ms,
            max_ms=max_ms,
        )
