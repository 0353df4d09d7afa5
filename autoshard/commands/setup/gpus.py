"""GPUs of this machine and their links: by NVML where nvidia-ml-py is installed, else by torch; buses by sysfs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

_BITS_PER_BYTE, _MEGA, _GIGA = 8, 1e6, 1e9
#: PCIe sends 128 bits in 130.
_PCIE_CODING: Final = 128 / 130
_BUS_FOLDER: Final = Path("/sys/bus/pci/devices")
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU and the links that leave it.

    Attributes:
        name: Full name.
        memory_bytes: Its memory.
        num_nvlinks: Active NVLinks; None where nothing says.
        nvlink_bytes_per_s: Peak of these links together, in one direction; 0 without them.
        pcie_bytes_per_s: Peak of its PCIe slot in one direction; 0 where the system does not say.
    """

    name: str
    memory_bytes: int
    num_nvlinks: int | None = None
    nvlink_bytes_per_s: float = 0.0
    pcie_bytes_per_s: float = 0.0

    @property
    def peak_bytes_per_s(self) -> float:
        """Peak of what links it to its neighbours; 0 where nothing says."""
        if self.num_nvlinks is None:
            return 0.0
        return self.nvlink_bytes_per_s if self.num_nvlinks else self.pcie_bytes_per_s


def found_gpus(bus_folder: Path = _BUS_FOLDER) -> list[Gpu]:
    """The GPUs here, those of `CUDA_VISIBLE_DEVICES` where it is set; none where neither NVML nor torch sees any.

    Args:
        bus_folder: Where the system describes the devices of its PCI buses.
    """
    try:
        import pynvml
    except ImportError:
        return list(_gpus_of_torch())
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver
        return list(_gpus_of_torch())
    try:
        return [_gpu(pynvml, handle, bus_folder) for handle in _handles(pynvml)]
    except pynvml.NVMLError:  # a part of a GPU, or a driver that does not know a question
        return list(_gpus_of_torch())
    finally:
        pynvml.nvmlShutdown()


def _gpus_of_torch() -> Iterator[Gpu]:
    try:
        import torch
    except ImportError:
        return
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        yield Gpu(name=about.name, memory_bytes=about.total_memory)


def _handles(nvml: ModuleType) -> list[Any]:
    """NVML's handles of the visible GPUs.

    NVML numbers GPUs by their places on the bus and CUDA, unless told otherwise, the fastest first; of machines with
    GPUs of one model the two agree.
    """
    visible = os.environ.get(_VISIBLE)
    if visible is None:
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return [
        nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(name)
        for name in names
        if name != "-1"
    ]


def _gpu(nvml: ModuleType, handle: Any, bus_folder: Path) -> Gpu:
    links = list(_active_links(nvml, handle))
    return Gpu(
        name=_as_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).total,
        num_nvlinks=len(links),
        nvlink_bytes_per_s=_nvlink_bytes_per_s(nvml, handle, links),
        pcie_bytes_per_s=_pcie_bytes_per_s(bus_folder, _as_text(nvml.nvmlDeviceGetPciInfo(handle).busId)),
    )


def _as_text(value: str | bytes) -> str:
    """Texts of NVML, which are bytes in its older versions."""
    return value.decode() if isinstance(value, bytes) else value


def _active_links(nvml: ModuleType, handle: Any) -> Iterator[int]:
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link):
                yield link
        except nvml.NVMLError:  # it has no such link
            return


def _nvlink_bytes_per_s(nvml: ModuleType, handle: Any, links: Sequence[int]) -> float:
    """Bytes per second of all links in one direction, of links whose speed NVML says."""
    if not links:
        return 0.0
    (speed,) = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON])
    return float(len(links) * speed.value.uiVal * _MEGA) if speed.nvmlReturn == 0 else 0.0


def _pcie_bytes_per_s(bus_folder: Path, bus_id: str) -> float:
    """Peak of a PCIe slot, such as `32.0 GT/s PCIe` on 16 lanes, by the id of a device on the bus."""
    domain, _, place = bus_id.lower().partition(":")
    device = bus_folder / f"{domain[-4:]}:{place}"
    try:
        transfers = float((device / "max_link_speed").read_text().split()[0])
        lanes = int((device / "max_link_width").read_text())
    except (OSError, ValueError, IndexError):  # a virtual bus says nothing
        return 0.0
    return transfers * _GIGA * lanes * _PCIE_CODING / _BITS_PER_BYTE
