"""`autoshard drift` and `replan`: a plan on the access of today, and one near it for that."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard.commands.arguments import (
    OutputOption,
    PlanPricingOptions,
    SettingsOption,
    check_planner,
    completed_topologies,
    parse_settings,
    positive_option,
    seed_option,
    share_option,
)
from autoshard.commands.options import command_options
from autoshard.console import JsonOption, emit, log, until
from autoshard.table import Column, Table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autoshard.evaluation.drift import AccessedPlan
    from autoshard.planners.planner import PlanRequest
    from autoshard.results.plan_drift import DriftedTable, PlanDrift
    from autoshard.results.replanned import Replanning

#: Tables that are printed.
_MAX_LINES = 32

PlanArgument = Annotated[Path, typer.Argument(help="The plan.", metavar="PLAN")]
_ACCESS = typer.Option(
    help="The plan's tables as they are looked up today: a tables.json, as `autoshard run --write-access` writes it, "
    "with the row orders beside it.",
    metavar="FILE",
)


def read_accessed(plan_path: Path, access_path: Path | None) -> AccessedPlan:
    """A plan, and how its tables are looked up today.

    Args:
        plan_path: The plan.
        access_path: The tables of today; None for those of the plan.

    Raises:
        InputError: If a file cannot be read, or is of other tables.
    """
    from autoshard.evaluation.drift import AccessedPlan, planned_rows, with_access
    from autoshard.formats import read_plan, read_tables
    from autoshard.formats.documents.fields import from_source
    from autoshard.formats.row_orders import read_counted_rows, read_row_orders

    plan = read_plan(plan_path)
    planned = planned_rows(plan, read_row_orders(plan, plan_path))
    if access_path is None:
        return AccessedPlan(plan=plan, now=plan.tables, planned=planned, rows_now=planned)
    counted = read_tables(access_path)
    now = from_source(str(access_path), lambda: with_access(plan.tables, counted))
    return AccessedPlan(plan=plan, now=now, planned=planned, rows_now=read_counted_rows(counted, access_path))


@command_options()
class DriftOptions:
    """Options of `autoshard drift`."""

    plan: PlanArgument
    access: Annotated[Path, _ACCESS]
    fail_above: Annotated[
        float | None,
        share_option("Exit with 1 if today's step is longer than the planned one by more than this share."),
    ] = None
    pricing: PlanPricingOptions


def drift(options: DriftOptions, as_json: JsonOption = False) -> None:
    """Prices a plan on today's access: the step, what hot rows and caches still get, and which tables drifted.

    Example:
        autoshard drift plan.json --access today.json

    Example for a nightly check that fails if the step is 10% longer:
        autoshard drift plan.json --access today.json --fail-above 0.1
    """
    from autoshard.report.plan_drift import drift_of
    from autoshard.results.plan_drift import DRIFT

    accessed = read_accessed(options.plan, options.access)
    found = drift_of(accessed, options.pricing.costs_of(accessed.plan))
    emit(DRIFT.to_json(found), _rendered(found), as_json=as_json)
    if options.fail_above is not None and found.change > options.fail_above:
        raise typer.Exit(1)


def _rendered(found: PlanDrift) -> RenderableType:
    from rich.console import Group

    from autoshard.core.quoting import write_bytes
    from autoshard.report.wording import write_interval, write_ms, write_percent

    planned, now = found.step_ms_planned, found.step_ms_now
    lines = [
        f"Predicted step {write_ms(planned.value)} ms ({write_interval(planned)}) as planned, {write_ms(now.value)} ms "
        f"({write_interval(now)}) on today's access, {write_percent(found.change, signed=True)}",
        f"Free memory of the fullest rank: {write_bytes(found.free_bytes_planned)} as planned, "
        f"{write_bytes(found.free_bytes_now)} today",
    ]
    ms = [Column(name, text=write_ms, justify="right") for name in ("planned ms", "today")]
    parts = Table.of(
        found.parts,
        [
            ("part of the step", lambda one: one.name.replace("_", " ")),
            (ms[0], lambda one: one.planned_ms),
            (ms[1], lambda one: one.now_ms),
        ],
    )
    return Group(*lines, "", parts, "", _tables(found.tables).first(_MAX_LINES, "more table"))


def _tables(tables: tuple[DriftedTable, ...]) -> Table:
    from autoshard.report.wording import write_percent

    def change(planned: float | None, now: float | None) -> str:
        return "" if planned is None or now is None else f"{write_percent(planned)} -> {write_percent(now)}"

    return Table.of(
        tables,
        [
            ("table", lambda one: one.table),
            ("lookups elsewhere", lambda one: write_percent(one.distance) + ("" if one.is_by_rows else " (curve)")),
            ("lookups a sample", lambda one: f"{one.lookups_planned:.4g} -> {one.lookups_now:.4g}"),
            ("hot rows", lambda one: None if one.hot_rows is None else f"{one.hot_rows:,}"),
            ("their lookups", lambda one: change(one.hot_share_planned, one.hot_share_now)),
            ("cache hits", lambda one: change(one.cache_hits_planned, one.cache_hits_now)),
        ],
    )


@command_options()
class ReplanOptions:
    """Options of `autoshard replan`."""

    plan: PlanArgument
    access: Annotated[Path | None, _ACCESS] = None
    topology: Annotated[
        str | None,
        typer.Option(
            help="The ranks as they are today, a topology.json or a bundled one, as many as before.",
            show_default="the plan's",
            autocompletion=completed_topologies,
        ),
    ] = None
    horizon: Annotated[float, positive_option("Steps within which moving rows has to pay off.")] = 10_000.0
    least_gain: Annotated[
        float, typer.Option(min=0, max=1, help="Share by which the step has to become shorter for any change.")
    ] = 0.02
    settings: SettingsOption = None
    time_limit: Annotated[float, positive_option("Seconds for the search.")] = 5.0
    seed: Annotated[int, seed_option("Seed of the search.")] = 0
    pricing: PlanPricingOptions
    output: OutputOption = None

    def __post_init__(self) -> None:
        check_planner("auto", parse_settings(self.settings), None)

    def request(self, accessed: AccessedPlan) -> PlanRequest:
        """The task, whose time begins now.

        Raises:
            InputError: If the topology is not there, or makes no sense.
            ModelError: If a trained model is there but damaged.
        """
        from autoshard.formats import load_topology
        from autoshard.planners.auto_options import AutoOptions
        from autoshard.planners.planner import PlanRequest
        from autoshard.planning import make_costs

        topology = accessed.plan.topology if self.topology is None else load_topology(self.topology)
        return PlanRequest(
            tables=accessed.now,
            topology=topology,
            costs=make_costs(accessed.now, topology, self.pricing.registry, risk=self.pricing.risk_of(accessed.plan)),
            seed=self.seed,
            time_limit_s=self.time_limit,
            started_s=time.perf_counter(),
            options={**AutoOptions.kept_of(accessed.plan), **parse_settings(self.settings)},
            registry=self.pricing.registry,
        )


def replan(options: ReplanOptions, as_json: JsonOption = False) -> None:
    """Makes a plan near an older one for today's access, if moving the rows pays off; else keeps the older one.

    The search starts from the older plan and its options. Tables go back to where they are unless moving them makes
    steps shorter by more than it takes, spread over --horizon steps. The plan that is written is the older one where
    nothing pays.

    Example:
        autoshard replan plan.json --access today.json -o new.json

    Example of a job that will train for another day, over slower links:
        autoshard replan plan.json --access today.json --topology links.json --horizon 500000 -o new.json
    """
    from autoshard.formats import write_plan
    from autoshard.formats.row_orders import with_row_orders
    from autoshard.results.replanned import REPLAN
    from autoshard.whatif.replanning import replan as replanned

    accessed = read_accessed(options.plan, options.access)
    with until("Planning near the older plan", options.time_limit):
        found = replanned(
            accessed, options.request(accessed), horizon_steps=options.horizon, least_gain=options.least_gain
        )
    emit(REPLAN.to_json(found.figures), _replanned(found.figures), as_json=as_json)
    if options.output is not None:
        write_plan(with_row_orders(found.plan, found.orders, options.output), options.output)
        log(f"Wrote {options.output}")


def _replanned(found: Replanning) -> RenderableType:
    from rich.console import Group

    from autoshard.core.quoting import write_bytes
    from autoshard.report.wording import write_interval, write_ms, write_percent

    before, after = found.step_ms_before, found.step_ms_after
    lines = [
        f"{'Changed' if found.is_changed else 'Stays'}: {found.reason}",
        f"Predicted step {write_ms(before.value)} ms ({write_interval(before)}) with the older plan, "
        f"{write_ms(after.value)} ms ({write_interval(after)}) with the new one, "
        f"{write_percent(found.gain, signed=True)} samples/s",
        f"To move: {write_bytes(found.migration_bytes)} of {len(found.tables):,} tables, "
        f"{write_ms(found.migration_ms)} ms; tables that go back to where they are: {found.num_kept:,}",
    ]
    moved = Table.of(
        found.tables,
        [("table", lambda one: one.table), ("to receive", lambda one: write_bytes(one.received_bytes))],
    )
    return Group(*lines, "", moved.first(_MAX_LINES, "more table")) if found.tables else Group(*lines)
