"""`autoshard compare`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from autoshard.commands.arguments import (
    RegistryOption,
    RiskOption,
    SeedOption,
    TablesArgument,
    TimeLimitOption,
    TopologyOption,
)
from autoshard.console import JsonOption, emit, log, progress
from autoshard.core.costs import Risk
from autoshard.core.errors import AutoshardError, InvalidOptionError

if TYPE_CHECKING:
    from autoshard.core import ShardingPlan
    from autoshard.report import ComparedPlan, MeasuredPlan

REPLAY_GROUP = "autoshard.replay"


class Replay(Protocol):
    """Plans as one machine ran them; `ceiling` are ranks that all ran the same."""

    @property
    def device_name(self) -> str:
        """Full name of the processor."""
        ...

    @property
    def plans(self) -> tuple[MeasuredPlan, ...]:
        """Measured times, in the order of the plans."""
        ...

    @property
    def ceiling(self) -> MeasuredPlan:
        """What identical ranks measured: their balance is the best that the machine can tell from perfect."""
        ...


class ReplayPlans(Protocol):
    """What an entry point of `REPLAY_GROUP` is."""

    def __call__(
        self, plans: Sequence[ShardingPlan], *, device: str = "auto", advance: Callable[[float], None]
    ) -> Replay:
        """Measures the kernels of every rank; `advance` is told how many ranks are done, the ceiling's included."""
        ...


def compare(
    tables: TablesArgument,
    topology: TopologyOption,
    planners: Annotated[str, typer.Option(help="Names of planners, with commas between them.")],
    replay: Annotated[
        bool, typer.Option("--replay", help="Also measure every rank's kernels on this machine.")
    ] = False,
    device: Annotated[str, typer.Option(help="Of --replay: `auto` (a GPU if there is one), `cpu` or `cuda`.")] = "auto",
    time_limit: TimeLimitOption = 1.0,
    seed: SeedOption = 0,
    registry: RegistryOption = None,
    risk: RiskOption = Risk.MEAN,
    output_dir: Annotated[Path | None, typer.Option(help="Folder for the plans, one PLANNER.json each.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write a page that opens without a network.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Plans one task with several planners, and shows them side by side.

    Example:
        autoshard compare tables.json --topology cpu-8 --planners random,cost-greedy,auto --replay --html report.html
    """
    from autoshard.formats import atomic_write, load_tables, load_topology, write_plan
    from autoshard.planners.planner import PlanRequest
    from autoshard.planning import compare as plan_all
    from autoshard.planning import make_costs
    from autoshard.report import comparison_page, comparison_table

    names = _names(planners)
    task, machine = load_tables(tables), load_topology(topology)
    request = PlanRequest(
        tables=task,
        topology=machine,
        costs=make_costs(task, machine, registry, risk=risk),
        seed=seed,
        time_limit_s=time_limit,
        registry=registry,
    )
    with progress("Planning", len(names)) as advance:
        rows: Sequence[ComparedPlan] = plan_all(names, request, on_planned=lambda _: advance(1))
    _check_any(rows)
    if output_dir is not None:
        for row in rows:
            if row.plan is not None:
                write_plan(row.plan, output_dir / f"{row.planner}.json")
    measured = _replay(rows, device) if replay else None
    if measured is not None:
        results = iter(measured.plans)
        rows = [row if row.plan is None else replace(row, measured=next(results)) for row in rows]
    notes = _notes(rows, measured)
    if html is not None:
        atomic_write(html, comparison_page(rows, notes))
    emit(_document(rows, measured), comparison_table(rows, notes), as_json=as_json)
    for written in (output_dir, html):
        if written is not None:
            log(f"Wrote {written}")


def _names(planners: str) -> list[str]:
    names = [name.strip() for name in planners.split(",") if name.strip()]
    if not names:
        raise InvalidOptionError("needs at least one name", field="--planners")
    for name in names:
        if names.count(name) > 1:
            raise InvalidOptionError(f"{name} is given twice", field="--planners")
    return names


def _check_any(rows: Sequence[ComparedPlan]) -> None:
    if any(row.plan is not None for row in rows):
        return
    kinds = {type(row.failure) for row in rows if row.failure is not None}
    kind = kinds.pop() if len(kinds) == 1 else AutoshardError
    raise kind("; ".join(f"{row.planner}: {row.failure}" for row in rows))


def _replay(rows: Sequence[ComparedPlan], device: str) -> Replay:
    from importlib.metadata import entry_points

    found = sorted(entry_points(group=REPLAY_GROUP), key=lambda point: point.name)
    if not found:
        raise InvalidOptionError("nothing that can replay plans is installed", field="--replay")
    replay_plans: ReplayPlans = found[0].load()
    plans = [row.plan for row in rows if row.plan is not None]
    sizes = [plan.group_size for plan in plans]
    with progress("Measuring ranks", sum(sizes) + max(sizes)) as advance:
        return replay_plans(plans, device=device, advance=advance)


def _notes(rows: Sequence[ComparedPlan], measured: Replay | None) -> list[str]:
    from autoshard.report import floor_ms
    from autoshard.report.wording import write_ms, write_percent

    notes = []
    floor = floor_ms(rows)
    models = sorted({row.plan.predicted.cost_model for row in rows if row.plan and row.plan.predicted})
    if floor is not None:
        notes.append(
            f"Floor: {write_ms(floor)} ms, the costliest shard alone; no placement of whole shards goes below it. "
            f"Predicted by {', '.join(models)}."
        )
    if measured is not None:
        notes.append(
            f"Ceiling: ranks with identical work balance at {write_percent(measured.ceiling.balance)} on this machine "
            f"({measured.device_name}); no measured balance tells more."
        )
    return notes


def _document(rows: Sequence[ComparedPlan], measured: Replay | None) -> dict[str, object]:
    from autoshard.report import BASELINE, floor_ms, speedups_over

    speedups = speedups_over(BASELINE, rows)
    return {
        "floor_kernel_ms": floor_ms(rows),
        "ceiling_balance": measured.ceiling.balance if measured else None,
        "device_name": measured.device_name if measured else None,
        "planners": [
            {
                "planner": row.planner,
                "planning_s": row.planning_s,
                "failure": None if row.failure is None else str(row.failure),
                "predicted_max_kernel_ms": row.predicted_max_ms,
                "predicted_balance": row.plan.predicted.balance if row.plan and row.plan.predicted else None,
                "cost_model": row.plan.predicted.cost_model if row.plan and row.plan.predicted else None,
                "measured_max_kernel_ms": row.measured.max_kernel_ms if row.measured else None,
                "measured_balance": row.measured.balance if row.measured else None,
                "measured_kernel_ms": list(row.measured.kernel_ms_per_rank) if row.measured else None,
                "speedup_over_random": speedups.get(row.planner),
                "prediction_error": row.prediction_error,
            }
            for row in rows
        ],
    }
