"""Virtual time of one process: what its threads compute, and nothing of what others do on the same machine."""

from __future__ import annotations

import fcntl
import os
import queue
import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")

#: Stretches of use that are remembered; the threads of a process, and ranks, are at most a few steps apart.
REMEMBERED = 256


#: Logical processors of the core that one of them is of.
_SIBLINGS = "/sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list"


def physical_cores() -> list[int]:
    """One logical processor of each physical core that this process may compute on."""
    found: dict[str, int] = {}
    for number in sorted(os.sched_getaffinity(0)):
        file = Path(_SIBLINGS.format(number=number))
        siblings = file.read_text(encoding="ascii").strip() if file.exists() else str(number)
        found.setdefault(siblings, number)
    return list(found.values())


class CoreToken:
    """The right to compute on a core of this machine, which one process at a time has; its threads share it.

    Args:
        file: Stands for the core; the same for all processes that compute on it.
    """

    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_CREAT | os.O_RDWR, 0o600)
        self._holders, self._lock = 0, threading.Lock()

    def take(self) -> None:
        """Returns when the process has the core."""
        with self._lock:
            if self._holders == 0:
                fcntl.flock(self._file, fcntl.LOCK_EX)
            self._holders += 1

    def give(self) -> None:
        """Lets others have it, unless another thread of the process computes."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                fcntl.flock(self._file, fcntl.LOCK_UN)


class BusyTimes:
    """When something is in use, a core or a link: whoever comes later has it where it is free.

    Attributes:
        begun_s: When stretches of use begin, which do not overlap, in their order.
        ended_s: When they end.
    """

    def __init__(self, begun_s: Sequence[float] = (), ended_s: Sequence[float] = ()) -> None:
        self.begun_s, self.ended_s = list(begun_s), list(ended_s)

    def work(self, begun_s: float, work_s: float) -> float:
        """Does work that can begin at some time; returns when it ends."""
        stretches = self._stretches(begun_s, work_s)
        for begun, ended in stretches:
            if ended > begun:
                self._keep(begun, ended)
        del self.begun_s[:-REMEMBERED], self.ended_s[:-REMEMBERED]
        return stretches[-1][1]

    def _stretches(self, begun_s: float, work_s: float) -> list[tuple[float, float]]:
        """Where it is free for so much work, at least one stretch."""
        found, at = [], bisect_right(self.ended_s, begun_s)
        for busy_s, free_s in zip(self.begun_s[at:], self.ended_s[at:], strict=True):
            if begun_s + work_s <= busy_s:
                break
            if busy_s > begun_s:
                found.append((begun_s, busy_s))
                work_s -= busy_s - begun_s
            begun_s = free_s
        return [*found, (begun_s, begun_s + work_s)]

    def _keep(self, begun_s: float, ended_s: float) -> None:
        at = bisect_right(self.begun_s, begun_s)
        if at and self.ended_s[at - 1] >= begun_s:  # goes on where the stretch before ended
            self.ended_s[at - 1] = ended_s
        else:
            self.begun_s.insert(at, begun_s)
            self.ended_s.insert(at, ended_s)


@dataclass(slots=True, eq=False)
class _ThreadTime:
    """Where a thread is in virtual time.

    Attributes:
        cpu: The system's clock of its CPU time.
        at_s: Time at its last stop.
        worked_s: What it had computed until then.
        since_s: CPU time of the thread when it went on; None while it is stopped.
    """

    cpu: int
    at_s: float = 0.0
    worked_s: float = 0.0
    since_s: float | None = None


class VirtualClock:
    """A thread's time goes on by the CPU time that it uses while its process has a core of the machine.

    It stands still while the thread waits. A collective, or what another thread hands over, then sets it forward.

    Args:
        token: The core of this machine that the process computes on.
    """

    def __init__(self, token: CoreToken) -> None:
        self._token, self._threads = token, threading.local()
        #: The rank's, which its threads share.
        self._core, self._core_lock = BusyTimes(), threading.Lock()
        self._running: list[_ThreadTime] = []

    @property
    def _own(self) -> _ThreadTime:
        """The thread's."""
        if not hasattr(self._threads, "time"):
            self._threads.time = _ThreadTime(time.pthread_getcpuclockid(threading.get_ident()))
        own: _ThreadTime = self._threads.time
        return own

    def now_s(self) -> float:
        """Virtual time of the thread."""
        self._count()
        return self._own.at_s

    def worked_s(self) -> float:
        """Seconds that the thread has computed: what its rank would not do is not counted."""
        self._count()
        return self._own.worked_s

    def start(self) -> None:
        """Lets the time of the thread go on, once its process has a core."""
        if self._own.since_s is None:
            self._token.take()
            self._go_on()

    def stop(self) -> None:
        """Stops the time of the thread, and lets other processes have the core."""
        if self._own.since_s is not None:
            self._pause()
            self._token.give()

    def set_forward(self, to_s: float) -> None:
        """Sets the time of the thread, which is stopped, forward; not back."""
        self._own.at_s = max(self._own.at_s, to_s)

    @contextmanager
    def uncounted(self) -> Iterator[float]:
        """While the thread does what its rank would not do; the process keeps its core. Yields the thread's time."""
        was_running = self._own.since_s is not None
        self._pause()
        try:
            yield self._own.at_s
        finally:
            if was_running:
                self._go_on()

    @contextmanager
    def idle(self) -> Iterator[None]:
        """While the thread waits: others have the core."""
        was_running = self._own.since_s is not None
        self.stop()
        try:
            yield
        finally:
            if was_running:
                self.start()

    def charge(self, begun_s: float, work_s: float) -> None:
        """Keeps the rank's core busy from some moment on with what no thread on this clock computes."""
        with self._core_lock:
            self._core.work(begun_s, work_s)

    @contextmanager
    def at(self, moment_s: float) -> Iterator[None]:
        """What the thread, which is stopped, does at another moment."""
        now_s, self._own.at_s = self._own.at_s, moment_s
        try:
            yield
        finally:
            self._own.at_s = now_s

    def handover(self) -> StampedQueue[Any]:
        """See `StepClock`."""
        return StampedQueue(self)

    def future(self) -> StampedFuture:
        """See `StepClock`."""
        return StampedFuture(self)

    def _go_on(self) -> None:
        own = self._own
        with self._core_lock:
            own.since_s = time.thread_time()
            self._running.append(own)

    def _pause(self) -> None:
        own = self._own
        if own.since_s is not None:
            self._count()
            with self._core_lock:
                self._running.remove(own)
                own.since_s = None

    def _count(self) -> None:
        """Counts what the running threads have computed: first the others, which took turns with this one on the core.

        As in real time, what they have done by now is done, and what they do from now on begins later.
        """
        own = self._own
        with self._core_lock:
            for one in sorted(self._running, key=lambda one: one is own):
                cpu_s = time.clock_gettime(one.cpu)
                assert one.since_s is not None, "it is running"
                one.at_s = self._core.work(one.at_s, cpu_s - one.since_s)
                one.worked_s += cpu_s - one.since_s
                one.since_s = cpu_s


