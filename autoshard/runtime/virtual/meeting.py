"""Memory that the processes of a group share, where each learns when the others came to a collective."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Final

import numpy as np

from autoshard.core.costs import MsArray
from autoshard.core.errors import DeviceError

#: Collectives of which a group remembers who came; more than half as many that nobody has waited for are not accepted.
NUM_SLOTS: Final = 64
#: Of a POSIX semaphore, on every Linux.
_SEMAPHORE_BYTES: Final = 32

_libc = ctypes.CDLL(None, use_errno=True)


class Meeting:
    """Collectives of a group, one slot after the other. The last process that comes to one opens it for all.

    Args:
        file: Of the group, the same for all its processes.
        rank: This process, in the group.
        size: Processes of the group.
        is_first: Whether the file is made; it is there when the others come.
        width: Numbers that each process tells the others.
    """

    def __init__(self, file: Path, rank: int, size: int, width: int, *, is_first: bool) -> None:
        self._rank, self._size = rank, size
        num_semaphores = NUM_SLOTS * (size + 1)
        parts = (num_semaphores * _SEMAPHORE_BYTES, NUM_SLOTS * 8, NUM_SLOTS * size * width * 8)
        handle = os.open(file, os.O_RDWR | (os.O_CREAT | os.O_EXCL if is_first else 0), 0o600)
        try:
            if is_first:
                os.ftruncate(handle, sum(parts))
            self._memory = mmap.mmap(handle, sum(parts))
        finally:
            os.close(handle)
        counts = np.frombuffer(self._memory, np.int64, NUM_SLOTS, offset=parts[0])
        told = np.frombuffer(self._memory, np.float64, NUM_SLOTS * size * width, offset=parts[0] + parts[1])
        self._counts, self._told = counts, told.reshape(NUM_SLOTS, size, width)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        # By slot: one that guards its count, and a gate for each process.
        self._semaphores = [
            [ctypes.c_void_p(base + (slot * (size + 1) + number) * _SEMAPHORE_BYTES) for number in range(size + 1)]
            for slot in range(NUM_SLOTS)
        ]
        if is_first:
            for guard, *gates in self._semaphores:
                for semaphore, value in ((guard, 1), *((gate, 0) for gate in gates)):
                    _called(_libc.sem_init(semaphore, 1, value))

    def come(self, number: int, told: MsArray) -> None:
        """Comes to a collective.

        Args:
            number: Of the collective, in the group.
            told: What the others get to know, shape (width,).
        """
        slot = number % NUM_SLOTS
        guard, *gates = self._semaphores[slot]
        self._told[slot, self._rank] = told
        _wait(guard)
        self._counts[slot] += 1
        is_last = self._counts[slot] == self._size
        if is_last:
            self._counts[slot] = 0
        _called(_libc.sem_post(guard))
        if is_last:
            for gate in gates:
                _called(_libc.sem_post(gate))

    def all_told(self, number: int) -> MsArray:
        """What the processes told at a collective, shape (size, width), once all have come; asked once for each."""
        slot = number % NUM_SLOTS
        _wait(self._semaphores[slot][1 + self._rank])
        return np.array(self._told[slot])


def _wait(semaphore: ctypes.c_void_p) -> None:
    while _libc.sem_wait(semaphore):
        if ctypes.get_errno() != 4:  # not EINTR: a signal
            _called(-1)


def _called(code: int) -> None:
    if code:
        raise DeviceError(f"processes cannot share a semaphore: {os.strerror(ctypes.get_errno())}")
