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
from autoshard.core.held import PlacedArrays, sums_by_rank
from autoshard.core.machine import device_family
from autoshard.evaluation.device_memory import device_memory
from autoshard.evaluation.stages import collectives_ms

#: Bytes of the mark of a row.
_MARK_BYTES: Final = 1
#: What a rank works in one synchronisation besides its collectives, by device family: milliseconds whatever is in it,
#: and for a byte that it puts into each of its all-reduces. Fitted to 13 plans in virtual time, as
#: `core.step.ENGINE_WORK`.
_WORK_MS: Final[Mapping[str, Mapping[SyncRows, tuple[float, ...]]]] = {
    "cpu": {SyncRows.ALL: (0.9, 0.12e-6), SyncRows.TOUCHED: (1.9, 3.3e-6, 1.0e-6)}
}
#: On others, what that moves of what is averaged, in gathers of so many bytes: all rows are divided in place, marks are
#: joined, searched and cleared, touched rows are gathered, joined, divided and put back.
_MOVES_OF_ALL, _MOVES_OF_MARKS, _MOVES_OF_TOUCHED = 1, 1, 3


def group_sync_bytes(plan: ShardingPlan, held: PlacedArrays) -> tuple[MsArray, ...]:
    """Bytes that each rank puts into the all-reduces of one synchronisation, one array of shape (R,) for each.

    Of all rows, their weights and moments (2D Eq. 1). Of touched rows, a mark for every row, then weights and moments
    of the distinct rows that the batches of all groups look up from one synchronisation to the next.

    Args:
        plan: The whole plan.
        held: What the ranks of one of its groups hold.
    """
    groups = plan.replica_groups

    def by_rank(bytes_U: Sequence[float]) -> MsArray:
        return sums_by_rank(np.array(bytes_U, dtype=np.float64)[held.local_M], held.ranks_M, plan.group_size)

    if groups.sync_rows is not SyncRows.TOUCHED:
        return (by_rank([local.memory_bytes for local in held.locals_U]),)
    touched = []
    for local, kind in zip(held.locals_U, held.kind_U, strict=True):
        table = held.first_K[kind].shard.table
        # Copies within a group are updated by the lookups of the whole group.
        num_lookups = plan.tables.batch_size * len(table.features) * local.pooling_factor * groups.sync_every
        touched.append(local.access.expected_distinct(num_lookups) * _row_bytes(table, local.embedding_dim))
    return by_rank([local.num_embeddings * _MARK_BYTES for local in held.locals_U]), by_rank(touched)


def group_sync_ms(plan: ShardingPlan, held: PlacedArrays, comm: CommModel) -> MsArray:
    """Time per step in which the ranks of a replica group average weights and moments with their copies, shape (R,).

    Args:
        plan: The whole plan.
        held: What the ranks of one of its groups hold.
        comm: Prices collectives.
    """
    groups, ms_R = plan.replica_groups, np.zeros(plan.group_size)
    if groups.num_groups == 1:
        return ms_R
    replicas = groups.replica_topology(plan.topology)
    once_ms, *ms_per_byte = _work_ms(groups, plan.topology)
    ms_R += once_ms
    for bytes_R, work_ms in zip(group_sync_bytes(plan, held), ms_per_byte, strict=True):
        ms_R += collectives_ms("all_reduce", bytes_R, comm, replicas) + work_ms * bytes_R
    return ms_R / groups.sync_every


def with_cheaper_sync(plan: ShardingPlan, comm: CommModel) -> ShardingPlan:
    """The plan with the rows to average that take its slowest rank less time; all rows where both take as long.

    Args:
        plan: The plan, with any `sync_rows`.
        comm: Prices collectives.
    """
    if plan.replica_groups.num_groups == 1:
        return plan
    held = plan.of_one_group().arrays
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
    once_ms, *ms_per_byte = _work_ms(groups, topology)
    ms = once_ms + sum(
        comm.collective_ms("all_reduce", one / size, replicas) + work_ms * one / size
        for one, work_ms in zip(num_bytes, ms_per_byte, strict=True)
    )
    return ms / groups.sync_every


def _work_ms(groups: ReplicaGroups, topology: Topology) -> tuple[float, ...]:
    """What a rank's own work takes in a synchronisation, whatever is in it, and for a byte of each all-reduce."""
    known = _WORK_MS.get(device_family(topology.device))
    if known is not None:
        return known[groups.sync_rows]
    is_touched = groups.sync_rows is SyncRows.TOUCHED
    moves = (_MOVES_OF_MARKS, _MOVES_OF_TOUCHED) if is_touched else (_MOVES_OF_ALL,)
    bytes_per_s = device_memory(topology.device).gather_bytes_per_s
    return (0.0, *(1e3 * number / bytes_per_s for number in moves))


def _row_bytes(table: EmbeddingTable, embedding_dim: int) -> int:
    return embedding_dim * table.dtype.num_bytes + table.optimizer.state_bytes_per_row(embedding_dim)
