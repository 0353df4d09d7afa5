"""What the constraints of tables leave to planners. Shape suffixes: R ranks, S sites."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autoshard.core import EmbeddingTable, TableSet, Tier, Topology
from autoshard.core.errors import InvalidPlanError
from autoshard.core.quoting import shown
from autoshard.planners.space.tiers import num_sites


def check_constraints(tables: TableSet, topology: Topology) -> None:
    """Checks that constraints name tables and ranks that are there.

    Raises:
        InvalidPlanError: If one does not.
    """
    colocated(tables)
    for index, table in enumerate(tables.tables):
        for rank in table.constraints.pinned_ranks:
            if not 0 <= rank < topology.world_size:
                raise InvalidPlanError(
                    f"must be in [0, {topology.world_size}), got {rank}",
                    field=f"tables[{index}].constraints.pinned_ranks",
                )


def allowed_ranks(table: EmbeddingTable, world_size: int) -> NDArray[np.bool_]:
    """Whether the table's pins allow each rank, shape (R,)."""
    pinned = table.constraints.pinned_ranks
    return np.isin(np.arange(world_size), pinned) if pinned else np.ones(world_size, dtype=np.bool_)


def allowed_sites(table: EmbeddingTable, tier: Tier, topology: Topology) -> NDArray[np.bool_]:
    """Whether the table may be held by a tier at each of its sites, memory aside, shape (S,).

    The table's pins must allow all ranks of the site, and its forbidden tiers the tier.
    """
    if tier in table.constraints.forbidden_tiers:
        return np.zeros(num_sites(tier, topology), dtype=np.bool_)
    allowed_SR = allowed_ranks(table, topology.world_size).reshape(num_sites(tier, topology), -1)
    return np.asarray(allowed_SR.all(axis=1))


def colocated(tables: TableSet) -> tuple[tuple[EmbeddingTable, ...], ...]:
    """Tables that must share their ranks together, all others one by one, in the order of each group's first table.

    Raises:
        InvalidPlanError: If a constraint names a table that is not there.
    """
    index_of = {table.name: index for index, table in enumerate(tables.tables)}
    root = list(range(len(index_of)))

    def find(index: int) -> int:
        while root[index] != index:
            index = root[index]
        return index

    for index, table in enumerate(tables.tables):
        for name in table.constraints.colocate_with:
            if name not in index_of:
                raise InvalidPlanError(
                    f"names {shown(name)}, which is no table", field=f"tables[{index}].constraints.colocate_with"
                )
            low, high = sorted((find(index), find(index_of[name])))
            root[high] = low
    groups: dict[int, list[EmbeddingTable]] = {}
    for index, table in enumerate(tables.tables):
        groups.setdefault(find(index), []).append(table)
    return tuple(tuple(group) for group in groups.values())
