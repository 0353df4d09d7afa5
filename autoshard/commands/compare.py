"""`autoshard compare` and `diff`: plans side by side."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard.commands.arguments import (
    DeviceOption,
    HtmlOption,
    ImageOption,
    SearchOptions,
    ServerOption,
    TablesArgument,
    TopologyOption,
    check_planner,
    completed_planners,
    open_client,
    parse_settings,
    refuse_local,
    tables_to_send,
    topology_to_send,
)
from autoshard.commands.options import Needs, command_options
from autoshard.commands.plan import draw
from autoshard.commands.run import RefineOption, refined
from autoshard.commands.run import replay as replay_all
from autoshard.console import JsonOption, emit, log, progress, warn, working
from autoshard.core.choices import Device
from autoshard.core.errors import AutoshardError, InvalidOptionError
from autoshard.core.quoting import shown
from autoshard.table import Column, Table, texts

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autoshard.core import CostModels
    from autoshard.plugins import ReplayProtocol
    from autoshard.report import ComparedPlan
    from autoshard.results.plan_diff import PlanDiff, ValueChange

#: The planner whose plan `--replay-refine` refines, and the row of what comes out.
_REFINABLE, _REFINED = "auto", "auto, refined"


@command_options()
class CompareOptions:
    """Options of `autoshard compare`."""

    tables: TablesArgument
    topology: TopologyOption
    planners: Annotated[
        str, typer.Option(help="Names of planners, with commas between them.", autocompletion=completed_planners)
    ]
    replay: Annotated[bool, typer.Option("--replay", help="Also measure every rank's kernels on this machine.")] = False
    replay_refine: RefineOption = None
    device: Annotated[
        DeviceOption,
        Needs("--replay or --replay-refine", lambda options: options.replay or options.replay_refine is not None),
    ] = Device.AUTO
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PLANNER.KEY=VALUE", help="An option of one of the planners; may be repeated."),
    ] = None
    search: SearchOptions
    server: ServerOption = None
    output_dir: Annotated[
        Path | None,
        typer.Option("--output", "-o", "--output-dir", help="Folder for the plans, one PLANNER.json each."),
    ] = None
    html: HtmlOption = None
    image: ImageOption = None

    def __post_init__(self) -> None:
        measured = {"--replay": self.replay, "--replay-refine": self.replay_refine}
        refuse_local(self.server, {**self.search.local_options, **measured})
        if not self.names:
            raise InvalidOptionError("needs at least one name", field="--planners")
        for name in self.names:
            if self.names.count(name) > 1:
                raise InvalidOptionError(f"{shown(name)} is given twice", field="--planners")
        if self.replay_refine is not None and _REFINABLE not in self.names:
            raise InvalidOptionError(
                f"refines the plan of {_REFINABLE}, which --planners lacks", field="--replay-refine"
            )
        _ = self.options_by_planner
        for name in self.names:
            check_planner(name, {}, self.server)

    @property
    def names(self) -> list[str]:
        """The planners' names."""
        return [name.strip() for name in self.planners.split(",") if name.strip()]

    @property
    def orders_target(self) -> Path | None:
        """The file after which copies of row orders are named that all plans share."""
        return self.output_dir / "tables.json" if self.output_dir else None

    @property
    def options_by_planner(self) -> dict[str, dict[str, object]]:
        """Options of planners, from `PLANNER.KEY=VALUE` texts."""
        found: dict[str, dict[str, object]] = {}
        for setting, value in parse_settings(self.settings).items():
            planner, dot, key = setting.partition(".")
            if not dot or not key or planner not in self.names:
                raise InvalidOptionError(
                    f"must be PLANNER.KEY=VALUE for a planner of --planners, got {shown(f'{setting}={value}')}",
                    field="--set",
                )
            found.setdefault(planner, {})[key] = value
        return found


