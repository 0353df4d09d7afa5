"""Row groups as the shards of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from autoshard.core import (
    Exchange,
    GradSync,
    PlacedShard,
    Pooling,
    Shard,
    ShardingPlan,
    TableSet,
    Tier,
)
from autoshard.evaluation.traffic import cheaper_exchange
from autoshard.planners.oper.row_group import RowGroup


def placed_shards(group: RowGroup, read_from: Sequence[int]) -> list[PlacedShard]:
    """A group's shards with a copy on each rank that is read from; `read_from` has one for each rank."""
    holders = sorted(set(read_from))
    if len(holders) == 1:
        return [PlacedShard.table_wise(shard, holders[0]) for shard in group.shards]
    replica_of = {rank: index for index, rank in enumerate(holders)}
    is_own = list(read_from) == holders and group.may_be(Tier.DATA_PARALLEL)
    return [
        PlacedShard(
            shard=shard,
            tier=Tier.DATA_PARALLEL if is_own else Tier.REPLICATED,
            replicas=tuple((rank,) for rank in holders),
            grad_sync=GradSync.SPARSE,
            fetch=None if is_own else tuple(replica_of[rank] for rank in read_from),
        )
        for shard in group.shards
    ]


def merged_shards(placed: Iterable[PlacedShard], tables: TableSet) -> tuple[PlacedShard, ...]:
    """Shards table by table, hottest rows first; neighbours that are held alike make one shard."""
    order = {table.name: index for index, table in enumerate(tables.tables)}
    in_order = sorted(placed, key=lambda one: (order[one.shard.table.name], one.shard.rows.start))
    held = groupby(in_order, key=lambda one: (one.shard.table.name, one.tier, one.replicas, one.fetch))
    return tuple(_merged(list(alike)) for _, alike in held)


def with_exchange(plan: ShardingPlan, exchange: Exchange | None) -> ShardingPlan:
    """The plan with what owners answer; None for what each shard answers with fewer values, sequences aside."""
    changed = []
    for one in plan.shards:
        is_sequence = one.shard.table.pooling is Pooling.SEQUENCE
        wanted = cheaper_exchange(one.shard, len(one.replicas[0])) if exchange is None or is_sequence else exchange
        changed.append(replace(one, exchange=wanted))
    return replace(plan, shards=tuple(changed))


def _merged(alike: Sequence[PlacedShard]) -> PlacedShard:
    first, start, stop = alike[0].shard, alike[0].shard.rows.start, alike[-1].shard.rows.stop
    if stop - start == first.table.num_embeddings:
        return replace(alike[0], shard=Shard.whole(first.table))
    return replace(alike[0], shard=replace(first, rows=replace(first.rows, start=start, stop=stop)))
