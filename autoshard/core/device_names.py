"""Names of devices: the short keys that topologies and models have, and what the machine says."""

from __future__ import annotations

import platform
import re
from pathlib import Path

_VENDOR_WORDS = re.compile(r"\b(nvidia|tesla|geforce|quadro)\b", re.IGNORECASE)


def gpu_key(name: str) -> str:
    """Short key of a GPU's name: `NVIDIA A100-SXM4-80GB` is `a100`."""
    words = _VENDOR_WORDS.sub("", name).strip().lower()
    return re.sub(r"[^a-z0-9]+", "-", words.split("-")[0]).strip("-") or "cuda"


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Full name of this machine's processor."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()
