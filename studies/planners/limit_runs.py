"""Steps of `auto`'s plans by time limit, over the best plan known: `python -m studies limits`.

Tables are MetaSyn's, drawn with replacement; on CPUs their rows are divided by 64. The best plan known is the best of
all runs of a task, searches of `--best-s` seconds from several seeds among them. Times are of planning, pricing and
checking, once models are loaded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from autoshard.commands.arguments import positive_option
from autoshard.commands.options import command_options
from autoshard.console import log, progress
from autoshard.core import Topology
from autoshard.core.errors import InvalidOptionError
from autoshard.formats import load_topology
from autoshard.formats.metasyn import metasyn
from autoshard.planners.planner import PlanRequest
from autoshard.planning import make_costs, make_plan
from autoshard.report.images import NumberTable
from studies.frame import OutputOptions, PartsOption, PartStore, RegistryOption, StudyResult, names_in
from studies.planners.search_runs import SCALE

#: Tables, ranks and the topology of each task, by name.
TASKS = {
    "80-cpu": (80, 8, "cpu-8"),
    "80-a100": (80, 8, "a100-8"),
    "200-dgx": (200, 16, "dgx-a100"),
    "800-cpu": (800, 80, "cpu-8"),
    "800-a100": (800, 80, "a100-32"),
}
LIMITS_S = (0.1, 1.0, 10.0)
#: Seed of the first task, as drawn.
_FIRST_SEED = 9001
_SEARCHES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRun:
    """One task.

    Attributes:
        task: Its name.
        seed: Seed that its tables are drawn with.
        limits_s: Time limits.
        steps_ms: The predicted step of the plan of each limit.
        took_s: Seconds that it took.
        best_ms: Of the best plan known.
    """

    task: str
    seed: int
    limits_s: tuple[float, ...]
    steps_ms: tuple[float, ...]
    took_s: tuple[float, ...]
    best_ms: float

    @property
    def gaps(self) -> tuple[float, ...]:
        """Excess of each limit's step over the best one known, as a share of it."""
        return tuple(step_ms / self.best_ms - 1.0 for step_ms in self.steps_ms)

    @property
    def line(self) -> str:
        """One line for people."""
        texts = (
            f"{limit_s:g} s {gap:.2%} ({took_s:.2f} s)"
            for limit_s, gap, took_s in zip(self.limits_s, self.gaps, self.took_s, strict=True)
        )
        return f"{self.task}, seed {self.seed}: {', '.join(texts)} above {self.best_ms:.5g} ms"


def of_ranks(base: Topology, num_ranks: int) -> Topology:
    """A topology with as many ranks; its nodes stay as they are, if it has several levels."""
    outer = replace(base.levels[-1], size=num_ranks)
    return replace(base, world_size=num_ranks, levels=(*base.levels[:-1], outer))


def run_task(task: str, seed: int, best_s: float, registry: Path | None) -> LimitRun:
    """Plans one task with every limit, and longer."""
    num_tables, num_ranks, name = TASKS[task]
    base = load_topology(f"{name}-{num_ranks}" if name == "dgx-a100" else name)
    topology = base if base.world_size == num_ranks else of_ranks(base, num_ranks)
    pool = metasyn().scaled(SCALE) if topology.device == "cpu" else metasyn()
    tables = pool.redrawn(num_tables, seed)
    costs = make_costs(tables, topology, registry)
    request = PlanRequest(tables=tables, topology=topology, costs=costs, registry=registry)
    runs = [_planned(replace(request, time_limit_s=limit_s)) for limit_s in LIMITS_S]
    longer = [replace(request, time_limit_s=best_s / _SEARCHES, seed=number) for number in range(1, _SEARCHES + 1)]
    return LimitRun(
        task=task,
        seed=seed,
        limits_s=LIMITS_S,
        steps_ms=tuple(step_ms for step_ms, _ in runs),
        took_s=tuple(took_s for _, took_s in runs),
        best_ms=min(step_ms for step_ms, _ in [*runs, *map(_planned, longer)]),
    )


def _planned(request: PlanRequest) -> tuple[float, float]:
    """The plan's step in ms, and the seconds that it took."""
    started_s = time.perf_counter()
    plan = make_plan("auto", request)
    took_s = time.perf_counter() - started_s
    assert plan.predicted is not None, "make_plan prices"
    return plan.predicted.step_ms.value, took_s


@command_options()
class LimitOptions:
    """Options of the study `limits`."""

    tasks: Annotated[str, typer.Option(help=f"Tasks, with commas: any of {', '.join(TASKS)}.")] = ",".join(TASKS)
    seeds: Annotated[int, typer.Option(min=1, help="Draws of each task.")] = 10
    best_s: Annotated[float, positive_option("Seconds of search for the best plan known.")] = 240.0
    registry: RegistryOption = None
    parts: PartsOption = None

    def __post_init__(self) -> None:
        if not self.chosen or not set(self.chosen) <= set(TASKS):
            raise InvalidOptionError(f"must be any of {', '.join(TASKS)}, got {self.tasks!r}", field="--tasks")

    @property
    def chosen(self) -> tuple[str, ...]:
        """Names of the tasks."""
        return tuple(names_in(self.tasks))


def main(options: LimitOptions, output: OutputOptions) -> None:
    """Measures how far above the best plan known `auto` ends within each time limit.

    Example:
        OMP_NUM_THREADS=1 python -m studies limits --tasks 80-a100 --seeds 2 --best-s 20 --parts limits -o docs/figures
    """
    settings = {"best_s": options.best_s, "limits_s": list(LIMITS_S)}
    parts = PartStore(options.parts)
    parts.check_identity(settings)
    runs = []
    draws = list(product(options.chosen, range(_FIRST_SEED, _FIRST_SEED + options.seeds)))
    with progress("Planning", len(draws)) as advance:
        for task, seed in draws:
            run = partial(run_task, task, seed, options.best_s, options.registry)
            runs.append(parts.find_data(f"{task}-{seed}", LimitRun, run))
            log(runs[-1].line)
            advance(1)
    document = {**settings, "runs": [asdict(one) | {"gaps": list(one.gaps)} for one in runs]}
    output.write(StudyResult(name="limits", document=document, tables=(limits_table(runs),)))


def limits_table(runs: Sequence[LimitRun]) -> NumberTable:
    """Largest and median gaps by task and limit, and the longest time."""
    lines = []
    for task, (index, limit_s) in product(dict.fromkeys(run.task for run in runs), enumerate(LIMITS_S)):
        mine = [run for run in runs if run.task == task]
        gaps = [run.gaps[index] for run in mine]
        longest_s = max(run.took_s[index] for run in mine)
        lines.append(
            (task, f"{limit_s:g}", str(len(mine)), f"{median(gaps):.2%}", f"{max(gaps):.2%}", f"{longest_s:.2f}")
        )
    columns = ("task", "limit s", "draws", "median gap", "largest gap", "longest s")
    return NumberTable(columns=columns, lines=tuple(lines), caption="Predicted steps of `auto` over the best known")
