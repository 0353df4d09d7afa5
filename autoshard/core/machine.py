"""The machine that kernels were measured on, as samples and cards of models describe it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

from autoshard.core.accepted import AT_LEAST_0, FINITE_AT_LEAST_0

#: Words of processor names that tell no two processors apart.
_WORDS_OF_ALL = re.compile(r"\((r|tm)\)|@.*|\b(cpu|processor|nvidia|tesla|geforce|quadro)\b", re.IGNORECASE)
_VENDOR_WORDS = re.compile(r"\b(nvidia|tesla|geforce|quadro)\b", re.IGNORECASE)
#: Memory and slot of a GPU: `80GB HBM3`, `PCIe`.
_FORM_WORDS = re.compile(r"\b(\d+gb|hbm\w*|pcie|sxm\d*|nvl)\b")
_BETWEEN_WORDS = re.compile(r"[^a-z0-9]+")
_MAX_MODEL = 100
#: What machines that are alike have alike, beside the design of their cores.
_FACTS: Final = ("core_threads", "core_cache_bytes", "cache_bytes", "cache_threads")
#: Largest factor between the clocks, and between the memory bandwidths, of machines that are alike. The bandwidth is
#: that of one thread's copies beside whatever else runs, so that its factor is wide; both are chosen, not fitted.
_CLOCK_FACTOR, _BANDWIDTH_FACTOR = 1.15, 2.0


def device_family(device: str) -> str:
    """The kind of device that a key names: `cpu` of both `cpu` and `cpu:amd-25-17-avx512-1m-l2`."""
    return device.partition(":")[0]


def gpu_key(name: str) -> str:
    """Short key of a GPU's name: `NVIDIA A100-SXM4-80GB` is `a100`, `NVIDIA H100 80GB HBM3` is `h100`."""
    words = _VENDOR_WORDS.sub("", name).strip().lower().split("-")[0]
    return _BETWEEN_WORDS.sub("-", _FORM_WORDS.sub("", words)).strip("-") or "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMachine:
    """A processor or GPU with what decides how fast it runs kernels; 0 and empty texts are not known.

    Attributes:
        device_name: Full name of the processor, for readers: processors of one name differ in caches and cores.
        core: Design of a core: vendor, family and model by number, widest vectors, such as `amd-25-17-avx512`.
        core_threads: Hardware threads of a core.
        core_cache_bytes: Second-level cache of a core; of a GPU, 0.
        cache_bytes: Cache before the memory.
        cache_threads: Hardware threads that share the cache before the memory.
        memory_bytes: Memory of the host; of a GPU, its own.
        memory_bytes_per_s: Bandwidth of a copy from memory to memory by one thread, bytes read and bytes written.
            Measured with samples, so that no two figures are the same: it does not count where machines are equal.
        clock_mhz: Clock that the system states; of a GPU, the highest.
        driver_version: Of a GPU.
        torch_version: The build that ran the kernels.
        fbgemm_version: Likewise.
    """

    device_name: str
    core: str = ""
    core_threads: int = 0
    core_cache_bytes: int = 0
    cache_bytes: int = 0
    cache_threads: int = 0
    memory_bytes: int = 0
    memory_bytes_per_s: float = field(default=0.0, compare=False)
    clock_mhz: float = 0.0
    driver_version: str = ""
    torch_version: str = ""
    fbgemm_version: str = ""

    def __post_init__(self) -> None:
        AT_LEAST_0.check_fields(
            self, "core_threads", "core_cache_bytes", "cache_bytes", "cache_threads", "memory_bytes"
        )
        FINITE_AT_LEAST_0.check_fields(self, "memory_bytes_per_s", "clock_mhz")

    def key_in(self, family: str) -> str:
        """Key of the machine within a family of devices: `cpu:amd-25-17-avx512-1m-l2-32m-cache-of-2`.

        It names what kernels feel, as far as that is known; the processor's name stands for a core's unknown design.
        Where nothing is known and the name has no letter or digit, the family is the key.
        """
        parts = (
            self.core or _WORDS_OF_ALL.sub(" ", self.device_name),
            f"{self.core_threads}-threads" if self.core_threads > 1 else "",
            _size(self.core_cache_bytes, "l2"),
            _size(self.cache_bytes, "cache"),
            f"of-{self.cache_threads}" if self.cache_threads else "",
        )
        model = _BETWEEN_WORDS.sub("-", " ".join(parts).lower()).strip("-")[:_MAX_MODEL]
        return f"{family}:{model}" if model else family

    def is_like(self, other: MeasuredMachine) -> bool:
        """Whether kernels take alike on both, as far as is known of both.

        The processors' names count only where the design of the cores is not known of both.
        """
        is_one_design = self.core == other.core if self.core and other.core else self.device_name == other.device_name
        pairs = [(getattr(self, name), getattr(other, name)) for name in _FACTS]
        return (
            is_one_design
            and all(own == its or not (own and its) for own, its in pairs)
            and _within(self.clock_mhz, other.clock_mhz, _CLOCK_FACTOR)
            and _within(self.memory_bytes_per_s, other.memory_bytes_per_s, _BANDWIDTH_FACTOR)
        )

    def __str__(self) -> str:
        shared = f" of {self.cache_threads} threads" if self.cache_threads else ""
        facts = (
            self.core,
            f"{self.clock_mhz / 1e3:.1f} GHz" if self.clock_mhz else "",
            f"{self.core_threads} threads a core" if self.core_threads > 1 else "",
            f"{self.core_cache_bytes / 2**20:g} MiB L2" if self.core_cache_bytes else "",
            f"{self.cache_bytes / 2**20:g} MiB last cache{shared}" if self.cache_bytes else "",
        )
        known = ", ".join(fact for fact in facts if fact)
        return f"{self.device_name} ({known})" if known else self.device_name


def _size(num_bytes: int, name: str) -> str:
    """A cache in a key: `32m-cache`, in KiB where it is no multiple of a MiB."""
    if not num_bytes:
        return ""
    return f"{num_bytes >> 20}m-{name}" if num_bytes % 2**20 == 0 else f"{num_bytes >> 10}k-{name}"


def _within(one: float, other: float, factor: float) -> bool:
    """Whether two amounts differ by no more than a factor; they do not where one is unknown."""
    return not (one and other) or max(one, other) <= factor * min(one, other)


@runtime_checkable
class KnowsMachine(Protocol):
    """A cost model that knows the machine of its samples."""

    @property
    def name(self) -> str:
        """What answers call it."""
        ...

    @property
    def measured_on(self) -> MeasuredMachine | None:
        """The machine; None for a model whose samples did not say."""
        ...
