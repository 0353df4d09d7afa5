"""Synchronisation of replica groups: its collectives, what they send and cost, and which rows are cheaper to average.

Shape suffixes: R ranks of a replica group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from autoshard.core import CommModel, EmbeddingTable, ReplicaGroups, ShardingPlan, SyncRows, TableSet, Topology
from autoshard.core.costs import MsArray
from autoshard.core.machine import device_family
from autoshard.core.plan import HeldShard

#: Bytes of the mark of a row.
_MARK_BYTES: Final = 1
#: What a rank works in one synchronisation besides its collectives, by device family: milliseconds whatever is in it,
#: and of a megabyte that it puts into each of its all-reduces. Marks are brought together and searched for rows, which
#: are copied, divided and put back. Fitted to 13 plans in virtual time, as `core.step.ENGINE_WORK`.
_WORK_MS: Final[Mapping[str, Mapping[SyncRows, tuple[float, ...]]]] = {
    "cpu": {SyncRows.ALL: (0.9, 0.12), SyncRows.TOUCHED: (1.9, 3.3, 1.0)}
}


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
    bytes_CR = group_sync_bytes(plan, held)
    once_ms, *megabyte_ms = _work_ms(groups, plan.topology)
    ms_R = np.full(plan.group_size, once_ms)
    for bytes_R, work_ms in zip(bytes_CR, megabyte_ms, strict=True):
        ms_R += _all_reduces_ms(bytes_R, comm, replicas) + work_ms * bytes_R / 1e6
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
    once_ms, *megabyte_ms = _work_ms(groups, topology)
    moved_ms = [
        comm.all_reduce_ms(one / size, replicas) + work_ms * one / size / 1e6
        for one, work_ms in zip(num_bytes, megabyte_ms, strict=True)
    ]
    return (once_ms + sum(moved_ms)) / groups.sync_every


def _work_ms(groups: ReplicaGroups, topology: Topology) -> tuple[float, ...]:
    """What a synchronisation takes a rank besides its collectives: once, and for a megabyte of each."""
    nothing = (0.0,) * (3 if groups.sync_rows is SyncRows.TOUCHED else 2)
    is_alone = groups.num_groups == 1
    return nothing if is_alone else _WORK_MS.get(device_family(topology.device), {}).get(groups.sync_rows, nothing)


def _row_bytes(table: EmbeddingTable, embedding_dim: int) -> int:
    return embedding_dim * table.dtype.num_bytes + table.optimizer.state_bytes_per_row(embedding_dim)


def _all_reduces_ms(bytes_R: MsArray, comm: CommModel, topology: Topology) -> MsArray:
    """All-reduces of different sizes, shape (R,)."""
    distinct, which_R = np.unique(bytes_R, return_inverse=True)
    return np.array([comm.all_reduce_ms(one, topology) for one in distinct.tolist()])[which_R.reshape(-1)]
