"""Stage `plans`: plans for eight of this card by every planner, each rank's shards measured on the one card."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from autoshard.core import Topology
from autoshard.formats import load_tables, load_topology
from autoshard.planners.planner import PlanRequest
from autoshard.planners.registry import planner_names
from autoshard.planning import compare, make_costs
from autoshard.report import ComparedPlan
from autoshard.report.images import Section
from autoshard.report.wording import write_ms, write_percent
from autoshard.table import Table
from bench.kernels.harness import Settings
from bench.kernels.measurable import is_measurable
from bench.kernels.replay import replay_plans
from bench.measuring.timing import RoundSettings
from studies.frame import Numbers
from studies.gpu.costs import MODELS_FILE
from studies.gpu.samples import varied
from studies.gpu.stages import Stage, Visit

_TOPOLOGIES: Final = {"h100": "h100-8", "h200": "hgx-h200", "cpu": "cpu-8"}
_SCALE: Final = {"cuda": 1, "cpu": 256}
_NUM_TABLES: Final = 48
_SEED: Final = 1000
#: Speed-ups are over it.
_BASELINE: Final = "random"
_ROUNDS: Final = RoundSettings(num_warmup=2, num_measured=5, num_dropped=1)


def _run(visit: Visit) -> Numbers:
    device, kind = visit.device, visit.device.device.type
    topology = topology_of(device.key)
    tables = varied(load_tables("metasyn").scaled(_SCALE[kind])).sample(_NUM_TABLES, _SEED)
    names = [_BASELINE, *(name for name in planner_names() if name != _BASELINE)]
    with tempfile.TemporaryDirectory() as folder:
        models = visit.folder / MODELS_FILE
        if models.exists():
            shutil.unpack_archive(models, folder)
        costs = make_costs(tables, topology, Path(folder))
        limit_s = min(2.0, visit.share(0.3) / len(names))
        request = PlanRequest(tables=tables, topology=topology, costs=costs, time_limit_s=limit_s)
        rows = list(compare(names, request))
    found = {"cost_model": costs.kernel.name, "topology": topology.device, "time_limit_s": limit_s}
    visit.keep({**found, "rows": [_row(row) for row in rows]})
    replayed = [row for row in rows if row.plan is not None and _can_run(row, on_cuda=device.is_cuda)]
    usual = Settings.for_device(device)
    rounds = replace(_ROUNDS, flush_every_run=usual.rounds.flush_every_run)
    settings = replace(usual, rounds=rounds, max_group_sets=4096, max_attempts=1, max_spread=0.15)
    replay = replay_plans([row.plan for row in replayed if row.plan is not None], device=kind, settings=settings)
    measured = {row.planner: replace(row, measured=plan) for row, plan in zip(replayed, replay.plans, strict=True)}
    return {
        **found,
        "ceiling_balance": replay.ceiling.balance,
        "num_groups": replay.num_groups,
        "rows": [_row(measured.get(row.planner, row)) for row in rows],
    }


def topology_of(key: str) -> Topology:
    """Eight ranks of a device; those of the nearest known one, where it is not known itself."""
    known = load_topology(_TOPOLOGIES.get(key, _TOPOLOGIES["h100"]))
    return known if key in _TOPOLOGIES else replace(known, device=key)


def _can_run(row: ComparedPlan, *, on_cuda: bool) -> bool:
    assert row.plan is not None, "asked of plans alone"
    return all(is_measurable(shard, on_cuda=on_cuda) for rank in row.plan.local_shards() for shard in rank)


def _row(row: ComparedPlan) -> dict[str, Any]:
    predicted = None if row.plan is None else row.plan.predicted
    return {
        "planner": row.planner,
        "failure": None if row.failure is None else str(row.failure),
        "planning_s": row.planning_s,
        "predicted_ms": None if predicted is None else predicted.max_kernel_ms,
        "predicted_step_ms": None if predicted is None else predicted.step_ms.value,
        "measured_ms": None if row.measured is None else row.measured.max_kernel_ms,
        "measured_balance": None if row.measured is None else row.measured.balance,
    }


def _show(numbers: Numbers) -> Sequence[Section]:
    return list(_sections(numbers))


def _sections(numbers: Numbers) -> Iterator[Section]:
    rows = sorted(numbers["rows"], key=lambda one: one["measured_ms"] or float("inf"))
    random_ms = next((one["measured_ms"] for one in rows if one["planner"] == _BASELINE), None)

    def speed_up(one: dict[str, Any]) -> str:
        return f"{random_ms / one['measured_ms']:.2f}" if random_ms and one["measured_ms"] else "–"

    table = Table.of(
        rows,
        (
            ("planner", lambda one: one["planner"]),
            ("slowest rank, predicted, ms", lambda one: _ms(one["predicted_ms"])),
            ("measured, ms", lambda one: _ms(one["measured_ms"])),
            ("balance, measured", lambda one: _percent(one["measured_balance"])),
            ("speed-up over random", speed_up),
            ("step, predicted, ms", lambda one: _ms(one["predicted_step_ms"])),
            ("planning, s", lambda one: f"{one['planning_s']:.2f}"),
        ),
        caption=f"{_NUM_TABLES} tables on 8 ranks of {numbers['topology']}, prices of {numbers['cost_model']}",
    )
    failed = "; ".join(f"{one['planner']}: {one['failure']}" for one in rows if one["failure"])
    ceiling = numbers.get("ceiling_balance")
    caption = "Each rank's kernels, measured one after the other on this device."
    if ceiling is not None:
        caption += f" Identical ranks have a balance of {write_percent(ceiling)} here."
    yield Section(title="Plans", caption=caption + (f" Without a plan: {failed}." if failed else ""), tables=(table,))


def _ms(value: float | None) -> str:
    return "–" if value is None else write_ms(value)


def _percent(value: float | None) -> str:
    return "–" if value is None else write_percent(value)


def _headline(numbers: Numbers) -> str:
    measured = [one for one in numbers["rows"] if one["measured_ms"] is not None]
    if not measured:
        return ""
    best = min(measured, key=lambda one: one["measured_ms"])
    return f"{best['planner']}: slowest rank {write_ms(best['measured_ms'])} ms"


STAGE: Final = Stage(name="plans", share=0.12, run=_run, show=_show, headline=_headline)
