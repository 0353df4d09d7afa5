"""AutoShard's Fig. 12, left: how fast the policy learns, on tasks that it never trains on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from autoshard.report.images import NumberTable, Section
from autoshard.report.wording import write_percent
from costmodel.evaluation_numbers import Summary
from policies.evaluation.charts import Line, Panel, line_chart
from policies.evaluation.figure import Figure, Found, Part
from policies.evaluation.lab import COST_GREEDY, LOOKUP_GREEDY, Lab
from policies.evaluation.parts import Numbers
from policies.evaluation.settings import EvaluationSettings
from policies.evaluation.summaries import NONE, write_seconds
from policies.evaluation.trained import training_curve
from policies.scores import Baselines

#: Shares of the best known balance whose first crossing is told.
_GOALS: Final = (0.8, 0.9, 0.95, 0.98)
_POLICY: Final = "policy in training"


def _train_seed(seed: int, lab: Lab) -> Numbers:
    settings = lab.settings
    unseen = lab.problems(lab.target_seeds())
    points = training_curve(
        lab.problems(lab.train_seeds(seed)),
        lab.problems(lab.validation_seeds()),
        unseen,
        seed=seed,
        num_updates=settings.curve_updates,
        every=settings.curve_every,
        advance=lab.advance,
    )
    best = [lab.best_known(task, settings.size) for task in lab.target_seeds()]
    baselines = Baselines.of(unseen)
    return {
        "points": [
            {"num_updates": one.num_updates, "training_s": one.training_s, **one.score.to_json()} for one in points
        ],
        "best_known": {name: float(np.mean([one[name] for one in best])) for name in ("balance", "max_ms")},
        COST_GREEDY: baselines.cost_greedy.to_json(),
        LOOKUP_GREEDY: baselines.lookup_greedy.to_json(),
    }


def relative(part: Numbers, score: Mapping[str, float], name: str) -> float:
    """A score over that of the best known plans."""
    return float(score[name] / part["best_known"][name])


def first_crossing(part: Numbers, goal: float) -> Mapping[str, Any] | None:
    """The first point of a curve whose balance is a share of the best known; None if none is."""
    return next((point for point in part["points"] if relative(part, point, "balance") >= goal), None)


def _parts(settings: EvaluationSettings) -> Sequence[Part]:
    return [Part(f"seed-{seed}", partial(_train_seed, seed)) for seed in range(settings.num_seeds)]


def _show(found: Found, settings: EvaluationSettings) -> Section:
    parts = list(found.values())
    seconds = [float(np.mean(values)) for values in _columns(parts, "training_s")]
    updates = [int(values[0]) for values in _columns(parts, "num_updates")]
    balance = [
        Summary.of([relative(part, part["points"][index], "balance") for part in parts])
        for index in range(len(updates))
    ]
    panels = []
    for title, x in (("seconds of training", seconds), ("updates", updates)):
        lines = {_POLICY: Line(x=x, y=balance)}
        for planner in (LOOKUP_GREEDY, COST_GREEDY):
            level = Summary.of([relative(part, part[planner], "balance") for part in parts])
            lines[planner] = Line(x=(x[0], x[-1]), y=(level, level), is_level=True)
        panels.append(
            Panel(title="balance over that of the best known plan", lines=lines, x_title=title, is_percent=True)
        )
    best = float(np.mean([part["best_known"]["balance"] for part in parts]))
    per_s = float(np.mean([part["points"][-1]["num_updates"] / part["points"][-1]["training_s"] for part in parts]))
    return Section(
        title=FIGURE.title,
        caption=f"From random weights, one greedy decode on {settings.num_target_tasks} unseen tasks of "
        f"{settings.num_tables} tables on {settings.num_ranks} ranks; mean and deviation over {len(parts)} seeds. "
        f"{per_s:.1f} updates a second on one core, on predicted costs: samples for the cost model were collected "
        f"before, and scoring is not counted. The best known plans are those of `auto` after {settings.search_s:g} s; "
        f"they balance at {write_percent(best)}. AutoShard's paper: 80% balance after 454 s on four GPUs, measuring "
        "included.",
        figure=line_chart(panels),
        tables=(_table(parts),),
    )


def _columns(parts: Sequence[Numbers], name: str) -> list[list[float]]:
    """Values of all seeds, point by point."""
    return [list(values) for values in zip(*([point[name] for point in part["points"]] for part in parts), strict=True)]


def _table(parts: Sequence[Numbers]) -> NumberTable:
    lines = []
    for goal in _GOALS:
        points = [first_crossing(part, goal) for part in parts]
        reached = [point for point in points if point is not None]
        cells = ("updates", "seconds")
        if reached:
            updates, seconds = ([point[name] for point in reached] for name in ("num_updates", "training_s"))
            cells = (
                f"{np.mean(updates):.0f}, at most {max(updates)}",
                f"{np.mean(seconds):.1f}, at most {max(seconds):.1f}",
            )
        lines.append((f"{goal:.0%}", *(cells if reached else (NONE, NONE)), f"{len(reached)} of {len(parts)}"))
    last = [relative(part, part["points"][-1], "balance") for part in parts]
    end = parts[0]["points"][-1]["num_updates"]
    lines.append(
        (
            f"{np.mean(last):.1%}",
            f"{end} (end of training)",
            write_seconds(float(np.mean([part["points"][-1]["training_s"] for part in parts]))),
            "",
        )
    )
    return NumberTable(
        columns=("share of the best known balance", "updates", "seconds", "seeds that reach it"),
        lines=tuple(lines),
        caption="How long it takes",
    )


FIGURE = Figure(name="fig12-training", title="Training curve (AutoShard, Fig. 12, left)", parts=_parts, show=_show)
