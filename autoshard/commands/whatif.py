"""`autoshard explain` and `simulate`: plans of the same tables with something changed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard.commands.arguments import (
    HtmlOption,
    ImageOption,
    OverlapOption,
    PlanPricingOptions,
    SearchOptions,
    ServerOption,
    SettingsOption,
    TablesArgument,
    check_planner,
    completed_planners,
    completed_topologies,
    open_client,
    parse_settings,
    refuse_local,
    written_file,
)
from autoshard.commands.options import Needs, command_options
from autoshard.commands.plan import draw
from autoshard.console import JsonOption, emit, log, progress, until, working
from autoshard.core.choices import MOST_EXPLAINED, GroupLayout, Lengths
from autoshard.core.errors import InfeasiblePlanError, InvalidOptionError
from autoshard.core.quoting import shown, write_bytes
from autoshard.table import Column, Table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autoshard.core import ShardingPlan, TableSet
    from autoshard.results.explanation import Alternative, ExplainedTable, Explanation, Improvement
    from autoshard.results.sweep import SimulatedPoint, SweepPoint, UnpricedPoint
    from autoshard.results.sweep_record import SweepRecord
    from autoshard.whatif.sweep import Simulator

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
        Needs("--table left out", lambda options: not options.table),
    ] = MOST_EXPLAINED
    pricing: PlanPricingOptions
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
    risk = options.pricing.risk_of(plan)
    with open_client(server) as client:
        stored = client.evaluate(plan, risk=risk)
        return client.improve(stored.id, tables=options.table or (), most=options.most, risk=risk)


def _overview(found: Explanation, num_tables: int) -> Table:
    left = num_tables - len(found.tables)
    others = f" {left:,} more table{'s' if left > 1 else ''}: --most 0 explains all." if left > 0 else ""
    return Table.of(
        found.tables,
        [
            ("table", lambda one: one.table),
            (Column("sharding"), lambda one: one.option),
            (Column("ranks"), lambda one: _ranks(one.ranks)),
            ("memory", lambda one: write_bytes(one.hbm_bytes)),
            (Column("slowest rank of"), _binds),
            (Column("next best"), lambda one: _next_best(one, found.step_ms)[0]),
            ("step then", lambda one: _next_best(one, found.step_ms)[1]),
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
                ("memory per rank", lambda other: write_bytes(other.hbm_bytes)),
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
    used, there = write_bytes(found.used_bytes), write_bytes(found.capacity_bytes)
    return f"Least memory is left on rank {found.fullest_rank}: tables and training take {used} of {there}."


def _next_best(one: ExplainedTable, step_ms: float) -> tuple[str, str]:
    """The best alternative and how much longer the step would be; without one, why there is none."""
    best = next((other for other in one.alternatives if other.step_ms is not None), None)
    if best is None or best.step_ms is None:
        return one.reason, ""
    return best.option, f"{best.step_ms / step_ms - 1:+.2%}"


def _binds(one: ExplainedTable) -> str:
    """The parts of the step that the table adds to at their slowest ranks; named once if forward and backward."""
    ends = [part.partition("_") for part in one.binds]
    both = {end for way, _, end in ends if way == "forward"} & {end for way, _, end in ends if way == "backward"}
    names = (end if end in both else part.replace("_", " ") for part, (*_, end) in zip(one.binds, ends, strict=True))
    return ", ".join(dict.fromkeys(names))


def _ranks(ranks: tuple[int, ...]) -> str:
    if len(ranks) <= _RANKS_SHOWN:
        return ", ".join(map(str, ranks))
    is_range = ranks == tuple(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]} to {ranks[-1]}" if is_range else f"{len(ranks)} ranks"


_RANKS = "8,16,32,64,128,256,512,1024,2048,4096"
_GROUPED = Needs(
    "--groups or --group-size", lambda options: options.groups is not None or options.group_size is not None
)


@command_options()
class SimulateOptions:
    """Options of `autoshard simulate`."""

    tables: TablesArgument
    topology: Annotated[
        str,
        typer.Option(
            help="Machines, with commas between them: names of bundled topologies (`autoshard list topologies`) or "
            "files; each is made for every number of ranks.",
            autocompletion=completed_topologies,
        ),
    ] = "dgx-a100"
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, with commas between them.")] = _RANKS
    groups: Annotated[str | None, typer.Option(help="Numbers of replica groups.", show_default="1")] = None
    group_size: Annotated[
        str | None, typer.Option(help="Ranks per replica group, instead of --groups: larger clusters have more groups.")
    ] = None
    batch_size: Annotated[
        str | None, typer.Option(help="Samples per step over all ranks.", show_default="that of the tables")
    ] = None
    batch_per_rank: Annotated[str | None, typer.Option(help="Samples per step and rank, instead of --batch-size.")] = (
        None
    )
    planner: Annotated[
        str,
        typer.Option(
            help="Planner of each point (`autoshard list planners`); auto uses the time limit.",
            autocompletion=completed_planners,
        ),
    ] = "neo"
    settings: SettingsOption = None
    search: SearchOptions
    layout: Annotated[GroupLayout, typer.Option(help="Whether groups lie across nodes or within them."), _GROUPED] = (
        GroupLayout.ACROSS_NODES
    )
    sync_every: Annotated[
        int, typer.Option(min=1, help="Steps from one synchronisation of groups to the next."), _GROUPED
    ] = 1
    overlap: OverlapOption = None
    batches: Annotated[
        int,
        typer.Option(min=0, max=1_000_000, help="Batches to draw per point, for the spread, at least 2; 0 for none."),
    ] = 100
    lengths: Annotated[
        Lengths,
        typer.Option(help="Ids per sample: declared (the features' variance; without one, a fixed length) or poisson."),
        Needs("--batches above 0", lambda options: options.batches > 0),
    ] = Lengths.DECLARED
    output: Annotated[
        Path | None,
        written_file(
            "--output", "-o", help="JSON file of the points; points that it already has are not computed again."
        ),
    ] = None
    html: HtmlOption = None
    image: ImageOption = None

    def __post_init__(self) -> None:
        if self.groups is not None and self.group_size is not None:
            raise InvalidOptionError("cannot be given with --group-size", field="--groups")
        if self.batch_size is not None and self.batch_per_rank is not None:
            raise InvalidOptionError("cannot be given with --batch-per-rank", field="--batch-size")
        if self.batches == 1:
            raise InvalidOptionError("must be 0, or at least 2, got 1", field="--batches")
        check_planner(self.planner, parse_settings(self.settings), None)
        self.points(1)

    def points(self, batch_size: int) -> Sequence[SweepPoint]:
        """All combinations.

        Args:
            batch_size: Samples per step where no option says how many.
        """
        from autoshard.whatif.sweep import sweep_points

        return sweep_points(
            machines=_texts(self.topology, "--topology"),
            ranks=_numbers(self.ranks, "--ranks"),
            groups=_numbers(self.groups or "1", "--groups"),
            group_sizes=_numbers(self.group_size, "--group-size") if self.group_size else (),
            batch_sizes=_numbers(self.batch_per_rank or self.batch_size or str(batch_size), "--batch-size"),
            is_batch_per_rank=self.batch_per_rank is not None,
        )

    def simulator(self, task: TableSet) -> Simulator:
        """Simulator of the points."""
        from autoshard.whatif.sweep import Simulator

        return Simulator(
            tables=task,
            planner=self.planner,
            options=parse_settings(self.settings),
            time_limit_s=self.search.time_limit,
            seed=self.search.seed,
            payload=self.search.parsed_payload,
            registry=self.search.pricing.registry,
            risk=self.search.pricing.risk,
            overlap=self.overlap,
            layout=self.layout,
            sync_every=self.sync_every,
            num_batches=self.batches,
            lengths=self.lengths,
        )


def simulate(options: SimulateOptions, as_json: JsonOption = False) -> None:
    """Simulates training steps on clusters of any size: plans and prices every combination.

    Points that do not fit the memory are listed with the reason. The models that price plans price kernels, collectives
    and dense layers; devices without a trained model are priced from published bandwidths.

    Examples:
        autoshard simulate criteo-1tb --ranks 8,64,512 --batch-per-rank 2048
        autoshard simulate nvidia-medium --topology zionex,dgx-h100 -o sweep.json --html sweep.html --image sweep.svg
        autoshard simulate tables.json --ranks 256,1024,4096 --group-size 256 --batch-per-rank 1152 --json
    """
    from autoshard.formats import atomic_write, load_machine
    from autoshard.report.images import figure_page
    from autoshard.report.simulation import simulation_report, simulation_table
    from autoshard.results.sweep_record import SIMULATION

    for point in options.points(1):
        load_machine(point.machine, point.num_ranks)  # a name that is wrong costs no simulated points
    task = options.search.load_tables(options.tables)
    record = _run(options.simulator(task), options.tables, options.points(task.batch_size), options.output)
    _check_possible(record.points)
    wants_page = options.html is not None or options.image is not None
    report = simulation_report(record, f"Simulated steps of {options.tables}") if wants_page else None
    if report is not None and options.html is not None:
        atomic_write(options.html, figure_page(report))
    emit(SIMULATION.to_json(record), simulation_table(record.points), as_json=as_json)
    for written in (options.output, options.html):
        if written is not None:
            log(f"Wrote {written}")
    if report is not None and options.image is not None:
        draw(report.figures, options.image)
    _check_priced(record.points)


def _run(simulator: Simulator, name: str, points: Sequence[SweepPoint], output: Path | None) -> SweepRecord:
    """Simulates the points that the file lacks, and writes it after each; the record of these points alone."""
    from autoshard.results.sweep_record import SIMULATION, SweepRecord, read_record

    settings = simulator.settings(name)
    record = SweepRecord(settings=settings) if output is None else read_record(output, settings)
    found = []
    with progress(f"Simulating {len(points)} points", len(points)) as advance:
        for point in points:
            simulated = record.find(point, simulator.basis(point))
            if simulated is None:
                simulated = simulator.simulate(point)
                others = [one for one in record.points if one.point != point]
                if len(others) < len(record.points):
                    log(f"{output}: the cluster or the models changed since: simulated {point.label} anew")
                record = record.with_points([*others, simulated])
                if output is not None:
                    SIMULATION.write(record, output)
            found.append(simulated)
            advance(1)
    return SweepRecord(settings=settings, points=tuple(found))


def _check_possible(points: Sequence[SimulatedPoint]) -> None:
    """Refuses options with which no point can be planned at all, before anything is printed."""
    from autoshard.results.sweep import PointStatus, UnpricedPoint

    unpriced = [one for one in points if isinstance(one, UnpricedPoint)]
    if len(unpriced) == len(points) and all(one.status is PointStatus.IMPOSSIBLE for one in unpriced):
        raise InvalidOptionError(f"{_reasons(unpriced)}; so no point is possible")


def _check_priced(points: Sequence[SimulatedPoint]) -> None:
    """Refuses sweeps in which no point has a plan; the printed points have the reasons."""
    from autoshard.results.sweep import UnpricedPoint

    unpriced = [one for one in points if isinstance(one, UnpricedPoint)]
    if len(unpriced) == len(points):
        raise InfeasiblePlanError(f"no point fits: {_reasons(unpriced)}")


def _reasons(unpriced: Sequence[UnpricedPoint]) -> str:
    return "; ".join(dict.fromkeys(one.reason for one in unpriced))


def _texts(values: str, option: str) -> list[str]:
    found = [value.strip() for value in values.split(",") if value.strip()]
    if not found or len(set(found)) != len(found):
        raise InvalidOptionError(f"must be different names with commas between them, got {shown(values)}", field=option)
    return found


def _numbers(values: str, option: str) -> list[int]:
    texts = [value.strip().replace("_", "") for value in values.split(",")]
    if not all(text.isdecimal() and int(text) > 0 for text in texts) or len(set(texts)) != len(texts):
        raise InvalidOptionError(
            f"must be different whole numbers above 0 with commas between them, got {shown(values)}", field=option
        )
    return [int(text) for text in texts]
