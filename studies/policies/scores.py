"""Scores of planners over tasks and seeds, as predicted and as replayed on this machine, and how tables write them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from autoshard.report.wording import write_ms, write_percent
from autoshard.results.comparison import MeasuredPlan
from autoshard.table import Table
from studies.frame import Numbers, Summary
from studies.policies.lab import POLICY, RANDOM, SAMPLED, EvaluationSettings, Found, Lab, Part, Scored

NONE = "n/a"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerScores:
    """A planner's scores: means over the tasks of a seed, of which mean and deviation over seeds.

    Attributes:
        balance: min / max over ranks of kernel time.
        max_ms: Kernel time of the slowest rank.
        step_ms: A whole step; None where it is not known.
        planning_s: Seconds per plan; None where it is not known.
        speedup: Slowest rank of random sharding over that of the planner; None without random sharding.
        num_failed: Tasks without a plan, of all seeds; they count nowhere else.
        num_tasks: Tasks, of all seeds.
    """

    balance: Summary
    max_ms: Summary
    step_ms: Summary | None
    planning_s: Summary | None
    speedup: Summary | None
    num_failed: int
    num_tasks: int

    @property
    def planned(self) -> str:
        """`9 of 10`: tasks with a plan."""
        return f"{self.num_tasks - self.num_failed} of {self.num_tasks}"


def planner_scores(parts: Sequence[Numbers], planner: str) -> PlannerScores | None:
    """Scores of a planner; None if it has no plan at all.

    Args:
        parts: One per seed, each with `tasks`, and in each of these numbers by planner.
        planner: Which.
    """
    seeds = [[task for task in part["tasks"] if "max_ms" in task.get(planner, {})] for part in parts]
    num_tasks = sum(len(part["tasks"]) for part in parts)
    planned = [tasks for tasks in seeds if tasks]
    if not planned:
        return None

    def over_seeds(name: str) -> Summary:
        return Summary.of([float(np.mean([task[planner][name] for task in tasks])) for tasks in planned])

    def where_known(name: str) -> Summary | None:
        return over_seeds(name) if all(name in task[planner] for tasks in planned for task in tasks) else None

    has_random = all("max_ms" in task.get(RANDOM, {}) for tasks in planned for task in tasks)
    speedups = [float(np.mean([speedup(task, planner) for task in tasks])) for tasks in planned] if has_random else []
    return PlannerScores(
        balance=over_seeds("balance"),
        max_ms=over_seeds("max_ms"),
        step_ms=where_known("step_ms"),
        planning_s=where_known("planning_s"),
        speedup=Summary.of(speedups) if speedups else None,
        num_failed=num_tasks - sum(map(len, planned)),
        num_tasks=num_tasks,
    )


def speedup(task: Numbers, planner: str) -> float:
    """Slowest rank of random sharding over that of a planner (AutoShard Sec. 5.1)."""
    return float(task[RANDOM]["max_ms"] / task[planner]["max_ms"])


def by_planner(parts: Sequence[Numbers], planners: Iterable[str]) -> dict[str, PlannerScores]:
    """Scores of those planners that have plans."""
    found = {planner: planner_scores(parts, planner) for planner in planners}
    return {planner: scores for planner, scores in found.items() if scores is not None}


def label(planner: str, settings: EvaluationSettings) -> str:
    """A planner's name in tables."""
    return f"{POLICY}, {settings.num_samples} samples" if planner == SAMPLED else planner


def planner_table(
    parts: Sequence[Numbers],
    planners: Iterable[str],
    settings: EvaluationSettings,
    caption: str,
    columns: Sequence[tuple[str, Callable[[str, PlannerScores], str]]],
) -> Table:
    """A line for each planner: its scores, and how many tasks it has planned.

    Args:
        parts: As in `planner_scores`.
        planners: Planners in the order of the lines; without any plan, the last cell has the reason.
        settings: Settings of the evaluation.
        caption: The caption.
        columns: Heading of each column of scores, and its cells by planner and scores.
    """
    lines = []
    for planner in planners:
        scores = planner_scores(parts, planner)
        if scores is None:
            failures = [task[planner]["failure"] for part in parts for task in part["tasks"] if planner in task]
            cells = [*[NONE] * len(columns), f"0 of {len(failures)}: {failures[0]}" if failures else NONE]
        else:
            cells = [*(cell(planner, scores) for _, cell in columns), scores.planned]
        lines.append((label(planner, settings), *cells))
    headings = ("planner", *(heading for heading, _ in columns), "tasks planned")
    return Table(columns=headings, rows=tuple(lines), caption=caption)


def write_share(summary: Summary | None) -> str:
    """Mean and deviation in percent: `97.9% ± 0.3`."""
    return NONE if summary is None else f"{write_percent(summary.mean)} ± {100 * summary.deviation:.1f}"


def write_factor(summary: Summary | None) -> str:
    """Mean and deviation: `1.712 ± 0.027`."""
    return NONE if summary is None else f"{summary.mean:.3f} ± {summary.deviation:.3f}"


