"""Plans that both engines of the runtime execute."""

from __future__ import annotations

from enum import StrEnum

from autoshard.core import PlacedShard, Shard, ShardingPlan, TableSet, Tier, Topology
from autoshard.core.shard import Split


class Layout(StrEnum):
    """How the tables of a plan are held."""

    TABLE_WISE = "table-wise"
    """Each on one rank."""
    ROW_WISE = "row-wise"
    """Each in equal blocks of rows on all ranks."""
    MIXED = "mixed"
    """Every second one in blocks of rows, the others on one rank each."""


def plan_of(layout: Layout, tables: TableSet, topology: Topology) -> ShardingPlan:
    """Deals tables to ranks, in turn by falling lookups times dim; sums of bags are exchanged.

    A table with too few rows for a block on every rank is on one rank in all layouts: TorchRec does not execute it
    otherwise.
    """
    R = topology.world_size
    order = sorted(tables.tables, key=lambda table: -table.pooling_factor * table.embedding_dim)
    shards = []
    for number, table in enumerate(order):
        has_blocks = table.num_embeddings > -(-table.num_embeddings // R) * (R - 1)
        if has_blocks and (layout is Layout.ROW_WISE or (layout is Layout.MIXED and number // R % 2)):
            shards.append(
                PlacedShard(
                    shard=Shard.whole(table), tier=Tier.ROW_WISE, replicas=(tuple(range(R)),), split=Split.BLOCK
                )
            )
        else:
            shards.append(PlacedShard.table_wise(Shard.whole(table), number % R))
    return ShardingPlan(tables=tables, topology=topology, shards=tuple(shards))
