"""Collectives that run while the process goes on."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from autoshard.core.step import StepCollective
from autoshard.runtime.timing import Span, StepTimer


class Pending:
    """A collective under way.

    On a GPU `wait` makes the current stream wait; the host goes on.

    Args:
        work: The collective, just started.
        collective: What to count its time as.
        timer: Where to count it.
    """

    def __init__(self, work: dist.Work | None, collective: StepCollective, timer: StepTimer) -> None:
        assert work is not None, "this process is in the group"
        self._work, self._collective, self._timer = work, collective, timer
        self._begun = timer.mark()
        self._ended: Any = None
        if self._begun is not None:
            work.get_future().add_done_callback(self._end)

    def wait(self) -> None:
        """Waits until the collective has ended.

        Raises:
            RuntimeError: If it failed.
        """
        waiting = self._timer.mark()
        self._work.wait()
        waited = self._timer.mark()
        took = Span(self._begun, waited if self._ended is None else self._ended)
        self._timer.count(self._collective, took, Span(waiting, waited))

    def _end(self, _: object) -> None:
        self._ended = self._timer.mark()
