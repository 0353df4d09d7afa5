"""The processor at hand, as Linux describes it: name, caches, memory, clock."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final

from autoshard.core.machine import MeasuredMachine

CPU: Final = "cpu"
SYSFS_CACHES: Final = Path("/sys/devices/system/cpu/cpu0/cache")

_CPUINFO: Final = Path("/proc/cpuinfo")
_SIZE = re.compile(r"(\d+)([KMG]?)")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_CORE_CACHE_LEVEL = 2


@lru_cache(maxsize=1)
def this_processor() -> MeasuredMachine:
    """The processor that runs this, without the versions of what runs on it."""
    caches = cache_bytes_by_level()
    return MeasuredMachine(
        device_name=processor_name(),
        core_cache_bytes=caches.get(_CORE_CACHE_LEVEL, 0),
        cache_bytes=caches[max(caches)] if caches else 0,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        clock_mhz=float(_of_cpuinfo("cpu MHz") or 0),
    )


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


def _of_cpuinfo(name: str, cpuinfo: Path = _CPUINFO) -> str:
    """What Linux says of the first processor; empty if it does not."""
    try:
        found = re.search(rf"^{name}\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else ""
