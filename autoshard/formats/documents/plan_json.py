"""`plan.json` (`autoshard.plan/1`): a whole plan."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from autoshard.core import (
    DType,
    Provenance,
    ReplicaGroups,
    RowOrder,
    ShardingPlan,
    TableSet,
    Topology,
)
from autoshard.core.errors import FormatError, InvalidPlanError
from autoshard.core.quoting import shortened
from autoshard.formats.documents.document import Document
from autoshard.formats.documents.fields import check_object, check_writable, from_source
from autoshard.formats.documents.json_document import join
from autoshard.formats.documents.kinds import (
    ANY_OBJECT,
    Field,
    by_name,
    fields_of,
    in_context,
    list_of,
    record,
)
from autoshard.formats.documents.prediction_json import ESTIMATE, prediction_kind
from autoshard.formats.documents.rank_layouts import RankLayouts
from autoshard.formats.documents.shards_json import shard_kind
from autoshard.formats.documents.tables_json import DTYPE, LISTED_ORDER, TABLES
from autoshard.formats.documents.topology_json import TOPOLOGY
from autoshard.validator import validate_plan

#: More than the 100,000 tables that there may be. Reading takes about 0.07 ms and 3 kB a shard, pricing as long again.
MAX_SHARDS = 2**17


def _provenance(*, options: dict[str, object], **values: Any) -> Provenance:
    check_writable(options, "options")
    return Provenance(options=options, **values)


_PROVENANCE: Final = record(_provenance, *fields_of(Provenance, options=ANY_OBJECT))


def _fields(folder: Path | None) -> tuple[Field, ...]:
    return fields_of(
        ShardingPlan,
        known={DType: DTYPE},
        tables=TABLES.kind(folder),
        topology=TOPOLOGY.kind(),
        shards=in_context(list_of(shard_kind({}), 1, MAX_SHARDS).schema),
        row_orders=in_context(by_name(LISTED_ORDER).schema),
        predicted=in_context(prediction_kind().schema),
        provenance=_PROVENANCE,
    )


def _plan(
    *, tables: TableSet, topology: Topology, replica_groups: ReplicaGroups, shards: object, **given: Any
) -> ShardingPlan:
    layouts = RankLayouts.of(replica_groups, topology)
    size, by_name = layouts.group_size, {table.name: table for table in tables.tables}
    placed = list_of(shard_kind(by_name, layouts), 1, MAX_SHARDS).read(shards, "shards")
    if "row_orders" in given:
        given["row_orders"] = _read_row_orders(given["row_orders"], by_name)
    if "predicted" in given:
        given["predicted"] = prediction_kind(size, size).read(given["predicted"], "predicted")
    return ShardingPlan(tables=tables, topology=topology, replica_groups=replica_groups, shards=placed, **given)


def _read_row_orders(value: object, table_names: Collection[str]) -> dict[str, RowOrder]:
    orders = {}
    for name, order in check_object(value, "row_orders").items():
        path = join("row_orders", shortened(name))
        if name not in table_names:
            raise FormatError("no table has that name", field=path)
        orders[name] = LISTED_ORDER.read(order, path)
    return orders


def _parts(plan: ShardingPlan) -> dict[str, Any]:
    names = ("tables", "topology", "replica_groups", "payload")
    parts: dict[str, Any] = {name: getattr(plan, name) for name in names}
    shard = shard_kind({}, RankLayouts.of(plan.replica_groups, plan.topology))
    parts["shards"] = [shard.write(placed) for placed in plan.shards]
    if plan.row_orders:
        parts["row_orders"] = by_name(LISTED_ORDER).write(plan.row_orders)
    if plan.predicted is not None:
        parts["predicted"] = prediction_kind().write(plan.predicted)
    if plan.provenance is not None:
        parts["provenance"] = plan.provenance
    return parts


def _check(plan: ShardingPlan) -> None:
    if len(plan.shards) > MAX_SHARDS:
        raise InvalidPlanError(f"must be at most {MAX_SHARDS:,}, got {len(plan.shards):,}", field="shards")


PLAN: Final = Document(
    name="plan",
    meaning="A whole sharding plan, with its tables and its topology.",
    make=_plan,
    fields=_fields,
    parts=_parts,
    definitions=(shard_kind({}), ESTIMATE, prediction_kind()),
    check=_check,
)
write_plan = PLAN.write
plan_from_json, plan_to_json = PLAN.from_json, PLAN.to_json


def read_plan(path: str | Path) -> ShardingPlan:
    """Reads a `plan.json`, and validates the plan.

    Raises:
        InputError: If it cannot be read, or does not hold a valid plan; the text names file and field.
    """
    plan = PLAN.read(path)
    from_source(str(path), lambda: validate_plan(plan))
    return plan
