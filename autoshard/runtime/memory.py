"""Memory that is free on the devices of processes, and whether what they are to hold has room in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Set

import torch

from autoshard.core import MemoryLevel
from autoshard.core.errors import DeviceError
from autoshard.core.quoting import write_bytes
from autoshard.hardware import free_host_bytes


def check_room(
    bytes_of: Callable[[int, Set[MemoryLevel]], int],
    process: int,
    num_processes: int,
    device: torch.device,
    refusal: str,
    beside_bytes: int = 0,
) -> None:
    """Refuses what this process's GPU has no room for, or this host for all of its processes.

    Args:
        bytes_of: Bytes that a process needs on some levels.
        process: This process.
        num_processes: All of them.
        device: This process's device.
        refusal: What is said, with `{needed}` and `{free}` bytes and `{where}`.
        beside_bytes: Bytes that a GPU needs beside.

    Raises:
        DeviceError: If more is needed than is free.
    """

    def check(needed_bytes: int, where: str, free_bytes: int) -> None:
        if needed_bytes > free_bytes:
            needed, free = write_bytes(needed_bytes), write_bytes(free_bytes)
            raise DeviceError(refusal.format(needed=needed, where=where, free=free))

    on_host = set(MemoryLevel)
    if device.type == "cuda":
        on_host = {MemoryLevel.DDR}
        check(bytes_of(process, {MemoryLevel.HBM}) + beside_bytes, device.type, free_device_bytes(device))
    check(sum(bytes_of(one, on_host) for one in processes_here(process, num_processes)), "cpu", free_host_bytes())


def processes_here(process: int, num_processes: int) -> range:
    """Which of some processes torchrun started on this host; without it, all of them.

    Args:
        process: This process.
        num_processes: All of them.
    """
    if "LOCAL_WORLD_SIZE" not in os.environ:
        return range(num_processes)
    first = process - int(os.environ["LOCAL_RANK"])
    return range(first, first + int(os.environ["LOCAL_WORLD_SIZE"]))


def free_device_bytes(device: torch.device) -> int:
    """Memory of a GPU that this process can still take, or has taken and does not use."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
