"""The machine: ranks in nested levels, with bandwidths, latencies and memory."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from autoshard.core.accepted import FINITE, MAX_WORLD_SIZE, WHOLE, Range
from autoshard.core.declared import Meaning, Written, check_ranges
from autoshard.core.errors import InvalidTopologyError
from autoshard.core.quoting import shown

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
#: Keys of devices, by which models are found and their folders named: a kind, such as `cpu` or `a100`, and with a colon
#: one machine of it, `cpu:amd-25-17-avx512-1m-l2`.
DEVICE_KEY = re.compile(f"{_NAME}(:{_NAME})?")

#: Bytes per second of a link or a memory, and seconds of latency: beyond any hardware, and no sum of them overflows.
MIN_BANDWIDTH, MAX_BANDWIDTH = 1.0, 1e18
MAX_LATENCY_S = 3600.0
_BYTES = Range(at_least=0, at_most=2**60, kind=WHOLE)
_RANKS = Range(at_least=1, at_most=MAX_WORLD_SIZE, kind=WHOLE)
_BANDWIDTHS = Range(at_least=MIN_BANDWIDTH, at_most=MAX_BANDWIDTH, kind=FINITE)
_LATENCIES = Range(at_least=0, at_most=MAX_LATENCY_S, kind=FINITE)
#: Milliseconds in which a rank fetches one row.
MAX_FETCH_MS = 1e9


class MemoryLevel(StrEnum):
    """Where rows live: device memory, host memory or solid-state disk."""

    HBM = "hbm"
    DDR = "ddr"
    SSD = "ssd"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBytes:
    """Bytes per memory level."""

    hbm: Annotated[int, _BYTES, Meaning("Device memory.")]
    ddr: Annotated[int, _BYTES, Meaning("Host memory.", written=Written.ALWAYS)] = 0
    ssd: Annotated[int, _BYTES, Meaning("Disks.", written=Written.ALWAYS)] = 0

    def __post_init__(self) -> None:
        check_ranges(self, InvalidTopologyError, "memory_bytes.")

    def __getitem__(self, level: MemoryLevel) -> int:
        return {MemoryLevel.HBM: self.hbm, MemoryLevel.DDR: self.ddr, MemoryLevel.SSD: self.ssd}[level]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBandwidth:
    """Bytes per second at which one rank reads rows of a memory level, and writes them; None for what is usual."""

    hbm: Annotated[float | None, _BANDWIDTHS, Meaning("Device memory, as gathers of whole rows reach it.")] = None
    ddr: Annotated[
        float | None,
        _BANDWIDTHS,
        Meaning(
            "Between the host's memory and the device, in one direction: of what all ranks of a host share, each rank "
            "has its part."
        ),
    ] = None
    ssd: Annotated[float | None, _BANDWIDTHS, Meaning("Solid-state disks of a rank, whole pages.")] = None

    def __post_init__(self) -> None:
        check_ranges(self, InvalidTopologyError, "memory_bandwidth_bytes_per_s.")

    def __getitem__(self, level: MemoryLevel) -> float | None:
        return {MemoryLevel.HBM: self.hbm, MemoryLevel.DDR: self.ddr, MemoryLevel.SSD: self.ssd}[level]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Bandwidth per rank and latency of one collective at one level."""

    bytes_per_s: Annotated[float, _BANDWIDTHS, Meaning("Bandwidth.")]
    latency_s: Annotated[float, _LATENCIES, Meaning("Latency.", written=Written.REQUIRED)] = 0.0

    def __post_init__(self) -> None:
        check_ranges(self, InvalidTopologyError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A nested level: `size` consecutive ranks that its links connect."""

    name: Annotated[str, Meaning("Label, such as node.")]
    size: Annotated[int, _RANKS, Meaning("Ranks that the level connects.")]
    all_to_all: Annotated[Link, Meaning("Link of a rank in an all-to-all.")]
    all_reduce: Annotated[Link, Meaning("The same in an all-reduce.")]
    shared_links: Annotated[
        bool,
        Meaning(
            "Whether the ranks of each unit of the level inside share their links to this one, as those of a node "
            "with one network card do; all_to_all is then a rank's part while all of them send alike. Never at the "
            "first level; false if left out."
        ),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The ranks of a cluster."""

    world_size: Annotated[int, _RANKS, Meaning("Number of ranks.")]
    device: Annotated[
        str,
        Meaning(
            "Kind of device, such as cpu or a100, or one machine of it by its cores and caches, such as "
            "cpu:amd-25-17-avx512-1m-l2, by which cost models are found; for a machine without any, those of its kind "
            "are taken."
        ),
    ]
    memory_bytes: Annotated[
        MemoryBytes, Meaning("Of each rank, for embeddings, unless overridden; levels left out have none.")
    ]
    levels: Annotated[
        tuple[Level, ...],
        Meaning("From the node outwards; each size is a multiple of the one before, the last is world_size."),
    ]
    # As (rank, memory) pairs.
    overrides: Annotated[tuple[tuple[int, MemoryBytes], ...], Meaning("Ranks with other memory than the rest.")] = ()
    fetch_ms: Annotated[
        tuple[tuple[float, ...], ...] | None,
        Meaning("`[i][j]`: milliseconds for rank i to fetch one row from rank j (OPER's matrix L)."),
    ] = None
    memory_bandwidth: Annotated[
        MemoryBandwidth,
        Meaning(
            "At which one rank reads rows of a memory level, and writes them; levels left out are priced by published "
            "figures."
        ),
    ] = field(default_factory=MemoryBandwidth)
    _memory: tuple[MemoryBytes, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_ranges(self, InvalidTopologyError)
        if not DEVICE_KEY.fullmatch(self.device):
            raise InvalidTopologyError(
                "must name a kind of device, such as cpu or a100, in up to 100 letters, digits, '.', '_' and '-', "
                "starting with a letter or digit, and may name one machine after a colon, such as "
                f"cpu:amd-25-17-avx512-1m-l2; got {shown(self.device)}",
                field="device",
            )
        self._check_levels()
        memory = [self.memory_bytes] * self.world_size
        for rank, override in self.overrides:
            if not 0 <= rank < self.world_size:
                raise InvalidTopologyError(f"must be in [0, {self.world_size}), got {rank}", field="overrides.ranks")
            memory[rank] = override
        object.__setattr__(self, "_memory", tuple(memory))
        if self.fetch_ms is not None:
            rows = self.fetch_ms
            if len(rows) != self.world_size or any(len(row) != self.world_size for row in rows):
                raise InvalidTopologyError(f"must be {self.world_size} rows of as many numbers", field="fetch_ms")
            if any(not 0 <= value <= MAX_FETCH_MS for row in rows for value in row):
                raise InvalidTopologyError(f"must hold numbers in [0, {MAX_FETCH_MS:g}]", field="fetch_ms")

    def _check_levels(self) -> None:
        if not self.levels:
            raise InvalidTopologyError("needs at least one level", field="levels")
        if self.levels[0].shared_links:
            message = "must be false at the first level, where every rank has a link of its own"
            raise InvalidTopologyError(message, field="levels[0].shared_links")
        inner = 1
        for index, level in enumerate(self.levels):
            if not isinstance(level.size, int) or level.size < 1 or level.size % inner:
                raise InvalidTopologyError(
                    f"must be a whole multiple of the level inside it ({inner}), got {level.size}",
                    field=f"levels[{index}].size",
                )
            inner = level.size
        if inner != self.world_size:
            raise InvalidTopologyError(
                f"the last level must hold all {self.world_size} ranks, it holds {inner}", field="levels"
            )

    @property
    def local_world_size(self) -> int:
        """Ranks of one node."""
        return self.levels[0].size

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.world_size // self.local_world_size

    @property
    def hbm_bytes(self) -> list[int]:
        """Device memory of every rank."""
        return [memory.hbm for memory in self._memory]

    def memory_of(self, rank: int) -> MemoryBytes:
        """Memory of one rank."""
        return self._memory[rank]

    def node_of(self, rank: int) -> int:
        """Index of the node of a rank."""
        return rank // self.local_world_size
