"""Planners side by side on many tasks, predicted and replayed: `python -m studies side-by-side`.

Tasks are random tables of a pool, drawn with seeds that policy training never uses. `auto` may cut tables and hold them
on several ranks; all others, and the row `auto+whole`, place whole tables. All plans of a task, the refined one too,
are replayed in the same interleaved rounds at its end, with the ceiling.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import mean
from typing import Annotated

import numpy as np
import typer

from autoshard.commands.arguments import DeviceOption, positive_option
from autoshard.commands.options import command_options
from autoshard.console import log, progress
from autoshard.core import ShardingPlan
from autoshard.core.choices import Device
from autoshard.core.errors import InvalidOptionError
from autoshard.evaluation.step_price import model_names
from autoshard.formats import load_tables, load_topology
from autoshard.planners.planner import PlanRequest
from autoshard.planners.registry import planner_names
from autoshard.planning import compare, make_costs, refine_plan
from autoshard.report import ComparedPlan
from autoshard.results.comparison import MeasuredPlan
from autoshard.table import Table
from bench.kernels.replay import Replay, replay_plans
from bench.measuring.devices import find_device
from bench.measuring.robust_stats import MsArray
from studies.frame import (
    OutputOptions,
    PartsOption,
    PartStore,
    RegistryOption,
    StudyResult,
    names_in,
    options_without,
)

#: `auto` as it searches whole tables by the kernels of the slowest rank, which is what all others but `auto` do.
WHOLE = "auto+whole"
_WHOLE_OPTIONS = {"auto": {"objective": "kernel", "sharding_types": "table_wise"}}
PLANNERS = f"random,size-greedy,dim-greedy,lookup-greedy,torchrec,karmarkar-karp,cost-greedy,policy,{WHOLE},auto"
_BASELINE = "random"
_FIRST_SEED = 1000
#: The row of the refined plan of `WHOLE`.
REFINED = "auto+refine"
#: Options that a task's numbers do not depend on; what depends on the registry are the models, which have names.
_FREE = {"registry", "num_tasks", "parts"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTask:
    """One task: all planners' plans, as predicted and as replayed, and the ceiling of the same rounds.

    Attributes:
        rows: One per planner, in their order, each with its plan; after them that of the refined plan, if there is one.
        replay: Measured plans and ceiling.
        searched_ms: Predicted kernel time of the slowest rank after a long search by `auto`; None without one.
    """

    rows: tuple[ComparedPlan, ...]
    replay: Replay
    searched_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerNumbers:
    """What is kept of one planner's plan of a task. Times are kernels of the slowest rank, but for the step.

    Attributes:
        planner: Its name.
        predicted_max_ms: Predicted time.
        predicted_balance: Predicted balance of the ranks' kernels.
        predicted_step_ms: Predicted step.
        measured: Measured kernels of the ranks.
        prediction_error: Predicted over measured time, minus 1.
        planning_s: Wall-clock seconds of planning.
    """

    planner: str
    predicted_max_ms: float
    predicted_balance: float
    predicted_step_ms: float
    measured: MeasuredPlan
    prediction_error: float
    planning_s: float

    @classmethod
    def of(cls, row: ComparedPlan) -> PlannerNumbers:
        """The numbers of a plan that was priced and replayed."""
        assert row.plan is not None, "planners without a plan have ended the comparison"
        assert row.measured is not None, "all plans are replayed"
        predicted = row.plan.prices
        return cls(
            planner=row.planner,
            predicted_max_ms=predicted.max_kernel_ms,
            predicted_balance=predicted.balance,
            predicted_step_ms=predicted.step_ms.value,
            measured=row.measured,
            prediction_error=row.prediction_error or 0.0,
            planning_s=row.planning_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskNumbers:
    """What is kept of one task: the finished part of the study.

    Attributes:
        rows: One per plan.
        ceiling: What identical ranks measured in the same rounds.
        searched_ms: As of `ComparedTask`.
    """

    rows: tuple[PlannerNumbers, ...]
    ceiling: MeasuredPlan
    searched_ms: float | None

    @classmethod
    def of(cls, task: ComparedTask) -> TaskNumbers:
        """The numbers of a task."""
        rows = tuple(map(PlannerNumbers.of, task.rows))
        return cls(rows=rows, ceiling=task.replay.ceiling, searched_ms=task.searched_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerMeans:
    """One planner's means over tasks. Speed-ups are means of the ratios of the tasks."""

    planner: str
    predicted_max_ms: float
    predicted_balance: float
    predicted_step_ms: float
    measured_max_ms: float
    measured_balance: float
    below_ceiling: float
    """By how much the measured balance is below the ceiling of the same rounds; 0.02 are two points."""
    measured_speedup: float
    prediction_error: float
    """Mean over tasks of |predicted / measured - 1| of the slowest rank."""
    planning_s: float


