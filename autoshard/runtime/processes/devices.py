"""The device of a process, whether it holds what a plan puts there, and the group of processes on such devices."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Set
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from autoshard.core import MemoryLevel, ShardingPlan
from autoshard.core.choices import Device
from autoshard.core.errors import DeviceError
from autoshard.evaluation.batch_memory import dense_bytes, row_order_bytes, training_bytes
from autoshard.hardware import free_host_bytes
from autoshard.runtime.engine.holdings import GroupOrder, Holding
from autoshard.runtime.engine.rows.fused import kept_rows
from autoshard.runtime.memory import check_room, processes_here
from autoshard.runtime.ownership import ownership_of

#: Of each GPU, for NCCL: four communicators (vectors, batches that are prefetched, dense layers, replicas) of 256 MiB.
#: Assumed from its buffers of 4 MiB per channel and peer; nothing here has measured it.
_COMMUNICATORS_BYTES = 1 << 30
#: Of the memory that is free, what tables may take where their rows may share it: batches that are drawn ahead, gloo
#: and the allocator take as much again with many processes. And how often rows are halved.
_SPARED, _MOST_HALVINGS = 0.4, 20
_REFUSAL = (
    "tables and training need {needed} on this {where}, {free} are free: scale the tables down, or use more machines"
)


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


@contextmanager
def joined(device: torch.device, timeout: timedelta | None = None) -> Iterator[None]:
    """Joins the process group that torchrun's environment describes, and leaves it at the end.

    Args:
        device: This process's device: groups are over NCCL on a GPU, over gloo on a CPU.
        timeout: How long a collective waits for a process that is silent but not dead; None for torch's own.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    yield
    # Not after an error: a group whose peers are gone would wait for them.
    dist.destroy_process_group()


def check_memory(
    plan: ShardingPlan, process: int, num_processes: int, device: torch.device, row_share: float = 1.0
) -> None:
    """Refuses a plan that the device cannot train; on a CPU the system would end the process without a word.

    Tables with their optimizer state count, caches with their indices, what `training_bytes` counts for a batch, and
    NCCL's buffers. Host memory is that of the processes which torchrun started on this host; without it, of all.

    Args:
        plan: The plan.
        process: This process, of all that execute the plan.
        num_processes: All of them.
        device: This process's device.
        row_share: Share of the rows that have memory of their own, see `kept_rows`.

    Raises:
        DeviceError: If more is needed than is free.
    """
    need = _Need(plan, num_processes, row_share)
    communicators = _COMMUNICATORS_BYTES if num_processes > 1 else 0
    check_room(need.bytes_of, process, num_processes, device, _REFUSAL, communicators)


def fitting_row_share(plan: ShardingPlan, process: int, num_processes: int) -> float:
    """The largest share of the rows, of 1, a half, a quarter and so on, that fits this host with memory to spare.

    Args:
        plan: The plan.
        process: This process, of all that execute the plan.
        num_processes: All of them.
    """
    here, free_bytes = processes_here(process, num_processes), free_host_bytes()
    for halvings in range(_MOST_HALVINGS):
        need = _Need(plan, num_processes, 0.5**halvings)
        if sum(need.bytes_of(one, set(MemoryLevel)) for one in here) <= _SPARED * free_bytes:
            break
    return 0.5**halvings


def needed_bytes(plan: ShardingPlan, process: int, num_processes: int, device: torch.device) -> int:
    """What `check_memory` counts of one process on its device."""
    levels = {MemoryLevel.HBM} if device.type == "cuda" else set(MemoryLevel)
    return _Need(plan, num_processes).bytes_of(process, levels)


def resident_bytes() -> int:
    """Host memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def peak_bytes(device: torch.device, base_bytes: int) -> int:
    """Most memory of a device that this process has used; on a CPU, beyond `base_bytes`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - base_bytes)


class _Need:
    """What processes need of memory.

    Args:
        plan: The plan.
        num_processes: All processes that execute it.
        row_share: Share of the rows that have memory of their own.
    """

    def __init__(self, plan: ShardingPlan, num_processes: int, row_share: float = 1.0) -> None:
        self._owners, self._row_share = ownership_of(plan, num_processes), row_share
        groups = GroupOrder.of(plan.replica_groups, num_processes).groups
        self._places = {process: place for group in groups for place, process in enumerate(group)}
        group = plan.of_one_group()
        self._training_R = training_bytes(group)
        # What a process has once, however many ranks it runs: row orders, parameters of dense layers.
        self._once = row_order_bytes(group) + dense_bytes(group.tables, 1)

    def bytes_of(self, process: int, levels: Set[MemoryLevel]) -> int:
        """Bytes that a process needs on some levels; those of training are the device's."""
        place = self._places[process]
        needed = sum(self._held_bytes(one, place, levels) for one in self._owners.holdings)
        if MemoryLevel.HBM in levels:
            ranks = list(self._owners.plan_ranks_of(place))
            needed += round(self._training_R[ranks].sum() - (len(ranks) - 1) * self._once)
        return needed

    def _held_bytes(self, holding: Holding, place: int, levels: Set[MemoryLevel]) -> int:
        held, rows = holding.num_bytes(place), holding.num_rows(place)
        share = 1.0 if holding.is_replicated or not rows else kept_rows(rows, self._row_share) / rows
        return round(share * sum(held[level] for level in levels))
