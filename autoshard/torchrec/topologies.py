"""TorchRec's `Topology` as a topology."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from autoshard.core import Level, Link, MemoryBytes, Topology
from autoshard.core.machine import gpu_key

#: TorchRec's bandwidths are bytes per millisecond.
_MS_PER_S = 1e3


def topology_of(torchrec_topology: Any, *, device: str | None = None) -> Topology:
    """The topology that one of TorchRec says: ranks, nodes, memory of each rank, bandwidths inside and between nodes.

    Args:
        torchrec_topology: `torchrec.distributed.planner.Topology`.
        device: Key of the device kind, by which cost models are found; None for this machine's, or `cpu`.
    """
    on_host = torchrec_topology.compute_device == "cpu"
    world_size, node_size = torchrec_topology.world_size, torchrec_topology.local_world_size
    memory = [
        MemoryBytes(hbm=one.storage.ddr) if on_host else MemoryBytes(hbm=one.storage.hbm, ddr=one.storage.ddr)
        for one in torchrec_topology.devices
    ]
    inside, between = (
        Link(bytes_per_s=float(bytes_per_ms) * _MS_PER_S)
        for bytes_per_ms in (torchrec_topology.intra_host_bw, torchrec_topology.inter_host_bw)
    )
    levels = [Level(name="node", size=node_size, all_to_all=inside, all_reduce=inside)]
    if node_size < world_size:
        levels.append(Level(name="cluster", size=world_size, all_to_all=between, all_reduce=between))
    return Topology(
        world_size=world_size,
        device=device or device_key(on_host=on_host),
        memory_bytes=memory[0],
        levels=tuple(levels),
        overrides=tuple((rank, one) for rank, one in enumerate(memory) if one != memory[0]),
    )


def usual_topology() -> Any:
    """The topology that TorchRec's planner takes where it is given none: the processes of the default group."""
    from torchrec.distributed.comm import get_local_size
    from torchrec.distributed.planner.types import HardwareConfig, KernelConfig, TopologyFactory, TrainerConfig

    return TopologyFactory.create_topology(
        TrainerConfig(world_size=dist.get_world_size(), local_world_size=get_local_size()),
        HardwareConfig(),
        KernelConfig(compute_device="cuda" if torch.cuda.is_available() else "cpu"),
    )


def device_key(*, on_host: bool) -> str:
    """Key of this process's kind of device."""
    if on_host:
        return "cpu"
    return gpu_key(torch.cuda.get_device_name()) if torch.cuda.is_available() else "cuda"
