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

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autoshard.core import ShardingPlan
    from autoshard.results.explanation import ExplainedTable, Explanation, Improvement

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
    from autoshard.results.explanation_json import EXPLANATION

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
    from rich.table import Table

    from autoshard.report.wording import write_ms, write_percent

    if not improvements:
        return shown
    table = Table(title="Single changes, each planned")
    for name in ("change", "step ms", "samples/s", "gain"):
        table.add_column(name, justify="left" if name == "change" else "right", overflow="fold")
    for one in improvements:
        gain = write_percent(one.gain, signed=True)
        table.add_row(one.text, write_ms(one.step_ms), f"{one.samples_per_s:,.0f}", gain)
    return Group(shown, "", table)


def _served(plan: ShardingPlan, options: ExplainOptions, server: str) -> tuple[Explanation, tuple[Improvement, ...]]:
    """What a service explains, which stores the plan for that."""
    risk = options.pricing.risk
    with open_client(server) as client:
        stored = client.evaluate(plan, risk=risk)
        return client.improve(stored.id, tables=options.table or (), risk=risk)


def _overview(found: Explanation, num_tables: int) -> RenderableType:
    from rich.table import Table

    left = num_tables - len(found.tables)
    others = f" {left:,} more tables: --most 0 explains all." if left > 0 else ""
    shown = Table(title=_title(found), caption=f"{_collectives(found)} {_memory(found)}{others}")
    for name in ("table", "sharding", "ranks", "bytes per rank", "on the slowest rank of", "reason"):
        shown.add_column(name, justify="right" if name == "bytes per rank" else "left", overflow="fold")
    for one in found.tables:
        held = f"{one.hbm_bytes:,}"
        shown.add_row(one.table, one.option, _ranks(one.ranks), held, _binds(one), one.reason)
    return shown


def _details(found: Explanation) -> RenderableType:
    from rich.console import Group
    from rich.table import Table

    blocks: list[RenderableType] = []
    for one in found.tables:
        shown = Table(
            title=f"{one.table}: {one.option} on {_ranks(one.ranks)}",
            caption=f"{one.reason}. {_title(found)}, {one.without_ms:.6g} ms without it. At the slowest rank of: "
            f"{_binds(one) or 'no part'}.",
        )
        for name in ("alternative", "step ms", "change", "bytes per rank", "ruled out"):
            right = name in ("step ms", "change", "bytes per rank")
            shown.add_column(name, justify="right" if right else "left", overflow="fold")
        for other in one.alternatives:
            is_open = other.step_ms is not None
            shown.add_row(
                other.option,
                f"{other.step_ms:.6g}" if is_open else "",
                f"{(other.step_ms or 0.0) / found.step_ms - 1:+.2%}" if is_open else "",
                f"{other.hbm_bytes:,}",
                other.ruled_out,
            )
        blocks.append(shown)
    return Group(*blocks)


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
