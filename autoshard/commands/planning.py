"""`autoshard plan` and `autoshard evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard.commands.arguments import (
    RegistryOption,
    RiskOption,
    SeedOption,
    TablesArgument,
    TimeLimitOption,
    TopologyOption,
    check_needed,
    parse_settings,
)
from autoshard.commands.replaying import DeviceOption, RefineOption, refined
from autoshard.console import JsonOption, emit, log, working
from autoshard.core.costs import Risk

if TYPE_CHECKING:
    from autoshard.core import ShardingPlan


def plan(
    context: typer.Context,
    tables: TablesArgument,
    topology: TopologyOption,
    planner: Annotated[str, typer.Option(help="Name of the planner (`autoshard list planners`).")] = "auto",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of the planner; may be repeated.")
    ] = None,
    time_limit: TimeLimitOption = 1.0,
    seed: SeedOption = 0,
    registry: RegistryOption = None,
    risk: RiskOption = Risk.MEAN,
    replay_refine: RefineOption = None,
    device: DeviceOption = "auto",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write the plan to.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Plans how tables are sharded over ranks: which rank holds which rows and columns.

    Example:
        autoshard import metasyn --num-tables 80 --seed 1 --scale 64 -o tables.json
        autoshard plan tables.json --topology cpu-8 -o plan.json

    Example of a plan that `autoshard run` executes:
        autoshard plan tables.json --topology cpu-8 --set tiers=table_wise -o plan.json
    """
    from autoshard.formats import load_tables, load_topology
    from autoshard.planners.planner import PlanRequest
    from autoshard.planning import make_costs, make_plan

    check_needed(context, "--replay-refine", replay_refine is not None, "--device")
    task, machine = load_tables(tables), load_topology(topology)
    with working(f"Planning with {planner}"):
        request = PlanRequest(
            tables=task,
            topology=machine,
            costs=make_costs(task, machine, registry, risk=risk),
            seed=seed,
            time_limit_s=time_limit,
            options=parse_settings(settings or []),
            registry=registry,
        )
        made = make_plan(planner, request)
    if replay_refine is not None:
        made = refined(made, request.costs, replay_refine, device)
    _finish(made, output, as_json)


def evaluate(
    plan: Annotated[Path, typer.Argument(help="Plan to price.", metavar="PLAN")],
    registry: RegistryOption = None,
    risk: RiskOption = Risk.MEAN,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write the priced plan to.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Prices a plan: kernels, exchange and memory of every rank.

    Example:
        autoshard evaluate plan.json --registry registry -o priced.json
    """
    from autoshard.evaluation import evaluate as price
    from autoshard.formats import read_plan
    from autoshard.planning import plan_costs

    loaded = read_plan(plan)
    priced = loaded.with_predicted(price(loaded, plan_costs(loaded, registry, risk=risk)))
    _finish(priced, output, as_json)


def _finish(made: ShardingPlan, output: Path | None, as_json: bool) -> None:
    from autoshard.formats import plan_to_json, write_plan
    from autoshard.report import plan_summary

    if output is not None:
        write_plan(made, output)
    emit(plan_to_json(made), plan_summary(made), as_json=as_json)
    if output is not None:
        log(f"Wrote {output}")
