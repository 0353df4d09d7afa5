"""The machine that kernels were measured on, as samples and cards of models describe it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from autoshard.core.accepted import AT_LEAST_0, FINITE_AT_LEAST_0

#: Words of processor names that tell no two processors apart.
_WORDS_OF_ALL = re.compile(r"\((r|tm)\)|@.*|\b(cpu|processor|nvidia|tesla|geforce|quadro)\b", re.IGNORECASE)
_VENDOR_WORDS = re.compile(r"\b(nvidia|tesla|geforce|quadro)\b", re.IGNORECASE)
#: Memory and slot of a GPU: `80GB HBM3`, `PCIe`.
_FORM_WORDS = re.compile(r"\b(\d+gb|hbm\w*|pcie|sxm\d*|nvl)\b")
_BETWEEN_WORDS = re.compile(r"[^a-z0-9]+")
_MAX_MODEL = 100


def device_family(device: str) -> str:
    """The kind of device that a key names: `cpu` of both `cpu` and `cpu:amd-epyc`."""
    return device.partition(":")[0]


def model_key(family: str, device_name: str) -> str:
    """Key of a device by its model: `cpu:amd-epyc` of the family `cpu` and the name `AMD EPYC`.

    Args:
        family: Key of the kind of device.
        device_name: Full name of the processor; with no letter or digit in it, the family is the key.
    """
    words = _BETWEEN_WORDS.sub("-", _WORDS_OF_ALL.sub(" ", device_name).lower()).strip("-")
    return f"{family}:{words[:_MAX_MODEL]}" if words else family


def gpu_key(name: str) -> str:
    """Short key of a GPU's name: `NVIDIA A100-SXM4-80GB` is `a100`, `NVIDIA H100 80GB HBM3` is `h100`."""
    words = _VENDOR_WORDS.sub("", name).strip().lower().split("-")[0]
    return _BETWEEN_WORDS.sub("-", _FORM_WORDS.sub("", words)).strip("-") or "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMachine:
    """A processor or GPU with what decides how fast it runs kernels; 0 and empty texts are not known.

    Attributes:
        device_name: Full name of the processor.
        core_cache_bytes: Second-level cache of a core; of a GPU, 0.
        cache_bytes: Cache before the memory.
        memory_bytes: Memory of the host; of a GPU, its own.
        clock_mhz: Clock that the system states; of a GPU, the highest.
        driver_version: Of a GPU.
        torch_version: The build that ran the kernels.
        fbgemm_version: Likewise.
    """

    device_name: str
    core_cache_bytes: int = 0
    cache_bytes: int = 0
    memory_bytes: int = 0
    clock_mhz: float = 0.0
    driver_version: str = ""
    torch_version: str = ""
    fbgemm_version: str = ""

    def __post_init__(self) -> None:
        AT_LEAST_0.check_fields(self, "core_cache_bytes", "cache_bytes", "memory_bytes")
        FINITE_AT_LEAST_0.check_fields(self, "clock_mhz")

    def is_like(self, other: MeasuredMachine) -> bool:
        """Whether the processors have one name, and caches of one size where both are known."""
        return self.device_name == other.device_name and all(
            own == its or not (own and its)
            for own, its in (
                (self.core_cache_bytes, other.core_cache_bytes),
                (self.cache_bytes, other.cache_bytes),
            )
        )

    def __str__(self) -> str:
        sizes = ((self.core_cache_bytes, "L2"), (self.cache_bytes, "last cache"))
        known = [f"{size / 2**20:g} MiB {name}" for size, name in sizes if size]
        return f"{self.device_name} ({', '.join(known)})" if known else self.device_name


@runtime_checkable
class KnowsMachine(Protocol):
    """A cost model that knows the machine of its samples."""

    @property
    def measured_on(self) -> MeasuredMachine | None:
        """The machine; None for a model whose samples did not say."""
        ...
