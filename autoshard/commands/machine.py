"""What this machine has: its GPUs, their links, its processors and memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from autoshard.core import Level, Link, MemoryBytes, Topology
from autoshard.core.machine import gpu_key
from autoshard.formats import bundled_topologies, bundled_topology

#: Bundled topology whose links are taken for a machine of processors.
_CPU_TOPOLOGY = "cpu-8"
#: Bundled topologies whose links are taken for machines of GPUs.
_MACHINES = ("dgx-{key}", "hgx-{key}")
#: Of a GPU that no bundled topology has.
_OTHER_GPU = "dgx-a100"
_BITS_PER_BYTE, _MEGA, _GIGA = 8, 1e6, 1e9
#: A network card in bytes per second where the system does not say: 10 Gbit/s.
_USUAL_CARD = 1.25e9
_CARD_LATENCY_S = 2e-5


def this_machine(*, ranks: int | None, nodes: int | None) -> tuple[Topology, list[str]]:
    """The topology of this machine, or of the machines of a torchrun job, and what was assumed.

    Args:
        ranks: Ranks of a machine; None for torchrun's, one for each GPU, or 1.
        nodes: Machines; None for torchrun's, or 1.
    """
    gpus = found_gpus()
    per_node = ranks or int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or len(gpus) or 1
    total = int(os.environ.get("WORLD_SIZE", 0))
    num_nodes = nodes or (max(1, total // per_node) if total else 1)
    on_gpus = len(gpus) >= per_node
    key = gpu_key(gpus[0].name) if on_gpus else "cpu"
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_node
    memory = MemoryBytes(hbm=host_bytes)
    if on_gpus:
        memory = MemoryBytes(hbm=min(gpu.memory_bytes for gpu in gpus), ddr=host_bytes)
    node, note = _node_links(key, gpus[:per_node] if on_gpus else [], per_node)
    notes = [f"links inside a machine: {note}"]
    levels = [replace(node, size=per_node)]
    if num_nodes > 1:
        card, told = _between_machines()
        notes.append(f"links between machines: {told}, shared by {per_node} ranks")
        link = Link(bytes_per_s=card / per_node, latency_s=_CARD_LATENCY_S)
        size = per_node * num_nodes
        levels.append(Level(name="cluster", size=size, all_to_all=link, all_reduce=link, shared_links=per_node > 1))
    topology = Topology(world_size=per_node * num_nodes, device=key, memory_bytes=memory, levels=tuple(levels))
    return topology, notes


def _node_links(key: str, gpus: list[Gpu], per_node: int) -> tuple[Level, str]:
    """The links inside a machine, and where they are from: the nearest bundled machine, at most the links' own peak."""
    known = bundled_topologies()
    names = [_CPU_TOPOLOGY] if key == "cpu" else [name.format(key=key) for name in _MACHINES]
    name = next((name for name in names if name in known), _OTHER_GPU)
    topology = bundled_topology(name)
    assert topology is not None
    level, note = topology.levels[0], f"those of bundled {name}, not measured"
    slowest = min(gpus, key=lambda gpu: gpu.peak_bytes_per_s, default=None)
    if slowest is None or slowest.peak_bytes_per_s == 0 or per_node == 1:
        return level, note
    peak, told = slowest.peak_bytes_per_s, _told(slowest)
    if level.all_to_all.bytes_per_s <= peak:
        return level, f"{note}; {told}"
    # Each rank sends and receives 2 (n - 1) / n bytes for each byte that n ranks reduce.
    reduced = min(level.all_reduce.bytes_per_s, peak * per_node / (2 * (per_node - 1)))
    all_to_all = replace(level.all_to_all, bytes_per_s=peak)
    all_reduce = replace(level.all_reduce, bytes_per_s=reduced)
    return replace(level, all_to_all=all_to_all, all_reduce=all_reduce), f"{told}, not measured"


def _told(gpu: Gpu) -> str:
    links = f"{gpu.num_nvlinks} NVLinks" if gpu.num_nvlinks else "PCIe without NVLink"
    return f"{links} of {gpu.peak_bytes_per_s / 1e9:,.0f} GB/s at most"


def _between_machines() -> tuple[float, str]:
    """Bytes per second of all that links this machine to others, and where that is from."""
    ports = list(infiniband_ports())
    if not ports:
        return _network_card()
    return sum(ports) * _GIGA / _BITS_PER_BYTE, f"{sum(ports):,.0f} Gbit/s of {len(ports)} InfiniBand ports"


def infiniband_ports(folder: Path = Path("/sys/class/infiniband")) -> Iterator[float]:
    """Gbit/s of each active port."""
    for port in sorted(folder.glob("*/ports/*")):
        try:
            # Such as "4: ACTIVE" and "400 Gb/sec (4X NDR)".
            if "ACTIVE" in (port / "state").read_text():
                yield float((port / "rate").read_text().split()[0])
        except (OSError, ValueError, IndexError):
            continue


