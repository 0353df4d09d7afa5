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
from autoshard.core.topology import DEVICE_KEY, MAX_FETCH_MS
from autoshard.formats.documents.document import Document
from autoshard.formats.documents.kinds import (
    Field,
    Kind,
    field_kind,
    fields_of,
    in_context,
    list_of,
    named,
    number_in,
    record,
    text_of,
    whole_number,
)

_MAX_LEVELS = 16
#: What files call a field, where it is not what Python does.
_NAMES: Final = {"memory_bandwidth": "memory_bandwidth_bytes_per_s"}

MEMORY_SIZE: Final[Kind[int]] = field_kind(MemoryBytes, "hbm")
_LINK: Final = named(
    "topology",
    "link",
    record(Link, *fields_of(Link)),
    "Bytes per second and rank, and latency, of a collective.",
)
_KNOWN: Final[dict[type, Kind[Any]]] = {Link: _LINK}
_LEVEL: Final = named("topology", "level", record(Level, *fields_of(Level, known=_KNOWN)))
_MEMORY: Final = record(MemoryBytes, *fields_of(MemoryBytes))
_OTHER_MEMORY: Final[Kind[dict[str, int]]] = record(
    dict, *(replace(one, is_optional=True) for one in fields_of(MemoryBytes))
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
    listed = fields_of(
        Topology,
        "world_size",
        "device",
        "memory_bytes",
        "levels",
        "memory_bandwidth",
        known=_KNOWN,
        device=text_of(DEVICE_KEY.pattern),
        memory_bytes=_MEMORY,
        levels=list_of(_LEVEL, 1, _MAX_LEVELS),
        overrides=in_context(_overrides(MAX_WORLD_SIZE).schema),
        fetch_ms=in_context(_fetch_ms(1, MAX_WORLD_SIZE).schema),
    )
    return tuple(replace(one, name=_NAMES.get(one.name, one.name)) for one in listed)


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
