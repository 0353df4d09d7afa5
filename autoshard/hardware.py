"""The processor at hand, as Linux describes it: name, caches, memory, clock."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final

from autoshard.core.machine import MeasuredMachine, device_family

CPU: Final = "cpu"
SYSFS_CPU: Final = Path("/sys/devices/system/cpu/cpu0")
SYSFS_CACHES: Final = SYSFS_CPU / "cache"

_CPUINFO: Final = Path("/proc/cpuinfo")
_MEMINFO: Final = Path("/proc/meminfo")
#: Limits of the container that this runs in, if it does.
_CGROUP: Final = Path("/sys/fs/cgroup")
#: Memory of a container that holds what was read of files: Linux takes it back where processes need it.
_OF_FILES = ("active_file", "inactive_file")
_SIZE = re.compile(r"(\d+)([KMG]?)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_CORE_CACHE_LEVEL = 2
#: Vendors of x86 cores by what they say of themselves.
_VENDORS = {"AuthenticAMD": "amd", "GenuineIntel": "intel"}
#: Widest vectors that kernels are compiled for, as flags of processors name them, the widest first.
_VECTORS = {"avx512f": "avx512", "avx2": "avx2", "sve": "sve", "asimd": "neon"}


@lru_cache(maxsize=1)
def this_processor() -> MeasuredMachine:
    """The processor that runs this, without the versions of what runs on it, and without what has to be measured."""
    caches = cache_bytes_by_level()
    return MeasuredMachine(
        device_name=processor_name(),
        core=core_design(),
        core_threads=_num_listed(SYSFS_CPU / "topology" / "thread_siblings_list"),
        core_cache_bytes=caches.get(_CORE_CACHE_LEVEL, 0),
        cache_bytes=caches[max(caches)] if caches else 0,
        cache_threads=_last_cache_threads(),
        memory_bytes=_memory_bytes(),
        clock_mhz=_highest_mhz() or float(_of_cpuinfo("cpu MHz") or 0),
    )


def is_of_device(machine: MeasuredMachine, device: str) -> bool:
    """Whether a device's key means a machine.

    A key such as `cpu:amd-25-17-avx512-1m-l2` names one by what kernels feel of it. The key `cpu` names none: the
    machine at hand is taken for it. Keys of GPUs name their models, all of which are alike.
    """
    family = device_family(device)
    if device != family:
        return machine.key_in(family) == device
    return family != CPU or machine.is_like(this_processor())


def core_design(cpuinfo: Path = _CPUINFO) -> str:
    """Vendor, family and model of the cores, and their widest vectors: `amd-25-17-avx512`; empty if not told.

    Processors of different designs share names, such as `AMD EPYC` where a virtual machine hides the rest.
    """
    vendor = _of_cpuinfo("vendor_id", cpuinfo)
    # Arm's cores have an implementer and a part instead.
    names = ("cpu family", "model") if vendor else ("CPU implementer", "CPU part")
    numbers = [_of_cpuinfo(name, cpuinfo) for name in names]
    if not all(numbers):
        return ""
    flags = (_of_cpuinfo("flags", cpuinfo) or _of_cpuinfo("Features", cpuinfo)).split()
    vectors = next((name for flag, name in _VECTORS.items() if flag in flags), "")
    design = (_VENDORS.get(vendor, vendor.lower()) if vendor else "arm", *numbers, vectors)
    return "-".join(part for part in design if part)


def processor_name(cpuinfo: Path = _CPUINFO) -> str:
    """Full name of the processor."""
    return _of_cpuinfo("model name", cpuinfo) or platform.processor() or platform.machine()


def cache_bytes_by_level(sysfs: Path = SYSFS_CACHES) -> Mapping[int, int]:
    """Bytes of the CPU's largest cache of each level, as far as the machine tells.

    Args:
        sysfs: Folder with one `index*` folder per cache, each with the files `level` and `size`.
    """
    found: dict[int, int] = {}
    for cache in sysfs.glob("index*"):
        try:
            level, size = int((cache / "level").read_text()), _SIZE.fullmatch((cache / "size").read_text().strip())
        except (OSError, ValueError):
            continue
        if size is not None:
            found[level] = max(found.get(level, 0), int(size[1]) * _UNITS[size[2]])
    return found


def free_host_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Memory that processes can still take, also inside a container with a limit.

    Args:
        meminfo: What Linux says of its memory; all memory counts as free where it does not say what is.
        cgroup: Folder with the files `memory.max`, `memory.current` and `memory.stat` of a container.
    """
    free = 1024 * _stated("MemAvailable:", meminfo) or _memory_bytes()
    try:
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no container, or "max"
        return free
    of_files = sum(_stated(name, cgroup / "memory.stat") for name in _OF_FILES)
    return max(0, min(free, limit - used + of_files))


def _stated(name: str, file: Path) -> int:
    """A number that Linux states in a line of its own, after its name; 0 if it does not."""
    try:
        found = re.search(rf"^{re.escape(name)}\s+(\d+)", file.read_text(), re.MULTILINE)
    except OSError:
        found = None
    return int(found[1]) if found else 0


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _last_cache_threads(sysfs: Path = SYSFS_CACHES) -> int:
    """Hardware threads that share the last cache; 0 if the machine does not tell."""
    found: dict[int, int] = {}
    for cache in sysfs.glob("index*"):
        try:
            found[int((cache / "level").read_text())] = _num_listed(cache / "shared_cpu_list")
        except (OSError, ValueError):
            continue
    return found[max(found)] if found else 0


def _num_listed(file: Path) -> int:
    """How many numbers a list such as `0-3,8` has; 0 where there is none."""
    try:
        spans = [span.partition("-") for span in file.read_text().strip().split(",")]
        return sum(int(last or first) - int(first) + 1 for first, _, last in spans)
    except (OSError, ValueError):
        return 0


def _highest_mhz(sysfs: Path = SYSFS_CPU) -> float:
    """The highest clock, which stays the same while the present one changes with the load; 0 if it is not told."""
    try:
        return int((sysfs / "cpufreq" / "cpuinfo_max_freq").read_text()) / 1e3
    except (OSError, ValueError):
        return 0.0


def _of_cpuinfo(name: str, cpuinfo: Path = _CPUINFO) -> str:
    """What Linux says of the first processor; empty if it does not."""
    try:
        found = re.search(rf"^{re.escape(name)}\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else ""
