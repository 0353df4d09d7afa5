"""Collectives of a step within a replica group, priced.

Shape suffixes: B placements (none for one), R ranks of the group, L levels, N shards, X `EXCHANGE_PARTS`, 2 kinds of
bytes: reduce-scattered and gathered, or all-reduced and all-gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.core import CommModel, GradSync, PlacedShard, Topology
from autoshard.core.costs import EvenCollective, LinkBytes, MsArray
from autoshard.evaluation.rank_work import RankWork
from autoshard.evaluation.traffic import sync_bytes_by_way, whole_share

#: Bytes of the number of rows that a rank announces before it gathers their ids.
_COUNT_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stages:
    """Collectives of a step within a replica group, in milliseconds as the model of collectives has them.

    Attributes:
        all_to_all_ms_XBR: Of each of `EXCHANGE_PARTS`.
        scatter_ms_2B: Of the reduce-scatter of sums, and of the all-gather of their gradients: alike on all ranks.
        sync_ms_BR: Of gradients of rows that ranks hold copies of; R is 1 where ranks are alike.
    """

    all_to_all_ms_XBR: MsArray
    scatter_ms_2B: MsArray
    sync_ms_BR: MsArray

    @classmethod
    def of(cls, work: RankWork, comm: CommModel, topology: Topology) -> Stages:
        """Prices what ranks send.

        Args:
            work: What they do.
            comm: Prices collectives.
            topology: Of the replica group.
        """
        return cls(
            all_to_all_ms_XBR=all_to_alls_ms(work.links, comm, topology),
            scatter_ms_2B=scatters_ms(work.scattered_2B, comm, topology),
            sync_ms_BR=syncs_ms(work.synced_BR2, comm, topology),
        )

    @property
    def exchange_ms_XBR(self) -> MsArray:  # noqa: N802 - a shape suffix
        """All of `EXCHANGE_PARTS`: the all-to-all, and what is reduce-scattered and gathered beside it."""
        exchange_ms_XBR = self.all_to_all_ms_XBR.copy()
        exchange_ms_XBR[1:] += self.scatter_ms_2B[..., None]
        return exchange_ms_XBR


def all_to_alls_ms(links: LinkBytes, comm: CommModel, topology: Topology) -> MsArray:
    """Times of all-to-alls, shape (..., R): the one place where steps have them from.

    Args:
        links: Bytes that leave and reach ranks, shapes (L, ..., R).
        comm: Prices collectives.
        topology: Of the ranks.
    """
    return comm.links_ms(links, topology)


def scatters_ms(bytes_2B: MsArray, comm: CommModel, topology: Topology) -> MsArray:
    """Times of reduce-scatters and of all-gathers whose larger buffers have so many bytes, shape (2, B...)."""
    reduced_B, gathered_B = bytes_2B
    return np.stack(
        [
            collectives_ms("reduce_scatter", reduced_B, comm, topology),
            collectives_ms("all_gather", gathered_B, comm, topology),
        ]
    )


def syncs_ms(bytes_B2: MsArray, comm: CommModel, topology: Topology) -> MsArray:
    """Times of the collectives in which replicas sum their gradients, of ranks, plans or shards; shape (B...,).

    What is gathered comes first, then what is reduced. An all-gather of the numbers of rows goes before that of their
    ids, as the runtime has it.

    Args:
        bytes_B2: Bytes that are reduced, and bytes that are gathered, shape (B..., 2).
        comm: Prices collectives.
        topology: Of the replica group.
    """
    reduced_B, gathered_B = bytes_B2[..., 0], bytes_B2[..., 1]
    counts_ms = comm.collective_ms("all_gather", float(_COUNT_BYTES * topology.world_size), topology)
    gathers_ms = np.where(gathered_B > 0, counts_ms + collectives_ms("all_gather", gathered_B, comm, topology), 0.0)
    return np.asarray(gathers_ms + collectives_ms("all_reduce", reduced_B, comm, topology))


def collectives_ms(collective: EvenCollective, bytes_B: MsArray, comm: CommModel, topology: Topology) -> MsArray:
    """Times of collectives of so many bytes, each size priced once; of the shape of `bytes_B`."""
    sizes = bytes_B.ravel().tolist()
    times_ms = {size: comm.collective_ms(collective, size, topology) for size in dict.fromkeys(sizes)}
    return np.array([times_ms[size] for size in sizes], dtype=np.float64).reshape(bytes_B.shape)


def cheapest_syncs(
    placed_N: Sequence[PlacedShard], group_batch_size: int, comm: CommModel, topology: Topology
) -> list[GradSync]:
    """The gradient synchronisation of least predicted time for each shard; none for one replica.

    Each way is priced by itself, latencies included; of ways that cost alike, the first of dense, sparse, all-gather.

    Args:
        placed_N: The shards, with any synchronisation.
        group_batch_size: Samples per step of the replica group.
        comm: Prices collectives.
        topology: Of the replica group.
    """
    found = [GradSync.NONE] * len(placed_N)
    copied = [index for index, placed in enumerate(placed_N) if len(placed.replicas) > 1]
    if not copied:
        return found
    by_way = sync_bytes_by_way([placed_N[index] for index in copied], group_batch_size)
    shares = np.array([whole_share(placed_N[index].replicas, topology) for index in copied])[:, None]
    ways = [how for how in GradSync if how is not GradSync.NONE]
    cheapest_N = np.argmin([syncs_ms(shares * by_way[how], comm, topology) for how in ways], axis=0)
    for index, way in zip(copied, cheapest_N.tolist(), strict=True):
        found[index] = ways[way]
    return found
