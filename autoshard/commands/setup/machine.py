"""This machine as a topology: what the system says of its devices and network cards, and what is assumed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from autoshard.core import Level, Link, MemoryBytes, Topology
from autoshard.core.machine import gpu_key
from autoshard.formats import bundled_topologies, bundled_topology

#: Bundled topology whose links are taken for a machine of processors.
_CPU_TOPOLOGY = "cpu-8"
#: Bundled topologies whose links are taken for machines of GPUs.
_MACHINES = ("dgx-{key}", "hgx-{key}")
#: Of a GPU that no bundled topology has.
_OTHER_GPU = "dgx-a100"
_BITS_PER_BYTE, _MEGA = 8, 1e6
#: A network card in bytes per second where the system does not say: 10 Gbit/s.
_USUAL_CARD = 1.25e9
_CARD_LATENCY_S = 2e-5


def this_machine(*, ranks: int | None, nodes: int | None) -> tuple[Topology, list[str]]:
    """The topology of this machine, or of the machines of a torchrun job, and what was assumed.

    Args:
        ranks: Ranks of a machine; None for torchrun's, one for each GPU, or 1.
        nodes: Machines; None for torchrun's, or 1.
    """
    notes: list[str] = []
    gpus = _gpus()
    per_node = ranks or int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or len(gpus) or 1
    total = int(os.environ.get("WORLD_SIZE", 0))
    num_nodes = nodes or (max(1, total // per_node) if total else 1)
    on_gpus = len(gpus) >= per_node
    key = gpu_key(gpus[0][0]) if on_gpus else "cpu"
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_node
    memory = MemoryBytes(hbm=min(size for _, size in gpus), ddr=host_bytes) if on_gpus else MemoryBytes(hbm=host_bytes)
    node, source = _node_links(key)
    notes.append(f"links inside a machine: those of bundled {source}, not measured")
    levels = [replace(node, size=per_node)]
    if num_nodes > 1:
        card, told = _network_card()
        notes.append(f"links between machines: {told}, shared by {per_node} ranks")
        link = Link(bytes_per_s=card / per_node, latency_s=_CARD_LATENCY_S)
        size = per_node * num_nodes
        levels.append(Level(name="cluster", size=size, all_to_all=link, all_reduce=link, shared_links=per_node > 1))
    topology = Topology(world_size=per_node * num_nodes, device=key, memory_bytes=memory, levels=tuple(levels))
    return topology, notes


def _gpus() -> list[tuple[str, int]]:
    """Names and bytes of memory of the GPUs here."""
    try:
        import torch
    except ImportError:
        return []
    found = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
    return [(about.name, about.total_memory) for about in found]


def _node_links(key: str) -> tuple[Level, str]:
    """The links inside the nearest bundled machine, and its name."""
    known = bundled_topologies()
    names = [_CPU_TOPOLOGY] if key == "cpu" else [name.format(key=key) for name in _MACHINES]
    name = next((name for name in names if name in known), _OTHER_GPU)
    topology = bundled_topology(name)
    assert topology is not None
    return topology.levels[0], name


def _network_card(folder: Path = Path("/sys/class/net")) -> tuple[float, str]:
    """Bytes per second of the fastest network card, and where that is from."""
    fastest, name = 0, ""
    for card in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            speed = int((card / "speed").read_text())
        except (OSError, ValueError):  # the loopback and cards without a cable say nothing
            continue
        if speed > fastest:
            fastest, name = speed, card.name
    if not fastest:
        return _USUAL_CARD, "10 Gbit/s, since the system does not say"
    return fastest * _MEGA / _BITS_PER_BYTE, f"{fastest:,} Mbit/s of {name}"
