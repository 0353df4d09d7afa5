"""Row groups with the ranks that they are read from, as the shards of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from autoshard.core import Exchange, GradSync, PlacedShard, Pooling, RowRange, RowsBy, Shard, TableSet, Tier, Topology
from autoshard.evaluation.traffic import cheaper_exchange
from autoshard.planners.oper.row_group import RowGroup
from autoshard.planners.space.options import placed_shard


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldGroup:
    """A row group and, for each rank, the rank that it reads it from; who is read from holds a copy."""

    group: RowGroup
    read_from: tuple[int, ...]


def placed_shards(held: Iterable[HeldGroup], tables: TableSet, topology: Topology) -> tuple[PlacedShard, ...]:
    """Shards table by table, hottest rows first; neighbouring groups that are held alike make one shard."""
    of_table: dict[str, list[tuple[Shard, tuple[int, ...]]]] = {table.name: [] for table in tables.tables}
    for one in held:
        for shard in one.group.shards:
            of_table[shard.table.name].append((shard, one.read_from))
    placed: list[PlacedShard] = []
    for parts in of_table.values():
        parts.sort(key=lambda part: part[0].rows.start)
        for read_from, alike in groupby(parts, key=lambda part: part[1]):
            placed.append(_placed(_joined([shard for shard, _ in alike]), read_from, topology))
    return tuple(placed)


def with_exchange(placed: Iterable[PlacedShard], exchange: Exchange | None) -> tuple[PlacedShard, ...]:
    """The shards with what owners answer; None for what each shard answers with fewer values, sequences aside."""
    changed = []
    for one in placed:
        is_sequence = one.shard.table.pooling is Pooling.SEQUENCE
        wanted = cheaper_exchange(one.shard, len(one.replicas[0])) if exchange is None or is_sequence else exchange
        changed.append(replace(one, exchange=wanted))
    return tuple(changed)


def _joined(shards: Sequence[Shard]) -> Shard:
    first, start, stop = shards[0], shards[0].rows.start, shards[-1].rows.stop
    if stop - start == first.table.num_embeddings:
        return Shard.whole(first.table)
    return replace(first, rows=RowRange(start=start, stop=stop, by=RowsBy.ACCESS_RANK))


def _placed(shard: Shard, read_from: tuple[int, ...], topology: Topology) -> PlacedShard:
    holders = sorted(set(read_from))
    if len(holders) == 1:
        return placed_shard(shard, Tier.TABLE_WISE, topology, holders[0])
    forbidden = shard.table.constraints.forbidden_tiers
    if read_from == tuple(range(topology.world_size)) and Tier.DATA_PARALLEL not in forbidden:
        return placed_shard(shard, Tier.DATA_PARALLEL, topology)
    replica_of = {rank: index for index, rank in enumerate(holders)}
    return PlacedShard(
        shard=shard,
        tier=Tier.REPLICATED,
        replicas=tuple((rank,) for rank in holders),
        grad_sync=GradSync.SPARSE,
        fetch=tuple(replica_of[rank] for rank in read_from),
    )
