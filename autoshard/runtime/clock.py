"""The clock of steps: that of the wall or, in `runtime.virtual`, that of machines which are not there."""

from __future__ import annotations

import queue
import time
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Protocol, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Handover(Protocol[T]):
    """Items that threads give to another thread, in their order."""

    def put(self, item: T, /) -> None:
        """Gives an item."""
        ...

    def get(self) -> T:
        """The next item, once there is one; a thread that gets None ends."""
        ...


class StepClock(Protocol):
    """Tells the time of the thread that asks. What threads give each other carries the time at which it was given."""

    def now_s(self) -> float:
        """Seconds since some moment, the same for all threads and, on one machine, for all processes."""
        ...

    def worked_s(self) -> float:
        """Seconds that the thread has computed: CPU time, without what it waited for."""
        ...

    def idle(self) -> AbstractContextManager[None]:
        """While the thread waits for something that is neither a collective nor comes from another thread."""
        ...

    def uncounted(self) -> AbstractContextManager[object]:
        """While the thread works at what belongs to no step."""
        ...

    def handover(self) -> Handover[Any]:
        """Makes a queue from some threads to another one."""
        ...

    def future(self) -> Future[Any]:
        """Makes a result that one thread computes and another one waits for."""
        ...


class MachineClock:
    """The time of the machine."""

    now_s = staticmethod(time.perf_counter)
    worked_s = staticmethod(time.thread_time)

    def idle(self) -> AbstractContextManager[None]:
        """Nothing: time goes on."""
        return nullcontext()

    def uncounted(self) -> AbstractContextManager[object]:
        """Nothing: time goes on."""
        return nullcontext()

    def handover(self) -> Handover[Any]:
        """A queue."""
        return queue.SimpleQueue()

    def future(self) -> Future[Any]:
        """A future."""
        return Future()


WALL: Final[StepClock] = MachineClock()


def clock_of(group: dist.ProcessGroup) -> StepClock:
    """The clock that a group's collectives are timed on: its own in virtual time, else that of the wall."""
    clock: StepClock = getattr(group, "clock", WALL)
    return clock
