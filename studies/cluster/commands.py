"""Commands `measure` and `run` of `python -m studies.cluster`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType

from autoshard.commands.arguments import positive_option
from autoshard.commands.options import command_options
from autoshard.commands.run import RunOptions, run_on
from autoshard.console import JsonOption, emit, progress
from autoshard.core.choices import Device
from autoshard.core.errors import InvalidOptionError
from autoshard.table import Column, Table
from bench.collecting.termination import TERMINATED_EXIT_CODE, Terminated
from studies.cluster.network import ClusterSpec

if TYPE_CHECKING:
    from studies.cluster.links import MeasuredLinks
    from studies.cluster.network import Cluster

_SMALLEST_BYTES = 2**14


@command_options(panel="Cluster")
class ClusterOptions:
    """What the cluster consists of."""

    num_nodes: Annotated[int, typer.Option(min=1, max=250, help="Nodes, each a network namespace.")] = 2
    ranks_per_node: Annotated[int, typer.Option(min=1, help="Processes of each node.")] = 2
    mbit_per_s: Annotated[float, positive_option("Rate of the link of each node, in each direction.")] = 1000.0
    latency_ms: Annotated[float, typer.Option(min=0, help="Time from node to node that the link adds.")] = 0.0

    def spec(self) -> ClusterSpec:
        """The cluster.

        Raises:
            InvalidOptionError: If a number is out of range.
        """
        return ClusterSpec(
            num_nodes=self.num_nodes,
            ranks_per_node=self.ranks_per_node,
            bits_per_s=self.mbit_per_s * 1e6,
            latency_s=self.latency_ms / 1e3,
        )


@command_options()
class MeasureOptions:
    """Options of `measure`."""

    output: Annotated[Path, typer.Option("--output", "-o", help="File for the topology.", metavar="FILE")]
    store: Annotated[
        Path | None, typer.Option(help="Store that the samples are appended to. Left out: they are not kept.")
    ] = None
    max_bytes: Annotated[
        int,
        typer.Option(
            min=4 * _SMALLEST_BYTES,
            help=f"Bytes per rank of the largest collective; the smallest has {_SMALLEST_BYTES}.",
        ),
    ] = 2**20
    seconds: Annotated[
        float | None, positive_option("Time to measure for, again and again. Left out: everything once.")
    ] = None
    cluster: ClusterOptions


def measure(options: MeasureOptions, as_json: JsonOption = False) -> None:
    """Measures the links of a cluster on this machine, and writes its topology.

    Nodes are network namespaces of this machine (root and iproute2 are needed). Runs all-to-all, all-reduce,
    reduce-scatter and all-gather over gloo at several sizes: in a node, across nodes and over all ranks. A topology
    holds bandwidth and latency of the first two.

    Example:
        python -m studies.cluster measure --num-nodes 2 --ranks-per-node 2 --mbit-per-s 400 -o topology.json
    """
    from autoshard.formats import topology_to_json, write_topology
    from studies.cluster.links import measured_topology

    spec = options.cluster.spec()
    if spec.num_ranks < 2:
        raise InvalidOptionError("must be at least 2 ranks in all: one exchanges nothing", field="ranks_per_node")
    links = _measured(options, spec)
    topology = measured_topology(spec.topology(), links)
    write_topology(topology, options.output)
    result = {"output": str(options.output), "topology": topology_to_json(topology), "links": _links_json(links)}
    emit(result, _rendered(options, links), as_json=as_json)


def run(options: RunOptions, cluster: ClusterOptions, as_json: JsonOption = False) -> None:
    """Executes a plan's training steps on a cluster of this machine, one process per rank of the cluster.

    Example:
        python -m studies.cluster run plan.json --num-nodes 2 --ranks-per-node 2 --mbit-per-s 400 --verify-steps 2
    """
    spec = cluster.spec()
    if options.most_nproc not in (None, spec.num_ranks):
        raise InvalidOptionError(f"must be left out or {spec.num_ranks}, got {options.nproc}", field="nproc")
    if options.virtual.virtual_time:
        raise InvalidOptionError("must be left out: links of a cluster are real", field="--virtual-time")
    if options.device is Device.CUDA:
        raise InvalidOptionError(
            f"must be auto or cpu: links of a cluster are gloo's, got {options.device}", field="device"
        )
    from autoshard.formats import read_plan

    plan = read_plan(options.plan)
    with opened_cluster(spec) as opened:
        run_on(opened, replace(options, device=Device.CPU), spec.num_ranks, as_json, plan)


@contextmanager
def opened_cluster(spec: ClusterSpec) -> Iterator[Cluster]:
    """A cluster of this machine until the block ends; a command that SIGTERM ends within exits with code 143."""
    from studies.cluster.network import open_cluster

    try:
        with open_cluster(spec) as cluster:
            yield cluster
    except Terminated:
        raise typer.Exit(TERMINATED_EXIT_CODE) from None


def _measured(options: MeasureOptions, spec: ClusterSpec) -> MeasuredLinks:
    from bench.collectives.sampling import powers_of_four
    from studies.cluster.links import fit_links, link_samples, num_link_samples

    sizes = powers_of_four(_SMALLEST_BYTES, options.max_bytes)
    with (
        tempfile.TemporaryDirectory(prefix="autoshard-samples-") as folder,
        opened_cluster(spec) as cluster,
        progress("Measuring collectives", options.seconds or num_link_samples(spec, sizes)) as bar,
    ):
        samples = link_samples(
            options.store or Path(folder),
            spec,
            sizes,
            cluster,
            seconds=options.seconds,
            advance=lambda count, elapsed: bar(elapsed if options.seconds else count),
        )
    return fit_links(samples)


def _links_json(links: MeasuredLinks) -> list[dict[str, object]]:
    return [
        {"level": level.value, "operator": operator.value, "bytes_per_s": one.bytes_per_s, "latency_s": one.latency_s}
        for (level, operator), one in links.items()
    ]


def _rendered(options: MeasureOptions, links: MeasuredLinks) -> RenderableType:
    table = Table(
        columns=("level", Column("operator"), "MB/s per rank", "latency ms"),
        rows=[
            (level, operator, f"{one.bytes_per_s / 1e6:.1f}", f"{one.latency_s * 1e3:.2f}")
            for (level, operator), one in links.items()
        ],
    )
    return Group(f"Wrote {options.output}.", "", table)
