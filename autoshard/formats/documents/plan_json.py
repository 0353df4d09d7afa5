"""`plan.json` (`autoshard.plan/1`): a whole plan, read and written."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from autoshard.core import (
    DType,
    GroupLayout,
    Payload,
    Provenance,
    ReplicaGroups,
    RowOrder,
    ShardingPlan,
)
from autoshard.core.errors import FormatError, InvalidPlanError
from autoshard.core.quoting import shortened, shown
from autoshard.evaluation.validator import validate_plan
from autoshard.formats.documents.fields import Fields, check_writable, from_source, text
from autoshard.formats.documents.json_document import format_json, join, read_json
from autoshard.formats.documents.prediction_json import prediction_from_json, prediction_to_json
from autoshard.formats.documents.rank_layouts import RankLayouts
from autoshard.formats.documents.shards_json import shard_from_json, shard_to_json
from autoshard.formats.documents.tables_json import MAX_ROWS, tables_from_json, tables_to_json
from autoshard.formats.documents.topology_json import MAX_WORLD_SIZE, topology_from_json, topology_to_json
from autoshard.formats.files import atomic_write

PLAN_SCHEMA = "autoshard.plan/1"

#: More than the 100,000 tables that there may be. Reading takes about 0.07 ms and 3 kB a shard, pricing as long again.
MAX_SHARDS = 2**17
MAX_MOMENT_SCALE = 1e6

_REQUIRED = ("schema", "tables", "topology", "replica_groups", "payload", "shards")
_OPTIONAL = ("row_orders", "predicted", "provenance")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def read_plan(path: str | Path) -> ShardingPlan:
    """Reads a `plan.json` and validates the plan, whoever wrote it.

    Raises:
        InputError: If the file cannot be read, holds no plan, or the plan is not valid; the text names file and field.
    """

    def make() -> ShardingPlan:
        plan = plan_from_json(document, folder=Path(path).parent)
        validate_plan(plan)
        return plan

    document = read_json(path)
    return from_source(str(path), make)


def write_plan(plan: ShardingPlan, path: str | Path) -> None:
    """Validates a plan and writes a `plan.json` that reads back as an equal one.

    Raises:
        InvalidPlanError: If the plan is not valid or has more shards than can be read; nothing is written then.
        FormatError: If the file cannot be written.
    """
    validate_plan(plan)
    if len(plan.shards) > MAX_SHARDS:
        raise InvalidPlanError(f"must be at most {MAX_SHARDS:,}, got {len(plan.shards):,}", field="shards")
    atomic_write(path, format_json(plan_to_json(plan)))


def plan_from_json(document: object, path: str = "", *, folder: Path | None = None) -> ShardingPlan:
    """Reads the object of a `plan.json`; whether the plan is valid is for `validate_plan` to say.

    Args:
        document: The parsed JSON.
        path: Dotted path of the object, if it is part of another.
        folder: Where Parquet files that its tables name lie.

    Raises:
        InputError: If it holds no plan; the text names the field.
    """
    fields = Fields(document, path, required=_REQUIRED, optional=_OPTIONAL, schema=PLAN_SCHEMA)
    tables = tables_from_json(fields["tables"], fields.at("tables"), folder=folder)
    topology = topology_from_json(fields["topology"], fields.at("topology"))
    groups = _groups_from_json(fields)
    layouts = fields.build(lambda: RankLayouts.of(groups, topology))
    by_name = {table.name: table for table in tables.tables}
    where = fields.at("shards")
    return ShardingPlan(
        tables=tables,
        topology=topology,
        shards=tuple(
            shard_from_json(value, f"{where}[{index}]", by_name, layouts)
            for index, value in enumerate(fields.items("shards", maximum=MAX_SHARDS))
        ),
        replica_groups=groups,
        payload=_payload_from_json(fields),
        row_orders=_row_orders_from_json(fields, by_name),
        predicted=prediction_from_json(fields, layouts.group_size) if "predicted" in fields else None,
        provenance=_provenance_from_json(fields) if "provenance" in fields else None,
    )


def plan_to_json(plan: ShardingPlan) -> dict[str, object]:
    """The object of a `plan.json`.

    Raises:
        InvalidPlanError: If the replica groups do not divide the world.
    """
    layouts = RankLayouts.of(plan.replica_groups, plan.topology)
    document: dict[str, object] = {
        "schema": PLAN_SCHEMA,
        "tables": tables_to_json(plan.tables),
        "topology": topology_to_json(plan.topology),
        "replica_groups": {
            "num_groups": plan.replica_groups.num_groups,
            "layout": plan.replica_groups.layout,
            "sync_every": plan.replica_groups.sync_every,
            "moment_scale": plan.replica_groups.moment_scale,
        },
        "payload": {"forward": plan.payload.forward, "backward": plan.payload.backward},
        "shards": [shard_to_json(placed, layouts) for placed in plan.shards],
    }
    if plan.row_orders:
        document["row_orders"] = {
            name: {"file": order.file, "digest": order.digest, "num_ordered": order.num_ordered}
            for name, order in plan.row_orders.items()
        }
    if plan.predicted is not None:
        document["predicted"] = prediction_to_json(plan.predicted)
    if plan.provenance is not None:
        document["provenance"] = {
            "planner": plan.provenance.planner,
            "options": dict(plan.provenance.options),
            "seed": plan.provenance.seed,
            "models": dict(plan.provenance.models),
            "version": plan.provenance.version,
        }
    return document


def _groups_from_json(plan: Fields) -> ReplicaGroups:
    fields = plan.fields("replica_groups", required=("num_groups", "layout", "sync_every", "moment_scale"))
    return ReplicaGroups(
        num_groups=fields.whole("num_groups", minimum=1, maximum=MAX_WORLD_SIZE),
        layout=fields.choice("layout", GroupLayout, GroupLayout.ACROSS_NODES),
        sync_every=fields.whole("sync_every", minimum=1),
        moment_scale=fields.number("moment_scale", minimum=1e-6, maximum=MAX_MOMENT_SCALE),
    )


def _payload_from_json(plan: Fields) -> Payload:
    fields = plan.fields("payload", required=("forward", "backward"))
    return Payload(
        forward=fields.choice("forward", DType, DType.FP32), backward=fields.choice("backward", DType, DType.FP32)
    )


def _row_orders_from_json(plan: Fields, table_names: Collection[str]) -> dict[str, RowOrder]:
    path = plan.at("row_orders")
    orders = plan.mapping("row_orders").items()
    return {name: _row_order_from_json(name, value, path, table_names) for name, value in orders}


def _row_order_from_json(name: str, value: object, path: str, table_names: Collection[str]) -> RowOrder:
    path = join(path, shortened(name))
    if name not in table_names:
        raise FormatError("no table has that name", field=path)
    fields = Fields(value, path, required=("file", "digest", "num_ordered"))
    file, digest = fields.text("file"), fields.text("digest")
    if Path(file).name != file or "\\" in file:
        raise FormatError(
            f"must be the name of a file in the plan's folder, got {shown(file)}", field=fields.at("file")
        )
    if not _DIGEST.fullmatch(digest):
        raise FormatError(f"must be sha256: and 64 hexadecimal digits, got {shown(digest)}", field=fields.at("digest"))
    num_ordered = fields.whole("num_ordered", minimum=1, maximum=MAX_ROWS)
    return RowOrder(file=file, digest=digest, num_ordered=num_ordered)


def _provenance_from_json(plan: Fields) -> Provenance:
    fields = plan.fields("provenance", required=("planner", "options", "seed", "models", "version"))
    options, models = fields.mapping("options"), fields.mapping("models")
    check_writable(options, fields.at("options"))
    return Provenance(
        planner=fields.text("planner"),
        version=fields.text("version"),
        seed=fields.whole("seed"),
        options=options,
        models={
            text(name, fields.at("models")): text(model, join(fields.at("models"), shortened(name)))
            for name, model in models.items()
        },
    )