def compare_task(
    request: PlanRequest,
    planners: Sequence[str],
    search_s: float = 0.0,
    num_refinements: int = 0,
    device: str = "auto",
) -> ComparedTask:
    """Plans a task with all planners, and replays all plans in the same rounds.

    Args:
        request: The task.
        planners: Their names, `WHOLE` among them or not.
        search_s: Seconds of the long search of whole tables; 0 for none.
        num_refinements: Measurements that refine the plan of `WHOLE`, which has to be among them, in a row of its own;
            0 for no such row.
        device: Where to measure: `auto`, `cpu` or `cuda`.

    Raises:
        AutoshardError: The first planner's that found no plan.
    """
    rows = [_planned(name, request) for name in planners]
    if num_refinements:
        base = next(row for row in rows if row.planner == WHOLE)
        rows.append(_refined(base, request, num_refinements, device))
    replay = replay_plans([row.plan for row in rows if row.plan is not None], device=device)
    searched_ms = None
    if search_s:
        searched_ms = _planned(WHOLE, replace(request, time_limit_s=search_s)).predicted_max_ms
    measured = tuple(replace(row, measured=plan) for row, plan in zip(rows, replay.plans, strict=True))
    return ComparedTask(rows=measured, replay=replay, searched_ms=searched_ms)


def _planned(name: str, request: PlanRequest) -> ComparedPlan:
    whole = name == WHOLE
    row = compare(["auto" if whole else name], request, options=_WHOLE_OPTIONS if whole else None)[0]
    if row.failure is not None:
        raise row.failure
    return replace(row, planner=name)


def _refined(base: ComparedPlan, request: PlanRequest, num_measurements: int, device: str) -> ComparedPlan:
    assert base.plan is not None, "planners without a plan have ended the comparison"
    started_s = time.perf_counter()

    def measure(plans: Sequence[ShardingPlan]) -> list[MsArray]:
        return [np.array(plan.kernel_ms_per_rank) for plan in replay_plans(plans, device=device).plans]

    plan, remark = refine_plan(base.plan, request.costs, measure, num_measurements=num_measurements)
    log(f"{REFINED}: {remark}")
    return replace(base, planner=REFINED, plan=plan, planning_s=base.planning_s + time.perf_counter() - started_s)


def planner_means(tasks: Sequence[TaskNumbers]) -> tuple[PlannerMeans, ...]:
    """Means over tasks, for each planner; speed-ups are over `random`, which has to be among them."""
    names = [row.planner for row in tasks[0].rows]
    return tuple(_means(name, [task.rows[index] for task in tasks], tasks) for index, name in enumerate(names))


def _means(name: str, rows: Sequence[PlannerNumbers], tasks: Sequence[TaskNumbers]) -> PlannerMeans:
    pairs = list(zip(tasks, [row.measured for row in rows], strict=True))
    return PlannerMeans(
        planner=name,
        predicted_max_ms=mean(row.predicted_max_ms for row in rows),
        predicted_balance=mean(row.predicted_balance for row in rows),
        predicted_step_ms=mean(row.predicted_step_ms for row in rows),
        measured_max_ms=mean(plan.max_kernel_ms for _, plan in pairs),
        measured_balance=mean(plan.balance for _, plan in pairs),
        below_ceiling=mean(task.ceiling.balance - plan.balance for task, plan in pairs),
        measured_speedup=mean(_measured_ms(task, _BASELINE) / plan.max_kernel_ms for task, plan in pairs),
        prediction_error=mean(abs(row.prediction_error) for row in rows),
        planning_s=mean(row.planning_s for row in rows),
    )


def _measured_ms(task: TaskNumbers, planner: str) -> float:
    return next(row.measured.max_kernel_ms for row in task.rows if row.planner == planner)


@command_options()
class SideBySideOptions:
    """Options of the study `side-by-side`."""

    registry: RegistryOption = None
    planners: Annotated[str, typer.Option(help="Names of planners, with commas between them.")] = PLANNERS
    tables: Annotated[str, typer.Option(help="Pool that tasks are drawn from.")] = "metasyn"
    scale: Annotated[int, typer.Option(min=1, help="Divides rows and batch of the pool.")] = 64
    topology: Annotated[str, typer.Option(help="Ranks to plan for.")] = "cpu-8"
    num_tables: Annotated[int, typer.Option(min=1, help="Tables per task.")] = 80
    num_tasks: Annotated[int, typer.Option(min=1, help="Tasks, with seeds 1000, 1001, ...")] = 8
    time_limit: Annotated[float, positive_option("Seconds for planners that search.")] = 0.9
    search_seconds: Annotated[float, typer.Option(min=0, help="Also search whole tables this long; 0 for not.")] = 0.0
    refine: Annotated[
        int, typer.Option(min=0, help=f"Measurements that refine `{WHOLE}`, as row `{REFINED}`; 0 for none.")
    ] = 0
    device: DeviceOption = Device.AUTO
    parts: PartsOption = None

    def __post_init__(self) -> None:
        if _BASELINE not in self.chosen:
            raise InvalidOptionError(f"must name {_BASELINE}, which speed-ups are relative to", field="--planners")
        if self.refine and WHOLE not in self.chosen:
            raise InvalidOptionError(f"refines the plan of {WHOLE}, which --planners lacks", field="--refine")

    @property
    def chosen(self) -> tuple[str, ...]:
        """Names of the planners."""
        return names_in(self.planners, "--planners", (*planner_names(), WHOLE))

    def requests(self) -> list[PlanRequest]:
        """The tasks."""
        pool, machine = load_tables(self.tables).scaled(self.scale), load_topology(self.topology)
        costs = make_costs(pool, machine, self.registry)
        return [
            PlanRequest(
                tables=pool.sample(self.num_tables, seed),
                topology=machine,
                costs=costs,
                time_limit_s=self.time_limit,
                registry=self.registry,
            )
            for seed in range(_FIRST_SEED, _FIRST_SEED + self.num_tasks)
        ]


