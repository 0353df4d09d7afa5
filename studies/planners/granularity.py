"""`auto` over every way to hold tables against all other planners, and at scale: `python -m studies granularity`.

Bundled tables and a sample of MetaSyn are planned for bundled machines by every planner with one time limit each, and
compared by predicted steps. At scale, tables of MetaSyn, under new names where they are drawn twice, are planned for a
wider cluster of the same nodes. Seconds are those of the planner alone, wall clock and CPU.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group
from rich.table import Table

from autoshard.console import JsonOption, emit, log, progress
from autoshard.core import ShardingPlan, TableSet, Topology
from autoshard.core.errors import AutoshardError, InvalidOptionError
from autoshard.evaluation import evaluate
from autoshard.evaluation.validator import validate_plan
from autoshard.formats import atomic_write, load_tables, load_topology
from autoshard.formats.metasyn import metasyn
from autoshard.planners.planner import PlanRequest
from autoshard.planners.registry import get_planner, planner_names
from autoshard.planning import make_costs
from studies.planners.search_runs import SCALE

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerRun:
    """One planner on one task.

    Attributes:
        planner: Its name.
        step_ms: Predicted step of its plan; None if it made none.
        wall_s: What planning took.
        cpu_s: CPU time of it.
        said: How a search ended, or why there is no plan.
    """

    planner: str
    step_ms: float | None
    wall_s: float
    cpu_s: float
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All planners on one task.

    Attributes:
        tables: Name of the tables.
        num_tables: How many.
        machine: Name of the topology.
        num_ranks: Ranks.
        time_limit_s: What every planner was given.
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

    def to_json(self) -> dict[str, object]:
        """As a JSON object."""
        return {**asdict(self), "ratio": self.ratio}


def compare_planners(
    tables: TableSet, topology: Topology, names: Sequence[str], time_limit_s: float, *, title: tuple[str, str]
) -> Comparison:
    """Plans one task with all planners.

    Args:
        tables: What to place.
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
    plan, said = None, ""
    try:
        plan = planner.plan(request)
    except AutoshardError as error:
        said = str(error)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    step_ms = None
    if plan is not None:
        validate_plan(plan)
        step_ms = evaluate(plan, request.costs).step_ms.value
        said = plan.provenance.models.get("search", "") if plan.provenance is not None else ""
    return PlannerRun(planner=name, step_ms=step_ms, wall_s=wall_s, cpu_s=cpu_s, said=said), plan


def widened(base: Topology, num_ranks: int) -> Topology:
    """As many ranks in nodes of the same size.

    Raises:
        InvalidOptionError: If the nodes do not divide the ranks.
    """
    if num_ranks % base.local_world_size:
        raise InvalidOptionError(
            f"must be a multiple of {base.local_world_size}, got {num_ranks}", field="--scale-ranks"
        )
    return replace(base, world_size=num_ranks, levels=(base.levels[0], replace(base.levels[-1], size=num_ranks)))


def main(
    time_limit: Annotated[float, typer.Option(help="Seconds for every planner.")] = 1.0,
    tables: Annotated[str, typer.Option(help="Tables, with commas.")] = ",".join(TABLES),
    machines: Annotated[str, typer.Option(help="Machines, with commas.")] = ",".join(MACHINES),
    planners: Annotated[
        str | None, typer.Option(help="Planners to compare with, with commas; all but torchrec if left out.")
    ] = None,
    scale_tables: Annotated[int, typer.Option(help="Tables at scale; 0 to leave that out.")] = 1000,
    scale_ranks: Annotated[int, typer.Option(help="Ranks at scale.")] = 128,
    scale_limit: Annotated[float, typer.Option(help="Seconds for every planner at scale.")] = 2.0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON file, written after every task.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compares `auto` over every way to hold tables with all other planners, by predicted steps.

    Example:
        OMP_NUM_THREADS=1 taskset -c 0 python -m studies granularity -o docs/figures/auto-tiers.json
    """
    others = [name for name in planner_names() if name not in {AUTO, *_SLOW}]
    if planners is not None:
        others = [name for name in planners.split(",") if name]
    # What comes first loads the models.
    names = [*others, AUTO]
    pairs = [(name, machine) for name in tables.split(",") if name for machine in machines.split(",") if machine]
    found: list[Comparison] = []
    with progress("Planning", len(pairs) + bool(scale_tables)) as advance:
        for name, machine in pairs:
            topology = load_topology(machine)
            found.append(compare_planners(_tables(name, topology), topology, names, time_limit, title=(name, machine)))
            _told(found, output)
            advance(1)
        if scale_tables:
            found.append(_at_scale(scale_tables, scale_ranks, scale_limit, names))
            _told(found, output)
            advance(1)
    emit({"comparisons": [one.to_json() for one in found]}, Group(*_rendered(found)), as_json=as_json)


def _tables(name: str, topology: Topology) -> TableSet:
    if name != METASYN:
        return load_tables(name)
    sample = metasyn().sample(_NUM_SAMPLED, 0)
    return sample.scaled(SCALE) if topology.device == "cpu" else sample


def _at_scale(num_tables: int, num_ranks: int, time_limit_s: float, names: Sequence[str]) -> Comparison:
    drawn = metasyn().redrawn(num_tables, 0)
    topology = widened(load_topology("a100-32"), num_ranks)
    # Planners whose time grows with tables times ranks, or rows, whatever the limit.
    quick = [name for name in names if name not in {"cp-sat", "oper", "replica-groups"}]
    return compare_planners(drawn, topology, quick, time_limit_s, title=(METASYN, f"a100-32 with {num_ranks} ranks"))


def _told(found: Sequence[Comparison], output: Path | None) -> None:
    log(found[-1].line)
    if output is not None:
        atomic_write(output, json.dumps({"comparisons": [one.to_json() for one in found]}, indent=1) + "\n")


def _rendered(found: Sequence[Comparison]) -> list[Table]:
    shown = Table(title="Predicted steps at one time limit")
    for name in ("tables", "machine", "auto, ms", "best other, ms", "by", "auto over it", "auto, s", "CPU s", "held"):
        shown.add_column(name, justify="left" if name in ("tables", "machine", "by", "held") else "right")
    for one in found:
        best = one.best_other
        shown.add_row(
            f"{one.tables} ({one.num_tables})",
            one.machine,
            "" if one.auto.step_ms is None else f"{one.auto.step_ms:.4g}",
            "" if best is None else f"{best.step_ms:.4g}",
            "" if best is None else best.planner,
            "" if one.ratio is None else f"{one.ratio:.3f}",
            f"{one.auto.wall_s:.2f}",
            f"{one.auto.cpu_s:.2f}",
            ", ".join(f"{tier} {count}" for tier, count in one.held.items()),
        )
    return [shown]
