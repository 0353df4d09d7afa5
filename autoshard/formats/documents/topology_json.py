"""`topology.json` (`autoshard.topology/1`): the machine, read and written."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from autoshard.core import Level, Link, MemoryBandwidth, MemoryBytes, MemoryLevel, Topology
from autoshard.core.errors import FormatError
from autoshard.core.quoting import shown
from autoshard.core.topology import MAX_BANDWIDTH, MAX_FETCH_MS, MAX_LATENCY_S, MIN_BANDWIDTH
from autoshard.formats.documents.fields import Fields, from_source, items, number
from autoshard.formats.documents.json_document import format_json, read_json
from autoshard.formats.files import atomic_write

TOPOLOGY_SCHEMA = "autoshard.topology/1"

MAX_WORLD_SIZE = 2**17
MAX_MEMORY_BYTES = 2**60

_MEMORY_FIELDS = tuple(level.value for level in MemoryLevel)


def read_topology(path: str | Path) -> Topology:
    """Reads a `topology.json`.

    Raises:
        InputError: If the file cannot be read or holds no topology; the text names file and field.
    """
    document = read_json(path)
    return from_source(str(path), lambda: topology_from_json(document))


def write_topology(topology: Topology, path: str | Path) -> None:
    """Writes a `topology.json` that reads back as an equal topology.

    Raises:
        FormatError: If the file cannot be written.
    """
    atomic_write(path, format_json(topology_to_json(topology)))


def topology_from_json(document: object, path: str = "") -> Topology:
    """Reads the object of a `topology.json`.

    Args:
        document: The parsed JSON.
        path: Dotted path of the object, if it is part of another.

    Raises:
        InputError: If it holds no topology; the text names the field.
    """
    fields = Fields(
        document,
        path,
        required=("schema", "world_size", "device", "memory_bytes", "levels"),
        optional=("memory_bandwidth_bytes_per_s", "overrides", "fetch_ms"),
        schema=TOPOLOGY_SCHEMA,
    )
    world_size = fields.whole("world_size", minimum=1, maximum=MAX_WORLD_SIZE)
    device = fields.text("device")
    memory = _memory_from_json(fields, {"ddr": 0, "ssd": 0})
    bandwidth = _bandwidth_from_json(fields)
    levels = _levels_from_json(fields)
    overrides = _overrides_from_json(fields, memory, world_size)
    fetch_ms = _matrix_from_json(fields, world_size) if "fetch_ms" in fields else None
    return fields.build(
        lambda: Topology(
            world_size=world_size,
            device=device,
            memory_bytes=memory,
            levels=levels,
            overrides=overrides,
            fetch_ms=fetch_ms,
            memory_bandwidth=bandwidth,
        )
    )


def topology_to_json(topology: Topology) -> dict[str, object]:
    """The object of a `topology.json`."""
    document: dict[str, object] = {
        "schema": TOPOLOGY_SCHEMA,
        "world_size": topology.world_size,
        "device": topology.device,
        "memory_bytes": _memory_to_json(topology.memory_bytes),
        "levels": [
            {
                "name": level.name,
                "size": level.size,
                "all_to_all": _link_to_json(level.all_to_all),
                "all_reduce": _link_to_json(level.all_reduce),
            }
            for level in topology.levels
        ],
    }
    known = {level.value: topology.memory_bandwidth[level] for level in MemoryLevel}
    if any(value is not None for value in known.values()):
        document["memory_bandwidth_bytes_per_s"] = {name: value for name, value in known.items() if value is not None}
    if topology.overrides:
        document["overrides"] = [
            {"ranks": [rank for rank, _ in group], "memory_bytes": _memory_to_json(memory)}
            for memory, group in groupby(topology.overrides, key=lambda override: override[1])
        ]
    if topology.fetch_ms is not None:
        document["fetch_ms"] = [list(row) for row in topology.fetch_ms]
    return document


def _levels_from_json(document: Fields) -> tuple[Level, ...]:
    levels: list[Level] = []
    path = document.at("levels")
    for index, value in enumerate(document.items("levels", maximum=16)):
        fields = Fields(value, f"{path}[{index}]", required=("name", "size", "all_to_all", "all_reduce"))
        name = fields.text("name")
        if any(level.name == name for level in levels):
            raise FormatError(f"{shown(name)} is used twice; names must differ", field=fields.at("name"))
        levels.append(
            Level(
                name=name,
                size=fields.whole("size", minimum=1, maximum=MAX_WORLD_SIZE),
                all_to_all=_link_from_json(fields, "all_to_all"),
                all_reduce=_link_from_json(fields, "all_reduce"),
            )
        )
    return tuple(levels)


def _link_from_json(level: Fields, name: str) -> Link:
    fields = level.fields(name, required=("bytes_per_s", "latency_s"))
    bandwidth, latency = (
        fields.number("bytes_per_s", minimum=MIN_BANDWIDTH, maximum=MAX_BANDWIDTH),
        fields.number("latency_s", maximum=MAX_LATENCY_S),
    )
    return fields.build(lambda: Link(bytes_per_s=bandwidth, latency_s=latency))


def _link_to_json(link: Link) -> dict[str, object]:
    return {"bytes_per_s": link.bytes_per_s, "latency_s": link.latency_s}


def _memory_from_json(parent: Fields, inherited: dict[str, int]) -> MemoryBytes:
    required = [name for name in _MEMORY_FIELDS if name not in inherited]
    fields = parent.fields("memory_bytes", required=required, optional=tuple(inherited))
    sizes = {
        name: fields.whole(name, maximum=MAX_MEMORY_BYTES, default=inherited.get(name, 0)) for name in _MEMORY_FIELDS
    }
    return MemoryBytes(**sizes)


def _memory_to_json(memory: MemoryBytes) -> dict[str, int]:
    return {level.value: memory[level] for level in MemoryLevel}


def _bandwidth_from_json(document: Fields) -> MemoryBandwidth:
    fields = document.fields("memory_bandwidth_bytes_per_s", required=(), optional=_MEMORY_FIELDS)
    known = {
        name: fields.number(name, minimum=MIN_BANDWIDTH, maximum=MAX_BANDWIDTH)
        for name in _MEMORY_FIELDS
        if name in fields
    }
    return document.build(lambda: MemoryBandwidth(**known))


def _overrides_from_json(document: Fields, memory: MemoryBytes, world_size: int) -> tuple[tuple[int, MemoryBytes], ...]:
    overrides: dict[int, MemoryBytes] = {}
    path = document.at("overrides")
    for index, value in enumerate(document.items("overrides", maximum=world_size)):
        fields = Fields(value, f"{path}[{index}]", required=("ranks", "memory_bytes"))
        override = _memory_from_json(fields, _memory_to_json(memory))  # levels left out stay as they are
        for rank in fields.whole_numbers("ranks", maximum=world_size - 1):
            if rank in overrides:
                raise FormatError(f"rank {rank} is overridden twice", field=fields.at("ranks"))
            overrides[rank] = override
    return tuple(overrides.items())


def _matrix_from_json(document: Fields, world_size: int) -> tuple[tuple[float, ...], ...]:
    path = document.at("fetch_ms")
    rows = document.items("fetch_ms", minimum=world_size, maximum=world_size)
    return tuple(
        tuple(
            number(value, f"{path}[{i}][{j}]", maximum=MAX_FETCH_MS)
            for j, value in enumerate(items(row, f"{path}[{i}]", minimum=world_size, maximum=world_size))
        )
        for i, row in enumerate(rows)
    )