def compare(options: CompareOptions, as_json: JsonOption = False) -> None:
    """Plans one task with several planners, and shows them side by side.

    Example:
        autoshard compare tables.json --topology cpu-8 --planners random,cost-greedy,auto --replay --html report.html

    Example with whole tables only:
        autoshard compare tables.json --topology cpu-8 --planners cost-greedy,auto --set auto.sharding_types=table_wise
    """
    from autoshard.formats import atomic_write, write_plan
    from autoshard.report import comparison_figures, comparison_page, comparison_table
    from autoshard.report.comparison_json import COMPARISON

    rows = _planned(options) if options.server is None else _served(options, options.server)
    if options.output_dir is not None:
        for row in rows:
            if row.plan is not None:
                write_plan(row.plan, options.output_dir / f"{row.planner.replace(', ', '-')}.json")
    measured = _replay(rows, options.device) if options.replay else None
    if measured is not None:
        results = iter(measured.plans)
        noise = 1 - measured.ceiling.balance
        rows = [row if row.plan is None else replace(row, measured=next(results), measured_noise=noise) for row in rows]
    notes = _notes(rows, measured)
    of_replay = _replay_warnings(rows, measured)
    if options.html is not None:
        atomic_write(options.html, comparison_page(rows, [*notes, *of_replay]))
    for warning in dict.fromkeys([*of_replay, *_warnings(rows, is_served=options.server is not None)]):
        warn(warning)
    emit(COMPARISON.to_json((rows, measured)), comparison_table(rows, notes), as_json=as_json)
    for written in (options.output_dir, options.html):
        if written is not None:
            log(f"Wrote {written}")
    if options.image is not None:
        draw(comparison_figures(rows), options.image)


def _planned(options: CompareOptions) -> Sequence[ComparedPlan]:
    from autoshard.formats.row_orders import MovedOrders
    from autoshard.planning import compare as plan_all

    by_planner = options.options_by_planner
    request = options.search.request(options.tables, options.topology)
    orders = MovedOrders(request.tables, Path(options.tables).parent, options.orders_target)
    request = replace(request, tables=orders.named)
    with progress("Planning", len(options.names)) as advance:
        rows: Sequence[ComparedPlan] = plan_all(
            options.names, request, options=by_planner, on_planned=lambda _: advance(1)
        )
    _check_any(rows)
    orders.copy()
    if options.replay_refine is None:
        return rows
    return _with_refined(rows, request.costs, options.replay_refine, options.device)


def _served(options: CompareOptions, server: str) -> Sequence[ComparedPlan]:
    """The plans that a service makes."""
    from autoshard.client import ComparisonTask

    search = options.search
    tables, orders = tables_to_send(options.tables, options.orders_target)
    task = ComparisonTask(
        tables=tables,
        topology=topology_to_send(options.topology),
        planners=options.names,
        options=options.options_by_planner,
        time_limit_s=search.time_limit,
        payload=search.parsed_payload,
        seed=search.seed,
        risk=search.pricing.risk,
    )
    with working(f"Planning at {server}"), open_client(server) as client:
        rows = client.compare(task).rows
    _check_any(rows)
    orders.copy()
    return rows


def _check_any(rows: Sequence[ComparedPlan]) -> None:
    if any(row.plan is not None for row in rows):
        return
    kinds = {type(row.failure) for row in rows if row.failure is not None}
    kind = kinds.pop() if len(kinds) == 1 else AutoshardError
    raise kind("; ".join(f"{row.planner}: {row.failure}" for row in rows))


def _with_refined(
    rows: Sequence[ComparedPlan], costs: CostModels, num_measurements: int, device: str
) -> list[ComparedPlan]:
    """One row more, after that of the planner whose plan is refined."""
    found = []
    for row in rows:
        found.append(row)
        if row.planner != _REFINABLE:
            continue
        if row.plan is None:
            found.append(replace(row, planner=_REFINED))
            continue
        started_s = time.perf_counter()
        try:
            plan, failure = refined(row.plan, costs, num_measurements, device), None
        except AutoshardError as error:
            plan, failure = None, error
        planning_s = row.planning_s + time.perf_counter() - started_s
        found.append(replace(row, planner=_REFINED, planning_s=planning_s, plan=plan, failure=failure))
    return found


def _replay(rows: Sequence[ComparedPlan], device: str) -> ReplayProtocol:
    from autoshard.plugins import find_replay

    plans = [row.plan for row in rows if row.plan is not None]
    return replay_all(find_replay("--replay"), plans, device, "Measuring ranks")


def _replay_warnings(rows: Sequence[ComparedPlan], measured: ReplayProtocol | None) -> tuple[str, ...]:
    """Sentences about the device that the plans, all for one topology, were measured on."""
    from autoshard.report.caveats import device_warnings

    plans = [row.plan for row in rows if row.plan is not None]
    return () if measured is None else device_warnings(measured.device, plans[0])


def _warnings(rows: Sequence[ComparedPlan], *, is_served: bool) -> Iterator[str]:
    """Sentences about the plans; what the models noted here was logged when they priced."""
    from autoshard.report.caveats import memory_warnings, noise_warnings, plan_warnings

    yield from noise_warnings(rows)
    for row in rows:
        if row.plan is not None:
            yield from plan_warnings(row.plan) if is_served else memory_warnings(row.plan)


