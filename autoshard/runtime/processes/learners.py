"""The processes that train one network together, and the device that each of them trains on."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import distributed

from autoshard.core.choices import Device
from autoshard.runtime.processes.devices import choose_device, joined


@dataclass(frozen=True, slots=True, kw_only=True)
class Learners:
    """This process among those that train one network together, each on its share of every batch.

    Attributes:
        device: Device of this process's network and batches.
        rank: Number of this process.
        world_size: Number of processes; 1 trains alone.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rank: int = 0
    world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process reports, saves and publishes."""
        return self.rank == 0

    @property
    def description(self) -> str:
        """Device and number of processes, for logs: `cuda:0`, `4 processes, the first on cuda:0`."""
        return f"{self.device}" if self.world_size == 1 else f"{self.world_size} processes, the first on {self.device}"

    def average_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Sets the gradients of all processes to their mean; each needs gradients of the same parameters."""
        if self.world_size == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        distributed.all_reduce(flat)
        flat /= self.world_size
        means = flat.split_with_sizes([gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))


@contextmanager
def joined_learners(accelerator: Device) -> Iterator[Learners]:
    """Joins the processes that torchrun started together; without torchrun, this process trains alone.

    Processes on GPUs exchange gradients over NCCL, processes on CPUs over gloo.

    Args:
        accelerator: Device to train on.

    Raises:
        DeviceError: If CUDA is asked for and there is no GPU for each process.
    """
    device = choose_device({accelerator}, field="--accelerator")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        yield Learners(device=device)
        return
    with joined(device):
        yield Learners(device=device, rank=distributed.get_rank(), world_size=world_size)
