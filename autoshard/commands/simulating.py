"""`autoshard simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard.commands.arguments import (
    HtmlOption,
    ImageOption,
    OverlapOption,
    SearchOptions,
    SettingsOption,
    TablesArgument,
    parse_settings,
)
from autoshard.commands.catalogue import completed_planners, completed_topologies
from autoshard.commands.options import Needs, command_options
from autoshard.commands.showing import draw
from autoshard.console import JsonOption, emit, log, progress
from autoshard.core.choices import Lengths
from autoshard.core.errors import InfeasiblePlanError, InvalidOptionError
from autoshard.core.plan import GroupLayout, Payload
from autoshard.core.quoting import shown
from autoshard.results.sweep import PointStatus, SimulatedPoint, SweepPoint, UnpricedPoint
from autoshard.results.sweep_record import SIMULATION, SweepRecord, read_record
from autoshard.whatif.sweep import Simulator, sweep_points

if TYPE_CHECKING:
    from autoshard.core import TableSet

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
        int, typer.Option(min=0, max=1_000_000, help="Batches to draw per point, for the spread; 0 for none.")
    ] = 100
    lengths: Annotated[
        Lengths,
        typer.Option(help="Ids per sample: declared (the features' variance; without one, a fixed length) or poisson."),
        Needs("--batches above 0", lambda options: options.batches > 0),
    ] = Lengths.DECLARED
    output: Annotated[
        Path | None,
        typer.Option(
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

    def points(self, task: TableSet) -> Sequence[SweepPoint]:
        """All combinations."""
        return sweep_points(
            machines=_texts(self.topology, "--topology"),
            ranks=_numbers(self.ranks, "--ranks"),
            groups=_numbers(self.groups or "1", "--groups"),
            group_sizes=_numbers(self.group_size, "--group-size") if self.group_size else (),
            batch_sizes=_numbers(self.batch_per_rank or self.batch_size or str(task.batch_size), "--batch-size"),
            is_batch_per_rank=self.batch_per_rank is not None,
        )

    def simulator(self, task: TableSet) -> Simulator:
        """Simulator of the points."""
        return Simulator(
            tables=task,
            planner=self.planner,
            options=parse_settings(self.settings or []),
            time_limit_s=self.search.time_limit,
            seed=self.search.seed,
            payload=Payload.parse(self.search.payload, "--payload"),
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
    from autoshard.formats import atomic_write
    from autoshard.report.images import figure_page
    from autoshard.report.simulation import simulation_report, simulation_table

    task = options.search.load_tables(options.tables)
    record = _run(options.simulator(task), options.tables, options.points(task), options.output)
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
    from autoshard.formats import load_machine
    from autoshard.planners.registry import get_planner

    get_planner(simulator.planner)
    for point in points:
        load_machine(point.machine, point.num_ranks)  # a name that is wrong costs no simulated points
    settings = simulator.settings(name)
    record = SweepRecord(settings=settings) if output is None else read_record(output, settings)
    found = []
    with progress(f"Simulating {len(points)} points", len(points)) as advance:
        for point in points:
            simulated = record.find(point)
            if simulated is None:
                simulated = simulator.simulate(point)
                record = record.with_points([*record.points, simulated])
                if output is not None:
                    SIMULATION.write(record, output)
            found.append(simulated)
            advance(1)
    return SweepRecord(settings=settings, points=tuple(found))


def _check_possible(points: Sequence[SimulatedPoint]) -> None:
    """Refuses options with which no point can be planned at all, before anything is printed."""
    unpriced = [one for one in points if isinstance(one, UnpricedPoint)]
    if len(unpriced) == len(points) and all(one.status is PointStatus.IMPOSSIBLE for one in unpriced):
        raise InvalidOptionError(f"{_reasons(unpriced)}; so no point is possible")


def _check_priced(points: Sequence[SimulatedPoint]) -> None:
    """Refuses sweeps in which no point has a plan; the printed points have the reasons."""
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
