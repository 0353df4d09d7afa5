"""Measured links of a cluster: what its collectives take, by level and operator.

Shape suffixes: S samples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from autoshard.core import DType, Level, Link, Topology
from autoshard.core.topology import MAX_BANDWIDTH
from autoshard.formats.stores.collective_samples import (
    COLLECTIVE_SAMPLES,
    CollectiveSample,
    GroupLevel,
    Operator,
    Splits,
)
from autoshard.runtime.processes.launch import Launcher
from bench.collecting.collectives import collect_collectives
from bench.collecting.sample_log import Advance
from bench.collecting.termination import Terminated
from bench.collectives.sampling import CollectiveSettings, Processes, choose_collectives
from studies.cluster.network import ClusterSpec

MeasuredLinks = Mapping[tuple[GroupLevel, Operator], Link]


def link_samples(
    folder: Path,
    spec: ClusterSpec,
    sizes: Sequence[int],
    launcher: Launcher,
    *,
    seconds: float | None = None,
    advance: Advance = lambda *_: None,
) -> list[CollectiveSample]:
    """Measures collectives on the links of a cluster that is up.

    Args:
        folder: Store that the samples are appended to.
        spec: The cluster.
        sizes: Bytes per rank, at least two.
        launcher: Starts the processes on its nodes.
        seconds: Time to measure for, again and again; None for everything once.
        advance: Told how many samples have just been measured, and the seconds since the last call.

    Raises:
        Terminated: If SIGTERM ended it; what was measured is in the store.
        AutoshardError: As `collect_collectives`.
    """
    collection = collect_collectives(
        folder, *_collectives(spec, sizes), device="cpu", seconds=seconds, advance=advance, launcher=launcher
    )
    if collection.is_terminated:
        raise Terminated
    return [sample for file in collection.files for sample in COLLECTIVE_SAMPLES.read_file(file)]


def num_link_samples(spec: ClusterSpec, sizes: Sequence[int]) -> int:
    """Samples of measuring everything once."""
    return len(choose_collectives(*_collectives(spec, sizes)))


def _collectives(spec: ClusterSpec, sizes: Sequence[int]) -> tuple[Processes, CollectiveSettings]:
    processes = Processes(nproc=spec.num_ranks, node_size=spec.ranks_per_node)
    return processes, CollectiveSettings(sizes=tuple(sizes), dtypes=(DType.FP32,))


def fit_links(samples: Sequence[CollectiveSample]) -> MeasuredLinks:
    """Bandwidth and latency of every level and operator among samples with equal splits.

    The bytes of an all-to-all are those that leave a rank, of the other operators a rank's larger buffer: as topologies
    state bandwidths.

    Args:
        samples: Of at least two sizes each.
    """
    groups: dict[tuple[GroupLevel, Operator], list[CollectiveSample]] = defaultdict(list)
    for sample in samples:
        if sample.collective.splits is Splits.EQUAL:
            groups[sample.collective.level, sample.collective.operator].append(sample)
    return {
        key: _fit(np.array([_num_bytes(one) for one in group]), np.array([one.latency_ms / 1e3 for one in group]))
        for key, group in groups.items()
    }


def measured_topology(topology: Topology, links: MeasuredLinks) -> Topology:
    """A cluster's topology with the links that were measured.

    An all-to-all beyond the node is measured between the ranks of one local index, in all such groups at once; an
    all-reduce over all ranks, as cost models take it.
    """
    across = GroupLevel.ACROSS_NODES
    keys = {
        "node": ((GroupLevel.NODE, Operator.ALL_TO_ALL), (GroupLevel.NODE, Operator.ALL_REDUCE)),
        "cluster": (
            (across, Operator.ALL_TO_ALL),
            (GroupLevel.WORLD if topology.local_world_size > 1 else across, Operator.ALL_REDUCE),
        ),
    }

    def measured(level: Level) -> Level:
        all_to_all, all_reduce = keys[level.name]
        return replace(
            level,
            all_to_all=links.get(all_to_all, level.all_to_all),
            all_reduce=links.get(all_reduce, level.all_reduce),
        )

    return replace(topology, levels=tuple(map(measured, topology.levels)))


def _num_bytes(sample: CollectiveSample) -> float:
    one = sample.collective
    return sample.mean_sent_bytes if one.operator is Operator.ALL_TO_ALL else one.bytes_per_rank


def _fit(bytes_S: NDArray[np.float64], seconds_S: NDArray[np.float64]) -> Link:
    """Latency plus bytes over bandwidth with the least relative squared errors, neither of them below 0."""
    features_S2 = np.stack([1 / seconds_S, bytes_S / seconds_S], axis=1)
    (latency_s, seconds_per_byte), _ = nnls(features_S2, np.ones(len(seconds_S)))
    return Link(bytes_per_s=1 / max(float(seconds_per_byte), 1 / MAX_BANDWIDTH), latency_s=float(latency_s))
