"""Steps of `auto`'s plans by time limit, over the best plan known: `python -m studies limits`.

Tables are MetaSyn's, drawn with replacement; on CPUs their rows are divided by 64. Plans within limits are made by the
command `autoshard plan`, a process of its own each, so that none finds what another has worked out; times are of the
whole command, imports included. The best plan known is the best of these and of searches from several seeds.

Commands and searches are parts that may be made apart from each other, and on different machines.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from autoshard.commands.arguments import positive_option
from autoshard.commands.options import command_options
from autoshard.console import log, progress
from autoshard.core import ShardingPlan, TableSet, Topology
from autoshard.core.errors import AutoshardError
from autoshard.formats import load_topology, read_plan, write_tables, write_topology
from autoshard.formats.metasyn import metasyn
from autoshard.planners.planner import PlanRequest
from autoshard.planning import kernel_model, make_costs, make_plan
from autoshard.table import Table
from studies.frame import OutputOptions, PartsOption, PartStore, RegistryOption, StudyResult, names_in

#: Seed of the first task, as drawn.
_FIRST_SEED = 9001
#: Rows and batch of MetaSyn are divided by this for CPUs.
_CPU_SCALE = 64


def metasyn_for(topology: Topology) -> TableSet:
    """The pool that tasks on a topology are drawn from; smaller on CPUs."""
    return metasyn().scaled(_CPU_SCALE) if topology.device == "cpu" else metasyn()


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitTask:
    """Kind of tasks.

    Attributes:
        num_tables: Tables drawn.
        num_ranks: Ranks.
        base: Bundled topology whose nodes they are.
        goals: Time limits in seconds, each with the largest excess over the best step known, as a share of it.
    """

    num_tables: int
    num_ranks: int
    base: str
    goals: Mapping[float, float]

    def topology(self) -> Topology:
        """The ranks."""
        return of_ranks(load_topology(self.base), self.num_ranks)

    def tables(self, seed: int) -> TableSet:
        """Tables of a seed."""
        return metasyn_for(self.topology()).redrawn(self.num_tables, seed)

    def request(self, seed: int, registry: Path | None) -> PlanRequest:
        """One of the tasks."""
        tables, topology = self.tables(seed), self.topology()
        return PlanRequest(
            tables=tables, topology=topology, costs=make_costs(tables, topology, registry), registry=registry
        )


_FEW, _MANY = {0.1: 0.015, 1.0: 0.003}, {1.0: 0.02, 10.0: 0.007}
TASKS = {
    "80-cpu": LimitTask(num_tables=80, num_ranks=8, base="cpu-8", goals=_FEW),
    "80-a100": LimitTask(num_tables=80, num_ranks=8, base="a100-8", goals=_FEW),
    "200-dgx": LimitTask(num_tables=200, num_ranks=16, base="dgx-a100-16", goals={1.0: 0.007}),
    "160-a100": LimitTask(num_tables=160, num_ranks=32, base="a100-32", goals={1.0: 0.015}),
    "800-cpu": LimitTask(num_tables=800, num_ranks=80, base="cpu-8", goals=_MANY),
    "800-a100": LimitTask(num_tables=800, num_ranks=80, base="a100-32", goals=_MANY),
    "1000-a100": LimitTask(num_tables=1000, num_ranks=128, base="a100-32", goals={1.0: 0.03}),
    "5000-a100": LimitTask(num_tables=5000, num_ranks=1024, base="a100-32", goals={1.0: 0.03, 10.0: 0.03}),
    "10000-a100": LimitTask(num_tables=10_000, num_ranks=1024, base="a100-32", goals={1.0: 0.03}),
}


class Making(StrEnum):
    """Parts of the study that are made."""

    ALL = "all"
    """Commands and searches."""
    COMMANDS = "commands"
    """Plans within the time limits."""
    SEARCHES = "searches"
    """Searches for the best plan known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRun:
    """Plans of one task within its time limits.

    Attributes:
        task: Its kind's name.
        seed: Seed that its tables are drawn with.
        limits_s: Time limits.
        steps_ms: The predicted step of the plan of each limit.
        took_s: Seconds that each command took.
        searches: How each search ended.
    """

    task: str
    seed: int
    limits_s: tuple[float, ...]
    steps_ms: tuple[float, ...]
    took_s: tuple[float, ...]
    searches: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPlan:
    """One plan.

    Attributes:
        step_ms: Its predicted step.
        took_s: Seconds that making it took.
        search: How the search ended.
    """

    step_ms: float
    took_s: float
    search: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGaps:
    """Plans of one task beside the best plan known.

    Attributes:
        run: The plans.
        searched_ms: Steps of the searches for the best plan known.
    """

    run: LimitRun
    searched_ms: tuple[float, ...]

    @property
    def best_ms(self) -> float:
        """Step of the best plan known."""
        return min((*self.run.steps_ms, *self.searched_ms))

    @property
    def gaps(self) -> tuple[float, ...]:
        """Excess of each limit's step over the best one known, as a share of it."""
        return tuple(step_ms / self.best_ms - 1.0 for step_ms in self.run.steps_ms)

    @property
    def line(self) -> str:
        """One line for people."""
        texts = (
            f"{limit_s:g} s {gap:.2%} ({took_s:.2f} s)"
            for limit_s, gap, took_s in zip(self.run.limits_s, self.gaps, self.run.took_s, strict=True)
        )
        known = f"{self.best_ms:.5g} ms, the best of {len(self.searched_ms)} searches and these"
        return f"{self.run.task}, seed {self.run.seed}: {', '.join(texts)} above {known}"

    def to_json(self) -> dict[str, object]:
        """As a JSON object."""
        searched = {"searched_ms": list(self.searched_ms), "best_ms": self.best_ms}
        return {**asdict(self.run), **searched, "gaps": list(self.gaps)}


