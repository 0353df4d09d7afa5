"""Network namespaces as nodes: each has a link to a bridge, which is in a namespace of its own.

Nothing of a cluster shows outside its namespaces: the machine's interfaces, routes and firewall stay as they are. The
names of the namespaces hold the id of the process that made them, by which what a killed process left is found.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from autoshard.core import Level, Link, MemoryBytes, Topology
from autoshard.core.accepted import FINITE, WHOLE, WHOLE_AT_LEAST_1, Range
from autoshard.core.errors import DeviceError, InvalidOptionError
from autoshard.runtime.processes.launch import Torchrun
from bench.collecting.termination import termination_raised

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


_NAME = "autoshard-{pid}-{number}-{node}"
_OWNER = re.compile(r"autoshard-(\d+)-")
_numbers = itertools.count()
#: CAP_NET_ADMIN and CAP_SYS_ADMIN, see capability.h.
_CAPABILITIES = 1 << 12 | 1 << 21

_INTERFACE = "eth0"
_ADDRESS = "10.0.0.{node}"
_PORT = 29500
#: Largest packet that the kernel hands to a link, and the tokens of its bucket: such a packet, and what the link
#: carries between two wake-ups. More would let small collectives pass at any rate.
_PACKET_BYTES, _WAKE_UP_S = 2**14, 2e-4
#: Longest queue before a link: long enough that bursts of a collective are not dropped.
_QUEUE_S = 0.2
_QUEUE_PACKETS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster that is up; a `Launcher` of `run_requests` and `collect_collectives`.

    Attributes:
        spec: What it consists of.
        namespaces: Names of the nodes' network namespaces; `ip netns exec NAME` runs a command on a node.
    """

    spec: ClusterSpec
    namespaces: tuple[str, ...]

    def torchruns(self, nproc: int) -> Sequence[Torchrun]:
        """One torchrun per node, with gloo on its link.

        Raises:
            InvalidOptionError: If the cluster has another number of ranks.
        """
        spec = self.spec
        if nproc != spec.num_ranks:
            raise InvalidOptionError(
                f"must be {spec.num_ranks}, the {spec.num_nodes} nodes of {spec.ranks_per_node}, got {nproc}",
                field="nproc",
            )
        options = (
            f"--nnodes={spec.num_nodes}",
            f"--nproc-per-node={spec.ranks_per_node}",
            f"--master-addr={_ADDRESS.format(node=1)}",
            f"--master-port={_PORT}",
        )
        return [
            Torchrun(
                options=(*options, f"--node-rank={rank}", f"--local-addr={_ADDRESS.format(node=rank + 1)}"),
                prefix=("ip", "netns", "exec", namespace),
                variables={"GLOO_SOCKET_IFNAME": _INTERFACE},
            )
            for rank, namespace in enumerate(self.namespaces)
        ]


@contextmanager
def open_cluster(spec: ClusterSpec) -> Iterator[Cluster]:
    """Sets up a cluster, and takes it down whatever happens; called in the main thread, as it handles SIGTERM.

    Processes that are left on it are killed. What a killed process left of its own clusters is removed first.

    Raises:
        DeviceError: If this machine cannot have one, see `check_support`.
        Terminated: When SIGTERM arrives.
    """
    check_support()
    remove_leftovers()
    pid, number = os.getpid(), next(_numbers)
    nodes = range(1, spec.num_nodes + 1)
    switch, *namespaces = (_NAME.format(pid=pid, number=number, node=node) for node in ("switch", *nodes))
    with termination_raised():
        _remove({*namespaces, switch})  # of a killed process that had the same id
        try:
            _ip("netns", "add", switch)
            _ip("-netns", switch, "link", "add", "switch", "type", "bridge")
            _ip("-netns", switch, "link", "set", "switch", "up")
            for node, namespace in enumerate(namespaces, start=1):
                _add_node(spec, node, namespace, switch)
            yield Cluster(spec=spec, namespaces=tuple(namespaces))
        finally:
            _remove({*namespaces, switch})


def check_support() -> None:
    """Makes sure that this machine and user can have a cluster.

    Raises:
        DeviceError: If not; it says why.
    """
    if sys.platform != "linux":
        raise DeviceError(f"a cluster of network namespaces needs Linux, this is {sys.platform}")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise DeviceError(f"a cluster of network namespaces needs the program `{program}`: install iproute2")
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    effective = re.search(r"^CapEff:\s*(\w+)", status, re.MULTILINE)
    if effective is None or ~int(effective[1], 16) & _CAPABILITIES:
        raise DeviceError("a cluster of network namespaces needs root (CAP_NET_ADMIN and CAP_SYS_ADMIN)")


def remove_leftovers() -> None:
    """Removes the clusters of processes that are gone, with the processes on them."""
    owners = {name: _OWNER.match(name) for name in _namespaces()}
    _remove({name for name, owner in owners.items() if owner and not Path("/proc", owner[1]).exists()})


def _add_node(spec: ClusterSpec, node: int, namespace: str, switch: str) -> None:
    port = f"port{node}"
    _ip("netns", "add", namespace)
    _ip("-netns", namespace, "link", "add", _INTERFACE, "type", "veth", "peer", "name", port, "netns", switch)
    _ip("-netns", namespace, "addr", "add", f"{_ADDRESS.format(node=node)}/24", "dev", _INTERFACE)
    # Ahead of the first packet.
    for where, device in ((namespace, _INTERFACE), (switch, port)):
        rate, burst = f"{spec.bits_per_s:.0f}bit", f"{_PACKET_BYTES + spec.bits_per_s / 8 * _WAKE_UP_S:.0f}b"
        bucket = ("tbf", "rate", rate, "burst", burst, "latency", f"{_QUEUE_S:g}s")
        _ip("-netns", where, "link", "set", device, "gso_max_size", str(_PACKET_BYTES))
        _tc(where, "dev", device, "root", "handle", "1:", *bucket)
    if spec.latency_s:
        delay = ("netem", "delay", f"{spec.latency_s * 1e6:.0f}us", "limit", str(_QUEUE_PACKETS))
        _tc(namespace, "dev", _INTERFACE, "parent", "1:1", "handle", "10:", *delay)
    _ip("-netns", switch, "link", "set", port, "master", "switch", "up")
    _ip("-netns", namespace, "link", "set", "lo", "up")
    _ip("-netns", namespace, "link", "set", _INTERFACE, "up")


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines()]


def _remove(names: Set[str]) -> None:
    """Removes those that exist, with the processes on them; links go with their namespaces."""
    for name in names & set(_namespaces()):
        try:
            for pid in _ip("netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _ip("netns", "delete", name)
        except DeviceError:
            if name in _namespaces():  # no other process has removed it meanwhile
                raise


def _tc(namespace: str, *words: str) -> None:
    _execute("tc", "-netns", namespace, "qdisc", "add", *words)


def _ip(*words: str) -> str:
    return _execute("ip", *words)


def _execute(*words: str) -> str:
    # In a session of its own, so that Ctrl-C does not reach it.
    done = subprocess.run(words, capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"it ended with {done.returncode}"
        raise DeviceError(f"the cluster of network namespaces failed: {' '.join(words)}: {reason}")
    return done.stdout