def main(options: SideBySideOptions, output: OutputOptions) -> None:
    """Compares planners on several tasks, by prediction and by measuring.

    Example:
        python -m studies side-by-side --registry demo/registry --num-tasks 8 --search-seconds 60 --parts task-runs
    """
    requests, tasks = options.requests(), []
    parts = PartStore.of(options.parts, _identity(options, requests[0]))
    with progress("Tasks", options.num_tasks) as advance:
        for number, request in enumerate(requests):
            tasks.append(
                parts.find_data(f"task-{_FIRST_SEED + number}", TaskNumbers, partial(_numbers, request, options))
            )
            log(_line(len(tasks), options.num_tasks, tasks[-1]))
            advance(1)
    means = planner_means(tasks)
    output.write(
        StudyResult(name="side-by-side", document=_document(tasks, means), tables=(means_table(tasks, means),))
    )


def _identity(options: SideBySideOptions, request: PlanRequest) -> dict[str, object]:
    models = model_names(request.costs, request.tables, request.topology.device)
    return options_without(options, _FREE) | {"models": models}


def _numbers(request: PlanRequest, options: SideBySideOptions) -> TaskNumbers:
    planners = options.chosen
    return TaskNumbers.of(compare_task(request, planners, options.search_seconds, options.refine, options.device))


def _line(number: int, num_tasks: int, task: TaskNumbers) -> str:
    slowest = ", ".join(f"{row.planner} {row.measured.max_kernel_ms:.2f}" for row in task.rows)
    return f"task {number} of {num_tasks}: ceiling {task.ceiling.balance:.3f}; measured ms: {slowest}"


def _summary(tasks: Sequence[TaskNumbers]) -> dict[str, float | None]:
    auto = [next((row for row in task.rows if row.planner == WHOLE), None) for task in tasks]
    gaps = [
        row.predicted_max_ms / task.searched_ms - 1
        for task, row in zip(tasks, auto, strict=True)
        if row is not None and row.predicted_max_ms and task.searched_ms
    ]
    return {
        "ceiling_balance": mean(task.ceiling.balance for task in tasks),
        "auto_over_long_search_mean": mean(gaps) if gaps else None,
        "auto_over_long_search_max": max(gaps) if gaps else None,
    }


def _document(tasks: Sequence[TaskNumbers], means: Sequence[PlannerMeans]) -> dict[str, object]:
    return {
        "device_name": find_device().name,
        "num_tasks": len(tasks),
        **_summary(tasks),
        "planners": [asdict(row) for row in means],
        "tasks": [
            {
                "seed": _FIRST_SEED + number,
                "ceiling_balance": task.ceiling.balance,
                "searched_ms": task.searched_ms,
                "planners": {
                    row.planner: {
                        "predicted_max_ms": row.predicted_max_ms,
                        "measured_max_ms": row.measured.max_kernel_ms,
                        "measured_balance": row.measured.balance,
                        "measured_ms": row.measured.kernel_ms_per_rank,
                    }
                    for row in task.rows
                },
            }
            for number, task in enumerate(tasks)
        ],
    }


def means_table(tasks: Sequence[TaskNumbers], means: Sequence[PlannerMeans]) -> Table:
    """A line for each planner."""
    summary = (f"{name} {value:.4f}" for name, value in _summary(tasks).items() if value is not None)
    return Table.of(
        means,
        (
            ("planner", lambda row: row.planner),
            ("predicted max ms", lambda row: f"{row.predicted_max_ms:.2f}"),
            ("predicted balance", lambda row: f"{row.predicted_balance:.3f}"),
            ("predicted step ms", lambda row: f"{row.predicted_step_ms:.2f}"),
            ("measured max ms", lambda row: f"{row.measured_max_ms:.2f}"),
            ("measured balance", lambda row: f"{row.measured_balance:.3f}"),
            ("below ceiling", lambda row: f"{row.below_ceiling:.3f}"),
            ("speed-up over random", lambda row: f"{row.measured_speedup:.3f}"),
            ("prediction error", lambda row: f"{row.prediction_error:.1%}"),
            ("planning s", lambda row: f"{row.planning_s:.2f}"),
        ),
        caption=f"Means of {len(tasks)} tasks on {find_device().name}: {', '.join(summary)}",
    )
