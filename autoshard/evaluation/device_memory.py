"""Published speeds of devices' memories, by device key: prices of devices that nobody measured come from them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from autoshard.core.machine import device_family

MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of one device kind, as one rank's embedding kernels see it.

    Attributes:
        bytes_per_s: Published bandwidth of the memory that holds the tables.
        source: Where the published figures are from, and which of the others are assumed or measured.
        gather_share: Share of that bandwidth that gathering whole rows reaches.
        access_bytes: Bytes that the smallest access moves; narrower rows and states move as many.
        cache_bytes: Cache before the memory, from which rows that repeat within a batch are read.
        cache_bytes_per_s: Bandwidth of that cache.
        output_bytes_per_s: Bandwidth at which freshly allocated outputs and gradients are written and read; 0 if that
            is the rate at which rows are gathered.
        lookup_s: Time of one lookup besides its bytes: address, bounds, adding the row up.
        sort_s: Time per lookup to group a batch's lookups by row; 0 for that of a radix sort at the memory's bandwidth.
        bag_s: Time per bag of the backward pass besides its gradient's bytes; a row that is not pooled is a bag.
        update_s: Time to update one distinct row, besides its bytes: the wait for one access after the other, where
            too few are in flight to hide it.
        state_s: As `update_s`, added for rows with optimizer state, which lies elsewhere.
        forward_launch_ms: Start of a fused forward kernel, whatever it does.
        backward_launch_ms: Start of the kernels of a fused backward pass (sort, run lengths, update).
        host_bytes_per_s: Link to the host's memory in one direction; 0 if the tables are in the host's memory anyway.
        low_factor: Lower end of the interval of a price, over the price.
        high_factor: Upper end.
    """

    bytes_per_s: float
    source: str
    cache_bytes: int
    cache_bytes_per_s: float
    gather_share: float = 0.84
    access_bytes: int = 32
    output_bytes_per_s: float = 0.0
    lookup_s: float = 0.0
    sort_s: float = 0.0
    bag_s: float = 0.0
    update_s: float = 0.0
    state_s: float = 0.0
    forward_launch_ms: float = 0.017
    backward_launch_ms: float = 0.085
    host_bytes_per_s: float = 0.0
    low_factor: float = 0.3
    high_factor: float = 6.0

    @property
    def gather_bytes_per_s(self) -> float:
        """Bandwidth of gathered rows."""
        return self.bytes_per_s * self.gather_share


@dataclass(frozen=True, slots=True, kw_only=True)
class SolidStateDisk:
    """Published speeds of a solid-state disk: the larger of both times is that of one access."""

    page_bytes: int
    read_bytes_per_s: float
    read_accesses_per_s: float
    write_bytes_per_s: float
    write_accesses_per_s: float
    source: str

    @property
    def fetch_s(self) -> float:
        """Time to read one row's page."""
        return max(self.page_bytes / self.read_bytes_per_s, 1 / self.read_accesses_per_s)

    @property
    def store_s(self) -> float:
        """Time to write it back."""
        return max(self.page_bytes / self.write_bytes_per_s, 1 / self.write_accesses_per_s)


SSD = SolidStateDisk(
    page_bytes=4096,
    read_bytes_per_s=6.5e9,
    read_accesses_per_s=900e3,
    write_bytes_per_s=3.5e9,
    write_accesses_per_s=200e3,
    source="Samsung, PM9A3 U.2 data sheet (PCIe 4.0): 6,500 / 3,500 MB/s, 900 / 200 thousand accesses per second",
)

# GPUs. Gathers reach 850 of 900 GB/s on a V100 and 1,300 of 1,555 GB/s on an A100 (Neo, Appendix B); the A100's share
# stands for later ones. Memory moves in sectors of 32 bytes (CUDA C++ Best Practices Guide). What kernels take beside
# their bytes was measured on an H200: least-squares fits of relative errors, rounded, to 1,966 sets of fused shards (1
# to 15 of MetaSyn's tables, batches of 4,096 to 65,536, dims of 4 to 256, FBGEMM 1.6, caches flushed, November 2026). A
# lookup takes 0.04 ns forward and 0.19 ns backward, a distinct row 0.22 ns and 0.1 ns more for its state; outputs are
# written at 1.7 TB/s; launches take 17 and 85 microseconds. Measured over predicted is between 0.75 and 1.3 for nine
# such sets of ten, 13% off on average; sets with rows of replicas, which nothing was fitted to, take 1.04 to 5.7 times
# as long as predicted. Without these waits prices were 2.5 times too low (docs/results/gpu.md). Other GPUs have the
# same launches, and waits that are longer by how many multiprocessors they have at which clock: nobody has measured
# those, and intervals are assumptions. Where gathers were measured to reach their share of the bandwidth, or memory is
# slow, lookups hide behind it.
_WAITS_OF_H200: Final = {"sort_s": 190e-12, "update_s": 220e-12, "state_s": 100e-12}
_OUTPUT_BYTES_PER_S, _LOOKUP_S = 1.7e12, 40e-12


