"""Synchronisation of replica groups: its collectives, what they send and cost, and which rows are cheaper to average.

Shape suffixes: R ranks of a replica group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from autoshard.core import CommModel, EmbeddingTable, ReplicaGroups, ShardingPlan, SyncRows, TableSet, Topology
from autoshard.core.costs import MsArray
from autoshard.core.plan import HeldShard

#: Bytes of the mark of a row.
_MARK_BYTES: Final = 1


def group_sync_bytes(plan: ShardingPlan, held: Sequence[HeldShard]) -> tuple[MsArray, ...]:
    """Bytes that each rank puts into the all-reduces of one synchronisation, one array of shape (R,) for each.

    Of all rows, their weights and moments (2D Eq. 1). Of touched rows, a mark for every row, then weights and moments
    of the distinct rows that the batches of all groups look up from one synchronisation to the next.

    Args:
        plan: The whole plan.
        held: What the ranks of one of its groups hold.
    """
    all_R, marks_R, touched_R = (np.zeros(plan.group_size) for _ in range(3))
    groups = plan.replica_groups
    is_touched = groups.sync_rows is SyncRows.TOUCHED
    for shard in held:
        local = shard.local
        if not is_touched:
            all_R[shard.ranks] += local.memory_bytes
            continue
        table = plan.tables[local.table]
        # Copies within a group are updated by the lookups of the whole group.
        num_lookups = plan.tables.batch_size * len(table.features) * local.pooling_factor * groups.sync_every
        marks_R[shard.ranks] += local.num_embeddings * _MARK_BYTES
        touched_R[shard.ranks] += local.access.expected_distinct(num_lookups) * _row_bytes(table, local.embedding_dim)
    return (marks_R, touched_R) if is_touched else (all_R,)


def group_sync_ms(plan: ShardingPlan, held: Sequence[HeldShard], comm: CommModel) -> MsArray:
    """Time per step in which the ranks of a replica group average weights and moments with their copies, shape (R,).

    Args:
        plan: The whole plan.
        held: What the ranks of one of its groups hold.
        comm: Prices collectives.
    """
    groups = plan.replica_groups
    replicas = groups.replica_topology(plan.topology)
    ms_R = np.zeros(plan.group_size)
    for bytes_R in group_sync_bytes(plan, held):
        ms_R += _all_reduces_ms(bytes_R, comm, replicas)
    return ms_R / groups.sync_every


def with_cheaper_sync(plan: ShardingPlan, comm: CommModel) -> ShardingPlan:
    """The plan with the rows to average that take its slowest rank less time; all rows where both take as long.

    Args:
        plan: The plan, with any `sync_rows`.
        comm: Prices collectives.
    """
    if plan.replica_groups.num_groups == 1:
        return plan
    held = plan.of_one_group().held_shards()
    plans = [replace(plan, replica_groups=replace(plan.replica_groups, sync_rows=rows)) for rows in SyncRows]
    return min(plans, key=lambda one: group_sync_ms(one, held, comm).max())


def least_sync_ms(tables: TableSet, groups: ReplicaGroups, topology: Topology, comm: CommModel) -> float:
    """Time per step that synchronisation takes at least, however tables are sharded: that of the mean rank.

    Args:
        tables: All tables.
        groups: The groups, with the rows that they average.
        topology: Of the world.
        comm: Prices collectives.
    """
    num_bytes = [float(tables.storage_bytes)]
    if groups.sync_rows is SyncRows.TOUCHED:
        num_samples = tables.batch_size * groups.sync_every
        touched = sum(
            table.access.expected_distinct(num_samples * table.pooling_factor) * _row_bytes(table, table.embedding_dim)
            for table in tables.tables
        )
        num_bytes = [float(sum(table.num_embeddings for table in tables.tables) * _MARK_BYTES), touched]
    size, replicas = groups.group_size(topology), groups.replica_topology(topology)
    return sum(comm.all_reduce_ms(one / size, replicas) for one in num_bytes) / groups.sync_every


def _row_bytes(table: EmbeddingTable, embedding_dim: int) -> int:
    return embedding_dim * table.dtype.num_bytes + table.optimizer.state_bytes_per_row(embedding_dim)


def _all_reduces_ms(bytes_R: MsArray, comm: CommModel, topology: Topology) -> MsArray:
    """All-reduces of different sizes, shape (R,)."""
    distinct, which_R = np.unique(bytes_R, return_inverse=True)
    return np.array([comm.all_reduce_ms(one, topology) for one in distinct.tolist()])[which_R.reshape(-1)]
