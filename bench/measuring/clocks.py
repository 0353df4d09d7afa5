"""The clock of a GPU and what holds it back, as nvidia-smi tells them."""

from __future__ import annotations

import csv
import math
import subprocess
from dataclasses import dataclass
from typing import Any

import torch

from bench.measuring.devices import BenchDevice

#: The second field's name changed with driver 535; older drivers refuse the new one.
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
_TIMEOUT_S = 20.0

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


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClocks:
    """State of a GPU at one moment.

    Attributes:
        sm_mhz: Clock of the multiprocessors; None if the driver does not tell.
        throttle_reasons: Why the clock is held back, by nvidia-smi's names; resting and clocks that were set by hand
            are no reasons.
    """

    sm_mhz: int | None
    throttle_reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDriver:
    """A GPU's driver: its version, empty if it is not told, and the highest clock that it sets."""

    version: str
    max_sm_mhz: int | None


def read_clocks(device: BenchDevice) -> DeviceClocks | None:
    """The state of a GPU now; None on a CPU, and where nvidia-smi is missing or tells nothing.

    One call takes some 20 to 500 ms, and the clocks of a GPU that rests fall within seconds: call it right after work.
    """
    return query_clocks(_selector(device.device)) if device.is_cuda else None


def query_clocks(selector: str) -> DeviceClocks | None:
    """The state of the GPU that `nvidia-smi --id` knows by this UUID or PCI bus id; None if it tells nothing."""
    answers = (_asked(selector, f"clocks.sm,{reasons}") for reasons in _REASONS)
    answer = next((answer for answer in answers if answer is not None), None)
    return None if answer is None else parse_clocks(answer)


def query_driver(device: BenchDevice) -> GpuDriver:
    """The driver of a GPU; what nvidia-smi does not tell is empty."""
    words = (_asked(_selector(device.device), "driver_version,clocks.max.sm") or "").strip().split(", ")
    return GpuDriver(version=words[0], max_sm_mhz=_mhz(words[-1]))


def _asked(selector: str, fields: str) -> str | None:
    """What nvidia-smi prints of a GPU's fields; None if it is missing or does not know them."""
    command = ["nvidia-smi", f"--id={selector}", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout if answer.returncode == 0 else None


def parse_clocks(text: str) -> DeviceClocks | None:
    """Reads the line that nvidia-smi prints for one GPU.

    Args:
        text: Its standard output: the clock in MHz and a hexadecimal mask, separated by a comma. A clock that is no
            number (`[N/A]`, `[Unknown Error]`) is taken as not told.

    Returns:
        None if the text is no such line.
    """
    lines = [row for row in csv.reader(text.splitlines(), skipinitialspace=True) if row]
    if len(lines) != 1 or len(lines[0]) != 2:
        return None
    clock, mask = lines[0]
    return DeviceClocks(sm_mhz=_mhz(clock), throttle_reasons=_throttle_reasons(mask))


def _throttle_reasons(mask: str) -> tuple[str, ...]:
    try:
        bits = int(mask.strip(), 16)
    except ValueError:  # not told
        return ()
    names = []
    for position in range(bits.bit_length()):
        bit = 1 << position
        # A reason that this list does not know yet counts: better one doubt too many.
        name = _REASON_OF_BIT.get(bit, f"unknown_{bit:#x}")
        if bits & bit and name not in _NOT_THROTTLING:
            names.append(name)
    return tuple(names)


def _mhz(text: str) -> int | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return round(number) if math.isfinite(number) else None


def _selector(device: torch.device) -> str:
    """A name of the device that does not depend on CUDA_VISIBLE_DEVICES, as its index does."""
    properties: Any = torch.cuda.get_device_properties(device)  # torch's own types lack some of its fields
    if hasattr(properties, "pci_bus_id"):  # a part of a GPU (MIG) has a UUID of its own, but shares its bus id
        domain = getattr(properties, "pci_domain_id", 0)
        return f"{domain:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    return f"GPU-{properties.uuid}"
