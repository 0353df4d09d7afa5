"""`topology.json` (`autoshard.topology/1`): the machine."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from autoshard.core import Level, Link, MemoryBandwidth, MemoryBytes, Topology
from autoshard.core.accepted import MAX_WORLD_SIZE
from autoshard.core.errors import FormatError
from autoshard.core.quoting import shown
from autoshard.core.topology import DEVICE_KEY, MAX_BANDWIDTH, MAX_FETCH_MS, MAX_LATENCY_S, MIN_BANDWIDTH
from autoshard.formats.documents.document import Document
from autoshard.formats.documents.kinds import (
    FLAG,
    TEXT,
    Field,
    Kind,
    in_context,
    list_of,
    named,
    number_in,
    optional,
    record,
    text_of,
    whole_number,
)

_MAX_LEVELS = 16

MEMORY_SIZE: Final = whole_number(0, 2**60)
_BANDWIDTH: Final = number_in(MIN_BANDWIDTH, MAX_BANDWIDTH)
_LINK: Final = named(
    "topology",
    "link",
    record(
        Link,
        Field("bytes_per_s", _BANDWIDTH, "Bandwidth."),
        Field("latency_s", number_in(0, MAX_LATENCY_S), "Latency."),
    ),
    "Bytes per second and rank, and latency, of a collective.",
)
_SHARED_LINKS: Final = (
    "Whether the ranks of each unit of the level inside share their links to this one, as those of a node with one "
    "network card do; false if left out. all_to_all is then a rank's part while all of them send alike."
)
_LEVEL: Final = named(
    "topology",
    "level",
    record(
        Level,
        Field("name", TEXT, "Label, such as node."),
        Field("size", whole_number(1, MAX_WORLD_SIZE), "Ranks that the level connects."),
        Field("all_to_all", _LINK),
        Field("all_reduce", _LINK),
        optional("shared_links", FLAG, _SHARED_LINKS, False),
    ),
)
_MEMORY: Final = record(
    MemoryBytes,
    Field("hbm", MEMORY_SIZE, "Device memory."),
    optional("ddr", MEMORY_SIZE, "Host memory; 0 if left out."),
    optional("ssd", MEMORY_SIZE, "Disks; 0 if left out."),
)
_OTHER_MEMORY: Final[Kind[dict[str, int]]] = record(
    dict,
    optional("hbm", MEMORY_SIZE, "Device memory."),
    optional("ddr", MEMORY_SIZE, "Host memory."),
    optional("ssd", MEMORY_SIZE, "Disks."),
)
_MEMORY_BANDWIDTH: Final = record(
    MemoryBandwidth,
    optional("hbm", _BANDWIDTH, "Device memory, as gathers of rows reach it.", None),
    optional("ddr", _BANDWIDTH, "Host memory, as the device reaches it.", None),
    optional("ssd", _BANDWIDTH, "Disks.", None),
)


def _overrides(world_size: int) -> Kind[tuple[dict[str, Any], ...]]:
    ranks = list_of(whole_number(0, world_size - 1))
    override: Kind[dict[str, Any]] = record(
        dict,
        Field("ranks", ranks, "The ranks."),
        Field("memory_bytes", _OTHER_MEMORY, "Levels left out stay as they are."),
    )
    return list_of(override, 1, world_size)


def _fetch_ms(*num_ranks: int) -> Kind[tuple[tuple[float, ...], ...]]:
    return list_of(list_of(number_in(0, MAX_FETCH_MS), *num_ranks), *num_ranks)


def _fields(_folder: Path | None) -> tuple[Field, ...]:
    device = (
        "Kind of device, such as cpu or a100, or one model of it, such as cpu:amd-epyc, by which cost models are "
        "found; for a model without any, those of its kind are taken."
    )
    levels = "From the node outwards; each size is a multiple of the one before, the last is world_size."
    bandwidth = (
        "At which one rank reads rows of a memory level, and writes them; levels left out are priced by published "
        "figures."
    )
    fetch_ms = "`[i][j]`: milliseconds for rank i to fetch one row from rank j."
    return (
        Field("world_size", whole_number(1, MAX_WORLD_SIZE), "Number of ranks."),
        Field("device", text_of(DEVICE_KEY.pattern), device),
        Field("memory_bytes", _MEMORY, "Of each rank, for embeddings."),
        Field("levels", list_of(_LEVEL, 1, _MAX_LEVELS), levels),
        optional("memory_bandwidth_bytes_per_s", _MEMORY_BANDWIDTH, bandwidth),
        optional("overrides", in_context(_overrides(MAX_WORLD_SIZE).schema), "Ranks with other memory than the rest."),
        optional("fetch_ms", in_context(_fetch_ms(1, MAX_WORLD_SIZE).schema), fetch_ms),
    )


def _topology(
    *,
    world_size: int,
    memory_bytes: MemoryBytes,
    levels: tuple[Level, ...],
    memory_bandwidth_bytes_per_s: MemoryBandwidth | None = None,
    **given: Any,
) -> Topology:
    names = [level.name for level in levels]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise FormatError(f"{shown(name)} is used twice; names must differ", field=f"levels[{index}].name")
    if "overrides" in given:
        given["overrides"] = _memory_of_ranks(given["overrides"], memory_bytes, world_size)
    if "fetch_ms" in given:
        given["fetch_ms"] = _fetch_ms(world_size, world_size).read(given["fetch_ms"], "fetch_ms")
    return Topology(
        world_size=world_size,
        memory_bytes=memory_bytes,
        levels=levels,
        memory_bandwidth=memory_bandwidth_bytes_per_s or MemoryBandwidth(),
        **given,
    )


def _memory_of_ranks(value: object, usual: MemoryBytes, world_size: int) -> tuple[tuple[int, MemoryBytes], ...]:
    found: dict[int, MemoryBytes] = {}
    for index, override in enumerate(_overrides(world_size).read(value, "overrides")):
        memory = replace(usual, **override["memory_bytes"])
        for rank in override["ranks"]:
            if rank in found:
                raise FormatError(f"rank {rank} is overridden twice", field=f"overrides[{index}].ranks")
            found[rank] = memory
    return tuple(found.items())


def _parts(topology: Topology) -> dict[str, Any]:
    names = ("world_size", "device", "memory_bytes", "levels")
    parts: dict[str, Any] = {name: getattr(topology, name) for name in names}
    if topology.memory_bandwidth != MemoryBandwidth():
        parts["memory_bandwidth_bytes_per_s"] = topology.memory_bandwidth
    if topology.overrides:
        parts["overrides"] = [
            {"ranks": [rank for rank, _ in group], "memory_bytes": _MEMORY.write(memory)}
            for memory, group in groupby(topology.overrides, key=lambda override: override[1])
        ]
    if topology.fetch_ms is not None:
        parts["fetch_ms"] = [list(row) for row in topology.fetch_ms]
    return parts


TOPOLOGY: Final = Document(
    name="topology",
    meaning="The ranks of a cluster, their memory and their links.",
    make=_topology,
    fields=_fields,
    parts=_parts,
    definitions=(_LEVEL, _LINK),
)
read_topology, write_topology = TOPOLOGY.read, TOPOLOGY.write
topology_from_json, topology_to_json = TOPOLOGY.from_json, TOPOLOGY.to_json
