"""`autoshard explain`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard.commands.arguments import PricingOptions
from autoshard.commands.options import command_options
from autoshard.commands.serving import ServerOption, open_client, refuse_local
from autoshard.console import JsonOption, emit, progress, until, working
from autoshard.table import Column, Table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autoshard.core import ShardingPlan
    from autoshard.results.explanation import Alternative, ExplainedTable, Explanation, Improvement

#: Ranks that a cell names one by one.
_RANKS_SHOWN = 6


@command_options()
class ExplainOptions:
    """Options of `autoshard explain`."""

    plan: Annotated[Path, typer.Argument(help="Plan to explain.", metavar="PLAN")]
    table: Annotated[
        list[str] | None, typer.Option("--table", help="Only this table, with all its alternatives; may be repeated.")
    ] = None
    most: Annotated[
        int,
        typer.Option(
            min=0, help="Explains so many of the tables, those of which a batch reads most bytes; 0 explains all."
        ),
    ] = 50
    pricing: PricingOptions
    server: ServerOption = None

    def __post_init__(self) -> None:
        refuse_local(self.server, {"--registry": self.pricing.registry})


def explain(options: ExplainOptions, as_json: JsonOption = False) -> None:
    """Compares each table's sharding with every alternative, and says which single change would help most.

    Changes one table at a time, placed where it is fastest, and leaves all others as they are: the 50 tables of which a
    batch reads most bytes, or those of --table. Then plans with twice the bandwidth, memory, ranks or batch, one at a
    time.

    Example:
        autoshard explain plan.json --table t3
    """
    from autoshard.formats import read_plan
    from autoshard.results.explanation import EXPLANATION

    loaded = read_plan(options.plan)
    if options.server is not None:
        with working(f"Explaining at {options.server}"):
            found, improvements = _served(loaded, options, options.server)
    else:
        found, improvements = _explained(loaded, options)
    shown = _details(found) if options.table else _overview(found, len(loaded.tables.tables))
    emit(EXPLANATION.to_json((found, improvements)), _with_improvements(shown, improvements), as_json=as_json)


def _explained(plan: ShardingPlan, options: ExplainOptions) -> tuple[Explanation, tuple[Improvement, ...]]:
    from autoshard.planners.hybrid.explanation import explain as explained
    from autoshard.whatif.improvements import find_improvements, trials_budget_s

    costs = options.pricing.costs_of(plan)
    started_s = time.perf_counter()
    with progress("Pricing alternatives", 1.0) as advance:
        found = explained(plan, costs, options.table or (), most=options.most, on_explained=advance)
    budget_s = trials_budget_s(time.perf_counter() - started_s)
    with until("Planning with single changes", budget_s):
        return found, find_improvements(plan, costs, found, budget_s=budget_s)


def _with_improvements(shown: RenderableType, improvements: Sequence[Improvement]) -> RenderableType:
    from rich.console import Group

    from autoshard.report.wording import write_ms, write_percent

    if not improvements:
        return shown
    table = Table.of(
        improvements,
        [
            ("change", lambda one: one.text),
            ("step ms", lambda one: write_ms(one.step_ms)),
            ("samples/s", lambda one: f"{one.samples_per_s:,.0f}"),
            ("gain", lambda one: write_percent(one.gain, signed=True)),
        ],
        title="Single changes, each planned",
        title_justify="center",
        is_boxed=True,
    )
    return Group(shown, "", table)


def _served(plan: ShardingPlan, options: ExplainOptions, server: str) -> tuple[Explanation, tuple[Improvement, ...]]:
    """What a service explains, which stores the plan for that."""
    risk = options.pricing.risk
    with open_client(server) as client:
        stored = client.evaluate(plan, risk=risk)
        return client.improve(stored.id, tables=options.table or (), risk=risk)


def _overview(found: Explanation, num_tables: int) -> Table:
    left = num_tables - len(found.tables)
    others = f" {left:,} more tables: --most 0 explains all." if left > 0 else ""
    return Table.of(
        found.tables,
        [
            ("table", lambda one: one.table),
            (Column("sharding"), lambda one: one.option),
            (Column("ranks"), lambda one: _ranks(one.ranks)),
            ("bytes per rank", lambda one: f"{one.hbm_bytes:,}"),
            (Column("on the slowest rank of"), _binds),
            (Column("reason"), lambda one: one.reason),
        ],
        title=_title(found),
        caption=f"{_collectives(found)} {_memory(found)}{others}",
        title_justify="center",
        is_boxed=True,
    )


def _details(found: Explanation) -> RenderableType:
    from rich.console import Group

    def change(other: Alternative) -> str:
        return "" if other.step_ms is None else f"{other.step_ms / found.step_ms - 1:+.2%}"

    tables = [
        Table.of(
            one.alternatives,
            [
                ("alternative", lambda other: other.option),
                ("step ms", lambda other: None if other.step_ms is None else f"{other.step_ms:.6g}"),
                ("change", change),
                ("bytes per rank", lambda other: f"{other.hbm_bytes:,}"),
                (Column("ruled out"), lambda other: other.ruled_out),
            ],
            title=f"{one.table}: {one.option} on {_ranks(one.ranks)}",
            caption=f"{one.reason}. {_title(found)}, {one.without_ms:.6g} ms without it. At the slowest rank of: "
            f"{_binds(one) or 'no part'}.",
            title_justify="center",
            is_boxed=True,
        )
        for one in found.tables
    ]
    return Group(*tables)


def _title(found: Explanation) -> str:
    groups = f", {found.num_groups} replica groups" if found.num_groups > 1 else ""
    return f"Predicted step {found.step_ms:.6g} ms{groups}"


def _collectives(found: Explanation) -> str:
    from autoshard.report.wording import write_ms

    times = (
        f"{collective.replace('_', ' ')} {write_ms(time.serialised_ms)} / {write_ms(time.exposed_ms)}"
        for collective, time in found.collectives.items()
        if time.serialised_ms > 0
    )
    return f"Collectives, serialised / exposed ms: {', '.join(times) or 'none'}."


def _memory(found: Explanation) -> str:
    from autoshard.report.wording import write_bytes

    used, there = write_bytes(found.used_bytes), write_bytes(found.capacity_bytes)
    return f"Least memory is left on rank {found.fullest_rank}: tables and training take {used} of {there}."


def _binds(one: ExplainedTable) -> str:
    return ", ".join(part.replace("_", " ") for part in one.binds)


def _ranks(ranks: tuple[int, ...]) -> str:
    if len(ranks) <= _RANKS_SHOWN:
        return ", ".join(map(str, ranks))
    is_range = ranks == tuple(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]} to {ranks[-1]}" if is_range else f"{len(ranks)} ranks"