def _network_card(folder: Path = Path("/sys/class/net")) -> tuple[float, str]:
    """Bytes per second of the fastest network card or bond of cards, and where that is from."""
    fastest, name = 0, ""
    for card in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            # Interfaces of containers, bridges and tunnels state a speed, too.
            speed = int((card / "speed").read_text()) if _is_card(card) else 0
        except (OSError, ValueError):  # the loopback and cards without a cable say nothing
            continue
        if speed > fastest:
            fastest, name = speed, card.name
    if not fastest:
        return _USUAL_CARD, "10 Gbit/s, since the system does not say"
    return fastest * _MEGA / _BITS_PER_BYTE, f"{fastest:,} Mbit/s of {name}"


def _is_card(interface: Path) -> bool:
    """Whether a network interface has a device of its own or, as a bond, members that have one."""
    members = interface / "bonding" / "slaves"
    names = members.read_text().split() if members.exists() else [interface.name]
    return any((interface.parent / name / "device").exists() for name in names)


#: PCIe sends 128 bits in 130.
_PCIE_CODING: Final = 128 / 130
_BUS_FOLDER: Final = Path("/sys/bus/pci/devices")
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU and the links that leave it.

    Attributes:
        name: Full name.
        memory_bytes: Its memory.
        num_nvlinks: Active NVLinks; None where nothing says.
        nvlink_bytes_per_s: Peak of these links together, in one direction; 0 without them.
        pcie_bytes_per_s: Peak of its PCIe slot in one direction; 0 where the system does not say.
    """

    name: str
    memory_bytes: int
    num_nvlinks: int | None = None
    nvlink_bytes_per_s: float = 0.0
    pcie_bytes_per_s: float = 0.0

    @property
    def peak_bytes_per_s(self) -> float:
        """Peak of what links it to its neighbours; 0 where nothing says."""
        if self.num_nvlinks is None:
            return 0.0
        return self.nvlink_bytes_per_s if self.num_nvlinks else self.pcie_bytes_per_s


def found_gpus(bus_folder: Path = _BUS_FOLDER) -> list[Gpu]:
    """The GPUs here, those of `CUDA_VISIBLE_DEVICES` where it is set; none where neither NVML nor torch sees any.

    Args:
        bus_folder: Where the system describes the devices of its PCI buses.
    """
    try:
        import pynvml
    except ImportError:
        return list(_gpus_of_torch())
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver
        return list(_gpus_of_torch())
    try:
        return [_gpu(pynvml, handle, bus_folder) for handle in _handles(pynvml)]
    except pynvml.NVMLError:  # a part of a GPU, or a driver that does not know a question
        return list(_gpus_of_torch())
    finally:
        pynvml.nvmlShutdown()


def _gpus_of_torch() -> Iterator[Gpu]:
    try:
        import torch
    except ImportError:
        return
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        yield Gpu(name=about.name, memory_bytes=about.total_memory)


def _handles(nvml: ModuleType) -> list[Any]:
    """NVML's handles of the visible GPUs.

    NVML numbers GPUs by their places on the bus and CUDA, unless told otherwise, the fastest first; of machines with
    GPUs of one model the two agree.
    """
    visible = os.environ.get(_VISIBLE)
    if visible is None:
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return [
        nvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else nvml.nvmlDeviceGetHandleByUUID(name)
        for name in names
        if name != "-1"
    ]


def _gpu(nvml: ModuleType, handle: Any, bus_folder: Path) -> Gpu:
    links = list(_active_links(nvml, handle))
    return Gpu(
        name=_as_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).total,
        num_nvlinks=len(links),
        nvlink_bytes_per_s=_nvlink_bytes_per_s(nvml, handle, links),
        pcie_bytes_per_s=_pcie_bytes_per_s(bus_folder, _as_text(nvml.nvmlDeviceGetPciInfo(handle).busId)),
    )


def _as_text(value: str | bytes) -> str:
    """Texts of NVML, which are bytes in its older versions."""
    return value.decode() if isinstance(value, bytes) else value


def _active_links(nvml: ModuleType, handle: Any) -> Iterator[int]:
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link):
                yield link
        except nvml.NVMLError:  # it has no such link
            return


def _nvlink_bytes_per_s(nvml: ModuleType, handle: Any, links: Sequence[int]) -> float:
    """Bytes per second of all links in one direction, of links whose speed NVML says."""
    if not links:
        return 0.0
    (speed,) = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON])
    return float(len(links) * speed.value.uiVal * _MEGA) if speed.nvmlReturn == 0 else 0.0


def _pcie_bytes_per_s(bus_folder: Path, bus_id: str) -> float:
    """Peak of a PCIe slot, such as `32.0 GT/s PCIe` on 16 lanes, by the id of a device on the bus."""
    domain, _, place = bus_id.lower().partition(":")
    device = bus_folder / f"{domain[-4:]}:{place}"
    try:
        transfers = float((device / "max_link_speed").read_text().split()[0])
        lanes = int((device / "max_link_width").read_text())
    except (OSError, ValueError, IndexError):  # a virtual bus says nothing
        return 0.0
    return transfers * _GIGA * lanes * _PCIE_CODING / _BITS_PER_BYTE