def of_ranks(base: Topology, num_ranks: int) -> Topology:
    """A topology with as many ranks; its nodes stay as they are, if it has several levels."""
    if base.world_size == num_ranks:
        return base
    outer = replace(base.levels[-1], size=num_ranks)
    return replace(base, world_size=num_ranks, levels=(*base.levels[:-1], outer))


def run_commands(task: str, seed: int, registry: Path | None) -> LimitRun:
    """Plans one task with every limit, by the command."""
    kind = TASKS[task]
    with TemporaryDirectory() as folder:
        tables, topology = Path(folder, "tables.json"), Path(folder, "topology.json")
        write_tables(kind.tables(seed), tables)
        write_topology(kind.topology(), topology)
        command = [str(Path(sys.executable).with_name("autoshard")), "plan", str(tables), "--topology", str(topology)]
        command += [] if registry is None else ["--registry", str(registry)]
        runs = [_run_command([*command, "--no-bound", "--time-limit", f"{limit_s:g}"]) for limit_s in kind.goals]
    return LimitRun(
        task=task,
        seed=seed,
        limits_s=tuple(kind.goals),
        steps_ms=tuple(run.step_ms for run in runs),
        took_s=tuple(run.took_s for run in runs),
        searches=tuple(run.search for run in runs),
    )


def _run_command(command: Sequence[str]) -> TimedPlan:
    with TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        started_s = time.perf_counter()
        done = subprocess.run([*command, "-o", str(path)], capture_output=True, text=True)
        took_s = time.perf_counter() - started_s
        if done.returncode:
            raise AutoshardError(done.stderr.strip().removeprefix("error: "))
        return _timed(read_plan(path), took_s)


def run_search(task: str, seed: int, number: int, best_s: float, registry: Path | None) -> TimedPlan:
    """One search for the best plan known of a task.

    Args:
        task: Its kind's name.
        seed: Seed that its tables are drawn with.
        number: Seed of the search.
        best_s: Its time limit.
        registry: Folder of trained models; None for the default.
    """
    request = replace(TASKS[task].request(seed, registry), time_limit_s=best_s, seed=number)
    started_s = time.perf_counter()
    plan = make_plan("auto", request)
    return _timed(plan, time.perf_counter() - started_s)


def _timed(plan: ShardingPlan, took_s: float) -> TimedPlan:
    assert plan.provenance is not None, "plans name their planner"
    return TimedPlan(step_ms=plan.prices.step_ms.value, took_s=took_s, search=plan.provenance.models.get("search", ""))


