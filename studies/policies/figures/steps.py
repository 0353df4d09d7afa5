"""Policies whose objective is the whole step, against the papers' planners at equal memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from autoshard.core.errors import ModelError
from autoshard.planners.planner import PlanRequest
from autoshard.planners.space.placement import PlacementProblem
from autoshard.report.images import Section
from autoshard.report.wording import write_percent
from autoshard.table import Table
from env import Objective
from policies.choices import Items
from policies.network.network import PlacementNetwork
from policies.planning.tasks import items_task
from studies.frame import Numbers, Summary
from studies.policies.charts import Panel, dot_chart
from studies.policies.lab import (
    AUTO,
    COST_GREEDY,
    POLICY,
    SAMPLED,
    EvaluationSettings,
    Figure,
    Found,
    Lab,
    Part,
    Scored,
)
from studies.policies.scores import label, planner_table, write_factor, write_seconds, write_seeds, write_time
from studies.policies.trained import train_network

FLEXSHARD, OPER = "flexshard", "oper"
#: The same planner where inputs and outputs of a batch take no memory. With them it has no room for tiers where memory
#: is short, and then places whole tables.
FLEXSHARD_CUT = "flexshard, tables cut"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of placed items, and the planners that the policy is compared with.

    Attributes:
        items: Kind of the items that the policy places.
        rival: The planner that it is held to.
        others: Planners that are shown, too.
        title: Heading of its table.
    """

    items: Items
    rival: str
    others: tuple[str, ...]
    title: str


CASES: Final[Mapping[str, Case]] = {
    case.items.value: case
    for case in (
        Case(items=Items.TABLES, rival=COST_GREEDY, others=(AUTO,), title="Whole tables"),
        Case(
            items=Items.TIERS, rival=FLEXSHARD, others=(FLEXSHARD_CUT, COST_GREEDY), title="Tiers by access frequency"
        ),
        Case(items=Items.ROW_GROUPS, rival=OPER, others=(COST_GREEDY,), title="Row groups"),
    )
}


def _run(name: str, seed: int, lab: Lab) -> Numbers:
    """Plans of all target tasks; `skipped` where the cost model cannot price what is placed."""
    case = CASES[name]
    try:
        problems = lab.problems(lab.target_seeds(), items=case.items, memory_fill=lab.settings.memory_share)
        items_task(problems[0], case.items, objective=Objective.STEP, costs=lab.costs)
    except ModelError as error:
        return {"skipped": str(error), "tasks": []}
    policies = _policies(case, seed, lab)
    return {"tasks": [_plan_task(case, problem, policies, lab) for problem in problems]}


def _policies(case: Case, seed: int, lab: Lab) -> Path:
    """The registry of a policy of such items, which is trained if it is not there yet."""
    fill = lab.settings.memory_share

    def train() -> PlacementNetwork:
        return train_network(
            lab.problems(lab.train_seeds(seed), items=case.items, memory_fill=fill),
            lab.problems(lab.validation_seeds(), items=case.items, memory_fill=fill),
            seed=seed,
            num_updates=lab.settings.step_updates,
            folder=lab.checkpoints(f"step-{case.items}-{seed}"),
            as_task=partial(items_task, items=case.items, objective=Objective.STEP, costs=lab.costs),
        )

    return lab.published(
        f"step-{case.items}-{seed}", train, items=case.items, objective=Objective.STEP, memory_fill=fill
    )


def _plan_task(case: Case, problem: PlacementProblem, policies: Path, lab: Lab) -> dict[str, Any]:
    request = lab.request(problem.tables, problem.topology)
    found = {planner: _best(planner, problem, request, lab) for planner in (case.rival, *case.others)}
    request = replace(request, registry=policies)
    for name, num_samples in ((POLICY, 1), (SAMPLED, lab.settings.num_samples)):
        found[name] = lab.plan(POLICY, request, {"items": case.items.value, "num_samples": num_samples})
    return {planner: scored.to_json() for planner, scored in found.items()}


def _best(planner: str, problem: PlacementProblem, request: PlanRequest, lab: Lab) -> Scored:
    """A planner's plan as it is, or with options that let it use all memory, whichever has the shorter step."""
    name = FLEXSHARD if planner == FLEXSHARD_CUT else planner
    found = [lab.plan(name, request, options) for options in memory_options(planner, problem)]
    return min(found, key=lambda scored: float(scored.to_json().get("step_ms", np.inf)))


