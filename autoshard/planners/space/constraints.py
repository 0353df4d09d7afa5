"""What the constraints of tables leave to planners. Shape suffixes: R ranks, S sites."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autoshard.core import EmbeddingTable, TableSet, Tier, Topology
from autoshard.core.errors import InvalidPlanError
from autoshard.core.quoting import shown
from autoshard.planners.space.tiers import num_sites


def place_in_tables(index: int) -> str:
    """Where a table's own constraints stand."""
    return f"tables[{index}].constraints"


def check_constraints(tables: TableSet, topology: Topology, place_of: Callable[[int], str] = place_in_tables) -> None:
    """Checks that constraints name tables and ranks that are there.

    Args:
        tables: The tables.
        topology: The ranks.
        place_of: Where the constraints of a table stand, by its index.

    Raises:
        InvalidPlanError: If one does not; the field is its place.
    """
    colocated(tables, place_of)
    for index, table in enumerate(tables.tables):
        for rank in table.constraints.pinned_ranks:
            if not 0 <= rank < topology.world_size:
                raise InvalidPlanError(
                    f"must be in [0, {topology.world_size}), got {rank}",
                    field=f"{place_of(index)}.pinned_ranks",
                )


def allowed_ranks(table: EmbeddingTable, world_size: int) -> NDArray[np.bool_]:
    """Whether the table's pins allow each rank, shape (R,)."""
    return _allowed(table.constraints.pinned_ranks, False, world_size, world_size)


def allowed_sites(table: EmbeddingTable, tier: Tier, topology: Topology) -> NDArray[np.bool_]:
    """Whether the table may be held by a tier at each of its sites, memory aside, shape (S,).

    The table's pins must allow all ranks of the site, and its forbidden tiers the tier.
    """
    is_forbidden = tier in table.constraints.forbidden_tiers
    return _allowed(table.constraints.pinned_ranks, is_forbidden, num_sites(tier, topology), topology.world_size)


# Most tables have the same constraints: none.
@lru_cache(maxsize=1024)
def _allowed(pinned_ranks: tuple[int, ...], is_forbidden: bool, num_sites: int, world_size: int) -> NDArray[np.bool_]:
    """Whether a table may be held at each of the sites, which are alike in size; not to be written to."""
    allowed_R = np.full(world_size, not is_forbidden)
    if pinned_ranks:
        allowed_R &= np.isin(np.arange(world_size), pinned_ranks)
    allowed_S: NDArray[np.bool_] = np.asarray(allowed_R.reshape(num_sites, -1).all(axis=1))
    allowed_S.setflags(write=False)
    return allowed_S


def colocated(
    tables: TableSet, place_of: Callable[[int], str] = place_in_tables
) -> tuple[tuple[EmbeddingTable, ...], ...]:
    """Tables that must share their ranks together, all others one by one, in the order of each group's first table.

    Args:
        tables: The tables.
        place_of: As of `check_constraints`.

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
                    f"names {shown(name)}, which is no table", field=f"{place_of(index)}.colocate_with"
                )
            low, high = sorted((find(index), find(index_of[name])))
            root[high] = low
    groups: dict[int, list[EmbeddingTable]] = {}
    for index, table in enumerate(tables.tables):
        groups.setdefault(find(index), []).append(table)
    return tuple(tuple(group) for group in groups.values())
