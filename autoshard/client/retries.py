"""When a request is sent again."""

from __future__ import annotations

from dataclasses import dataclass

import httpx

#: Statuses of answers that say when to send a request again: being answered, too many, busy or starting.
_LATER = (409, 429, 503)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How often, and for how long, a client sends a request again that the service turned away for now.

    Every request that makes something has an idempotency key, so that the service does it once.

    Attributes:
        most: Most times that a request is sent again.
        most_at_first: Most times that it is while nobody at that address has answered this client yet: the address
            may be wrong, and somebody waits to be told.
        max_wait_s: Longest wait before one of them.
    """

    most: int = 6
    most_at_first: int = 2
    max_wait_s: float = 30.0

    def wait_s(
        self, attempt: int, outcome: httpx.Response | httpx.TransportError, *, answered: bool = True
    ) -> float | None:
        """Seconds to wait before a request is sent again; None if it is not.

        Args:
            attempt: How often it was sent again already.
            outcome: The answer, or why there was none.
            answered: Whether this client has had an answer from that address.
        """
        if attempt >= (self.most if answered else min(self.most, self.most_at_first)):
            return None
        backoff_s = min(0.25 * 2.0**attempt, self.max_wait_s)
        if isinstance(outcome, httpx.ConnectError | httpx.ReadError | httpx.RemoteProtocolError):
            return backoff_s
        if isinstance(outcome, httpx.Response) and outcome.status_code in _LATER:
            given = outcome.headers.get("retry-after", "")
            return min(max(float(given), backoff_s), self.max_wait_s) if given.isdecimal() else None
        return None
