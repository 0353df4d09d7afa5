"""How many requests a client may send in a time."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from server.problems import RateLimitError

#: Clients that are remembered; the one that has been quiet for longest is forgotten first.
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
        burst_s: Seconds' worth of requests that a client may send at once after it has sent none.
        clock: The time in seconds.
    """

    def __init__(
        self, requests_per_s: float, burst_s: float = 2.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = requests_per_s
        self._most = max(1.0, burst_s * requests_per_s)
        self._clock = clock
        self.buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def check(self, client: str) -> None:
        """Counts a request.

        Raises:
            RateLimitError: If the client has sent too many; it says when to send the next.
        """
        now_s = self._clock()
        bucket = self.buckets.setdefault(client, _Bucket(self._most, now_s))
        self.buckets.move_to_end(client)
        if len(self.buckets) > _MAX_CLIENTS:
            self.buckets.popitem(last=False)
        bucket.tokens, bucket.at_s = min(self._most, bucket.tokens + (now_s - bucket.at_s) * self._rate), now_s
        if bucket.tokens < 1:
            wait_s = math.ceil((1 - bucket.tokens) / self._rate)
            raise RateLimitError(f"clients may send {self._rate:g} requests per second", retry_after_s=wait_s)
        bucket.tokens -= 1

    def give_back(self, client: str) -> None:
        """Takes a request from the count that was not one of those that are counted."""
        if client in self.buckets:
            self.buckets[client].tokens += 1
