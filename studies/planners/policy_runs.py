"""What the policy is worth: `python -m studies policy`.

Tasks are those of the study `limits`, of draws that no training sees, and ones that are drawn as for training. Each is
planned in one process that is warm, on one core: by `auto` within some time limits, with the policy and without it, one
after the other, so that both see the same machine; by the policy alone; and by planners beside them. Steps are over the
best one known: the shortest of these and of a long search.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import numpy as np
import typer

from autoshard.commands.options import command_options
from autoshard.console import log
from autoshard.core.accepted import FINITE_ABOVE_0
from autoshard.core.errors import AutoshardError
from autoshard.evaluation.evaluate import evaluate
from autoshard.formats import load_topology
from autoshard.planners.planner import PlanRequest
from autoshard.planning import get_planner, kernel_model
from autoshard.runtime.processes.threads import intra_op_threads
from autoshard.table import Table
from policies.planning.trained import TrainedPolicy
from policies.training.drawn_tasks import MACHINES, TaskKind, TaskSplit, task_seeds
from studies.frame import OutputOptions, PartsOption, PartStore, RegistryOption, StudyResult, names_in, numbers_in
from studies.planners.limit_runs import TASKS

#: Planners beside `auto`, by what the table calls them: name and options.
_OTHERS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "cost-greedy": ("cost-greedy", {}),
    "neuroshard": ("neuroshard", {}),
    "policy": ("policy", {}),
    "policy, no burst": ("policy", {"bursts": 0}),
    "policy, 64 samples, no burst": ("policy", {"num_samples": 64, "bursts": 0}),
    "policy, 4 bursts": ("policy", {"bursts": 4}),
}
_WITHOUT, _WITH = "auto", "auto with the policy"
#: Tasks of all machines and pools that training draws from, with seeds that it does not use.
_DRAWN = "drawn"
_TASKS = (*TASKS, _DRAWN)
#: Draws of the mean's interval.
_NUM_RESAMPLED = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRun:
    """Plans of one task.

    Attributes:
        task: Its kind's name.
        seed: Seed that its tables are drawn with.
        steps_ms: Predicted step of each plan, by the planner and, of `auto`, by the limit behind a comma.
        cpu_s: Seconds of CPU time that each took.
        best_ms: The shortest step, that of a long search included.
    """

    task: str
    seed: int
    steps_ms: Mapping[str, float]
    cpu_s: Mapping[str, float]
    best_ms: float

    def excess(self, name: str) -> float:
        """A plan's step over the shortest one, less 1."""
        return self.steps_ms[name] / self.best_ms - 1

    @property
    def line(self) -> str:
        """One line for people."""
        texts = (f"{name} {self.excess(name):.2%}" for name in self.steps_ms)
        return f"{self.task}, seed {self.seed}: {', '.join(texts)} above {self.best_ms:.5g} ms"


@command_options()
class PolicyStudyOptions:
    """Options of the study `policy`."""

    tasks: Annotated[str, typer.Option(help=f"Tasks, with commas: any of {', '.join(_TASKS)}.")] = (
        "80-cpu,80-a100,160-a100"
    )
    seeds: Annotated[int, typer.Option(min=1, help="Draws of each task.")] = 10
    limits: Annotated[str, typer.Option(help="Time limits of `auto` in seconds, with commas.")] = "0.05,0.2,1"
    first_seed: Annotated[int, typer.Option(min=0, help="Seed of the first draw's tables.")] = 7100
    best_s: Annotated[
        float, typer.Option(min=0.0, help="Seconds of the search for the best plan known; 0 plans by `auto` alone.")
    ] = 20.0
    registry: RegistryOption = None
    parts: PartsOption = None

    def __post_init__(self) -> None:
        _ = self.chosen, self.limits_s

    @property
    def chosen(self) -> tuple[str, ...]:
        """Names of the tasks."""
        return names_in(self.tasks, "--tasks", _TASKS)

    @property
    def limits_s(self) -> tuple[float, ...]:
        """The time limits."""
        return numbers_in(self.limits, "--limits", float, FINITE_ABOVE_0)

    def settings(self) -> dict[str, object]:
        """What parts depend on."""
        names = [name for task in self.chosen for name in ([TASKS[task].base] if task in TASKS else MACHINES)]
        machines = [load_topology(name) for name in dict.fromkeys(names)]
        return {
            "limits": list(self.limits_s),
            "best_s": self.best_s,
            "models": {one.device: kernel_model(one, self.registry).name for one in machines},
            "policies": {one.device: TrainedPolicy.for_device(self.registry, one.device).name for one in machines},
        }


def _request(task: str, seed: int, registry: Path | None) -> PlanRequest:
    if task == _DRAWN:
        return TaskKind(registry=registry).request(task_seeds(TaskSplit.TEST, seed + 1)[seed])
    return TASKS[task].request(seed, registry)


