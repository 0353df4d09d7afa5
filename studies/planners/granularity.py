"""`auto` over every way to hold tables against all other planners, and at scale: `python -m studies granularity`.

Bundled tables and a sample of MetaSyn are planned for bundled machines by every planner with one time limit each, and
compared by predicted steps. At scale, tables of MetaSyn, under new names where they are drawn twice, are planned for a
wider cluster of the same nodes. Seconds are those of the planner alone, wall clock and CPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

import typer

from autoshard.commands.arguments import positive_option
from autoshard.commands.options import command_options
from autoshard.core import ShardingPlan, TableSet, Topology
from autoshard.core.errors import AutoshardError, InvalidOptionError
from autoshard.evaluation import evaluate
from autoshard.formats import load_tables, load_topology
from autoshard.formats.metasyn import metasyn
from autoshard.planners.planner import PlanRequest
from autoshard.planners.registry import get_planner, planner_names
from autoshard.planning import make_costs
from autoshard.table import Table
from autoshard.validator import validate_plan
from studies.frame import OutputOptions, PartsOption, PartStore, StudyResult, names_in, options_without
from studies.planners.limit_runs import metasyn_for, of_ranks

AUTO = "auto"
METASYN = "metasyn"
TABLES = (
    *("criteo-kaggle", "mlperf-dlrm-v2", "nvidia-tiny", "nvidia-small", "nvidia-medium", "param-a", "param-b"),
    METASYN,
)
MACHINES = ("cpu-8", "a100-8", "a100-32")
#: Tables of MetaSyn that are planned like the bundled ones.
_NUM_SAMPLED = 80
#: Its time does not depend on the limit: minutes on the larger tasks.
_SLOW = {"torchrec"}
#: Options that may differ between two runs with the same parts.
_FREE = {"tables", "machines", "parts"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerRun:
    """One planner on one task.

    Attributes:
        planner: Its name.
        step_ms: Predicted step of its plan; None if it made none.
        wall_s: Seconds of planning.
        cpu_s: CPU time of it.
        remark: End of the search, or the reason why there is no plan.
    """

    planner: str
    step_ms: float | None
    wall_s: float
    cpu_s: float
    remark: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All planners on one task.

    Attributes:
        tables: Name of the tables.
        num_tables: How many.
        machine: Name of the topology.
        num_ranks: Ranks.
        time_limit_s: Time limit of every planner.
        cost_model: Which model priced the kernels.
        held: For the plan of `auto`, how many tables have a part in each tier.
        runs: One for each planner.
    """

    tables: str
    num_tables: int
    machine: str
    num_ranks: int
    time_limit_s: float
    cost_model: str
    held: dict[str, int]
    runs: tuple[PlannerRun, ...]

    @property
    def auto(self) -> PlannerRun:
        """The run of `auto`."""
        return next(run for run in self.runs if run.planner == AUTO)

    @property
    def best_other(self) -> PlannerRun | None:
        """The shortest step of the other planners, if any made a plan."""
        others = [run for run in self.runs if run.planner != AUTO and run.step_ms is not None]
        return min(others, key=lambda run: run.step_ms or 0.0, default=None)

    @property
    def ratio(self) -> float | None:
        """Step of `auto` over that of the best other planner."""
        best = self.best_other
        return None if best is None or self.auto.step_ms is None else self.auto.step_ms / (best.step_ms or 1.0)

    @property
    def line(self) -> str:
        """One line for people."""
        best = self.best_other
        other = "no other planner has a plan" if best is None else f"{best.planner} {best.step_ms:.4g} ms"
        step = "no plan" if self.auto.step_ms is None else f"{self.auto.step_ms:.4g} ms"
        seconds = f"{self.auto.wall_s:.2f} s ({self.auto.cpu_s:.2f} s CPU)"
        return f"{self.tables} on {self.machine}: auto {step} in {seconds}; {other}"


def compare_planners(
    tables: TableSet, topology: Topology, names: Sequence[str], time_limit_s: float, *, title: tuple[str, str]
) -> Comparison:
    """Plans one task with all planners.

    Args:
        tables: Tables to place.
        topology: Where to.
        names: Planners.
        time_limit_s: For each of them.
        title: Names of the tables and the topology.
    """
    request = PlanRequest(
        tables=tables, topology=topology, costs=make_costs(tables, topology), time_limit_s=time_limit_s
    )
    held: dict[str, int] = {}
    runs = []
    for name in names:
        run, plan = _run(name, request)
        runs.append(run)
        if name == AUTO and plan is not None:
            pairs = {(placed.shard.table.name, str(placed.tier)) for placed in plan.shards}
            for _, tier in sorted(pairs):
                held[tier] = held.get(tier, 0) + 1
    return Comparison(
        tables=title[0],
        num_tables=len(tables.tables),
        machine=title[1],
        num_ranks=topology.world_size,
        time_limit_s=time_limit_s,
        cost_model=request.costs.kernel.name,
        held=held,
        runs=tuple(runs),
    )


