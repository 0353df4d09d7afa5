"""What it takes to load a checkpoint under another plan."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoshard.core import EmbeddingTable, ShardingPlan
from autoshard.runtime.checkpoints.checkpoint import Checkpoint

#: Bytes of a moment.
_MOMENT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """What a rank of a replica group loads.

    Attributes:
        rank: The rank.
        read_bytes: Weights and moments that it reads from files: an even share of the rows of each table.
        held_bytes: Weights and moments that it then holds by the plan.
    """

    rank: int
    read_bytes: int
    held_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resharding:
    """Loading of a checkpoint under a plan.

    Attributes:
        ranks: Those of a replica group; each group loads all.
        averaged: Tables whose row-wise moments become means: a part of their columns has several in the checkpoint.
    """

    ranks: tuple[RankShare, ...]
    averaged: tuple[str, ...]


def reshard(checkpoint: Checkpoint, plan: ShardingPlan) -> Resharding:
    """What loading under a plan takes; nothing but the manifest and the saved plan is read.

    Raises:
        InputError: If the plan is of other tables; the field is the table.
    """
    checkpoint = checkpoint.chain()[0]  # deltas have rows of the same tables
    saved = {one.name: one for one in checkpoint.manifest.tables}
    tables = plan.tables.tables
    checkpoint.check_tables({saved[one.name].key if one.name in saved else one.name: one for one in tables})
    read, held, averaged = [0] * plan.group_size, [0] * plan.group_size, []
    for table in tables:
        tensors = saved[table.name].tensors
        row_bytes = table.embedding_dim * table.dtype.num_bytes
        row_bytes += sum(_MOMENT_BYTES * math.prod(tensors[one.name][1:]) for one in table.optimizer.moments)
        share = -(-table.num_embeddings // plan.group_size)
        for rank in range(plan.group_size):
            read[rank] += row_bytes * max(0, min(share, table.num_embeddings - rank * share))
        for moment in table.optimizer.moments:
            parts = _parts(checkpoint.plan, table, math.prod(tensors[moment.name][1:]))
            if moment.is_per_row and not parts <= _bounds(plan, table):
                averaged.append(table.name)
    for one in plan.held_shards():
        for rank in one.ranks.tolist():
            held[rank] += one.local.memory_bytes
    ranks = enumerate(zip(read, held, strict=True))
    return Resharding(
        ranks=tuple(RankShare(rank=rank, read_bytes=of, held_bytes=to) for rank, (of, to) in ranks),
        averaged=tuple(averaged),
    )


def _bounds(plan: ShardingPlan, table: EmbeddingTable) -> set[int]:
    """Where a plan cuts the columns of a table, from 0 to its last."""
    return {bound for placed in plan.shards if placed.shard.table.name == table.name for bound in placed.shard.columns}


def _parts(plan: ShardingPlan, table: EmbeddingTable, num_parts: int) -> set[int]:
    """Bounds of the columns that saved moments are of: those of the plan, or as even as they are."""
    bounds, dim = _bounds(plan, table), table.embedding_dim
    return bounds if len(bounds) == num_parts + 1 else set(range(0, dim + 1, max(1, dim // num_parts)))
