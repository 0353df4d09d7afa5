"""What keeps a task from being planned, and changes that let it be, each checked by planning with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np

from autoshard.core import Constraints, TableSet, Topology
from autoshard.core.accepted import MAX_WORLD_SIZE
from autoshard.core.errors import InputError
from autoshard.core.quoting import write_bytes
from autoshard.formats.topology_scaling import scaled_topology
from autoshard.planners.planner import PlanRequest
from autoshard.planners.space.constraints import allowed_ranks, colocated
from autoshard.whatif.changes import TaskChange, planned, with_hbm

#: Planner that cuts tables and holds them in all ways, so that it finds plans where others find none.
_ALL_WAYS = "auto"
_MEMORY_FACTORS = (1.125, 1.25, 1.5, 2, 3, 4, 6, 8, 16, 32, 64, 128, 256, 1024, 4096)
_RANK_FACTORS = (2, 4, 8, 16, 32, 64)
_MIB = 1 << 20
#: Time limit of a trial: it has to find any plan, not a good one.
_TRIAL_LIMIT_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """The first table without room, where whole tables are placed by falling size.

    Attributes:
        table: Its name, or those of all tables that must share its rank.
        rank: The rank that may hold it and has most room left.
        missing_bytes: Bytes of device memory that this rank lacks for it.
    """

    table: str
    rank: int
    missing_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A single change with which the planner found a plan.

    Attributes:
        field: What to change: `topology.memory_bytes.hbm`, `topology.world_size`, `planner` or `tables.constraints`.
        value: What to change it to; null for constraints, which are left out.
        text: The change in words.
        step_ms: Predicted step of the plan that was found.
    """

    field: str
    value: int | str | None
    text: str
    step_ms: float


def find_shortage(tables: TableSet, topology: Topology) -> Shortage | None:
    """Places whole tables by falling size, those with least choice of ranks first, where most room is left.

    Returns:
        The first that finds no room; None if all do, or constraints leave one no rank at all.
    """
    free_R = np.array(topology.hbm_bytes, dtype=np.int64)
    units = []
    for group in colocated(tables):
        allowed_R = np.all([allowed_ranks(table, topology.world_size) for table in group], axis=0)
        units.append((group, allowed_R, sum(table.storage_bytes for table in group)))
    for group, allowed_R, num_bytes in sorted(units, key=lambda unit: (int(unit[1].sum()), -unit[2])):
        if not allowed_R.any():
            return None
        rank = int(np.where(allowed_R, free_R, -1).argmax())
        if num_bytes > free_R[rank]:
            names = ", ".join(table.name for table in group)
            return Shortage(table=names, rank=rank, missing_bytes=int(num_bytes - free_R[rank]))
        free_R[rank] -= num_bytes
    return None


def find_remedies(
    planner: str, request: PlanRequest, *, budget_s: float, trial_s: float, max_ranks: int = MAX_WORLD_SIZE
) -> tuple[Remedy, ...]:
    """Looks for single changes with which a task that has no feasible plan has one.

    Tries more memory per rank, more ranks, another planner, and tables without constraints, each by planning with it;
    of every kind the smallest change of a few is told.

    Args:
        planner: The planner that found no plan.
        request: Its task.
        budget_s: Seconds after which no trial is begun.
        trial_s: Seconds that a trial is expected to take; one that would not end within the budget is not begun.
        max_ranks: Most ranks to try.

    Returns:
        The changes that were found, at most one of each kind.
    """
    request = replace(request, time_limit_s=min(request.time_limit_s, _TRIAL_LIMIT_S))
    found: dict[str, Remedy] = {}
    changes = chain(
        _more_memory(planner, request),
        _more_ranks(planner, request, max_ranks),
        _other_planner(planner, request),
        _free_tables(planner, request),
    )
    open_changes = (change for change in changes if change.field not in found)
    for change, plan in planned(open_changes, budget_s=budget_s, trial_s=trial_s):
        step_ms = plan.prices.step_ms.value
        found[change.field] = Remedy(field=change.field, value=change.value, text=change.text, step_ms=step_ms)
    return tuple(found.values())


def _more_memory(planner: str, request: PlanRequest) -> Iterator[TaskChange]:
    topology, needed = request.topology, request.tables.storage_bytes
    hbm = topology.hbm_bytes
    shortage = find_shortage(request.tables, topology)
    sizes = {round(factor * max(hbm)) for factor in _MEMORY_FACTORS}
    if shortage is not None:
        sizes.add(hbm[shortage.rank] + shortage.missing_bytes)
    for size in sorted(-(-size // _MIB) * _MIB for size in sizes):
        if sum(max(size, there) for there in hbm) >= needed:
            yield TaskChange(
                field="topology.memory_bytes.hbm",
                value=size,
                text=f"{write_bytes(size)} of device memory on every rank",
                planner=planner,
                make=partial(replace, request, topology=with_hbm(topology, partial(max, size))),
            )


def _more_ranks(planner: str, request: PlanRequest, max_ranks: int) -> Iterator[TaskChange]:
    needed = request.tables.storage_bytes
    for factor in _RANK_FACTORS:
        num_ranks = factor * request.topology.world_size
        if num_ranks > max_ranks or num_ranks * request.topology.memory_bytes.hbm < needed:
            continue
        try:
            topology = scaled_topology(request.topology, num_ranks)
        except InputError:
            return
        yield TaskChange(
            field="topology.world_size",
            value=num_ranks,
            text=f"{num_ranks:,} such ranks",
            planner=planner,
            make=partial(replace, request, topology=topology),
        )


def _other_planner(planner: str, request: PlanRequest) -> Iterator[TaskChange]:
    if planner != _ALL_WAYS:
        yield TaskChange(
            field="planner",
            value=_ALL_WAYS,
            text=f"the planner {_ALL_WAYS}, which also cuts tables",
            planner=_ALL_WAYS,
            make=partial(replace, request, options={}),
        )


def _free_tables(planner: str, request: PlanRequest) -> Iterator[TaskChange]:
    bound = [table.name for table in request.tables.tables if table.constraints != Constraints()]
    if bound:
        tables = tuple(replace(table, constraints=Constraints()) for table in request.tables.tables)
        yield TaskChange(
            field="tables.constraints",
            text=f"no constraints of the {len(bound):,} tables that have some",
            planner=planner,
            make=partial(replace, request, tables=replace(request.tables, tables=tables)),
        )
