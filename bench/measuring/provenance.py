"""What a sample says about the machine and the software that measured it."""

from __future__ import annotations

import math
import subprocess
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import autoshard
from autoshard.core.machine import MeasuredMachine
from autoshard.hardware import this_processor
from autoshard.runtime.processes.threads import intra_op_threads
from bench.measuring.caches import device_cache_bytes, last_level_cache_bytes
from bench.measuring.clocks import query_driver
from bench.measuring.devices import BenchDevice

#: Times the last cache that are copied, and most bytes of it: clouds state the cache of a whole host.
_CACHES_COPIED, _MOST_COPIED = 4, 256 * 2**20
_COPIES = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Versions of what decides how fast kernels are."""

    torch_version: str
    fbgemm_version: str
    autoshard_version: str
    git_commit: str
    """Commit of this checkout; empty where it is installed without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where something is measured."""

    device: BenchDevice
    num_threads: int
    """Intra-op threads of a kernel; 1 on a GPU."""
    software: Software
    hardware: MeasuredMachine
    """The processor or GPU, without the versions of what runs on it."""


def described_hardware(device: BenchDevice) -> MeasuredMachine:
    """What decides how fast a device runs kernels, as far as the machine tells; a CPU's bandwidth is measured."""
    if not device.is_cuda:
        here = this_processor()
        num_bytes = min(_CACHES_COPIED * last_level_cache_bytes(), _MOST_COPIED)
        return replace(here, memory_bytes_per_s=copied_bytes_per_s(num_bytes))
    properties = torch.cuda.get_device_properties(device.device)
    driver = query_driver(device.device)
    return MeasuredMachine(
        device_name=device.name,
        cache_bytes=device_cache_bytes(device.device),
        memory_bytes=properties.total_memory,
        clock_mhz=float(driver.max_sm_mhz or 0),
        driver_version=driver.version,
    )


@lru_cache(maxsize=1)
def copied_bytes_per_s(num_bytes: int) -> float:
    """Bandwidth of a copy of so many bytes by one thread, bytes read and bytes written; the quickest of several.

    By the thread's own clock, as kernels of one thread are timed. Measured once in a process.
    """
    with intra_op_threads(1):
        source = torch.ones(num_bytes // 4, dtype=torch.float32)
        target = torch.zeros_like(source)
        quickest = math.inf
        for _ in range(_COPIES):
            start = time.thread_time()
            target.copy_(source)
            quickest = min(quickest, time.thread_time() - start)
    return 2 * num_bytes / quickest


def installed_software() -> Software:
    """The versions that are running."""
    return Software(
        torch_version=torch.__version__,
        fbgemm_version=_fbgemm_version(),
        autoshard_version=autoshard.__version__,
        git_commit=_git_commit(Path(__file__).parent),
    )


def _fbgemm_version() -> str:
    for name in ("fbgemm-gpu-cpu", "fbgemm-gpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def _git_commit(folder: Path) -> str:
    try:
        result = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
