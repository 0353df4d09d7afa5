"""The clock of a GPU and what holds it back, as NVML tells them inside this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import median
from types import ModuleType
from typing import Any

import torch

from autoshard import console
from bench.measuring.devices import BenchDevice

#: NVML's bits for why clocks are not higher, by nvidia-smi's names.
_REASON_OF_BIT = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
#: Rest and settings that somebody chose: the clock is what it should be.
_NOT_THROTTLING = {"gpu_idle", "applications_clocks_setting", "sync_boost", "display_clock_setting"}
#: A locked clock moves by one step of 15 MHz at most.
_STEADY = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClocks:
    """A GPU while it worked.

    Attributes:
        sm_mhz: Median clock of the multiprocessors; None if nothing tells.
        lowest_sm_mhz: The lowest one.
        throttle_reasons: Why the clock was held back, by nvidia-smi's names; resting and clocks that were set by hand
            are no reasons.
    """

    sm_mhz: float | None = None
    lowest_sm_mhz: float | None = None
    throttle_reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDriver:
    """A GPU's driver: its version, empty if it is not told, and the highest clock that it sets."""

    version: str = ""
    max_sm_mhz: int | None = None


class ClockWatch:
    """Notes the clock of a device while it works; of a CPU, and where NVML does not answer, nothing.

    A call of NVML takes some 10 to 100 us. The clock of a GPU that rests falls: note it while work is queued.

    Args of the constructor:
        device: Whose clock.

    Attributes:
        lowest_mhz: Lowest clock that was ever noted; None before.
        highest_mhz: As `lowest_mhz`.
    """

    def __init__(self, device: BenchDevice) -> None:
        self._device = device
        nothing: tuple[ModuleType | None, Any] = (None, None)
        self._nvml, self._handle = _opened(device.device) if device.is_cuda else nothing
        self._mhz: list[int] = []
        self._reasons: set[str] = set()
        self.lowest_mhz: int | None = None
        self.highest_mhz: int | None = None

    def note(self) -> None:
        """Reads the clock and what holds it back."""
        nvml = self._nvml
        if nvml is None:
            return
        mhz = _asked(nvml, lambda: nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM))
        bits = _asked(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle))
        self._reasons.update(throttle_reasons(bits or 0))
        if mhz is None:
            _warn_once(f"NVML does not tell the clock of {self._device.name}: samples are stored without it")
            return
        self._mhz.append(mhz)
        self.lowest_mhz = mhz if self.lowest_mhz is None else min(mhz, self.lowest_mhz)
        self.highest_mhz = mhz if self.highest_mhz is None else max(mhz, self.highest_mhz)

    def taken(self) -> DeviceClocks:
        """What was noted since the last call; warns once of a clock that moved."""
        mhz, reasons = self._mhz, tuple(sorted(self._reasons))
        self._mhz, self._reasons = [], set()
        if not mhz:
            return DeviceClocks(throttle_reasons=reasons)
        if min(mhz) < max(mhz) * (1 - _STEADY):
            _warn_once(
                f"the clock of {self._device.name} is not locked: it went from {min(mhz)} to {max(mhz)} MHz during a "
                "group of rounds; `nvidia-smi --lock-gpu-clocks` steadies it"
            )
        return DeviceClocks(sm_mhz=float(median(mhz)), lowest_sm_mhz=float(min(mhz)), throttle_reasons=reasons)


def query_driver(device: torch.device) -> GpuDriver:
    """The driver of a GPU; what NVML does not tell is empty."""
    nvml, handle = _opened(device)
    if nvml is None:
        return GpuDriver()
    version = _asked(nvml, nvml.nvmlSystemGetDriverVersion) or ""
    return GpuDriver(
        version=version.decode() if isinstance(version, bytes) else version,  # bytes in its older versions
        max_sm_mhz=_asked(nvml, lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
    )


def throttle_reasons(bits: int) -> tuple[str, ...]:
    """What holds a clock back, of NVML's mask."""
    names = []
    for position in range(bits.bit_length()):
        bit = 1 << position
        # A reason that this list does not know yet counts: better one doubt too many.
        name = _REASON_OF_BIT.get(bit, f"unknown_{bit:#x}")
        if bits & bit and name not in _NOT_THROTTLING:
            names.append(name)
    return tuple(names)


def _opened(device: torch.device) -> tuple[ModuleType | None, Any]:
    """NVML and its handle of a GPU; it stays open, and counts how often it was opened."""
    try:
        import pynvml
    except ImportError:
        _warn_once("nvidia-ml-py is not installed: samples are stored without the clock of the GPU")
        return None, None
    try:
        pynvml.nvmlInit()
        return pynvml, _handle(pynvml, device)
    except pynvml.NVMLError as error:
        _warn_once(f"NVML does not answer ({error}): samples are stored without the clock of the GPU")
        return None, None


def _handle(nvml: ModuleType, device: torch.device) -> Any:
    """NVML's handle by a name of the device that does not depend on CUDA_VISIBLE_DEVICES, as its index does."""
    properties: Any = torch.cuda.get_device_properties(device)  # torch's own types lack some of its fields
    if not hasattr(properties, "pci_bus_id"):
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}".encode())
    # A part of a GPU (MIG) has a UUID of its own, but shares its bus id.
    domain = getattr(properties, "pci_domain_id", 0)
    bus_id = f"{domain:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    return nvml.nvmlDeviceGetHandleByPciBusId(bus_id.encode())


def _asked(nvml: ModuleType, question: Callable[[], Any]) -> Any:
    """The answer; None where the driver has none, as for a part of a GPU."""
    try:
        return question()
    except nvml.NVMLError:
        return None


@cache
def _warn_once(message: str) -> None:
    console.warn(message)
