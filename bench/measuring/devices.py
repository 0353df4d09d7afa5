"""The devices that kernels are measured on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autoshard.core.accepted import check_choice
from autoshard.core.choices import Device
from autoshard.core.errors import DeviceError
from autoshard.core.machine import gpu_key
from autoshard.hardware import processor_name


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchDevice:
    """A device with its names.

    Attributes:
        device: As torch calls it.
        key: Short name of the kind, such as `cpu` or `h200`; samples and cost models are kept per key.
        name: Full name of the processor.
    """

    device: torch.device
    key: str
    name: str

    @property
    def is_cuda(self) -> bool:
        """Whether it is a GPU."""
        return self.device.type == "cuda"


def find_device(wanted: str = "auto") -> BenchDevice:
    """The device that an option names.

    Args:
        wanted: `auto` (a GPU if there is one), `cpu` or `cuda`.

    Raises:
        InvalidOptionError: If it is none of these.
        DeviceError: If a GPU is asked for and there is none.
    """
    check_choice(wanted, Device, "device")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise DeviceError("torch finds no GPU here; `--device cpu` measures on the processor")
    if wanted == "cpu" or not torch.cuda.is_available():
        return BenchDevice(device=torch.device("cpu"), key="cpu", name=processor_name())
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    return BenchDevice(device=device, key=gpu_key(name), name=name)