class StampedQueue(Generic[T]):
    """A queue between threads, each of which is on a clock: none gets an item before it was put.

    Args:
        clock: The threads'.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._items: queue.SimpleQueue[tuple[float, T]] = queue.SimpleQueue()

    def put(self, item: T) -> None:
        """Gives an item."""
        self._items.put((self._clock.now_s(), item))

    def get(self) -> T:
        """The next item, once there is one. A thread that gets None ends, and must not keep the core."""
        self._clock.stop()
        put_s, item = self._items.get()
        self._clock.set_forward(put_s)
        if item is not None:
            self._clock.start()
        return item


class StampedFuture(Future[Any]):
    """A result that one thread computes and another waits for, each on a clock.

    Args:
        clock: The threads'.
    """

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock, self._set_s = clock, 0.0

    def set_result(self, result: Any) -> None:
        """Sets the result at the time of the thread."""
        self._set_s = self._clock.now_s()
        super().set_result(result)

    def set_exception(self, exception: BaseException | None) -> None:
        """Sets the error at the time of the thread."""
        self._set_s = self._clock.now_s()
        super().set_exception(exception)

    def result(self, timeout: float | None = None) -> Any:
        """The result; raises the error, if there is one."""
        self._wait(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error; None if there is none."""
        self._wait(timeout)
        return super().exception()

    def _wait(self, timeout: float | None) -> None:
        with self._clock.idle():
            super().exception(timeout)
            self._clock.set_forward(self._set_s)
