"""Looks for a field `weight_decay`, which a copy of the package declares, wherever a field of a table has to be.

Run by tests/test_new_field.py in a process of its own; prints the places, each with what was found there.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from autoshard.client import Client, PlanTask
from autoshard.core import MemoryLevel, Shard, local_shard
from autoshard.core.errors import AutoshardError
from autoshard.core.shard import PlacedShard, fused_kernel
from autoshard.evaluation.executable import plan_faults
from autoshard.formats import (
    json_schemas,
    load_topology,
    plan_from_json,
    plan_to_json,
    tables_from_json,
    tables_to_json,
)
from autoshard.formats.imports.importing import import_tables
from autoshard.formats.stores.samples import set_id_of
from autoshard.planning import make_plan
from autoshard.report.plan_diff import diff_plans
from autoshard.runtime.ownership import ownership_of
from bench.kernels.measurable import check_measurable
from bench.sampling.kinds import ShardKind
from costmodel.kernel.features import shard_features
from tests import builders as make
from tests.server.conftest import start_service


def refused(make):
    """The line of the error that a call raises."""
    try:
        make()
    except AutoshardError as error:
        return str(error)
    return ""


def places(folder):
    """Where the field is, by place: what is found there, true for as it has to be."""
    plain = tables_from_json(json.loads(Path("examples/tables.json").read_text()))
    with_field = tables_to_json(plain)
    with_field["tables"][0]["weight_decay"] = 0.25
    tables = tables_from_json(with_field)
    table, usual = tables.tables[0], plain.tables[0]
    request = make.request(tables, load_topology("cpu-8"), time_limit_s=60.0)
    made = make_plan("cost-greedy", request)
    before = make_plan("cost-greedy", replace(request, tables=plain))
    of_before = replace(
        before,
        tables=tables,
        shards=tuple(
            replace(placed, shard=replace(placed.shard, table=tables[placed.shard.table.name]))
            for placed in before.shards
        ),
    )
    local = local_shard(PlacedShard.table_wise(Shard.whole(table), 0), group_batch_size=64)
    local_usual = replace(local, weight_decay=0.0)
    (folder / "list.csv").write_text("num_embeddings,embedding_dim,weight decay\n100,16,0.5\n200,16,\n")
    listed = import_tables(folder / "list.csv", "table-list").tables
    twins = replace(
        plain, tables=(usual, replace(table, name="twin", features=(replace(usual.features[0], name="f"),)))
    )
    schema = json_schemas()["autoshard.tables/1"]["$defs"]["table"]["properties"]["weight_decay"]
    owners = ownership_of(before, 8)
    holding = next(one for one in owners.holdings if one.of == usual)
    return {
        "read": table.weight_decay == 0.25 and usual.weight_decay == 0.0,
        "written": tables_to_json(tables) == with_field and "weight_decay" not in tables_to_json(plain)["tables"][0],
        "schema": schema["maximum"] == 1 and schema["description"] == "Decay of the weights per step.",
        "range": refused(
            lambda: tables_from_json({**with_field, "tables": [{**with_field["tables"][0], "weight_decay": 2}]})
        ),
        "list": [one.weight_decay for one in listed] == [0.5, 0.0],
        "plan": plan_from_json(plan_to_json(made)).tables.tables[0] == table,
        "alike": len(set(twins.first_alike.values())) == 2,
        "fused": fused_kernel(table) != fused_kernel(usual),
        "held": local.weight_decay == 0.25,
        "kind": local.kernel_kind == f"{local_usual.kernel_kind}/weight_decay=0.25",
        "changed": [one.change for one in diff_plans(before, of_before).tables] == ["resized"],
        "agreed": owners.identity != replace(owners, tables=tables).identity,
        "kernels": holding.kernel_key != replace(holding, of=table).kernel_key,
        "executed": [fault.field for fault in plan_faults(made)],
        "features": refused(lambda: shard_features([local])),
        "samples": refused(lambda: set_id_of([local], device="cpu", num_threads=1)),
        "measured": refused(lambda: check_measurable(local, on_cuda=True)),
        "drawn": ShardKind(weight_decay=0.5, level=MemoryLevel.HBM).of(usual).weight_decay == 0.5,
        "usual": shard_features([local_usual]).shape[0] == 1
        and not refused(lambda: check_measurable(local_usual, on_cuda=True)),
    } | over_rest(folder, with_field)


def over_rest(folder, document):
    """The same over REST: what the service describes, what it answers, and what its client reads."""
    service = start_service(folder)
    try:
        with service.client() as http, Client(service.url) as client:
            described = http.get("/openapi.json").text
            stored = client.plan(PlanTask(tables=tables_from_json(document), topology="cpu-8", planner="size-greedy"))
            answered = http.get(f"/v1/plans/{stored.id}").json()
        return {
            "openapi": "Decay of the weights per step." in described,
            "client": stored.plan.tables.tables[0].weight_decay == 0.25,
            "rest": answered["plan"]["tables"] == document,
        }
    finally:
        service.stop()


if __name__ == "__main__":
    json.dump(places(Path(sys.argv[1])), sys.stdout)
