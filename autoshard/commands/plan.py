"""`autoshard plan`, `evaluate` and `show`: one plan."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoshard.commands.arguments import (
    DeviceOption,
    ImageOption,
    OutputOption,
    OverlapOption,
    PageOption,
    PlanPricingOptions,
    SearchOptions,
    ServerOption,
    SettingsOption,
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
from autoshard.commands.run import RefineOption, refined
from autoshard.console import JsonOption, emit, log, progress, step_progress, until, warn, working
from autoshard.core.choices import Device
from autoshard.core.errors import FormatError, InvalidOptionError

if TYPE_CHECKING:
    from autoshard.core import CostModels, ShardingPlan
    from autoshard.planners.planner import PlanRequest
    from autoshard.report.replay_json import ReplayResult

_log = logging.getLogger(__name__)
#: Tables up to which plans have lower bounds unless told otherwise: bounds of 80 tables on 8 ranks take 0.07 to 0.3 s
#: besides the encoding of their options, of 800 tables on 80 ranks 2 s (one core of a Xeon, November 2026).
_MOST_BOUNDED = 200
#: Seconds that bounds take about, whatever the task and for each table, by the same measurement; and the largest share
#: of the time limit that they get.
_BOUND_S, _BOUND_TABLE_S, _BOUND_SHARE = 0.05, 3e-3, 0.3
#: Plans of a run-off, all of which are in memory.
_MOST_CONTENDERS = 8
_BOUND_HELP = "Say how far the step is above a lower bound of plans by these sharding types"


def _bound_option(help: str, default: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option("--bound/--no-bound", help=help, show_default=default)
    return option


@command_options()
class PlanOptions:
    """Options of `autoshard plan`."""

    tables: TablesArgument
    topology: TopologyOption
    planner: Annotated[
        str, typer.Option(help="Name of the planner (`autoshard list planners`).", autocompletion=completed_planners)
    ] = "auto"
    settings: SettingsOption = None
    start: Annotated[
        Path | None,
        typer.Option(help="An older plan of the same tables to start from: the new one is no slower.", metavar="PLAN"),
    ] = None
    search: SearchOptions
    server: ServerOption = None
    replay_refine: RefineOption = None
    device: Annotated[DeviceOption, Needs("--replay-refine", lambda options: options.replay_refine is not None)] = (
        Device.AUTO
    )
    run_off: Annotated[
        int | None,
        typer.Option(
            min=2,
            max=_MOST_CONTENDERS,
            metavar="K",
            help="Execute the plan and up to K - 1 different ones, the best by their predictions, in virtual time on "
            "this machine, and keep the best; takes about a minute.",
        ),
    ] = None
    bound: Annotated[
        bool | None,
        _bound_option(
            f"{_BOUND_HELP}; takes up to {_BOUND_SHARE:.0%} of --time-limit, with --bound more if it must.",
            f"--bound up to {_MOST_BOUNDED} tables if the time is enough",
        ),
    ] = None
    output: OutputOption = None

    def __post_init__(self) -> None:
        here = {"--replay-refine": self.replay_refine, "--run-off": self.run_off, "--bound": self.bound}
        refuse_local(self.server, {**self.search.local_options, **here})
        check_planner(self.planner, parse_settings(self.settings), self.server)
        for option, value in (("--start", self.start), ("--replay-refine", self.replay_refine)):
            if self.run_off is not None and value is not None:
                raise InvalidOptionError("must be left out with --run-off", field=option)


@command_options()
class EvaluateOptions:
    """Options of `autoshard evaluate`."""

    plan: Annotated[
        Path, typer.Argument(help="Plan to price; or a TorchRec plan that torch.save wrote (.pt).", metavar="PLAN")
    ]
    tables: Annotated[
        str | None,
        typer.Option(help="The tables of a TorchRec plan, a tables.json or bundled ones.", show_default=False),
        Needs("a .pt file", lambda options: options.is_torchrec),
    ] = None
    topology: Annotated[
        str | None,
        typer.Option(help="The ranks of a TorchRec plan, a topology.json or a bundled one.", show_default=False),
        Needs("a .pt file", lambda options: options.is_torchrec),
    ] = None
    pricing: PlanPricingOptions
    overlap: OverlapOption = None
    bound: Annotated[bool | None, _bound_option(f"{_BOUND_HELP}.", f"--bound up to {_MOST_BOUNDED} tables")] = None
    output: OutputOption = None

    @property
    def is_torchrec(self) -> bool:
        """Whether the plan is one of TorchRec."""
        return self.plan.suffix == ".pt"

    def read(self) -> ShardingPlan:
        """The plan.

        Raises:
            InputError: If it cannot be read, or a TorchRec plan comes without its tables and ranks.
        """
        from autoshard.formats import load_tables, load_topology, read_plan
        from autoshard.formats.documents.fields import from_source
        from autoshard.formats.torchrec import from_torchrec
        from autoshard.formats.torchrec.stored_plans import read_stored_plan

        if not self.is_torchrec:
            return read_plan(self.plan)
        if self.tables is None or self.topology is None:
            raise InvalidOptionError("needs --tables and --topology, which a TorchRec plan lacks", field="PLAN")
        stored, tables, topology = read_stored_plan(self.plan), load_tables(self.tables), load_topology(self.topology)
        return from_source(str(self.plan), lambda: from_torchrec(stored, tables, topology))


def plan(options: PlanOptions, as_json: JsonOption = False) -> None:
    """Plans how tables are sharded over ranks: which rank holds which rows and columns.

    Example:
        autoshard import metasyn --num-tables 80 --seed 1 --scale 64 -o tables.json
        autoshard plan tables.json --topology cpu-8 -o plan.json

    Example of a plan that an older one is the start of:
        autoshard plan tables.json --topology cpu-8 --start plan.json -o new.json

    Example with a service's models:
        autoshard plan tables.json --topology cpu-8 --server http://localhost:8000 -o plan.json

    Example with whole tables only:
        autoshard plan tables.json --topology cpu-8 --set sharding_types=table_wise -o plan.json

    Example of a plan that was the best of four when they were executed:
        autoshard plan tables.json --topology cpu-8 --run-off 4 -o plan.json
    """
    from autoshard.formats import read_plan
    from autoshard.formats.row_orders import MovedOrders
    from autoshard.planning import make_plan

    if options.server is not None:
        _finish(_served(options, options.server), options.output, as_json)
        return
    with until(f"Planning with {options.planner}", options.search.time_limit):
        request = options.search.request(options.tables, options.topology, parse_settings(options.settings))
        orders = MovedOrders(request.tables, Path(options.tables).parent, options.output)
        start = None if options.start is None else read_plan(options.start)
        searched_s = request.time_limit_s - _bound_s(options.bound, request)
        task = replace(request, tables=orders.named, start=start, time_limit_s=searched_s)
        if options.run_off is None:
            made = make_plan(options.planner, task)
        else:
            from autoshard.whatif.run_off import contenders

            chosen = contenders(options.planner, task, options.run_off)
        is_bounded = _is_bounded(options.bound, request)
    orders.copy()
    if options.run_off is not None:
        made = _best_executed(chosen, options)
    if options.replay_refine is not None:
        made = refined(made, request.costs, options.replay_refine, options.device)
    if is_bounded:
        made = _bounded(made, request.costs, options.planner, request.options)
    _finish(made, options.output, as_json)


def _best_executed(chosen: Sequence[tuple[str, ShardingPlan]], options: PlanOptions) -> ShardingPlan:
    """The best of some plans in virtual time; logs what each took."""
    from autoshard.report.wording import write_ms
    from autoshard.whatif.run_off import run_off, with_outcome

    with step_progress(f"Executing {len(chosen)} plans") as on_step:
        registry, named_by = options.search.pricing.registry, options.output or Path(options.tables)
        found = run_off(chosen, None if registry is None else str(registry), on_step, named_by.parent)
    for one in found:
        step_ms, predicted_ms = write_ms(one.executed.step_ms), write_ms(one.predicted_ms)
        log(f"{one.name}: {step_ms} ms in virtual time, {predicted_ms} ms predicted")
    return with_outcome(found)


def _bound_s(is_wanted: bool | None, request: PlanRequest) -> float:
    """Seconds of the time limit that are kept for lower bounds; 0 where there will be none."""
    num_tables = len(request.tables.tables)
    needed_s, most_s = _BOUND_S + _BOUND_TABLE_S * num_tables, _BOUND_SHARE * request.time_limit_s
    if is_wanted:
        return min(needed_s, most_s)
    return needed_s if is_wanted is None and num_tables <= _MOST_BOUNDED and needed_s <= most_s else 0.0


def _is_bounded(is_wanted: bool | None, request: PlanRequest) -> bool:
    """Whether a plan that has just been made gets lower bounds: if it was asked for, or if there is time left."""
    if is_wanted is not None or len(request.tables.tables) > _MOST_BOUNDED:
        return bool(is_wanted)
    is_in_time = _bound_s(None, request) > 0 and time.perf_counter() < request.deadline_s()
    if not is_in_time:
        log(f"No lower bound within --time-limit {request.time_limit_s:g}: --bound takes the time that it needs")
    return is_in_time


def _served(options: PlanOptions, server: str) -> ShardingPlan:
    """The plan that a service makes."""
    from autoshard.client import PlanTask
    from autoshard.formats import read_plan

    search = options.search
    tables, orders = tables_to_send(options.tables, options.output)
    task = PlanTask(
        tables=tables,
        topology=topology_to_send(options.topology),
        planner=options.planner,
        options=parse_settings(options.settings),
        time_limit_s=search.time_limit,
        payload=search.parsed_payload,
        seed=search.seed,
        risk=search.pricing.risk,
        start=None if options.start is None else read_plan(options.start),
    )
    with until(f"Planning at {server}", search.time_limit), open_client(server) as client:
        made = client.plan(task)
    orders.copy()
    for warning in made.warnings:
        warn(warning)
    return made.plan


def evaluate(options: EvaluateOptions, as_json: JsonOption = False) -> None:
    """Prices a plan: kernels, exchange and memory of every rank.

    Example:
        autoshard evaluate plan.json --registry registry -o priced.json
        autoshard evaluate torchrec_plan.pt --tables tables.json --topology cpu-8 -o plan.json
    """
    from autoshard.evaluation.executable import plan_note
    from autoshard.formats.row_orders import moved_plan
    from autoshard.planning import repriced
    from autoshard.validator import validate_plan

    loaded = options.read()
    if options.is_torchrec:
        validate_plan(loaded)
    if note := plan_note(loaded):
        _log.warning("%s", note)
    costs = options.pricing.costs_of(loaded)
    priced = repriced(loaded, costs, overlap=options.overlap)
    if options.bound or (options.bound is None and len(priced.tables.tables) <= _MOST_BOUNDED):
        made = priced.provenance
        priced = _bounded(priced, costs, made.planner if made else "", made.options if made else {})
    if options.output is not None:
        priced = moved_plan(priced, options.plan, options.output)
    _finish(priced, options.output, as_json)


def _bounded(plan: ShardingPlan, costs: CostModels, planner: str, options: Mapping[str, object]) -> ShardingPlan:
    """The plan with lower bounds over what a planner chooses from with some options."""
    from autoshard.planning import searched_types, with_bounds

    with working("Computing lower bounds"):
        return with_bounds(plan, costs, searched_types(planner, options))


def _finish(plan: ShardingPlan, output: Path | None, as_json: bool) -> None:
    from autoshard.formats import plan_to_json, write_plan
    from autoshard.report import plan_summary
    from autoshard.report.caveats import memory_warnings

    if output is not None:
        write_plan(plan, output)
    for warning in memory_warnings(plan):
        warn(warning)
    emit(plan_to_json(plan) if as_json else {}, plan_summary(plan), as_json=as_json)
    if output is not None:
        log(f"Wrote {output}")


def show(
    plan: Annotated[Path, typer.Argument(help="Plan to look at.", metavar="PLAN")],
    html: PageOption = None,
    image: ImageOption = None,
    replayed: Annotated[
        Path | None, typer.Option(help="Output of `autoshard replay --json`, to show measured beside predicted times.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Shows what a plan costs and where its tables are.

    Example:
        autoshard show plan.json --html plan.html --image plan.svg

    Example with measured times:
        autoshard replay plan.json --json > replay.json
        autoshard show plan.json --replayed replay.json
    """
    from autoshard.formats import atomic_write, plan_to_json, read_plan
    from autoshard.report import plan_figures, plan_page, plan_summary, plan_warnings
    from autoshard.report.caveats import device_warnings

    loaded = read_plan(plan)
    replay = None if replayed is None else _read_replay(replayed, loaded)
    measured = None if replay is None else replay.measured
    of_replay = () if replay is None else device_warnings(replay.device, loaded)
    if html is not None:
        title = f"Sharding plan {plan.name}"
        atomic_write(html, plan_page(loaded, measured, title=title, measured_notes=of_replay))
        log(f"Wrote {html}")
    for warning in (*plan_warnings(loaded), *of_replay):
        warn(warning)
    emit(plan_to_json(loaded), plan_summary(loaded, measured), as_json=as_json)
    if image is not None:
        pictures = plan_figures(loaded, measured)
        draw({picture.name: picture.figure for picture in pictures}, image)


def draw(figures: Mapping[str, Any], image: Path) -> None:
    """Writes figures as images, with a progress bar, and logs their names; see `write_images`."""
    from autoshard.report.images import write_images

    with progress("Drawing", len(figures)) as advance:
        files = write_images(figures, image, on_drawn=advance)
    for file in files:
        log(f"Wrote {file}")


def _read_replay(path: Path, plan: ShardingPlan) -> ReplayResult:
    from autoshard.report.replay_json import REPLAY

    found = REPLAY.read(path)
    nums_shards = [len(shards) for shards in plan.local_shards()]
    if len(found.ranks) != len(nums_shards):
        message = f"must hold {len(nums_shards)} values, one per rank of the plan, got {len(found.ranks)}"
        raise FormatError(message, field="ranks", source=str(path))
    for number, (rank, num_shards) in enumerate(zip(found.ranks, nums_shards, strict=True)):
        if rank.num_shards != num_shards:
            message = f"must be {num_shards:,}, as in the plan, got {rank.num_shards:,}: it is of another plan"
            raise FormatError(message, field=f"ranks[{number}].num_shards", source=str(path))
    return found