def memory_options(planner: str, problem: PlacementProblem) -> tuple[Mapping[str, object], ...]:
    """A planner's usual options, and those that let it use all memory that there is."""
    room, held = int(problem.capacity_R.sum()), sum(table.storage_bytes for table in problem.tables.tables)
    if planner in (FLEXSHARD, FLEXSHARD_CUT):
        usual = {"tiers": 3, "count_activations": planner == FLEXSHARD}
        return usual, {**usual, "memory_budget_bytes": max(0, (room - held) // problem.num_ranks)}
    return ({}, {"extra_memory_ratio": max(0.0, room / held - 1)}) if planner == OPER else ({},)


def _parts(settings: EvaluationSettings) -> Sequence[Part]:
    return [
        Part(f"{name}-{seed}", partial(_run, name, seed)) for name in CASES for seed in range(settings.num_step_seeds)
    ]


def over_rival(parts: Sequence[Numbers], planner: str, rival: str) -> Summary | None:
    """Mean step of a planner over that of another, on the tasks that both have a plan for; over seeds."""
    ratios = []
    for part in parts:
        pairs = [
            (task[planner]["step_ms"], task[rival]["step_ms"])
            for task in part["tasks"]
            if "step_ms" in task[planner] and "step_ms" in task[rival]
        ]
        if pairs:
            ours, theirs = np.array(pairs).mean(axis=0)
            ratios.append(float(ours / theirs))
    return Summary.of(ratios) if ratios else None


def _show(found: Found, settings: EvaluationSettings) -> Section:
    tables, notes = [], []
    above: dict[str, dict[str, Summary]] = {label(planner, settings): {} for planner in (POLICY, SAMPLED)}
    for name, case in CASES.items():
        parts = [found[f"{name}-{seed}"] for seed in range(settings.num_step_seeds)]
        skipped = next((part["skipped"] for part in parts if "skipped" in part), None)
        if skipped is not None:
            notes.append(f"{case.title}: skipped, since {skipped}.")
            continue
        tables.append(_table(parts, case, settings))
        for planner in (POLICY, SAMPLED):
            ratio = over_rival(parts, planner, case.rival)
            if ratio is not None:
                lower = Summary(mean=ratio.mean - 1, deviation=ratio.deviation)
                above[label(planner, settings)][f"{case.title}<br>against {case.rival}"] = lower
    return Section(
        title=FIGURE.title,
        caption=f"{settings.num_target_tasks} unseen tasks of {settings.num_tables} tables on {settings.num_ranks} "
        f"ranks, whose tables fill {settings.memory_share:.0%} of all memory; the rest is there for copies, for every "
        f"planner alike ({FLEXSHARD} and {OPER} plan as they usually do, and again with leave to use all of it; the "
        f"better plan counts). {FLEXSHARD} has three tiers by its own rule `frontier`, not by FlexShard's. "
        f"Policies of {write_seeds(settings.num_step_seeds)}, {settings.step_updates} updates each, rewarded for short "
        f"steps. Times are predicted. '{FLEXSHARD_CUT}' counts no memory for inputs and outputs of a batch; "
        f"{FLEXSHARD} does, and places whole tables where its tiers leave no room for them. " + " ".join(notes),
        figure=dot_chart(Panel(title="step, against the planner named", bars=above, is_percent=True)),
        tables=tuple(tables),
    )


def _table(parts: Sequence[Numbers], case: Case, settings: EvaluationSettings) -> Table:
    def over(planner: str) -> str:
        ratio = over_rival(parts, planner, case.rival) if planner != case.rival else None
        return f"{write_factor(ratio)} ({write_percent(ratio.mean - 1, signed=True)})" if ratio else ""

    return planner_table(
        parts,
        (case.rival, *case.others, POLICY, SAMPLED),
        settings,
        case.title,
        (
            ("step, ms", lambda _, one: write_time(one.step_ms)),
            (f"over {case.rival}", lambda planner, _: over(planner)),
            ("slowest rank's kernels, ms", lambda _, one: write_time(one.max_ms)),
            ("planning", lambda _, one: write_seconds(one.planning_s.mean if one.planning_s else None)),
        ),
    )


FIGURE = Figure(name="steps", title="Whole steps, tiers and row groups", parts=_parts, show=_show)
