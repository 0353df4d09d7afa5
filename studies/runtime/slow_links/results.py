"""What the contests of one rate say: who is fastest, and how near predictions come."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

import numpy as np

from costmodel.kernel.metrics import kendall_tau
from studies.planners.step_runs import StepRun, StepSummary, summary_of
from studies.runtime.slow_links.contests import TORCHREC_WHOLE, ContestResult, EntryRun
from studies.runtime.slow_links.tasks import TaskKind

AUTO = "auto"
#: `auto` counts as near the shortest step if it takes at most this much longer.
NEAR = (0.02, 0.05, 0.10)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSummary:
    """All drawn tasks of one rate.

    Attributes:
        num_tasks: Tasks.
        wins: Tasks that each entry has the shortest measured step of.
        auto_over_best: For each task, the step of `auto` over the shortest.
        auto_near: For each of `NEAR`, the share of tasks whose `auto_over_best` is at most 1 plus that.
        over_auto: For each entry, the median of its step over that of `auto`.
        torchrec_over_auto: For each task that TorchRec's engine executes, the step of its planner there over `auto`'s.
        tau: Kendall's rank correlation of predicted and measured steps, all runs of the thin engine.
        tau_of_task: Mean over tasks of the same within a task.
        steps: Errors of the predictions of these runs.
        sent: For each stream, bytes executed over bytes predicted, summed over these runs.
    """

    num_tasks: int
    wins: Mapping[str, int]
    auto_over_best: tuple[float, ...]
    auto_near: Mapping[str, float]
    over_auto: Mapping[str, float]
    torchrec_over_auto: tuple[float, ...]
    tau: float
    tau_of_task: float
    steps: StepSummary
    sent: Mapping[str, float]


def measured_ms(result: ContestResult) -> dict[str, float]:
    """Measured steps by entry, of those that ran."""
    return {one.label: one.step.measured_ms for one in result.entries if one.step is not None}


def drawn(results: Sequence[ContestResult]) -> list[ContestResult]:
    """Contests of drawn tasks."""
    return [one for one in results if one.group in set(TaskKind)]


def thin_steps(result: ContestResult) -> list[StepRun]:
    """Runs of autoshard's own engine, which is what is predicted."""
    return [one.step for one in _thin(result) if one.step is not None]


def summarised(results: Sequence[ContestResult]) -> RateSummary:
    """Sums up the drawn tasks of one rate, at least one."""
    tasks = drawn(results)
    steps = [measured_ms(task) for task in tasks]
    best = [min(of_task.values()) for of_task in steps]
    over_best = tuple(of_task[AUTO] / shortest for of_task, shortest in zip(steps, best, strict=True))
    runs = [run for task in tasks for run in thin_steps(task)]
    labels = dict.fromkeys(label for of_task in steps for label in of_task)
    return RateSummary(
        num_tasks=len(tasks),
        # A plain dict: `asdict` cannot copy counters.
        wins=dict(Counter(min(of_task, key=of_task.__getitem__) for of_task in steps)),
        auto_over_best=over_best,
        auto_near={f"{share:.0%}": mean(one <= 1 + share for one in over_best) for share in NEAR},
        over_auto={label: median(_over_auto(label, steps)) for label in labels},
        torchrec_over_auto=tuple(_over_auto(TORCHREC_WHOLE, steps)),
        tau=_tau(runs),
        tau_of_task=mean(_tau(thin_steps(task)) for task in tasks),
        steps=summary_of(runs),
        sent=_sent_ratios(tasks),
    )


def _thin(result: ContestResult) -> Iterator[EntryRun]:
    return (one for one in result.entries if one.label != TORCHREC_WHOLE)


def _over_auto(label: str, steps: Sequence[Mapping[str, float]]) -> list[float]:
    return [of_task[label] / of_task[AUTO] for of_task in steps if label in of_task]


def _tau(runs: Sequence[StepRun]) -> float:
    return kendall_tau(np.array([run.predicted_ms for run in runs]), np.array([run.measured_ms for run in runs]))


def _sent_ratios(tasks: Sequence[ContestResult]) -> dict[str, float]:
    """Of the streams that something is predicted of."""
    executed: dict[str, float] = defaultdict(float)
    predicted: dict[str, float] = defaultdict(float)
    for sent in (one.sent for task in tasks for one in _thin(task)):
        for stream, num_bytes in sent.items():
            executed[stream] += num_bytes.executed
            predicted[stream] += num_bytes.predicted
    return {stream: executed[stream] / of_stream for stream, of_stream in predicted.items() if of_stream}