def _run(name: str, request: PlanRequest) -> tuple[PlannerRun, ShardingPlan | None]:
    planner = get_planner(name)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    plan, remark = None, ""
    try:
        plan = planner.plan(request)
    except AutoshardError as error:
        remark = str(error)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    step_ms = None
    if plan is not None:
        validate_plan(plan)
        step_ms = evaluate(plan, request.costs).step_ms.value
        remark = plan.provenance.models.get("search", "") if plan.provenance is not None else ""
    return PlannerRun(planner=name, step_ms=step_ms, wall_s=wall_s, cpu_s=cpu_s, remark=remark), plan


def widened(base: Topology, num_ranks: int) -> Topology:
    """As many ranks in nodes of the same size.

    Raises:
        InvalidOptionError: If the nodes do not divide the ranks.
    """
    if num_ranks % base.local_world_size:
        raise InvalidOptionError(
            f"must be a multiple of {base.local_world_size}, got {num_ranks}", field="--scale-ranks"
        )
    return of_ranks(base, num_ranks)


@command_options()
class GranularityOptions:
    """Options of the study `granularity`."""

    time_limit: Annotated[float, positive_option("Seconds for every planner.")] = 1.0
    tables: Annotated[str, typer.Option(help="Tables, with commas.")] = ",".join(TABLES)
    machines: Annotated[str, typer.Option(help="Machines, with commas.")] = ",".join(MACHINES)
    planners: Annotated[
        str | None, typer.Option(help="Planners to compare with, with commas.", show_default="all but torchrec")
    ] = None
    scale_tables: Annotated[int, typer.Option(min=0, help="Tables at scale; 0 to leave that out.")] = 1000
    scale_ranks: Annotated[int, typer.Option(min=1, help="Ranks at scale.")] = 128
    scale_limit: Annotated[float, positive_option("Seconds for every planner at scale.")] = 2.0
    parts: PartsOption = None

    @property
    def names(self) -> tuple[str, ...]:
        """Planners in the order in which they run; the first one's time includes the loading of models."""
        if self.planners is not None:
            return (*names_in(self.planners), AUTO)
        return (*(name for name in planner_names() if name not in {AUTO, *_SLOW}), AUTO)

    def comparisons(self) -> dict[str, Callable[[], Comparison]]:
        """All comparisons by the names of their parts."""
        found: dict[str, Callable[[], Comparison]] = {
            f"{name}-{machine}": partial(_compare, name, machine, self)
            for name in names_in(self.tables)
            for machine in names_in(self.machines)
        }
        return found | ({"scale": partial(_at_scale, self)} if self.scale_tables else {})


def main(options: GranularityOptions, output: OutputOptions) -> None:
    """Compares `auto` over every way to hold tables with all other planners, by predicted steps.

    Example:
        OMP_NUM_THREADS=1 taskset -c 0 python -m studies granularity -o docs/figures
    """
    parts = PartStore.of(options.parts, options_without(options, _FREE))
    found = parts.find_all("Planning", Comparison, options.comparisons(), lambda one: one.line)
    document = {"comparisons": [asdict(one) | {"ratio": one.ratio} for one in found]}
    output.write(StudyResult(name="granularity", document=document, tables=(comparison_table(found),)))


def _compare(name: str, machine: str, options: GranularityOptions) -> Comparison:
    topology = load_topology(machine)
    return compare_planners(_tables(name, topology), topology, options.names, options.time_limit, title=(name, machine))


def _tables(name: str, topology: Topology) -> TableSet:
    return metasyn_for(topology).sample(_NUM_SAMPLED, 0) if name == METASYN else load_tables(name)


def _at_scale(options: GranularityOptions) -> Comparison:
    topology = widened(load_topology("a100-32"), options.scale_ranks)
    # Planners whose time grows with tables times ranks, or rows, whatever the limit.
    quick = [name for name in options.names if name not in {"cp-sat", "oper", "replica-groups"}]
    title = (METASYN, f"a100-32 with {options.scale_ranks} ranks")
    return compare_planners(
        metasyn().redrawn(options.scale_tables, 0), topology, quick, options.scale_limit, title=title
    )


def comparison_table(found: Sequence[Comparison]) -> Table:
    """A line for each task."""
    return Table.of(
        found,
        (
            ("task", lambda one: f"{one.tables} ({one.num_tables}) on {one.machine}"),
            ("auto, ms", lambda one: _step(one.auto)),
            ("best other, ms", lambda one: _step(one.best_other)),
            ("by", lambda one: "" if one.best_other is None else one.best_other.planner),
            ("auto over it", lambda one: "" if one.ratio is None else f"{one.ratio:.3f}"),
            ("auto, s", lambda one: f"{one.auto.wall_s:.2f}"),
            ("CPU s", lambda one: f"{one.auto.cpu_s:.2f}"),
            ("held", lambda one: ", ".join(f"{tier} {count}" for tier, count in one.held.items())),
        ),
        caption="Predicted steps at one time limit",
    )


def _step(run: PlannerRun | None) -> str:
    return "" if run is None or run.step_ms is None else f"{run.step_ms:.4g}"