def _notes(rows: Sequence[ComparedPlan], measured: ReplayProtocol | None) -> list[str]:
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
            f"({measured.device_name}); differences above this are noise."
        )
    return notes


#: Tables and ranks that are listed without `--json`.
_MAX_LINES = 64


def diff(
    before: Annotated[Path, typer.Argument(help="First plan.", metavar="A")],
    after: Annotated[Path, typer.Argument(help="Second plan.", metavar="B")],
    as_json: JsonOption = False,
) -> None:
    """Compares two plans: tasks, predicted times, tables held differently, bytes that would have to move.

    Row orders that lie beside the plans are read; without them, the bytes of tables by two row orders are unknown.

    Example:
        autoshard diff plan.json other.json
    """
    from autoshard.formats import read_plan
    from autoshard.formats.row_orders import row_orders_at_hand
    from autoshard.report.plan_diff import diff_plans
    from autoshard.results.plan_diff import DIFF

    files = (before, after)
    plans = [read_plan(file) for file in files]
    digests = [{name: order.digest for name, order in plan.row_orders.items()} for plan in plans]
    differing = {name for name, _ in digests[0].items() ^ digests[1].items()}
    orders = [row_orders_at_hand(plan, file, differing) for plan, file in zip(plans, files, strict=True)]
    found = diff_plans(plans[0], plans[1], orders[0], orders[1])
    emit(DIFF.to_json(found), _rendered(found), as_json=as_json)


def _rendered(found: PlanDiff) -> RenderableType:
    from rich.console import Group

    if found.is_empty:
        return f"The plans hold all {found.num_alike:,} tables alike, at the same price."
    blocks: list[RenderableType] = [*_lines(found), ""]
    for heading, changes in (("task", found.task), ("part of the step, ms", found.parts)):
        if changes:
            blocks += [_values(heading, changes), ""]
    if found.tables:
        blocks += [_tables(found), ""]
    if found.ranks:
        blocks.append(_ranks(found))
    return Group(*blocks)


def _lines(found: PlanDiff) -> list[str]:
    from autoshard.core.quoting import write_bytes
    from autoshard.report.wording import write_interval, write_ms, write_percent

    lines = []
    first, second = found.step_ms_before, found.step_ms_after
    if first is not None and second is not None:
        change = f", {write_percent(second.value / first.value - 1, signed=True)}" if first.value else ""
        unsure = "; the intervals overlap" if found.is_within_intervals else ""
        lines.append(
            f"Predicted step {write_ms(first.value)} ms ({write_interval(first)}) before, {write_ms(second.value)} ms "
            f"({write_interval(second)}) after{change}{unsure}"
        )
    known = [change.received_bytes for change in found.tables if change.received_bytes is not None]
    num_unknown = len(found.tables) - len(known)
    unknown = f", and unknown bytes of {num_unknown:,} whose row orders are not at hand" if num_unknown else ""
    lines.append(
        f"Tables that differ: {len(found.tables):,}, held alike: {found.num_alike:,}; ranks would receive "
        f"{write_bytes(sum(known))}{unknown}"
    )
    return lines


def _values(heading: str, changes: Iterable[ValueChange]) -> Table:
    rows = [(change.name.replace("_", " "), _word(change.before), _word(change.after)) for change in changes]
    return Table(columns=texts(heading, "before", "after"), rows=rows)


def _word(value: object) -> str:
    from autoshard.report.wording import write_ms

    if value is None:
        return ""
    return write_ms(value) if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def _tables(found: PlanDiff) -> Table:
    from autoshard.core.quoting import write_bytes

    rows = [
        (
            *(change.table, change.change.value, change.before, change.after),
            "unknown" if change.received_bytes is None else write_bytes(change.received_bytes),
        )
        for change in found.tables
    ]
    table = Table(columns=texts("table", "change", "before", "after", "to receive"), rows=rows)
    return table.first(_MAX_LINES, "more table")


def _ranks(found: PlanDiff) -> Table:
    from autoshard.core.quoting import write_bytes
    from autoshard.report.wording import write_ms

    columns = (
        *(Column("rank"), Column("kernel ms before", text=write_ms), Column("after", text=write_ms)),
        *(Column("memory before", text=write_bytes), Column("after", text=write_bytes)),
    )
    rows = [
        (one.rank, one.kernel_ms_before, one.kernel_ms_after, one.hbm_bytes_before, one.hbm_bytes_after)
        for one in found.ranks
    ]
    return Table(columns=columns, rows=rows).first(_MAX_LINES, "more rank")
