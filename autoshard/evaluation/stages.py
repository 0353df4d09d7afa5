"""Collectives of a step, priced: within a replica group, and between the groups.

Shape suffixes: R ranks of a replica group, N ranks, plans or shards, 2 kinds of bytes: all-reduced and all-gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.core import CommModel, CostModels, GradSync, PlacedShard, ShardingPlan, Topology
from autoshard.core.costs import LinkBytes, MsArray
from autoshard.core.plan import HeldShard
from autoshard.evaluation.group_sync import group_sync_ms
from autoshard.evaluation.traffic import Stream, Traffic, sync_bytes_by_way

#: Bytes of the number of rows that a rank announces before it gathers their ids.
_COUNT_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Collectives of a step per rank, in milliseconds as the model of collectives has them.

    Attributes:
        topology: Of one replica group, over which all but the last are.
        input_ms_R: Of lengths and ids: one all-to-all.
        forward_ms_R: Of embeddings: the all-to-all, and the reduce-scatter of sums.
        backward_ms_R: Of their gradients: the all-to-all, and the all-gather.
        reduce_scatter_ms: The reduce-scatter's share, alike on all ranks.
        all_gather_ms: The all-gather's.
        reader_ms: What every rank works besides on what it reads, by `READER_PARTS`; 0 where the step's calibration
            counts it.
        sync_ms_R: Of gradients of rows that ranks of a group hold copies of.
        replicas: Of the ranks that hold copies of the same rows in different groups.
        group_sync_ms_R: Of weights and optimizer states between groups, per step.
    """

    topology: Topology
    input_ms_R: MsArray
    forward_ms_R: MsArray
    backward_ms_R: MsArray
    reduce_scatter_ms: float
    all_gather_ms: float
    reader_ms: tuple[float, ...]
    sync_ms_R: MsArray
    replicas: Topology
    group_sync_ms_R: MsArray

    @classmethod
    def of(
        cls,
        plan: ShardingPlan,
        group: ShardingPlan,
        costs: CostModels,
        traffic: Traffic,
        held: Sequence[HeldShard],
        reader_ms: tuple[float, ...],
    ) -> Stages:
        """Prices what a plan sends.

        Args:
            plan: The plan.
            group: What one of its replica groups does.
            costs: Models to price it with.
            traffic: Of the group.
            held: What its ranks hold.
            reader_ms: What each of them works on what it reads.
        """
        links = traffic.links(group.topology)

        def all_to_all(links: LinkBytes) -> MsArray:
            return costs.comm.links_ms(links, group.topology)

        reduce_scatter_ms = costs.comm.reduce_scatter_ms(traffic.scattered_bytes(Stream.FORWARD), group.topology)
        all_gather_ms = costs.comm.all_gather_ms(traffic.scattered_bytes(Stream.BACKWARD), group.topology)
        return cls(
            topology=group.topology,
            # Lengths and ids travel together, in messages with room for the ids of the batch before (Neo Sec. 7.1 and
            # TorchRec send ids after their lengths).
            input_ms_R=all_to_all(links[Stream.LENGTHS] + links[Stream.IDS]),
            forward_ms_R=all_to_all(links[Stream.FORWARD]) + reduce_scatter_ms,
            backward_ms_R=all_to_all(links[Stream.BACKWARD]) + all_gather_ms,
            reduce_scatter_ms=reduce_scatter_ms,
            all_gather_ms=all_gather_ms,
            reader_ms=reader_ms,
            sync_ms_R=syncs_ms(np.stack([traffic.reduced_R, traffic.gathered_R], axis=1), costs.comm, group.topology),
            replicas=plan.replica_groups.replica_topology(plan.topology),
            group_sync_ms_R=group_sync_ms(plan, held, costs.comm),
        )


def syncs_ms(bytes_N2: MsArray, comm: CommModel, topology: Topology) -> MsArray:
    """Times of the collectives in which replicas sum their gradients, of N ranks, plans or shards; shape (N,).

    What is gathered comes first, then what is reduced. An all-gather of the numbers of rows goes before that of their
    ids, as the runtime has it.

    Args:
        bytes_N2: Bytes that are reduced, and bytes that are gathered.
        comm: Prices collectives.
        topology: Of the replica group.
    """
    counts_ms = comm.all_gather_ms(float(_COUNT_BYTES * topology.world_size), topology)
    rows = [(reduced, gathered) for reduced, gathered in bytes_N2.tolist()]
    times_ms = {}
    for reduced, gathered in dict.fromkeys(rows):
        gather_ms = counts_ms + comm.all_gather_ms(gathered, topology) if gathered > 0 else 0.0
        times_ms[reduced, gathered] = gather_ms + comm.all_reduce_ms(reduced, topology)
    return np.array([times_ms[row] for row in rows])


def cheapest_sync(placed: PlacedShard, group_batch_size: int, comm: CommModel, topology: Topology) -> GradSync:
    """The gradient synchronisation of least predicted time for a shard; none for one replica.

    Each way is priced by itself, latencies included; of ways that cost alike, the first of dense, sparse, all-gather.

    Args:
        placed: The shard, with any synchronisation.
        group_batch_size: Samples per step of the replica group.
        comm: Prices collectives.
        topology: Of the replica group.
    """
    return cheapest_syncs([placed], group_batch_size, comm, topology)[0]


def cheapest_syncs(
    placed_N: Sequence[PlacedShard], group_batch_size: int, comm: CommModel, topology: Topology
) -> list[GradSync]:
    """As `cheapest_sync`, of many shards."""
    found = [GradSync.NONE] * len(placed_N)
    copied = [index for index, placed in enumerate(placed_N) if len(placed.replicas) > 1]
    if not copied:
        return found
    by_way = sync_bytes_by_way([placed_N[index] for index in copied], group_batch_size)
    ways = [how for how in GradSync if how is not GradSync.NONE]
    cheapest_N = np.argmin([syncs_ms(by_way[how], comm, topology) for how in ways], axis=0)
    for index, way in zip(copied, cheapest_N.tolist(), strict=True):
        found[index] = ways[way]
    return found
