"""What the policy has to reach against greedy on the cost model, task by task, and where it does not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from autoshard.report.images import NumberTable, Section
from autoshard.report.wording import write_percent
from costmodel.evaluation_numbers import Summary
from policies.evaluation.charts import Panel, dot_chart
from policies.evaluation.figure import Figure, Found, Part
from policies.evaluation.heuristics import label
from policies.evaluation.lab import AUTO, COST_GREEDY, POLICY, SAMPLED, Lab
from policies.evaluation.parts import Numbers
from policies.evaluation.settings import EvaluationSettings, Size
from policies.evaluation.summaries import planner_scores, write_factor, write_seeds, write_time

_PLANNERS = (COST_GREEDY, POLICY, SAMPLED, AUTO)


def _plan_size(size: Size, seed: int, is_full: bool, lab: Lab) -> Numbers:
    """Plans of all target tasks, by the policy of a seed; memory is nearly full where asked for."""
    num_tables, num_ranks = size
    policies = lab.policy_registry(seed)
    tasks = []
    for task in lab.target_seeds():
        tables = lab.pool.sample(num_tables, task)
        needed = sum(table.hbm_bytes for table in tables.tables)
        hbm_bytes = int(np.ceil(needed / (lab.settings.memory_share * num_ranks))) if is_full else None
        request = lab.request(tables, lab.topology(num_ranks, hbm_bytes), policies=policies)
        tasks.append(lab.plan_all(_PLANNERS, request))
    return {"tasks": tasks}


def _cases(settings: EvaluationSettings) -> dict[str, tuple[Size, bool]]:
    """Sizes of tasks and whether memory is nearly full, by name."""
    small, large = settings.size, settings.large
    return {
        _name(small): (small, False),
        **({_name(large): (large, False)} if large != small else {}),
        f"{_name(small)}-full": (small, True),
    }


def _name(size: Size) -> str:
    return f"{size[0]}-{size[1]}"


def _parts(settings: EvaluationSettings) -> Sequence[Part]:
    return [
        Part(f"{name}-{seed}", partial(_plan_size, size, seed, is_full))
        for seed in range(settings.num_seeds)
        for name, (size, is_full) in _cases(settings).items()
    ]


def over_greedy(parts: Sequence[Numbers], planner: str) -> tuple[Summary | None, int, int, int]:
    """How a planner compares with greedy on the cost model, on the tasks that both have a plan for.

    Returns:
        Its mean slowest rank over greedy's, mean and deviation over seeds (None without such tasks), and on how many
        tasks it is faster, as fast, and slower.
    """
    ratios, better, equal, worse = [], 0, 0, 0
    for part in parts:
        pairs = [
            (task[planner]["max_ms"], task[COST_GREEDY]["max_ms"])
            for task in part["tasks"]
            if "max_ms" in task[planner] and "max_ms" in task[COST_GREEDY]
        ]
        if not pairs:
            continue
        ours, theirs = np.array(pairs).T
        is_equal = np.isclose(ours, theirs, rtol=1e-6)
        ratios.append(float(ours.mean() / theirs.mean()))
        equal += int(is_equal.sum())
        better += int(((ours < theirs) & ~is_equal).sum())
        worse += int(((ours > theirs) & ~is_equal).sum())
    return (Summary.of(ratios) if ratios else None), better, equal, worse


def _show(found: Found, settings: EvaluationSettings) -> Section:
    tables = []
    above: dict[str, dict[str, Summary]] = {label(planner, settings): {} for planner in _PLANNERS[1:]}
    for name, (size, is_full) in _cases(settings).items():
        parts = [found[f"{name}-{seed}"] for seed in range(settings.num_seeds)]
        title = f"{size[0]} tables on {size[1]} ranks"
        if is_full:
            title += f", memory {settings.memory_share:.0%} full"
        tables.append(_table(parts, settings, title))
        for planner in _PLANNERS[1:]:
            ratio = over_greedy(parts, planner)[0]
            if ratio is not None:
                above[label(planner, settings)][title] = Summary(mean=ratio.mean - 1, deviation=ratio.deviation)
    return Section(
        title=FIGURE.title,
        caption=f"{settings.num_target_tasks} unseen tasks of each kind, the same for all; policies of "
        f"{write_seeds(settings.num_seeds)}, trained on {settings.num_tables} tables and {settings.num_ranks} ranks "
        "without memory limits. Below zero, the slowest rank is faster than with greedy planning on the same costs.",
        figure=dot_chart(Panel(title=f"slowest rank, against {COST_GREEDY}", bars=above, is_percent=True)),
        tables=tuple(tables),
    )


def _table(parts: Sequence[Numbers], settings: EvaluationSettings, title: str) -> NumberTable:
    lines = []
    for planner in _PLANNERS:
        scores = planner_scores(parts, planner)
        if scores is None:
            lines.append((label(planner, settings), *["n/a"] * 4, f"0 of {sum(len(part['tasks']) for part in parts)}"))
            continue
        ratio, better, equal, worse = over_greedy(parts, planner)
        against = planner != COST_GREEDY and ratio is not None
        lines.append(
            (
                label(planner, settings),
                write_time(scores.max_ms),
                f"{write_factor(ratio)} ({write_percent(ratio.mean - 1, signed=True)})" if against and ratio else "",
                f"{better} / {equal} / {worse}" if against else "",
                write_time(scores.step_ms),
                f"{scores.num_tasks - scores.num_failed} of {scores.num_tasks}",
            )
        )
    return NumberTable(
        columns=(
            *("planner", "slowest rank, ms", f"over {COST_GREEDY}", "faster / equal / slower", "whole step, ms"),
            "plans within memory",
        ),
        lines=tuple(lines),
        caption=title,
    )


FIGURE = Figure(name="targets", title="The policy against greedy on the cost model", parts=_parts, show=_show)