@command_options()
class LimitOptions:
    """Options of the study `limits`."""

    tasks: Annotated[str, typer.Option(help=f"Tasks, with commas: any of {', '.join(TASKS)}.")] = ",".join(TASKS)
    seeds: Annotated[int, typer.Option(min=1, help="Draws of each task.")] = 10
    best_s: Annotated[float, positive_option("Seconds of each search for the best plan known.")] = 120.0
    searches: Annotated[int, typer.Option(min=0, help="Searches for the best plan known, a seed each.")] = 5
    only: Annotated[
        Making, typer.Option(help="Parts to make; searches that are not made, but found in --best, count as known.")
    ] = Making.ALL
    registry: RegistryOption = None
    parts: PartsOption = None
    best: Annotated[
        Path | None, typer.Option(help="Folder of finished searches, as --parts.", show_default="that of --parts")
    ] = None

    def __post_init__(self) -> None:
        _ = self.chosen

    @property
    def chosen(self) -> tuple[str, ...]:
        """Names of the tasks."""
        return names_in(self.tasks, "--tasks", TASKS)

    @property
    def draws(self) -> list[tuple[str, int]]:
        """Tasks with the seeds of their tables: the first draw of every task, then the second."""
        return [(task, _FIRST_SEED + draw) for draw, task in product(range(self.seeds), self.chosen)]

    def settings(self) -> dict[str, object]:
        """What parts depend on."""
        topologies = [load_topology(base) for base in dict.fromkeys(kind.base for kind in TASKS.values())]
        models = {one.device: kernel_model(one, self.registry).name for one in topologies}
        return {"best_s": self.best_s, "models": models}


class LimitStudy:
    """Makes and finds the parts of the study.

    Args:
        options: Its options.
    """

    def __init__(self, options: LimitOptions) -> None:
        self.options = options
        self.settings = options.settings()
        folders = (options.parts, options.best or options.parts)
        self.commands, self.searches = (PartStore.of(folder, self.settings) for folder in folders)

    def searched_ms(self, task: str, seed: int) -> Iterator[float]:
        """Steps of the searches for the best plan known of a task: made, or only those that are there."""
        for number in range(1, self.options.searches + 1):
            name = f"{task}-{seed}-search-{number}"
            if self.options.only is Making.COMMANDS and not self.searches.has(name):
                continue
            search = partial(run_search, task, seed, number, self.options.best_s, self.options.registry)
            found = self.searches.find_data(name, TimedPlan, search)
            log(f"{task}, seed {seed}, search {number}: {found.step_ms:.5g} ms, {found.search}")
            yield found.step_ms

    def gaps(self, task: str, seed: int) -> TaskGaps | None:
        """Plans of a task beside the best known; None where only searches are made."""
        run = None
        if self.options.only is not Making.SEARCHES:
            made = partial(run_commands, task, seed, self.options.registry)
            run = self.commands.find_data(f"{task}-{seed}", LimitRun, made)
        searched_ms = tuple(self.searched_ms(task, seed))
        return None if run is None else TaskGaps(run=run, searched_ms=searched_ms)


def main(options: LimitOptions, output: OutputOptions) -> None:
    """Measures how far above the best plan known `auto` ends within each time limit.

    Example:
        OMP_NUM_THREADS=1 python -m studies limits --tasks 80-a100 --seeds 2 --best-s 20 --parts limits -o docs/figures

    Example of searches for the best plans known, apart from the plans within limits:
        OMP_NUM_THREADS=1 python -m studies limits --only searches --best best-known
        OMP_NUM_THREADS=1 python -m studies limits --only commands --best best-known --parts limits -o docs/figures
    """
    study = LimitStudy(options)
    found = []
    with progress("Planning", len(options.draws)) as advance:
        for task, seed in options.draws:
            gaps = study.gaps(task, seed)
            advance(1)
            if gaps is not None:
                log(gaps.line)
                found.append(gaps)
    if found:
        document = {**study.settings, "runs": [one.to_json() for one in found]}
        output.write(StudyResult(name="limits", document=document, tables=(limits_table(found),)))


def limits_table(found: Sequence[TaskGaps]) -> Table:
    """Largest and median gaps by task and limit, and the longest time."""
    lines = []
    for task in dict.fromkeys(one.run.task for one in found):
        mine = [one for one in found if one.run.task == task]
        for index, limit_s in enumerate(mine[0].run.limits_s):
            gaps = [one.gaps[index] for one in mine]
            took_s = [one.run.took_s[index] for one in mine]
            shares = (f"{share:.2%}" for share in (median(gaps), max(gaps), TASKS[task].goals[limit_s]))
            lines.append((task, f"{limit_s:g}", str(len(mine)), *shares, f"{median(took_s):.2f}", f"{max(took_s):.2f}"))
    columns = ("task", "limit s", "draws", "median gap", "largest gap", "goal", "command, median s", "longest s")
    return Table(columns=columns, rows=tuple(lines), caption="Predicted steps of `auto` over the best known")
