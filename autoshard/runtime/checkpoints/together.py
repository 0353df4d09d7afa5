"""What all processes do at once, and fail at together."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from autoshard.core.errors import AutoshardError, ExecutionError

T = TypeVar("T")

#: How long processes wait for one that writes a large checkpoint; one that ends is noticed at once.
_PATIENCE = timedelta(hours=2)


def host_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """A new gloo group of the same processes, which a thread can use beside them; all of them have to call it."""
    ranks = None if group is None else dist.get_process_group_ranks(group)
    made: dist.ProcessGroup = dist.new_group(ranks, _PATIENCE, "gloo", use_local_synchronization=ranks is not None)
    return made


def on_all(group: dist.ProcessGroup | None, work: Callable[[], T]) -> list[T]:
    """What the work returns on each process; all of them have to call it.

    Args:
        group: The processes; None for all, or for this one alone where there is no process group.
        work: What this one does.

    Raises:
        ExecutionError: On all of them, if it fails on one by an error of autoshard or of the system; the text names
            the process.
    """
    result: T | None = None
    told = ""
    try:
        result = work()
    except (AutoshardError, OSError) as error:
        told = cause(error)
    everybody: list[Any] = [(result, told)]
    if dist.is_initialized():
        everybody = [None] * dist.get_world_size(group)
        dist.all_gather_object(everybody, (result, told), group=group)
    for process, (_, fault) in enumerate(everybody):
        if fault:
            raise ExecutionError(fault + (f" (process {process})" if len(everybody) > 1 else ""))
    return [one for one, _ in everybody]


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
