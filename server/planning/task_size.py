"""How large a task may be: what planning takes grows with tables times ranks, whatever the time limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoshard.core import TableSet, Topology
from autoshard.core.errors import InputError
from server.bodies import PlanBody
from server.settings import ServerSettings


def check_documents(body: PlanBody, settings: ServerSettings) -> None:
    """Checks counts that a body states, before it is read in full.

    Args:
        body: Its documents may still be wrong in any other way.
        settings: Limits.

    Raises:
        InputError: If there are more tables, ranks or knots than planned for.
    """
    tables = body.tables.get("tables") if isinstance(body.tables, Mapping) else None
    if isinstance(tables, list):
        _check_count(len(tables), settings.max_tables, "tables", "tables.tables")
        _check_count(sum(map(_num_knots, tables)), settings.max_knots, "knots of access curves", "tables.tables")
    ranks = body.topology.get("world_size") if isinstance(body.topology, Mapping) else None
    if isinstance(ranks, int):
        _check_count(ranks, settings.max_ranks, "ranks", "topology.world_size")


def check_task(tables: TableSet, topology: Topology, settings: ServerSettings) -> None:
    """Checks the size of a task, of bundled tables and topologies too.

    Raises:
        InputError: If there are more tables or ranks than planned for, or more of both together.
    """
    num_tables, num_ranks = len(tables.tables), topology.world_size
    _check_count(num_tables, settings.max_tables, "tables", "tables")
    _check_count(num_ranks, settings.max_ranks, "ranks", "topology")
    if num_tables * num_ranks > settings.max_placements:
        raise InputError(
            f"tables times ranks must be at most {settings.max_placements:,}, "
            f"got {num_tables:,} x {num_ranks:,} = {num_tables * num_ranks:,}",
            field="topology",
        )


def _check_count(count: int, most: int, what: str, field: str) -> None:
    if count > most:
        raise InputError(f"must have at most {most:,} {what}, got {count:,}", field=field)


def _num_knots(table: Any) -> int:
    access = table.get("access") if isinstance(table, dict) else None
    knots = access.get("knots") if isinstance(access, dict) else None
    return len(knots) if isinstance(knots, list) else 0
