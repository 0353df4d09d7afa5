"""What planners answered to twelve tasks: `python -m tests.golden.plans` records it anew, and prints what has changed.

A planner's answer is kept as the digest of its placement, and what the plan was predicted to cost. Prices come from the
analytic model, searches end by their steps: the same on every machine, but for the last digits of a sum.
"""

import hashlib
import json
import sys
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from autoshard.core import (
    DType,
    ImpliedOrder,
    Optimizer,
    Payload,
    Pooling,
    ShardingPlan,
    TableSet,
    Topology,
)
from autoshard.core.errors import AutoshardError
from autoshard.formats import load_tables, load_topology, plan_to_json
from autoshard.planners.registry import planner_names
from autoshard.planning import make_plan
from tests import builders as make

RECORDED = Path(__file__).with_name("plans.json")
#: Planners whose answer depends on what is trained here, or on another project's release.
LEFT_OUT = {"policy", "torchrec"}
#: What makes planners end by their work, so that their time does not count.
OPTIONS = {
    "auto": {"steps": 20, "policy": False},
    "cp-sat": {"effort": 0.05, "refinements": 1},
    "neuroshard": {"steps": 3, "beam_width": 2, "candidates": 4},
}
#: Largest tasks that exact planners are asked for.
MOST_TABLES = {"cp-sat": 40}


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is planned for, and with which payload."""

    tables: TableSet
    topology: Topology
    payload: Payload = field(default_factory=Payload)


def some(name: str, stop: int | None = None, *, batch_size: int = 8192, start: int = 0) -> TableSet:
    """Bundled tables whose hot rows come first, or some of them."""
    tables = load_tables(name).tables[start:stop]
    ordered = tuple(replace(table, row_order=ImpliedOrder.BY_ID) for table in tables)
    return TableSet(batch_size=batch_size, tables=ordered)


def mixed() -> TableSet:
    """Tables of every number format, pooling and optimizer, some of them held to some kinds and ranks."""
    tables = list(some("nvidia-tiny", 24, batch_size=4096).tables)
    dtypes, poolings, optimizers = list(DType), list(Pooling), [kind for kind in Optimizer if kind != "none"]
    for index, table in enumerate(tables):
        tables[index] = replace(
            table,
            dtype=dtypes[index % 2],
            pooling=poolings[index % 3],
            optimizer=optimizers[index % 4],
            row_order=ImpliedOrder.BY_ID if index % 2 else None,
        )
    return TableSet(batch_size=4096, tables=tuple(tables))


@cache
def tasks() -> dict[str, Task]:
    """The tasks by name: small and large, whole tables and tables that fit no rank, one node and several."""
    return {
        "two large tables on a node": Task(tables=some("param-a"), topology=load_topology("a100-8")),
        "criteo on processes": Task(tables=some("criteo-kaggle", batch_size=2048), topology=load_topology("cpu-8")),
        "criteo in bf16": Task(
            tables=some("criteo-kaggle", batch_size=65536),
            topology=load_topology("a100-8"),
            payload=Payload(forward=DType.BF16, backward=DType.BF16),
        ),
        "mlperf on two nodes": Task(
            tables=some("mlperf-dlrm-v2", batch_size=65536), topology=load_topology("dgx-h100-16")
        ),
        "mlperf on small cards": Task(tables=some("mlperf-dlrm-v2"), topology=load_topology("zionex-16")),
        "metasyn, 20 on 4": Task(tables=some("metasyn", 20), topology=load_topology("cpu-host-4")),
        "metasyn, 60 on 8": Task(tables=some("metasyn", 160, start=100), topology=load_topology("a100-8")),
        "metasyn, 40 on hosts": Task(tables=some("metasyn", 340, start=300), topology=load_topology("cpu-host-16")),
        "nvidia tiny": Task(tables=some("nvidia-tiny", batch_size=16384), topology=load_topology("h100-8")),
        "nvidia small on nodes": Task(
            tables=some("nvidia-small", 60, batch_size=16384), topology=load_topology("a100-32")
        ),
        "all kinds": Task(tables=mixed(), topology=load_topology("a100-8")),
        "all kinds on nodes": Task(tables=mixed(), topology=load_topology("dgx-a100-16")),
    }


def planners_of(task: Task) -> list[str]:
    """Planners that are asked for a task."""
    known = [name for name in planner_names() if name not in LEFT_OUT]
    return [name for name in known if len(task.tables.tables) <= MOST_TABLES.get(name, sys.maxsize)]


def answer(name: str, task: Task) -> dict[str, object]:
    """What a planner says: the digest of its placement and the plan's prices, or why there is none."""
    request = make.request(
        task.tables, task.topology, time_limit_s=600.0, options=OPTIONS.get(name, {}), payload=task.payload
    )
    try:
        plan = make_plan(name, request)
    except AutoshardError as error:
        return {"error": type(error).__name__}
    assert plan.predicted is not None
    return {
        "placement": placement_digest(plan),
        "step_ms": plan.predicted.step_ms.value,
        "max_kernel_ms": plan.predicted.max_kernel_ms,
        "most_bytes": max(rank.used_bytes for rank in plan.predicted.ranks),
    }


def placement_digest(plan: ShardingPlan) -> str:
    """Names where everything is: shards with their rows, columns and ranks, and groups of replicas."""
    document = plan_to_json(plan)
    kept = {name: document.get(name) for name in ("shards", "replica_groups", "payload")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def record() -> None:
    """Asks every planner for every task, prints what differs from what is kept, and keeps the new answers."""
    kept = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    found = {}
    for title, task in tasks().items():
        for name in planners_of(task):
            found[key := f"{title}: {name}"] = answer(name, task)
            if found[key] != kept.get(key):
                print(f"{key}: {kept.get(key)} -> {found[key]}", flush=True)
    RECORDED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record()
