"""What all processes do at once, and fail at together."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from autoshard.core.errors import ExecutionError
from autoshard.runtime.engine.agreement import on_all
from autoshard.runtime.engine.groups import device_of

T = TypeVar("T")

#: How long processes wait for one that writes a large checkpoint; one that ends is noticed at once.
_PATIENCE = timedelta(hours=2)


def host_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A new gloo group of the same processes, which a thread can use beside them; all of them have to call it."""
    ranks = None if group is None else dist.get_process_group_ranks(group)
    made: dist.ProcessGroup = dist.new_group(ranks, _PATIENCE, "gloo", use_local_synchronization=ranks is not None)
    return made


@contextmanager
def alone() -> Iterator[None]:
    """For what one process does by itself: torch.distributed.checkpoint warns that it does."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        yield


def from_all(group: dist.ProcessGroup | None, work: Callable[[], T]) -> list[T]:
    """What the work returns on each process; all of them have to call it.

    Args:
        group: The processes; None for this one alone.
        work: What this one does; it waits for no other.

    Raises:
        AutoshardError: On all of them, if it fails on one; files that cannot be used are an `ExecutionError`.
    """

    def told() -> T:
        try:
            return work()
        except OSError as error:
            process = "" if group is None else f" (process {group.rank()})"
            raise ExecutionError(cause(error) + process) from error

    if group is None:
        return [told()]
    result = on_all(told, group, device_of(group))
    everybody: list[Any] = [None] * group.size()
    dist.all_gather_object(everybody, result, group=group)
    return everybody


def cause(error: BaseException) -> str:
    """Why reading or writing failed, in one line."""
    if isinstance(error, CheckpointException):
        process, (first, _) = min(error.failures.items())
        return f"{cause(first)} (process {process})"
    if isinstance(error, OSError):
        place = f": {error.filename}" if error.filename else ""
        return (error.strerror or str(error)).lower() + place
    text = str(error) or type(error).__name__
    if "PytorchStreamWriter" in text:  # torch's, whatever the file system told it
        return f"{os.strerror(errno.ENOSPC).lower()}, or the disk failed"
    return text.splitlines()[0]
