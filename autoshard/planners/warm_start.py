"""Plans to start from: an older plan of the same tables, as a plan of the task at hand."""

from __future__ import annotations

import logging
from dataclasses import replace

from autoshard.core import EmbeddingTable, PlacedShard, RowsBy, ShardingPlan
from autoshard.core.errors import InvalidPlanError
from autoshard.core.quoting import shown
from autoshard.planners.planner import PlanRequest
from autoshard.validator import validate_plan

_log = logging.getLogger(__name__)


def start_of(request: PlanRequest) -> ShardingPlan | None:
    """The request's start with the tables, topology and payload of the request; None if there is none, or none fits.

    Access frequencies, batch sizes, links and memory may have changed since the plan was made. Where it exceeds the
    memory or breaks a constraint now, a warning says so, and it is no start.

    Raises:
        InvalidPlanError: If it is of other tables or of another number of ranks.
    """
    plan = request.start
    if plan is None:
        return None
    _check_ranks(plan, request)
    tables = _same_tables(plan, request)
    shards = tuple(_placed(placed, tables[placed.shard.table.name]) for placed in plan.shards)
    moved = ShardingPlan(
        tables=request.tables,
        topology=request.topology,
        shards=shards,
        replica_groups=plan.replica_groups,
        payload=request.payload,
    )
    try:
        validate_plan(moved)
    except InvalidPlanError as error:
        _log.warning("the start is left out, it is no plan for this task: %s", error)
        return None
    return moved


def _check_ranks(plan: ShardingPlan, request: PlanRequest) -> None:
    there, here = plan.topology.world_size, request.topology.world_size
    if there != here:
        raise InvalidPlanError(f"must be a plan for {here} ranks, got one for {there}", field="start")


def _same_tables(plan: ShardingPlan, request: PlanRequest) -> dict[str, EmbeddingTable]:
    """The request's tables by name, which are those of the plan."""
    here = {table.name: table for table in request.tables.tables}
    there = {table.name: table for table in plan.tables.tables}
    for name in here:
        if name not in there:
            raise InvalidPlanError(f"must be a plan of the same tables; it has no table {shown(name)}", field="start")
    for name, old in there.items():
        if name not in here:
            raise InvalidPlanError(
                f"must be a plan of the same tables; the task has no table {shown(name)}", field="start"
            )
        sizes = [(table.num_embeddings, table.embedding_dim) for table in (here[name], old)]
        if sizes[0] != sizes[1]:
            (rows, dim), (old_rows, old_dim) = sizes
            raise InvalidPlanError(
                f"must be a plan of the same tables; {shown(name)} has {rows:,} rows of dimension {dim} here, "
                f"{old_rows:,} of {old_dim} there",
                field="start",
            )
    return here


def _placed(placed: PlacedShard, table: EmbeddingTable) -> PlacedShard:
    if placed.shard.rows.by is RowsBy.ACCESS_RANK and table.row_order is None:
        raise InvalidPlanError(
            f"cuts table {shown(table.name)} by access rank, which has no row order here", field="start"
        )
    return replace(placed, shard=replace(placed.shard, table=table))
