"""Tables, topologies and plans of request bodies, and how large they may be."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from autoshard.core import Payload, ShardingPlan, TableSet, Topology
from autoshard.core.costs import Risk
from autoshard.core.errors import AutoshardError, UnknownNameError
from autoshard.core.quoting import shown
from autoshard.evaluation.validator import validate_plan
from autoshard.formats import (
    bundled_table_sets,
    bundled_topologies,
    bundled_topology,
    load_tables,
    parse_json,
    plan_from_json,
    tables_from_json,
    topology_from_json,
)
from autoshard.planners.planner import PlanRequest
from autoshard.planning import make_costs
from server.settings import ServerSettings
from server.tasks.size import check_documents, check_num_shards, check_task

Named = str | dict[str, Any]


def tables_of(given: Named, field: str = "tables") -> TableSet:
    """The tables of a body: an object, or the name of bundled ones.

    Raises:
        InputError: If they are neither, or make no sense.
    """
    if isinstance(given, str):
        if given not in bundled_table_sets():
            raise _not_bundled(given, bundled_table_sets(), field)
        return load_tables(given)
    return tables_from_json(given, field)


def topology_of(given: Named, field: str = "topology") -> Topology:
    """The topology of a body, alike.

    Raises:
        InputError: If it is neither, or makes no sense.
    """
    if isinstance(given, str):
        found = bundled_topology(given)
        if found is None:
            raise _not_bundled(given, bundled_topologies(), field)
        return found
    return topology_from_json(given, field)


def task_of(tables: Named, topology: Named, settings: ServerSettings) -> tuple[TableSet, Topology]:
    """Tables and topology of a body, which are not too large for a task.

    Raises:
        InputError: If they are too large, or cannot be read.
    """
    check_documents(tables, topology, settings)
    read = tables_of(tables), topology_of(topology)
    check_task(*read, settings)
    return read


def plan_of(document: Mapping[str, Any], settings: ServerSettings, field: str = "plan") -> ShardingPlan:
    """The plan of a body: whole, valid and not too large.

    Raises:
        InputError: If it is none; the text names the field.
    """
    check_documents(document.get("tables"), document.get("topology"), settings)
    check_num_shards(document.get("shards"), settings)
    plan = plan_from_json(document, field)
    check_task(plan.tables, plan.topology, settings)
    try:
        validate_plan(plan)
    except AutoshardError as error:
        raise error.in_source(field) from error
    return plan


def stored_plan(answer: bytes) -> ShardingPlan:
    """The plan that the service once answered with."""
    document = parse_json(answer)
    assert isinstance(document, dict)
    return plan_from_json(document["plan"], "plan")


def request_of(
    tables: TableSet,
    topology: Topology,
    *,
    seed: int,
    time_limit_s: float,
    payload: str,
    registry: Path | None,
    options: Mapping[str, object] | None = None,
    risk: Risk = Risk.MEAN,
    started_s: float | None = None,
) -> PlanRequest:
    """A task for planners, whose time began at `started_s`, by `time.perf_counter`; now if that is None.

    Raises:
        InvalidOptionError: If the payload is none.
    """
    if started_s is None:
        started_s = time.perf_counter()
    return PlanRequest(
        tables=tables,
        topology=topology,
        costs=make_costs(tables, topology, registry, risk=risk),
        seed=seed,
        time_limit_s=time_limit_s,
        started_s=started_s,
        options=options or {},
        registry=registry,
        payload=Payload.parse(payload, "payload"),
    )


# Other names are paths to the loaders; a client must not read the service's files.
def _not_bundled(name: str, known: Iterable[str], field: str) -> UnknownNameError:
    return UnknownNameError(f"{shown(name)} is not bundled; there are: {', '.join(known)}", field=field)
