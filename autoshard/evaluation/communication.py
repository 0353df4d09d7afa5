"""Cost of collectives from the topology's latencies and bandwidths.

Shape suffixes: R ranks, L levels, U ranks of a unit of the level inside.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autoshard.core import Topology
from autoshard.core.costs import CollectiveName, EvenCollective, LinkBytes, MsArray
from autoshard.core.errors import InvalidTopologyError

#: Ends of the interval over the value, an assumption: small messages see a fraction of a published bandwidth, and
#: published latencies leave the software out.
_LOW_FACTOR, _HIGH_FACTOR = 0.4, 4.0


@dataclass(frozen=True, slots=True)
class AlphaBetaComm:
    """Latency plus bytes over bandwidth, level by level.

    Bytes between two ranks travel over the innermost level that holds both. Links inside a node and links that
    leave it are different hardware and work at the same time; levels outside the node share the ranks' network
    ports, so that their times add up.
    """

    @property
    def name(self) -> str:
        """What answers say."""
        return "alpha-beta"

    @property
    def is_affine(self) -> bool:
        """Bounds of plans may be proven by it."""
        return True

    def links_ms(self, links: LinkBytes, topology: Topology) -> MsArray:
        """Time per rank of an all-to-all, by what leaves and reaches ranks; shape (..., R).

        A rank is done when the larger of what it sends and what it receives is through. What stays on its rank
        is free, and so is the collective for a rank that exchanges nothing.
        """
        links = over_shared_links(links, topology)
        bytes_LR = np.maximum(links.leaving_LR, links.arriving_LR)
        by_level = [level.all_to_all for level in topology.levels]
        times_LR = [one_R / link.bytes_per_s for one_R, link in zip(bytes_LR, by_level, strict=True)]
        latency_LR = [np.where(one_R > 0, link.latency_s, 0.0) for one_R, link in zip(bytes_LR, by_level, strict=True)]
        beyond_R = np.sum(times_LR[1:], axis=0) if len(times_LR) > 1 else np.zeros_like(times_LR[0])
        seconds_R = np.max(latency_LR, axis=0) + np.maximum(times_LR[0], beyond_R)
        return np.asarray(seconds_R * 1e3)

    def collective_ms(self, collective: EvenCollective, num_bytes: float, topology: Topology) -> float:
        """Time of a collective in which all ranks put in as much, by its larger buffer.

        The outermost level's bandwidth is that of a whole all-reduce, inner levels included, as measured on such a
        cluster (Neo Appendix A has 60 GB/s over 128 ranks). A reduce-scatter, or an all-gather, moves half the bytes of
        an all-reduce of as large a buffer, behind the same latency.
        """
        if num_bytes <= 0 or topology.world_size == 1:
            return 0.0
        link = topology.levels[-1].all_reduce
        moved_bytes = num_bytes if collective == "all_reduce" else num_bytes / 2
        return (link.latency_s + moved_bytes / link.bytes_per_s) * 1e3

    def bounds_ms(self, _collective: CollectiveName, value_ms: MsArray, _topology: Topology) -> tuple[MsArray, MsArray]:
        """Fixed factors below and above, since nothing was measured."""
        return value_ms * _LOW_FACTOR, value_ms * _HIGH_FACTOR


def link_bytes(sent_bytes_RR: MsArray, topology: Topology) -> LinkBytes:
    """Adds up by level what rank i sends to rank j; what stays on its rank travels over no link.

    Raises:
        InvalidTopologyError: If the matrix is of another world.
    """
    sent = np.asarray(sent_bytes_RR, dtype=np.float64)
    if sent.shape != (topology.world_size, topology.world_size):
        raise InvalidTopologyError(
            f"must be {topology.world_size} rows of as many numbers, got shape {sent.shape}", field="sent_bytes"
        )
    level_RR = link_levels(topology)
    by_level = [np.where(level_RR == index, sent, 0.0) for index in range(len(topology.levels))]
    return LinkBytes(
        leaving_LR=np.stack([there.sum(axis=1) for there in by_level]),
        arriving_LR=np.stack([there.sum(axis=0) for there in by_level]),
    )


def over_shared_links(links: LinkBytes, topology: Topology) -> LinkBytes:
    """What passes the link of each rank: bytes of ranks that share theirs are spread over them evenly.

    Args:
        links: What leaves and reaches ranks; of one, where they are alike.
        topology: The same ranks.
    """
    if links.leaving_LR.shape[-1] == 1 or not any(level.shared_links for level in topology.levels):
        return links
    return LinkBytes(
        leaving_LR=_spread_over_units(links.leaving_LR, topology),
        arriving_LR=_spread_over_units(links.arriving_LR, topology),
    )


def _spread_over_units(bytes_LR: MsArray, topology: Topology) -> MsArray:
    spread_LR = bytes_LR.copy()
    for index, (inner, level) in enumerate(pairwise(topology.levels), start=1):
        if level.shared_links:
            units_RU = bytes_LR[index].reshape(*bytes_LR.shape[1:-1], -1, inner.size)
            spread_LR[index] = np.repeat(units_RU.mean(axis=-1), inner.size, axis=-1)
    return spread_LR


def link_levels(topology: Topology) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Index of the innermost level that holds both ranks, shape (R, R); -1 for a rank and itself."""
    ranks = np.arange(topology.world_size)
    levels = np.full((topology.world_size, topology.world_size), len(topology.levels) - 1, dtype=np.int64)
    for index in range(len(topology.levels) - 1, -1, -1):
        group = ranks // topology.levels[index].size
        levels[group[:, None] == group[None, :]] = index
    levels[ranks, ranks] = -1
    return levels
