"""How many requests a client may send in a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from server.problems import RateLimitError

#: Seconds' worth of requests that a client may send at once after it has sent none.
_BURST_S = 2.0
#: Clients after which those that have been quiet are forgotten.
_MAX_CLIENTS = 4096


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at_s: float


class RateLimit:
    """Counts the requests of each client: on average as many per second as the limit, and more for a moment.

    Each process counts for itself, so that replicas allow as many times more.

    Args:
        requests_per_s: The limit.
        clock: The time in seconds.
    """

    def __init__(self, requests_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = requests_per_s
        self._most = max(1.0, _BURST_S * requests_per_s)
        self._clock = clock
        self.buckets: dict[str, _Bucket] = {}

    def check(self, client: str) -> None:
        """Counts a request.

        Raises:
            RateLimitError: If the client has sent too many; it says when to send the next.
        """
        now_s = self._clock()
        if len(self.buckets) >= _MAX_CLIENTS:
            self._forget_quiet(now_s)
        bucket = self.buckets.setdefault(client, _Bucket(self._most, now_s))
        bucket.tokens, bucket.at_s = self._refilled(bucket, now_s), now_s
        if bucket.tokens < 1:
            wait_s = math.ceil((1 - bucket.tokens) / self._rate)
            raise RateLimitError(f"clients may send {self._rate:g} requests per second", retry_after_s=wait_s)
        bucket.tokens -= 1

    def _refilled(self, bucket: _Bucket, now_s: float) -> float:
        return min(self._most, bucket.tokens + (now_s - bucket.at_s) * self._rate)

    def _forget_quiet(self, now_s: float) -> None:
        """Drops clients that could send as many as new ones."""
        self.buckets = {
            client: bucket for client, bucket in self.buckets.items() if self._refilled(bucket, now_s) < self._most
        }
