"""The processes that train one network together, and the device that each of them trains on."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import distributed

from autoshard.core.choices import Device
from autoshard.runtime.processes.devices import choose_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Learners:
    """This process among those that train one network together, each on its share of every batch.

    Attributes:
        device: Device of this process's network and batches.
        rank: Number of this process.
        world_size: Number of processes; 1 trains alone.
        mixed_precision: Whether matrix products are in bf16 within `autocast`; weights are fp32 always.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rank: int = 0
    world_size: int = 1
    mixed_precision: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this process reports, saves and publishes."""
        return self.rank == 0

    @property
    def description(self) -> str:
        """Device and number of processes, for logs: `cuda:0`, `4 processes, the first on cuda:0`."""
        return f"{self.device}" if self.world_size == 1 else f"{self.world_size} processes, the first on {self.device}"

    def seed(self, seed: int) -> int:
        """A seed of this process's own draws; the first process keeps the one that is given."""
        return seed if self.is_first else int(np.random.SeedSequence([seed, self.rank]).generate_state(1)[0])

    def autocast(self) -> AbstractContextManager[object]:
        """Where matrix products are in bf16 if that is wanted."""
        return _in_bf16(self.device.type) if self.mixed_precision else nullcontext()

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

    def agreed(self, value: float) -> float:
        """The first process's value, in all processes: what ends a training must end it everywhere."""
        if self.world_size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        distributed.broadcast(shared, src=0)
        return float(shared)


@contextmanager
def _in_bf16(device_type: str) -> Iterator[None]:
    """Autocast to bf16. CPUs without units for it go without oneDNN, which has no recurrent layers in bf16 for them."""
    with ExitStack() as stack:
        if device_type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="TF32 acceleration on top of oneDNN")  # nobody asked for TF32
            stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        stack.enter_context(torch.autocast(device_type, torch.bfloat16))
        yield


@contextmanager
def joined_learners(accelerator: Device, *, mixed_precision: bool = False) -> Iterator[Learners]:
    """Joins the processes that torchrun started together; without torchrun, this process trains alone.

    Processes on GPUs exchange gradients over NCCL, processes on CPUs over gloo.

    Args:
        accelerator: Device to train on.
        mixed_precision: See `Learners`.

    Raises:
        DeviceError: If CUDA is asked for and there is no GPU for each process.
    """
    device = choose_device({accelerator}, field="--accelerator")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield Learners(device=device, mixed_precision=mixed_precision)
        return
    if device.type == "cuda":
        distributed.init_process_group("nccl", device_id=device)
    else:
        distributed.init_process_group("gloo")
    try:
        rank = distributed.get_rank()
        yield Learners(device=device, rank=rank, world_size=world_size, mixed_precision=mixed_precision)
    finally:
        distributed.destroy_process_group()
