"""Tables, topologies and plans of request bodies, and how large they may be."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autoshard.core import Payload, ShardingPlan, TableSet, Topology
from autoshard.core.costs import Risk
from autoshard.core.errors import AutoshardError, FormatError, UnknownNameError
from autoshard.core.quoting import shown
from autoshard.formats import (
    TableList,
    bundled_table_sets,
    bundled_topologies,
    bundled_topology,
    load_tables,
    parse_json,
    plan_from_json,
    tables_from_json,
    tables_from_list,
    topology_from_json,
)
from autoshard.formats.documents.fields import at_path
from autoshard.formats.documents.json_document import join
from autoshard.formats.documents.tables_json import CONSTRAINTS
from autoshard.formats.imports.table_lists import LIST_KEYS
from autoshard.planners.planner import PlanRequest
from autoshard.planners.space.constraints import check_constraints, colocated, place_in_tables
from autoshard.planning import make_costs
from autoshard.validator import validate_plan
from server.settings import ServerSettings
from server.tasks.size import check_documents, check_num_shards, check_task

Named = str | dict[str, Any]
Listed = Named | list[dict[str, Any]]


def tables_of(given: Listed, field: str = "tables", told: Callable[[TableList], None] | None = None) -> TableSet:
    """The tables of a body: an object, the name of bundled ones, or a table list.

    Args:
        given: A table list is what `tables_from_list` takes: rows, or an object without a schema.
        field: Of the body.
        told: Is told how a table list was read. Without it, where the answer has no room for that, a list has to say
            its batch size.

    Raises:
        InputError: If they are none of these, or make no sense.
    """
    if isinstance(given, str):
        if given not in bundled_table_sets():
            raise _not_bundled(given, bundled_table_sets(), field)
        return load_tables(given)
    if isinstance(given, dict) and ("schema" in given or not given.keys() & LIST_KEYS):
        return tables_from_json(given, field)
    return at_path(field, lambda: tables_from_list(given, told=told or _refuse_default))


def _refuse_default(found: TableList) -> None:
    if found.is_default_batch:
        raise FormatError("must be there, as the list says none", field="batch_size")


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


def task_of(
    tables: Listed,
    topology: Named,
    settings: ServerSettings,
    told: Callable[[TableList], None] | None = None,
    constraints: Mapping[str, object] | None = None,
) -> tuple[TableSet, Topology]:
    """Tables and topology of a body, which are not too large for a task; `told` as of `tables_of`.

    Raises:
        InputError: If they are too large, or cannot be read.
    """
    check_documents(tables, topology, settings)
    read = tables_of(tables, told=told), topology_of(topology)
    check_task(*read, settings)
    return constrained(*read, constraints or {}), read[1]


def constrained(tables: TableSet, topology: Topology | None, given: Mapping[str, object]) -> TableSet:
    """The tables with a body's `constraints`, by table, in place of their own.

    Args:
        tables: The tables, whose own constraints are checked, too.
        topology: The ranks; None to leave it open which there are.
        given: The constraints.

    Raises:
        InputError: If one is none, or names a table or rank that is not there.
    """
    field = "constraints"
    if unknown := given.keys() - {table.name for table in tables.tables}:
        raise UnknownNameError(f"{shown(min(unknown))} is none of the tables", field=field)
    read = {name: CONSTRAINTS.read(value, join(field, name)) for name, value in given.items()}

    def place_of(index: int) -> str:
        name = tables.tables[index].name
        return join(field, name) if name in read else place_in_tables(index)

    if read:
        made = (replace(table, constraints=read.get(table.name, table.constraints)) for table in tables.tables)
        tables = replace(tables, tables=tuple(made))
    if topology is None:
        colocated(tables, place_of)
    else:
        check_constraints(tables, topology, place_of)
    return tables


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
