"""What a cluster consists of."""

from __future__ import annotations

import os
from dataclasses import dataclass

from autoshard.core import Level, Link, MemoryBytes, Topology
from autoshard.core.accepted import FINITE, WHOLE, WHOLE_AT_LEAST_1, Range

#: All nodes have addresses in one network.
_NUM_NODES = Range(at_least=1, at_most=250, kind=WHOLE)
#: Beyond it `tc` cannot state the length of the queue.
_RATES = Range(at_least=1e6, at_most=1e11, kind=FINITE)
_LATENCIES = Range(at_least=0, at_most=10, kind=FINITE)
#: Ranks, their batches and the system have the other half of the machine's memory.
_MEMORY_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Nodes of a cluster, and the link that connects each of them to a switch.

    Attributes:
        num_nodes: Nodes.
        ranks_per_node: Processes of each node, which share its link.
        bits_per_s: Rate of a node's link, in each of its two directions.
        latency_s: Time from node to node that the link adds.

    Raises:
        InvalidOptionError: If a number is out of range.
    """

    num_nodes: int
    ranks_per_node: int
    bits_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        _NUM_NODES.check_fields(self, "num_nodes")
        WHOLE_AT_LEAST_1.check_fields(self, "ranks_per_node")
        _RATES.check_fields(self, "bits_per_s")
        _LATENCIES.check_fields(self, "latency_s")

    @property
    def num_ranks(self) -> int:
        """Ranks of the cluster."""
        return self.num_nodes * self.ranks_per_node

    def topology(self) -> Topology:
        """The cluster as its links are set; links within a node are assumed, as for runs on one machine.

        The ranks of a node share its rate. An all-reduce is a ring through all ranks, which enters each node once.
        """
        from autoshard.whatif.trials import local_topology  # imports torch

        num_ranks, bytes_per_s = self.num_ranks, self.bits_per_s / 8
        (node,) = local_topology("cpu", self.ranks_per_node, 0).levels
        levels = [node]
        if self.num_nodes > 1:
            ring = bytes_per_s * num_ranks / (2 * (num_ranks - 1))
            cluster = Level(
                name="cluster",
                size=num_ranks,
                all_to_all=Link(bytes_per_s=bytes_per_s / self.ranks_per_node, latency_s=self.latency_s),
                all_reduce=Link(bytes_per_s=ring, latency_s=2 * (num_ranks - 1) * self.latency_s),
                shared_links=True,
            )
            levels.append(cluster)
        hbm_bytes = int(_MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / num_ranks)
        memory_bytes = MemoryBytes(hbm=hbm_bytes)
        return Topology(world_size=num_ranks, device="cpu", memory_bytes=memory_bytes, levels=tuple(levels))
