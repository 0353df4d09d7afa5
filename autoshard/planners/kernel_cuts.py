"""Tables cut by columns for single ranks: several ways, by what one shard may add to its rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autoshard.core import CostModel, Shard, TableSet, Tier, Topology
from autoshard.planners.space.constraints import colocated
from autoshard.planners.space.options import column_counts, column_cuts, locals_of, placed_shard

#: Largest kernel time of a shard alone, over the mean of the ranks: memory alone decides first.
_LUMPS = (math.inf, 1.0, 0.5, 0.25)

Cutting = tuple[Shard, ...]
"""Shards that tile all tables."""
_Ways = list[tuple[float, Cutting]]
"""Ways to cut one table, with the kernel time of the widest shard alone; the fewest cuts first."""


def column_cuttings(tables: TableSet, topology: Topology, model: CostModel, min_partition: int = 0) -> list[Cutting]:
    """Ways to cut the tables by columns, each once, those with the fewest cuts first.

    Each way has a limit of what a shard's kernels take alone: none, then once, half and a quarter of what a rank takes
    in the mean if tables are whole. A table whose shards would be above it, or too large for the memory of any rank,
    is cut into 2, 4, 8 ... shards, as few as keep to the limit or as many as are wide enough. Tables that must share
    their ranks stay whole.

    Args:
        tables: The task's tables.
        topology: The task's topology.
        model: Prices shards.
        min_partition: Least columns of a column shard; 0 for 32 bytes of a row.

    Raises:
        ModelError: If the model cannot price a shard.
    """
    whole = [Shard.whole(table) for table in tables.tables]
    whole_ms = _alone_ms(whole, topology, tables.batch_size, model)
    mean_ms = sum(whole_ms) / topology.world_size
    room = max(topology.hbm_bytes)
    least_ms = min(_LUMPS) * mean_ms
    alone = {group[0].name for group in colocated(tables) if len(group) == 1}
    cut = [
        (table, alone_ms)
        for table, alone_ms in zip(tables.tables, whole_ms, strict=True)
        if table.name in alone and (alone_ms > least_ms or table.storage_bytes > room)
    ]
    parted = [
        column_cuts(Shard.whole(table), count)
        for table, _ in cut
        for count in column_counts(table, topology.world_size, min_partition)
    ]
    widest = [max(parts, key=lambda part: part.embedding_dim) for parts in parted]
    ways: dict[str, _Ways] = {table.name: [(alone_ms, (Shard.whole(table),))] for table, alone_ms in cut}
    for parts, alone_ms in zip(parted, _alone_ms(widest, topology, tables.batch_size, model), strict=True):
        ways[parts[0].table.name].append((alone_ms, parts))
    return _by_lumps(whole, ways, mean_ms, room)


def _by_lumps(whole: Sequence[Shard], ways: Mapping[str, _Ways], mean_ms: float, room: int) -> list[Cutting]:
    """Tables cut by each limit, those without ways to be cut whole; each cutting once."""
    cuttings = []
    for lump in _LUMPS:
        chosen = {name: _fewest(of_table, lump * mean_ms, room) for name, of_table in ways.items()}
        cuttings.append(tuple(part for shard in whole for part in chosen.get(shard.table.name, (shard,))))
    return list(dict.fromkeys(cuttings))


def _fewest(ways: _Ways, most_ms: float, room: int) -> Cutting:
    """The parts with the fewest cuts that keep to the limits; the narrowest if none does."""
    return next(
        (
            parts
            for alone_ms, parts in ways
            if alone_ms <= most_ms and max(part.storage_bytes for part in parts) <= room
        ),
        ways[-1][1],
    )


def _alone_ms(shards: Sequence[Shard], topology: Topology, batch_size: int, model: CostModel) -> list[float]:
    if not shards:
        return []
    locals_ = locals_of([placed_shard(shard, Tier.TABLE_WISE, topology) for shard in shards], batch_size)
    alone_ms: list[float] = model.predict_ms(model.encode(locals_)).tolist()
    return alone_ms
