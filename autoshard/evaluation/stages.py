"""Collectives of a step, priced: within a replica group, and between the groups.

Shape suffixes: R ranks of a replica group, N ranks or plans, 2 kinds of bytes: all-reduced and all-gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.core import CommModel, CostModels, GradSync, PlacedShard, ShardingPlan, Topology
from autoshard.core.costs import MsArray
from autoshard.core.plan import HeldShard
from autoshard.evaluation.group_sync import group_sync_ms
from autoshard.evaluation.traffic import Stream, SyncBytes, Traffic

#: Bytes of the number of rows that a rank announces before it gathers their ids.
_COUNT_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Collectives of a step per rank, in milliseconds as the model of collectives has them.

    Attributes:
        topology: Of one replica group, over which all but the last are.
        forward_ms_R: Of embeddings: the all-to-all, and the reduce-scatter of sums.
        backward_ms_R: Of their gradients: the all-to-all, and the all-gather.
        reduce_scatter_ms: The reduce-scatter's share, alike on all ranks.
        all_gather_ms: The all-gather's.
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
    ) -> Stages:
        """Prices what a plan sends.

        Args:
            plan: The plan.
            group: What one of its replica groups does.
            costs: Models to price it with.
            traffic: Of the group.
            held: What its ranks hold.
        """
        links = traffic.links(group.topology)

        def all_to_all(stream: Stream) -> MsArray:
            return costs.comm.links_ms(links[stream], group.topology)

        reduce_scatter_ms = costs.comm.reduce_scatter_ms(traffic.scattered_bytes(Stream.FORWARD), group.topology)
        all_gather_ms = costs.comm.all_gather_ms(traffic.scattered_bytes(Stream.BACKWARD), group.topology)
        return cls(
            topology=group.topology,
            # Ids can only travel once the lengths have told how many there are (Neo Sec. 7.1).
            input_ms_R=all_to_all(Stream.LENGTHS) + all_to_all(Stream.IDS),
            forward_ms_R=all_to_all(Stream.FORWARD) + reduce_scatter_ms,
            backward_ms_R=all_to_all(Stream.BACKWARD) + all_gather_ms,
            reduce_scatter_ms=reduce_scatter_ms,
            all_gather_ms=all_gather_ms,
            sync_ms_R=syncs_ms(np.stack([traffic.reduced_R, traffic.gathered_R], axis=1), costs.comm, group.topology),
            replicas=plan.replica_groups.replica_topology(plan.topology),
            group_sync_ms_R=group_sync_ms(plan, held, costs.comm),
        )


def sync_ms(synced: SyncBytes, comm: CommModel, topology: Topology) -> float:
    """Time of the collectives in which replicas sum their gradients: what is gathered first, then what is reduced.

    An all-gather of the numbers of rows goes before that of their ids, as the runtime has it.

    Args:
        synced: Of all shards of a rank.
        comm: Prices collectives.
        topology: Of the replica group.
    """
    gather_ms = 0.0
    if synced.gathered > 0:
        gather_ms = comm.all_gather_ms(float(_COUNT_BYTES * topology.world_size), topology)
        gather_ms += comm.all_gather_ms(synced.gathered, topology)
    return gather_ms + comm.all_reduce_ms(synced.reduced, topology)


def syncs_ms(bytes_N2: MsArray, comm: CommModel, topology: Topology) -> MsArray:
    """`sync_ms` of N ranks or plans, shape (N,).

    Args:
        bytes_N2: Bytes that are reduced, and bytes that are gathered.
        comm: Prices collectives.
        topology: Of the replica group.
    """
    distinct, which_N = np.unique(bytes_N2, axis=0, return_inverse=True)
    synced = [SyncBytes(reduced=reduced, gathered=gathered) for reduced, gathered in distinct.tolist()]
    return np.array([sync_ms(one, comm, topology) for one in synced])[which_N.reshape(-1)]


def cheapest_sync(placed: PlacedShard, group_batch_size: int, comm: CommModel, topology: Topology) -> GradSync:
    """The gradient synchronisation of least predicted time for a shard; none for one replica.

    Each way is priced by itself, latencies included; of ways that cost alike, the first of dense, sparse, all-gather.

    Args:
        placed: The shard, with any synchronisation.
        group_batch_size: Samples per step of the replica group.
        comm: Prices collectives.
        topology: Of the replica group.
    """
    if len(placed.replicas) == 1:
        return GradSync.NONE

    def way_ms(how: GradSync) -> float:
        return sync_ms(SyncBytes.of(replace(placed, grad_sync=how), group_batch_size), comm, topology)

    return min((how for how in GradSync if how is not GradSync.NONE), key=way_ms)
