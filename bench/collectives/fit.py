"""Latency and bandwidth of each level of a topology, from measured collectives.

Shape suffixes: S samples.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.core import Link, Topology
from autoshard.core.errors import InputError
from autoshard.evaluation.communication import AlphaBetaComm
from autoshard.formats.collective_samples import CollectiveSample, GroupLevel, Operator
from bench.collectives.operators import Movement

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """A link with the samples that it was fitted to.

    Attributes:
        operator: All-to-all or all-reduce.
        level: Whose groups ran it.
        nproc: Processes of the samples.
        node_size: Their processes per node.
        group_size: Ranks of a group.
        link: For all-to-all, bytes that a rank sends to others or receives from them, whichever is more; for
            all-reduce, bytes of the buffer.
        num_samples: Samples fitted.
        mean_error: Mean over the samples of |predicted - measured| / measured.
        max_error: Largest of these.
    """

    operator: Operator
    level: GroupLevel
    nproc: int
    node_size: int
    group_size: int
    link: Link
    num_samples: int
    mean_error: float
    max_error: float


def fit_link(num_bytes_S: FloatArray, seconds_S: FloatArray) -> Link:
    """Latency and bandwidth with the least squared relative error, both at least 0.

    Args:
        num_bytes_S: Bytes, at least two different numbers.
        seconds_S: Measured times, above 0.

    Raises:
        InputError: If the times do not tell a bandwidth: too few sizes, or no growth with the bytes.
    """
    if len(np.unique(num_bytes_S)) < 2:
        raise InputError("need two sizes or more to tell latency from bandwidth", field="bytes_per_rank")
    columns = np.stack([1.0 / seconds_S, num_bytes_S / seconds_S], axis=1)
    scale = columns.max(axis=0)
    latency_s, per_byte_s = np.linalg.lstsq(columns / scale, np.ones(len(seconds_S)), rcond=None)[0] / scale
    if latency_s < 0:  # then the best bandwidth alone: the error is convex, so its minimum lies on this edge
        latency_s, per_byte_s = 0.0, columns[:, 1].sum() / (columns[:, 1] ** 2).sum()
    if per_byte_s <= 0:
        raise InputError("larger ones do not take longer, so there is no bandwidth to fit", field="bytes_per_rank")
    return Link(bytes_per_s=float(1.0 / per_byte_s), latency_s=float(latency_s))


def fit_links(samples: Sequence[CollectiveSample]) -> tuple[LinkFit, ...]:
    """Fits all-to-all and all-reduce for every level of every arrangement of processes, drift divided out.

    Dtypes and splits are fitted together: what counts is bytes.

    Raises:
        InputError: If samples are of several devices, or those of a level tell no bandwidth.
    """
    _check_one_device(samples)
    parts: dict[tuple[int, int, GroupLevel, Operator], list[CollectiveSample]] = {}
    for sample in samples:
        operator = sample.collective.operator
        if operator in (Operator.ALL_TO_ALL, Operator.ALL_REDUCE):
            parts.setdefault((sample.nproc, sample.node_size, sample.collective.level, operator), []).append(sample)
    return tuple(_fit(part) for _, part in sorted(parts.items()))


def fitted_topology(samples: Sequence[CollectiveSample], like: Topology) -> Topology:
    """A topology whose links are measured ones.

    Samples come from the arrangement of processes that is nearest to the topology's: its ranks per node first, then
    its number of nodes. The node's links are those of `node` groups; the next level's all-to-all is that of
    `across_nodes` groups, whose bytes all leave their node, and its all-reduce that of all ranks, since
    `AlphaBetaComm` takes it for the whole collective. Levels beyond, and a level of groups that was not measured,
    keep the links they have.

    Args:
        samples: Of one device.
        like: Gives everything but the links and the device.

    Raises:
        InputError: If samples are of several devices, or fit no level of the topology.
    """
    used = links_used(samples, like)
    if not used:
        raise InputError(
            f"hold no all-to-all or all-reduce of a level that a topology of {like.world_size} ranks, "
            f"{like.local_world_size} to a node, has",
            field="samples",
        )
    levels = list(like.levels)
    for index, fit in used:
        is_exchange = fit.operator is Operator.ALL_TO_ALL
        level = levels[index]
        levels[index] = replace(level, all_to_all=fit.link) if is_exchange else replace(level, all_reduce=fit.link)
    return replace(like, levels=tuple(levels), device=samples[0].device)


def links_used(samples: Sequence[CollectiveSample], like: Topology) -> tuple[tuple[int, LinkFit], ...]:
    """What `fitted_topology` takes: index of a level, and the fit that its link comes from.

    Raises:
        InputError: If samples are of several devices, or those of a level tell no bandwidth.
    """
    _check_one_device(samples)
    arrangements = {(sample.nproc, sample.node_size) for sample in samples}

    def distance(arrangement: tuple[int, int]) -> tuple[float, float]:
        nproc, node_size = arrangement
        return (
            abs(math.log(node_size / like.local_world_size)),
            abs(math.log(nproc / node_size / like.num_nodes)),
        )

    nearest = min(sorted(arrangements), key=distance, default=None)
    fits = fit_links([sample for sample in samples if (sample.nproc, sample.node_size) == nearest])
    found = {(fit.level, fit.operator): fit for fit in fits}
    used: list[tuple[int, LinkFit]] = []
    for index, level in enumerate(like.levels[:2]):
        for operator in (Operator.ALL_TO_ALL, Operator.ALL_REDUCE):
            fit = found.get((_group_of(index, operator, found), operator))
            if fit is not None and level.size > 1:
                used.append((index, fit))
    return tuple(used)


def relative_errors(samples: Iterable[CollectiveSample], topology: Topology) -> FloatArray:
    """How far `AlphaBetaComm` on a topology is from measured collectives over all of its ranks, shape (S,).

    Returns:
        |predicted - measured| / measured of the all-to-alls and all-reduces that span the topology.

    Raises:
        InputError: If none does.
    """
    comm, errors = AlphaBetaComm(), []
    for sample in samples:
        if (sample.group_size, sample.num_nodes) != (topology.world_size, topology.num_nodes):
            continue
        collective = sample.collective
        if collective.operator is Operator.ALL_TO_ALL:
            movement = Movement.of(collective, sample.group_size)
            sent_bytes_RR = movement.count_RR.astype(np.float64) * collective.dtype.num_bytes
            predicted_ms = float(comm.all_to_all_ms(sent_bytes_RR, topology).max())
        elif collective.operator is Operator.ALL_REDUCE:
            predicted_ms = comm.all_reduce_ms(collective.bytes_per_rank, topology)
        else:
            continue
        errors.append(abs(predicted_ms - sample.latency_ms) / sample.latency_ms)
    if not errors:
        raise InputError(
            f"hold no all-to-all or all-reduce over {topology.world_size} ranks on {topology.num_nodes} nodes",
            field="samples",
        )
    return np.array(errors)


def _group_of(index: int, operator: Operator, found: Container[tuple[GroupLevel, Operator]]) -> GroupLevel:
    if index == 0:
        return GroupLevel.NODE
    if operator is Operator.ALL_REDUCE and (GroupLevel.WORLD, operator) in found:
        return GroupLevel.WORLD
    return GroupLevel.ACROSS_NODES  # with one rank to a node, that is the world


def _fit(samples: Sequence[CollectiveSample]) -> LinkFit:
    first = samples[0]
    reference_ms = float(np.median([sample.reference_ms for sample in samples]))
    seconds_S = np.array([sample.latency_ms / sample.reference_ms * reference_ms / 1e3 for sample in samples])
    num_bytes_S = np.array([_link_bytes(sample) for sample in samples], dtype=np.float64)
    link = fit_link(num_bytes_S, seconds_S)
    error_S = np.abs((link.latency_s + num_bytes_S / link.bytes_per_s) / seconds_S - 1.0)
    return LinkFit(
        operator=first.collective.operator,
        level=first.collective.level,
        nproc=first.nproc,
        node_size=first.node_size,
        group_size=first.group_size,
        link=link,
        num_samples=len(samples),
        mean_error=float(error_S.mean()),
        max_error=float(error_S.max()),
    )


def _link_bytes(sample: CollectiveSample) -> int:
    if sample.collective.operator is Operator.ALL_REDUCE:
        return sample.collective.bytes_per_rank
    return max(sample.max_sent_bytes, sample.max_received_bytes)


def _check_one_device(samples: Iterable[CollectiveSample]) -> None:
    devices = sorted({sample.device for sample in samples})
    if len(devices) > 1:
        raise InputError(f"are of several devices, take those of one: {', '.join(devices)}", field="samples")
