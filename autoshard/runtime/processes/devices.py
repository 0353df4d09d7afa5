"""The device of a process, and whether it holds what a plan puts there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Set

import torch

from autoshard.core import MemoryLevel
from autoshard.core.errors import DeviceError
from autoshard.runtime.engine.holdings import Ownership
from autoshard.runtime.results import Device
from autoshard.runtime.state import free_host_bytes


def choose_device(wanted: Set[Device], field: str | None = None) -> torch.device:
    """This process's device, under torchrun or alone.

    Args:
        wanted: What the requests ask for; all of them are executed on the same device, and `cpu` wins.
        field: Option that asks for it, for errors.

    Raises:
        DeviceError: If CUDA is asked for and there is no GPU for each process.
    """
    local_rank, num_local = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_gpus = torch.cuda.device_count()
    if Device.CPU in wanted or (Device.CUDA not in wanted and num_gpus < num_local):
        return torch.device("cpu")
    if num_gpus < num_local:
        need = "one process needs a GPU" if num_local == 1 else f"{num_local} processes need a GPU each"
        raise DeviceError(f"{need}, this machine has {num_gpus}", field=field)
    return torch.device("cuda", local_rank)


def check_memory(owners: Ownership, process: int, device: torch.device) -> None:
    """Refuses tables that the device cannot hold; on a CPU the system would end the process without a word.

    Args:
        owners: Who holds which tables. The processes are taken to share this machine.
        process: This process.
        device: Its device.

    Raises:
        DeviceError: If the tables and their optimizer state need more than is free.
    """
    host_levels = set(MemoryLevel)
    if device.type == "cuda":
        host_levels = {MemoryLevel.DDR}
        _check_free(owners, [process], {MemoryLevel.HBM}, str(device.type), torch.cuda.mem_get_info(device)[0])
    everybody = range(owners.num_processes)
    _check_free(owners, everybody, host_levels, "cpu", free_host_bytes())


def _check_free(
    owners: Ownership, processes: Iterable[int], levels: Set[MemoryLevel], where: str, free_bytes: int
) -> None:
    needed_bytes = sum(owners.storage_bytes(one)[level] for one in processes for level in levels)
    if needed_bytes > free_bytes:
        raise DeviceError(
            f"the tables need {needed_bytes:,} bytes on this {where}, {free_bytes:,} are free: "
            "scale them down, or use more machines"
        )