def _waits(slower: float, *, of_lookups: bool = False) -> dict[str, Any]:
    """What the kernels of a GPU take beside its memory's bytes.

    Args:
        slower: Multiprocessors times clock of an H200 (132 at 1.98 GHz) over the GPU's.
        of_lookups: Whether its memory is so fast that the time of a lookup is felt.
    """
    waits = {name: slower * seconds for name, seconds in _WAITS_OF_H200.items()}
    waits["output_bytes_per_s"] = _OUTPUT_BYTES_PER_S / slower
    return waits | ({"lookup_s": slower * _LOOKUP_S} if of_lookups else {})


# The CPU is one core, for a rank runs its kernels on one thread unless told otherwise. All figures but those from the
# data sheet are least-squares fits of relative errors, rounded, to what `autoshard collect` measured in two sessions
# that differ by a quarter: 400 sets of pooled fp32 shards and 1,000 sets of all kinds (1 to 20 shards of MetaSyn's
# tables / 64, Intel Xeon with 2 cores at 2.6 GHz, FBGEMM 1.8, caches flushed, November 2026). So rows are gathered at
# 2.9 GB/s; a lookup takes 3 ns forward and 12 ns backward; updating a distinct row 0.11 microseconds and 0.37 more for
# its optimizer state, both waits for memory; what is freshly allocated is written at 2.5 GB/s, since its pages are
# mapped on first touch; a call starts in 0.5 and 0.12 ms on cold caches. The last cache's bandwidth is not felt: its
# reads are part of the time per lookup. Measured over predicted is between 0.7 and 1.7 for nine such sets of ten; rows
# that are not pooled take up to 3 times as long.
DEVICE_MEMORY: Final[dict[str, DeviceMemory]] = {
    "cpu": DeviceMemory(
        bytes_per_s=204.8e9,
        gather_share=0.014,
        access_bytes=64,
        cache_bytes=60 * MIB,
        cache_bytes_per_s=200e9,
        output_bytes_per_s=2.5e9,
        lookup_s=3e-9,
        sort_s=12e-9,
        bag_s=50e-9,
        update_s=0.06e-6,
        state_s=0.33e-6,
        forward_launch_ms=0.48,
        backward_launch_ms=0.12,
        low_factor=0.4,
        high_factor=2.5,
        source="Intel ARK, Xeon Platinum 8380: 8 channels of DDR4-3200, 204.8 GB/s and 60 MB of L3 per socket; "
        "what one core makes of it is measured",
    ),
    "t4": DeviceMemory(
        bytes_per_s=320e9,
        cache_bytes=4 * MIB,
        cache_bytes_per_s=1270e9,
        host_bytes_per_s=16e9,
        source="NVIDIA T4 datasheet: 320 GB/s GDDR6, PCIe 3.0; L2 of 4 MB and 1,270 GB/s from Jia et al. 2019 "
        "(Dissecting the Turing T4 via microbenchmarking)",
        **_waits(4.1),
    ),
    "l4": DeviceMemory(
        bytes_per_s=300e9,
        cache_bytes=48 * MIB,
        cache_bytes_per_s=1000e9,
        host_bytes_per_s=32e9,
        source="NVIDIA L4 datasheet: 300 GB/s GDDR6, PCIe 4.0; L2 of 48 MB; its bandwidth is assumed",
        **_waits(2.2),
    ),
    "a10": DeviceMemory(
        bytes_per_s=600e9,
        cache_bytes=6 * MIB,
        cache_bytes_per_s=1800e9,
        host_bytes_per_s=32e9,
        source="NVIDIA A10 datasheet: 600 GB/s GDDR6, PCIe 4.0; L2 of 6 MB; its bandwidth is assumed",
        **_waits(2.1),
    ),
    "v100": DeviceMemory(
        bytes_per_s=900e9,
        gather_share=850 / 900,
        cache_bytes=6 * MIB,
        cache_bytes_per_s=3133e9,
        host_bytes_per_s=16e9,
        source="NVIDIA V100 datasheet: 900 GB/s HBM2, PCIe 3.0; L2 of 6 MB, 2,048 bytes per clock at 1.53 GHz; "
        "gathers 850 GB/s (Neo, Appendix B)",
        **_waits(2.1),
    ),
    "a100": DeviceMemory(
        bytes_per_s=1555e9,
        gather_share=1300 / 1555,
        cache_bytes=40 * MIB,
        cache_bytes_per_s=7219e9,
        host_bytes_per_s=32e9,
        source="NVIDIA A100 datasheet, 40 GB: 1,555 GB/s HBM2, PCIe 4.0; L2 of 40 MB, 5,120 bytes per clock at "
        "1.41 GHz (A100 whitepaper); gathers 1,300 GB/s (Neo, Appendix B)",
        **_waits(1.7),
    ),
    "h100": DeviceMemory(
        bytes_per_s=3350e9,
        cache_bytes=50 * MIB,
        cache_bytes_per_s=8986e9,
        host_bytes_per_s=64e9,
        source="NVIDIA H100 datasheet, SXM: 3.35 TB/s HBM3, PCIe 5.0; L2 of 50 MB, 5,120 bytes per clock at 1.755 GHz",
        **_waits(1.0, of_lookups=True),
    ),
    "h200": DeviceMemory(
        bytes_per_s=4800e9,
        cache_bytes=60 * MIB,
        cache_bytes_per_s=8986e9,
        host_bytes_per_s=64e9,
        low_factor=0.6,
        source="NVIDIA H200 datasheet, SXM: 4.8 TB/s HBM3e, PCIe 5.0; L2 of 60 MB as CUDA tells it, its bandwidth as "
        "the H100's; what kernels take beside their bytes is measured",
        **_waits(1.0, of_lookups=True),
    ),
    "b200": DeviceMemory(
        bytes_per_s=8000e9,
        cache_bytes=126 * MIB,
        cache_bytes_per_s=16000e9,
        host_bytes_per_s=64e9,
        source="NVIDIA DGX B200 datasheet: 64 TB/s HBM3e over 8 GPUs, PCIe 5.0; L2 of 126 MB; its bandwidth is assumed",
        **_waits(0.9, of_lookups=True),
    ),
    "mi300x": DeviceMemory(
        bytes_per_s=5300e9,
        access_bytes=64,
        cache_bytes=256 * MIB,
        cache_bytes_per_s=17200e9,
        host_bytes_per_s=64e9,
        source="AMD Instinct MI300X datasheet: 5.3 TB/s HBM3, PCIe 5.0; Infinity Cache of 256 MB and 17.2 TB/s "
        "(CDNA 3 whitepaper)",
        **_waits(1.0, of_lookups=True),
    ),
}

#: Stands for devices that are not in the table: the slowest memory of the GPUs' but one, and the smallest cache, so
#: that what is not known is rather priced too high.
UNKNOWN_DEVICE: Final = "t4"
#: Interval of their prices, as factors: from a GPU with eight times the bandwidth of the fastest above to one core.
UNKNOWN_LOW_FACTOR, UNKNOWN_HIGH_FACTOR = 0.01, 50.0


def device_memory(device: str, gather_bytes_per_s: float | None = None) -> DeviceMemory:
    """The memory that ranks are priced with.

    Args:
        device: Key of the device kind; one that is not in `DEVICE_MEMORY` has the memory of `UNKNOWN_DEVICE`.
        gather_bytes_per_s: What gathers of whole rows reach, where this card's memory is not that of its kind: what a
            topology states as `memory_bandwidth.hbm`.
    """
    usual = DEVICE_MEMORY.get(device_family(device), DEVICE_MEMORY[UNKNOWN_DEVICE])
    if gather_bytes_per_s is None:
        return usual
    return replace(usual, bytes_per_s=gather_bytes_per_s / usual.gather_share)
