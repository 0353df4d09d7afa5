"""Plans of an evaluation as this machine runs them, beside their prices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from autoshard.report.wording import write_percent
from autoshard.results.comparison import MeasuredPlan
from autoshard.table import Table
from studies.frame import Numbers, Summary
from studies.policies.lab import RANDOM, Lab, Scored
from studies.policies.settings import EvaluationSettings
from studies.policies.summaries import by_planner, label, write_factor, write_share, write_time


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
