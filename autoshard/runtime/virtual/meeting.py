"""Memory that processes share: where those of a group come to their collectives, and the links of all ranks."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from autoshard.core.costs import MsArray
from autoshard.core.errors import DeviceError
from autoshard.runtime.virtual.clock import REMEMBERED, BusyTimes

#: Collectives of which a group remembers who came; more than half as many that nobody has waited for are not accepted.
NUM_SLOTS: Final = 64
#: Levels of links; what travels further is counted to the last one.
_MOST_LEVELS: Final = 6
#: Of a POSIX semaphore, on every Linux.
_SEMAPHORE_BYTES: Final = 32

_libc = ctypes.CDLL(None, use_errno=True)


class SharedMemory:
    """A file in memory, with semaphores and numbers.

    Args:
        file: The same for all processes.
        num_semaphores: Semaphores.
        num_numbers: Numbers of 64 bits.
        first: Values of the semaphores, where this process makes the file; None where it is there.

    Attributes:
        numbers: The numbers, all 0 at first.
    """

    def __init__(self, file: Path, num_semaphores: int, num_numbers: int, first: Sequence[int] | None) -> None:
        handle = os.open(file, os.O_RDWR | (os.O_CREAT | os.O_EXCL if first is not None else 0), 0o600)
        size = num_semaphores * _SEMAPHORE_BYTES + 8 * num_numbers
        try:
            if first is not None:
                os.ftruncate(handle, size)
            self._memory = mmap.mmap(handle, size)
        finally:
            os.close(handle)
        self.numbers = np.frombuffer(self._memory, np.float64, offset=num_semaphores * _SEMAPHORE_BYTES)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._semaphores = [ctypes.c_void_p(base + number * _SEMAPHORE_BYTES) for number in range(num_semaphores)]
        for semaphore, value in zip(self._semaphores, first or (), strict=False):
            _called(_libc.sem_init(semaphore, 1, value))

    def take(self, number: int) -> None:
        """Waits until a semaphore is above 0, and takes 1 from it."""
        while _libc.sem_wait(self._semaphores[number]):
            if ctypes.get_errno() != errno.EINTR:
                _called(-1)

    def give(self, number: int) -> None:
        """Adds 1 to a semaphore."""
        _called(_libc.sem_post(self._semaphores[number]))


class Meeting:
    """Collectives of a group, one slot after the other. The last process that comes to one ends it for all.

    Args:
        file: Of the group, the same for all its processes.
        rank: This process, in the group.
        size: Processes of the group.
        width: Numbers that each process tells the others.
        is_first: Whether the file is made; it is there when the others come.
    """

    def __init__(self, file: Path, rank: int, size: int, width: int, *, is_first: bool) -> None:
        self._rank, self._size = rank, size
        # By slot: a semaphore that guards its count, and a gate for each process.
        first = [1, *[0] * size] * NUM_SLOTS if is_first else None
        # The end of the last collective; by slot its count, what processes told, and their ends.
        self._memory = SharedMemory(file, NUM_SLOTS * (size + 1), 1 + NUM_SLOTS * (1 + size * (width + 1)), first)
        slots = self._memory.numbers[1:].reshape(NUM_SLOTS, -1)
        self._counts, told, self._ends_s = slots[:, 0], slots[:, 1 : 1 + size * width], slots[:, 1 + size * width :]
        self._told = told.reshape(NUM_SLOTS, size, width)

    def come(self, number: int, told: MsArray) -> MsArray | None:
        """Comes to a collective.

        Args:
            number: Of the collective, in the group.
            told: What this process tells, shape (width,).

        Returns:
            What all told, shape (size, width), if this process is the last, which has to `end` the collective.
        """
        slot = number % NUM_SLOTS
        guard = slot * (self._size + 1)
        self._told[slot, self._rank] = told
        self._memory.take(guard)
        self._counts[slot] += 1
        is_last = self._counts[slot] == self._size
        if is_last:
            self._counts[slot] = 0
        self._memory.give(guard)
        return np.array(self._told[slot]) if is_last else None

    @property
    def ended_s(self) -> float:
        """When the group's last collective has ended, for whoever ends the next one."""
        return float(self._memory.numbers[0])

    def end(self, number: int, ends_s: MsArray) -> None:
        """Ends a collective that all have come to.

        Args:
            number: Of the collective.
            ends_s: When it ends for each process, shape (size,).
        """
        slot = number % NUM_SLOTS
        self._ends_s[slot] = ends_s
        self._memory.numbers[0] = ends_s.max()
        for process in range(self._size):
            self._memory.give(slot * (self._size + 1) + 1 + process)

    def wait(self, number: int) -> float:
        """When a collective ends for this process, once all have come; asked once for each."""
        slot = number % NUM_SLOTS
        self._memory.take(slot * (self._size + 1) + 1 + self._rank)
        return float(self._ends_s[slot, self._rank])


class SharedLinks:
    """The links of all ranks, each of which carries one collective after the other, either way.

    Collectives of several process groups are under way at the same time, such as ids of the next batch and embeddings
    of this one. What a link carries already goes first.

    Args:
        file: The same for all processes.
        num_ranks: Ranks.
        is_first: Whether the file is made.
    """

    def __init__(self, file: Path, num_ranks: int, *, is_first: bool) -> None:
        shape = (_MOST_LEVELS, 2, num_ranks, 1 + 2 * REMEMBERED)
        self._memory = SharedMemory(file, 1, int(np.prod(shape)), [1] if is_first else None)
        # By level, way and rank: how many stretches of use, when they begin, and when they end.
        self._links = self._memory.numbers.reshape(shape)

    def carry(self, level: int, ranks: Sequence[int], begins_s: float, work_s_2N: MsArray) -> float:
        """Carries a collective over the links of some ranks.

        Args:
            level: Of the topology, the outermost that it travels over.
            ranks: The ranks.
            begins_s: When it could begin.
            work_s_2N: Time that each rank's link is in use for it, to send and to receive.

        Returns:
            How much later it ends because links are in use.
        """
        later_s = 0.0
        self._memory.take(0)
        for way, number in np.argwhere(work_s_2N > 0).tolist():
            own_s = float(work_s_2N[way, number])
            link = self._links[min(level, _MOST_LEVELS - 1), way, ranks[number]]
            count = int(link[0])
            busy = BusyTimes(link[1 : 1 + count].tolist(), link[1 + REMEMBERED :][:count].tolist())
            later_s = max(later_s, busy.work(begins_s, own_s) - begins_s - own_s)
            count = len(busy.begun_s)
            link[0], link[1 : 1 + count], link[1 + REMEMBERED :][:count] = count, busy.begun_s, busy.ended_s
        self._memory.give(0)
        return later_s


def _called(code: int) -> None:
    if code:
        raise DeviceError(f"processes cannot share a semaphore: {os.strerror(ctypes.get_errno())}")
