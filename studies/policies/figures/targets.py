"""The policy against greedy on the cost model, task by task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from autoshard.core import TableSet
from autoshard.report.images import Section
from autoshard.table import Table
from studies.frame import Numbers, Summary
from studies.policies.charts import Panel, dot_chart
from studies.policies.lab import AUTO, COST_GREEDY, POLICY, SAMPLED, EvaluationSettings, Figure, Found, Lab, Part, Size
from studies.policies.scores import label, planner_table, write_seeds, write_time

_PLANNERS = (COST_GREEDY, POLICY, SAMPLED, AUTO)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """Tasks of one kind.

    Attributes:
        size: Tables and ranks.
        is_full: Whether memory is nearly full.
        is_level: Whether tables that decide alone were left out of the pool.
    """

    size: Size
    is_full: bool = False
    is_level: bool = False

    @property
    def name(self) -> str:
        """Name in parts."""
        return f"{self.size[0]}-{self.size[1]}" + "-full" * self.is_full + "-level" * self.is_level

    def title(self, settings: EvaluationSettings) -> str:
        """Name in tables."""
        title = f"{self.size[0]} tables on {self.size[1]} ranks"
        title += f", memory {settings.memory_share:.0%} full" if self.is_full else ""
        return title + (", no table decides alone" if self.is_level else "")

    def draw(self, lab: Lab, task: int) -> TableSet:
        """A task's tables."""
        if not self.is_level:
            return lab.pool.sample(self.size[0], task)
        return lab.pool.level(lab.alone_ms, *self.size).redrawn(self.size[0], task)


def _plan(case: _Case, seed: int, lab: Lab) -> Numbers:
    """Plans of all target tasks, by the policy of a seed."""
    num_ranks = case.size[1]
    policies = lab.policy_registry(seed)
    tasks = []
    for task in lab.target_seeds():
        tables = case.draw(lab, task)
        needed = sum(table.storage_bytes for table in tables.tables)
        hbm_bytes = int(np.ceil(needed / (lab.settings.memory_share * num_ranks))) if case.is_full else None
        request = lab.request(tables, lab.topology(num_ranks, hbm_bytes), policies=policies)
        tasks.append(lab.plan_all(_PLANNERS, request))
    return {"tasks": tasks}


def _cases(settings: EvaluationSettings) -> tuple[_Case, ...]:
    sizes = dict.fromkeys((settings.size, settings.large))
    level = (_Case(size=size, is_level=True) for size in sizes)
    return *(_Case(size=size) for size in sizes), *level, _Case(size=settings.size, is_full=True)


def _parts(settings: EvaluationSettings) -> Sequence[Part]:
    return [
        Part(f"{case.name}-{seed}", partial(_plan, case, seed))
        for seed in range(settings.num_seeds)
        for case in _cases(settings)
    ]


def over_greedy(parts: Sequence[Numbers], planner: str) -> tuple[Summary | None, int, int, int]:
    """A planner against greedy on the cost model, on the tasks that both have a plan for.

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
    for case in _cases(settings):
        parts = [found[f"{case.name}-{seed}"] for seed in range(settings.num_seeds)]
        title = case.title(settings)
        tables.append(_table(parts, settings, title))
        for planner in _PLANNERS[1:]:
            ratio = over_greedy(parts, planner)[0]
            if ratio is not None:
                above[label(planner, settings)][title] = Summary(mean=ratio.mean - 1, deviation=ratio.deviation)
    return Section(
        title=FIGURE.title,
        caption=f"{settings.num_target_tasks} unseen tasks of each kind, the same for all; policies of "
        f"{write_seeds(settings.num_seeds)}, trained on {settings.num_tables} tables and {settings.num_ranks} ranks "
        "without memory limits. Below zero, the slowest rank is faster than with greedy planning on the same costs. "
        "Where no table decides alone, those that cost more than half of an even share were left out of the pool.",
        figure=dot_chart(Panel(title=f"slowest rank, against {COST_GREEDY}", bars=above, is_percent=True)),
        tables=tuple(tables),
    )


def _table(parts: Sequence[Numbers], settings: EvaluationSettings, title: str) -> Table:
    against = {planner: over_greedy(parts, planner) for planner in _PLANNERS if planner != COST_GREEDY}

    def over(planner: str) -> str:
        ratio = against[planner][0] if planner in against else None
        return f"{100 * (ratio.mean - 1):+.2f}% ± {100 * ratio.deviation:.2f}" if ratio else ""

    def counts(planner: str) -> str:
        return " / ".join(map(str, against[planner][1:])) if over(planner) else ""

    return planner_table(
        parts,
        _PLANNERS,
        settings,
        title,
        (
            ("slowest rank, ms", lambda _, one: write_time(one.max_ms)),
            (f"over {COST_GREEDY}", lambda planner, _: over(planner)),
            ("faster / equal / slower", lambda planner, _: counts(planner)),
            ("whole step, ms", lambda _, one: write_time(one.step_ms)),
        ),
    )


FIGURE = Figure(name="targets", title="The policy against greedy on the cost model", parts=_parts, show=_show)