def run(task: str, seed: int, options: PolicyStudyOptions) -> PolicyRun:
    """Plans one task in all ways."""
    request = _request(task, seed, options.registry)
    others = _OTHERS if options.best_s else {}
    asked = [(name, replace(request, options=of)) for name, (_, of) in others.items()]
    for limit_s in options.limits_s:
        pair = [(_WITHOUT, {"policy": False}), (_WITH, {})]
        # Neither is always the first.
        for name, of in pair if seed % 2 else reversed(pair):
            asked.append((f"{name}, {limit_s:g} s", replace(request, options=of, time_limit_s=limit_s)))
    _plan("auto", replace(request, time_limit_s=0.05))  # so that nothing is imported on the way
    steps_ms, cpu_s = {}, {}
    for name, one in asked:
        planner = _OTHERS[name][0] if name in _OTHERS else "auto"
        began_s = time.process_time()
        found_ms = _plan(planner, one)
        if found_ms is not None:
            steps_ms[name], cpu_s[name] = found_ms, time.process_time() - began_s
    best_ms = _plan("auto", replace(request, time_limit_s=options.best_s, seed=1)) if options.best_s else None
    known = [*steps_ms.values(), *([] if best_ms is None else [best_ms])]
    return PolicyRun(task=task, seed=seed, steps_ms=steps_ms, cpu_s=cpu_s, best_ms=min(known))


def _plan(planner: str, request: PlanRequest) -> float | None:
    """The predicted step of a planner's plan; None if it has none."""
    try:
        plan = get_planner(planner).plan(request)
    except AutoshardError as error:
        log(f"{planner}: {error}")
        return None
    return evaluate(plan, request.costs).step_ms.value


def main(options: PolicyStudyOptions, output: OutputOptions) -> None:
    """Measures how far above the best plan known the policy ends, and `auto` with and without it.

    Example:
        OMP_NUM_THREADS=1 python -m studies policy --tasks 160-a100 --seeds 3 --parts runs -o docs/figures
    """
    settings = options.settings()
    store = PartStore.of(options.parts, settings)
    makers = {
        f"{task}-{options.first_seed + draw}": partial(run, task, options.first_seed + draw, options)
        for draw in range(options.seeds)
        for task in options.chosen
    }
    with intra_op_threads(1):
        found = store.find_all("Planning", PolicyRun, makers, lambda one: one.line)
    document: dict[str, Any] = {**settings, "runs": [asdict(one) for one in found]}
    by_task = [[one for one in found if one.task == task] for task in options.chosen]
    tables = (*map(policy_table, by_task), pairs_table(found))
    output.write(StudyResult(name="policy", document=document, tables=tables))


def policy_table(found: Sequence[PolicyRun]) -> Table:
    """Mean, median and largest excess of each planner, with the mean's 90% interval and CPU time."""
    lines = []
    for name in dict.fromkeys(name for one in found for name in one.steps_ms):
        mine = [one for one in found if name in one.steps_ms]
        excess = np.array([one.excess(name) for one in mine])
        low, high = interval(excess)
        lines.append(
            (
                name,
                str(len(mine)),
                f"{excess.mean():.2%}",
                f"{low:.2%} to {high:.2%}",
                f"{np.median(excess):.2%}",
                f"{excess.max():.2%}",
                f"{fmean(one.cpu_s[name] for one in mine):.3f}",
            )
        )
    columns = ("planner", "tasks", "mean excess", "90% interval", "median", "largest", "CPU s")
    return Table(columns=columns, rows=tuple(lines), caption=f"{found[0].task}: predicted steps over the best known")


def pairs_table(found: Sequence[PolicyRun]) -> Table:
    """Steps of `auto` with the policy over those without it, of the same tasks: means with their standard errors."""
    lines = []
    for task in dict.fromkeys(one.task for one in found):
        mine = [one.steps_ms for one in found if one.task == task]
        for name in dict.fromkeys(name for steps_ms in mine for name in steps_ms if name.startswith(f"{_WITHOUT}, ")):
            limit = name.removeprefix(f"{_WITHOUT}, ")
            both = [(one[f"{_WITH}, {limit}"], one[name]) for one in mine if {name, f"{_WITH}, {limit}"} <= one.keys()]
            change_N = np.array([with_ms / without_ms - 1 for with_ms, without_ms in both])
            error = change_N.std(ddof=1) / np.sqrt(len(change_N)) if len(change_N) > 1 else np.nan
            counts = (int((change_N < 0).sum()), int((change_N > 0).sum()))
            lines.append((task, limit, str(len(change_N)), f"{change_N.mean():+.2%} ± {error:.2%}", *map(str, counts)))
    columns = ("task", "limit", "pairs", "with the policy over without it", "shorter", "longer")
    return Table(columns=columns, rows=tuple(lines), caption="`auto` with the policy beside `auto` without it")


def interval(values_N: np.ndarray) -> tuple[float, float]:
    """The 90% interval of a mean, by drawing the values anew."""
    rng = np.random.default_rng(0)
    means = rng.choice(values_N, size=(_NUM_RESAMPLED, len(values_N))).mean(axis=1)
    low, high = np.quantile(means, [0.05, 0.95])
    return float(low), float(high)
