"""How large a task may be: what planning takes grows with tables times ranks, whatever the time limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoshard.api import MAX_TIME_LIMIT_S
from autoshard.core import TableSet, Topology
from autoshard.core.errors import FormatError, InputError
from server.settings import ServerSettings


def check_documents(tables: object, topology: object, settings: ServerSettings) -> None:
    """Checks counts that documents state, before they are read in full.

    Args:
        tables: The object of a tables.json, a name, a table list, or what is none of these.
        topology: The object of a topology.json, likewise.
        settings: Limits.

    Raises:
        InputError: If there are more tables or ranks than planned for.
    """
    listed = tables.get("tables", tables.get("rows")) if isinstance(tables, Mapping) else tables
    if isinstance(listed, list):
        _check_count(len(listed), settings.max_tables, "tables", "tables.tables")
    ranks = topology.get("world_size") if isinstance(topology, Mapping) else None
    if isinstance(ranks, int):
        _check_count(ranks, settings.max_ranks, "ranks", "topology.world_size")


def check_tables(tables: TableSet, settings: ServerSettings) -> None:
    """Checks the size of tables, however they were given: bundled, as a document, as a text or as a list.

    Raises:
        InputError: If there are more tables, or more knots, than planned for.
    """
    num_knots = sum(len(table.access.ranks_K) for table in tables.tables)
    _check_count(len(tables.tables), settings.max_tables, "tables", "tables")
    _check_count(num_knots, settings.max_knots, "knots of access curves", "tables")


def check_task(tables: TableSet, topology: Topology, settings: ServerSettings) -> None:
    """Checks the size of a task, of bundled tables and topologies too.

    Raises:
        InputError: If there are more tables, knots or ranks than planned for, or more tables and ranks together.
    """
    num_tables, num_ranks = len(tables.tables), topology.world_size
    check_tables(tables, settings)
    _check_count(num_ranks, settings.max_ranks, "ranks", "topology")
    if num_tables * num_ranks > settings.max_placements:
        raise InputError(
            f"tables times ranks must be at most {settings.max_placements:,}, "
            f"got {num_tables:,} x {num_ranks:,} = {num_tables * num_ranks:,}",
            field="topology",
        )


def most_ranks(tables: TableSet, settings: ServerSettings) -> int:
    """Most ranks of a task with these tables."""
    return min(settings.max_ranks, settings.max_placements // len(tables.tables))


def check_num_shards(shards: object, settings: ServerSettings) -> None:
    """Checks the number of a plan's shards before they are read.

    Args:
        shards: The list of a plan.json, or what is none.
        settings: Limits.

    Raises:
        InputError: If there are too many.
    """
    if isinstance(shards, list):
        _check_count(len(shards), settings.max_shards, "shards", "plan.shards")


def check_points(tables: TableSet, ranks: Sequence[int], points_per_rank: int, settings: ServerSettings) -> None:
    """Checks the size of a sweep, before its points are made.

    Args:
        tables: Tables of every point.
        ranks: Numbers of ranks.
        points_per_rank: Points with each of these numbers.
        settings: Limits.

    Raises:
        InputError: If there are more points, tables, knots or ranks than planned for, or more of all together.
    """
    _check_count(len(ranks) * points_per_rank, settings.max_points, "points", "ranks")
    check_tables(tables, settings)
    _check_count(max(ranks), settings.max_ranks, "ranks", "ranks")
    placements = len(tables.tables) * sum(ranks) * points_per_rank
    if placements > settings.max_placements:
        raise InputError(
            f"tables times ranks of all points must be at most {settings.max_placements:,}, got {placements:,}",
            field="ranks",
        )


def check_total_time(count: int, what: str, time_limit_s: float) -> None:
    """Checks the time limits of a request's parts together.

    Raises:
        FormatError: If they are longer than that of one plan may be.
    """
    if count * time_limit_s > MAX_TIME_LIMIT_S:
        raise FormatError(
            f"times the {count} {what} must be at most {MAX_TIME_LIMIT_S:g} s, got {time_limit_s:g} x {count}",
            field="time_limit_s",
        )


def _check_count(count: int, most: int, what: str, field: str) -> None:
    if count > most:
        raise InputError(f"must have at most {most:,} {what}, got {count:,}", field=field)
