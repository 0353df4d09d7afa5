"""Stage `card`: versions, what is missing, the clocks, and the ceilings of the card as they are measured.

Source:
    Ceilings: a copy within the device's memory, counted twice (read and written), as STREAM counts it; a matrix product
    in bf16 of sizes that fill the card.
"""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import torch

from autoshard.commands.setup import found_here
from autoshard.core.quoting import write_bytes
from autoshard.report.images import Section
from autoshard.table import Table
from bench.measuring.clocks import ClockWatch
from bench.measuring.devices import BenchDevice
from bench.measuring.provenance import described_hardware
from bench.measuring.timing import device_clock, led_ms
from studies.frame import Numbers
from studies.gpu.stages import Stage, Visit

_COPIED_BYTES: Final = {"cuda": 2**32, "cpu": 2**27}
_PRODUCT_WIDTH: Final = {"cuda": 8192, "cpu": 512}
_PACKAGES: Final = ("torch", "fbgemm-gpu", "fbgemm-gpu-cpu", "torchrec", "triton", "nvidia-ml-py", "numpy")
_REPETITIONS: Final = 10


def _run(visit: Visit) -> Numbers:
    device = visit.device
    watch = ClockWatch(device)
    until = time.monotonic() + visit.share(0.5)
    copied = _best(device, _copy(device.device), until, watch)
    until = time.monotonic() + visit.share(0.8)
    product = _best(device, _product(device.device), until, watch)
    width = _PRODUCT_WIDTH[device.device.type]
    return {
        "versions": _versions(),
        "missing": found_here()["missing"],
        "hardware": asdict(described_hardware(device)),
        "card": _properties(device.device),
        "lowest_sm_mhz": watch.lowest_mhz,
        "highest_sm_mhz": watch.highest_mhz,
        "throttle_reasons": list(watch.taken().throttle_reasons),
        "copy_bytes_per_s": 2 * _COPIED_BYTES[device.device.type] / copied * 1e3,
        "bf16_flops_per_s": 2 * width**3 / product * 1e3,
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda or "")}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _properties(device: torch.device) -> dict[str, Any]:
    if device.type == "cpu":
        return {}
    about: Any = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "multiprocessors": about.multi_processor_count,
        "capability": f"{about.major}.{about.minor}",
        "free_bytes": free,
        "total_bytes": total,
        "devices": torch.cuda.device_count(),
    }


def _copy(device: torch.device) -> Any:
    source = torch.zeros(_COPIED_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _product(device: torch.device) -> Any:
    width = _PRODUCT_WIDTH[device.type]
    left = torch.randn(width, width, device=device).to(torch.bfloat16)
    out = torch.empty_like(left)
    return lambda: torch.matmul(left, left, out=out)


def _best(device: BenchDevice, run: Any, until: float, watch: ClockWatch) -> float:
    """Shortest of some mean milliseconds: a ceiling."""
    clock = device_clock(device.device)
    found: list[float] = []
    while len(found) < 2 or (time.monotonic() < until and len(found) < _REPETITIONS):
        found.append(led_ms(run, clock, times=3))
        watch.note()
    return min(found[1:])


def _show(numbers: Numbers) -> Sequence[Section]:
    versions = Table(columns=("package", "version"), rows=tuple(numbers["versions"].items()), caption="What ran")
    hardware = numbers["hardware"]
    rows = [
        ("memory", write_bytes(hardware["memory_bytes"])),
        ("cache before it", write_bytes(hardware["cache_bytes"])),
        ("driver", hardware["driver_version"] or "not told"),
        ("highest clock", f"{hardware['clock_mhz']:.0f} MHz" if hardware["clock_mhz"] else "not told"),
        ("clock while it worked", _clock_range(numbers)),
        ("held back by", ", ".join(numbers["throttle_reasons"]) or "nothing"),
        ("copy, read and written", f"{numbers['copy_bytes_per_s'] / 1e9:,.0f} GB/s"),
        ("matrix product in bf16", f"{numbers['bf16_flops_per_s'] / 1e12:,.2f} TFLOP/s"),
        *((name.replace("_", " "), str(value)) for name, value in numbers["card"].items()),
    ]
    card = Table(columns=("of the device", ""), rows=tuple(rows), caption="What it is, and its ceilings")
    missing = "; ".join(numbers["missing"]) or "nothing"
    return (Section(title="The card", caption=f"Missing: {missing}.", tables=(card, versions)),)


def _clock_range(numbers: Numbers) -> str:
    low, high = numbers["lowest_sm_mhz"], numbers["highest_sm_mhz"]
    return "not told" if low is None else f"{low} to {high} MHz"


def _headline(numbers: Numbers) -> str:
    return (
        f"copies {numbers['copy_bytes_per_s'] / 1e9:,.0f} GB/s, "
        f"multiplies {numbers['bf16_flops_per_s'] / 1e12:,.1f} TFLOP/s in bf16"
    )


STAGE: Final = Stage(name="card", share=0.05, run=_run, show=_show, headline=_headline)
