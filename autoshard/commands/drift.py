"""`autoshard drift`: a plan on the access of today."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard.commands.arguments import PricingOptions, share_option
from autoshard.commands.options import command_options
from autoshard.console import JsonOption, emit
from autoshard.table import Column, Table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autoshard.core import ShardingPlan, TableSet
    from autoshard.core.access.counted import CountedRows
    from autoshard.results.plan_drift import DriftedTable, PlanDrift

#: Tables that are printed.
_MAX_LINES = 32

PlanArgument = Annotated[Path, typer.Argument(help="The plan.", metavar="PLAN")]
AccessOption = Annotated[
    Path,
    typer.Option(
        help="The plan's tables as they are looked up today: a tables.json, as `autoshard run --write-access` writes "
        "it, with the row orders beside it.",
        metavar="FILE",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accessed:
    """A plan, and how its tables are looked up today.

    Attributes:
        plan: The plan.
        now: Its tables today.
        planned: Rows of the plan by falling lookups.
        rows_now: Those of today.
    """

    plan: ShardingPlan
    now: TableSet
    planned: Mapping[str, CountedRows]
    rows_now: Mapping[str, CountedRows]

    @classmethod
    def read(cls, plan_path: Path, access_path: Path | None) -> Accessed:
        """Reads both.

        Args:
            plan_path: The plan.
            access_path: The tables of today; None for those of the plan.

        Raises:
            InputError: If a file cannot be read, or is of other tables.
        """
        from autoshard.evaluation.drift import planned_rows, with_access
        from autoshard.formats import read_plan, read_tables
        from autoshard.formats.documents.fields import from_source
        from autoshard.formats.row_orders import read_counted_rows, read_row_orders

        plan = read_plan(plan_path)
        planned = planned_rows(plan, read_row_orders(plan, plan_path))
        if access_path is None:
            return cls(plan=plan, now=plan.tables, planned=planned, rows_now=planned)
        counted = read_tables(access_path)
        now = from_source(str(access_path), lambda: with_access(plan.tables, counted))
        return cls(plan=plan, now=now, planned=planned, rows_now=read_counted_rows(counted, access_path))


@command_options()
class DriftOptions:
    """Options of `autoshard drift`."""

    plan: PlanArgument
    access: AccessOption
    fail_above: Annotated[
        float | None,
        share_option("Exit with 1 if today's step is longer than the planned one by more than this share."),
    ] = None
    pricing: PricingOptions


def drift(options: DriftOptions, as_json: JsonOption = False) -> None:
    """Prices a plan on today's access: the step, what hot rows and caches still get, and which tables drifted.

    Example:
        autoshard drift plan.json --access today.json

    Example for a nightly check that fails if the step is 10% longer:
        autoshard drift plan.json --access today.json --fail-above 0.1
    """
    from autoshard.report.plan_drift import drift_of
    from autoshard.results.plan_drift import DRIFT

    accessed = Accessed.read(options.plan, options.access)
    costs = options.pricing.costs_of(accessed.plan)
    found = drift_of(accessed.plan, accessed.now, costs, accessed.planned, accessed.rows_now)
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
    left = len(found.tables) - _MAX_LINES
    more = [f"{left:,} more tables; --json lists all"] if left > 0 else []
    return Group(*lines, "", parts, "", _tables(found.tables[:_MAX_LINES]), *more)


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