def write_time(summary: Summary | None) -> str:
    """Mean and deviation in milliseconds."""
    return NONE if summary is None else f"{write_ms(summary.mean)} ± {write_ms(summary.deviation)}"


def write_seeds(num_seeds: int) -> str:
    """`1 seed`, `5 seeds`."""
    return f"{num_seeds} seed" + ("" if num_seeds == 1 else "s")


def write_seconds(seconds: float | None) -> str:
    """Seconds, with a unit that suits them: `3.1 ms`, `0.52 s`."""
    if seconds is None:
        return NONE
    return f"{write_ms(1000 * seconds)} ms" if seconds < 0.1 else f"{seconds:.2f} s"


def replayed(lab: Lab, scored: Mapping[str, Scored]) -> Numbers:
    """Replays all plans of one task in the same rounds as the ceiling; those that failed are left out."""
    plans = {name: one.plan for name, one in scored.items() if one.plan is not None}
    replay = lab.replay(list(plans.values()))
    measured = dict(zip(plans, replay.plans, strict=True))
    return {
        "device_name": replay.device_name,
        "ceiling": _measured(replay.ceiling),
        "tasks": [{name: {**scored[name].to_json(), **_measured(plan)} for name, plan in measured.items()}],
        "predicted": {name: scored[name].to_json() for name in plans},
    }


def _measured(plan: MeasuredPlan) -> dict[str, Any]:
    return {"max_ms": plan.max_kernel_ms, "balance": plan.balance, "kernel_ms": list(plan.kernel_ms_per_rank)}


def joined(replays: Sequence[Numbers]) -> Numbers:
    """All replays of a seed, at least one, as one."""
    return {
        "device_name": replays[0]["device_name"],
        "ceilings": [replay["ceiling"]["balance"] for replay in replays],
        "tasks": [task for replay in replays for task in replay["tasks"]],
        "predicted": [replay["predicted"] for replay in replays],
    }


def seed_parts(
    settings: EvaluationSettings,
    plan_seed: Callable[[int, Lab], Numbers],
    replay_task: Callable[[int, int, Lab], Numbers],
) -> list[Part]:
    """A part for each seed, and one for each task of a seed that is replayed.

    Args:
        settings: Settings of the evaluation.
        plan_seed: Numbers of a seed.
        replay_task: Replays a task, by seed and index, as of `replayed`.
    """
    seeds = [Part(f"seed-{seed}", partial(plan_seed, seed)) for seed in range(settings.num_seeds)]
    tasks = product(range(settings.num_tasks_replayed), range(settings.num_seeds))
    return [*seeds, *(Part(f"replay-{seed}-{index}", partial(replay_task, seed, index)) for index, seed in tasks)]


def seeds_and_replays(found: Found, settings: EvaluationSettings) -> tuple[list[Numbers], list[Numbers]]:
    """What `seed_parts` made: numbers of the seeds, and their replays as of `joined`, if there are any."""
    seeds = [numbers for name, numbers in found.items() if name.startswith("seed-")]
    replays = [
        joined([numbers for name, numbers in found.items() if name.startswith(f"replay-{seed}-")])
        for seed in range(settings.num_seeds if settings.num_tasks_replayed else 0)
    ]
    return seeds, replays


def ceiling(seeds: Sequence[Numbers]) -> Summary:
    """Balance of ranks with identical work, over seeds; each as of `joined`."""
    return Summary.of([float(np.mean(numbers["ceilings"])) for numbers in seeds])


def replay_note(seeds: Sequence[Numbers]) -> str:
    """What was replayed, for a caption."""
    return (
        f"Replayed on {seeds[0]['device_name']}: {len(seeds[0]['tasks'])} of the tasks of each seed, all plans of a "
        f"task in the same interleaved rounds; ranks with identical work balanced at {write_share(ceiling(seeds))} "
        "there; differences above this are noise."
    )


def measured_table(seeds: Sequence[Numbers], names: Sequence[str], settings: EvaluationSettings) -> Table:
    """A line for each planner, and one for the ceiling.

    Args:
        seeds: Replays by seed, each as of `joined`.
        names: Planners, in the order of the lines.
        settings: Settings of the evaluation.
    """
    lines: list[tuple[str, ...]] = []
    for name, scores in by_planner(seeds, names).items():
        off = [
            abs(predicted[name]["max_ms"] / task[name]["max_ms"] - 1)
            for numbers in seeds
            for predicted, task in zip(numbers["predicted"], numbers["tasks"], strict=True)
            if name in task
        ]
        lines.append(
            (
                label(name, settings),
                write_share(scores.balance),
                write_time(scores.max_ms),
                write_factor(scores.speedup),
                write_percent(float(np.mean(off))),
            )
        )
    lines.append(("identical ranks (ceiling)", write_share(ceiling(seeds)), *[""] * 3))
    return Table(
        columns=("replayed", "balance", "slowest rank, ms", f"speed-up over {RANDOM}", "prediction off by"),
        rows=tuple(lines),
        caption="Measured, means and deviations over seeds",
    )
