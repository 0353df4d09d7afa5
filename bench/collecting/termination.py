"""Ending a run on SIGTERM, so that what was measured is still written."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

#: Exit code of a run that SIGTERM ended, as shells count it.
TERMINATED_EXIT_CODE = 128 + signal.SIGTERM


class Terminated(BaseException):
    """SIGTERM has arrived. No `Exception`: nothing that handles errors may take it for one."""


@contextmanager
def termination_raised() -> Iterator[None]:
    """Turns the first SIGTERM into `Terminated` in the main thread, and ignores those that follow it."""

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
