"""What all processes do together, or none: an error of one of them is the error of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from autoshard.core.errors import AutoshardError, DeviceError, ExecutionError

T = TypeVar("T")


def on_all(act: Callable[[], T], group: dist.ProcessGroup, device: torch.device) -> T:
    """Does something that waits for no other process, and goes on where all processes could; all have to call it.

    Args:
        act: What to do.
        group: The processes.
        device: Where to send from.

    Raises:
        AutoshardError: As `agree`.
    """
    try:
        done, error = act(), None
    except Exception as found:  # noqa: BLE001 - `agree` raises it
        error = found
    agree(error, group, device)
    return done


def agree(error: Exception | None, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raises the error of the first process that has one, on all of them; all have to call it.

    Args:
        error: This process's.
        group: The processes.
        device: Where to send from.

    Raises:
        AutoshardError: As `Agreement.wait`.
    """
    Agreement(error, group, device).wait()


class Agreement:
    """Whether all processes could do something: asked now, and heard in `wait`; all have to do both, in one order.

    Args:
        error: Why this process could not; None if it could.
        group: The processes.
        device: Where to send from.
    """

    def __init__(self, error: Exception | None, group: dist.ProcessGroup, device: torch.device) -> None:
        self._error, self._group, self._device = error, group, device
        self._first_1 = torch.tensor([group.size() if error is None else group.rank()], device=device)
        self._work = dist.all_reduce(self._first_1, op=dist.ReduceOp.MIN, group=group, async_op=True)

    def settle(self) -> None:
        """Returns when all have been asked."""
        self._work.wait()

    def wait(self) -> None:
        """Returns if all could.

        Raises:
            AutoshardError: The error of the first process that has one, on all of them: an error of this package as it
                is, memory that is lacking as a `DeviceError`, any other as an `ExecutionError`; the two name the
                process.
        """
        self.settle()
        first = int(self._first_1)
        if first == self._group.size():
            return
        told: list[Any] = [None if self._error is None else _told(self._error)]
        dist.broadcast_object_list(told, group_src=first, group=self._group, device=self._device)
        kind, message, field, source = told[0]
        raise kind(message, field=field, source=source) from self._error


def _told(error: Exception) -> tuple[type[AutoshardError], str, str | None, str | None]:
    """Kind and parts of the error that all processes raise."""
    if isinstance(error, AutoshardError):
        return type(error), error.message, error.field, error.source
    line = next(iter(str(error).splitlines()), "")
    by_process = f"process {dist.get_rank()}: "
    # torch says on a CPU that its allocator could not, as a plain RuntimeError.
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "not enough memory" in line:
        return DeviceError, f"{by_process}out of memory: {line}", None, None
    return ExecutionError, f"{by_process}{type(error).__name__}: {line}", None, None
