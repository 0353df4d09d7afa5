"""AutoShard's Fig. 12, left: how fast policies learn, by what teaches them, on tasks that they never train on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from autoshard.report.images import Section
from autoshard.report.wording import write_percent
from autoshard.table import Table
from policies.training.scores import Baselines
from studies.frame import Numbers, Summary
from studies.policies.charts import Line, Panel, line_chart
from studies.policies.lab import COST_GREEDY, LOOKUP_GREEDY, EvaluationSettings, Figure, Found, Lab, Part
from studies.policies.scores import NONE, write_seeds, write_share
from studies.policies.trained import Learner, training_curve

#: Shares of the best known balance whose first crossing is shown.
_GOALS: Final = (0.8, 0.9, 0.95, 0.98)
#: Measured rewards are too slow for several seeds.
_MEASURED_SEEDS: Final = 1


def _train_seed(learner: Learner, num_updates: int, seed: int, lab: Lab) -> Numbers:
    settings = lab.settings
    unseen = lab.problems(lab.target_seeds())
    points = training_curve(
        lab.problems(lab.train_seeds(seed)),
        lab.problems(lab.validation_seeds()),
        unseen,
        learner=learner,
        device=settings.device,
        seed=seed,
        num_updates=num_updates,
        every=1 if learner is Learner.MEASURED else settings.curve_every,
    )
    best = [lab.best_known(task, settings.size) for task in lab.target_seeds()]
    baselines = Baselines.of(unseen)
    return {
        "points": [point.to_json() for point in points],
        "best_known": {name: float(np.mean([one[name] for one in best])) for name in ("balance", "max_ms")},
        COST_GREEDY: baselines.cost_greedy.to_json(),
        LOOKUP_GREEDY: baselines.lookup_greedy.to_json(),
    }


def relative_balance(part: Numbers, score: Mapping[str, float]) -> float:
    """A balance over that of the best known plans."""
    return float(score["balance"] / part["best_known"]["balance"])


def first_crossing(part: Numbers, goal: float) -> Mapping[str, Any] | None:
    """The first point of a curve whose balance is a share of the best known; None if none is."""
    return next((point for point in part["points"] if relative_balance(part, point) >= goal), None)


def _learners(settings: EvaluationSettings) -> dict[Learner, tuple[int, int]]:
    """Numbers of updates and of seeds for each way to train."""
    found = dict.fromkeys(Learner, (settings.curve_updates, settings.num_seeds))
    found[Learner.MEASURED] = (settings.measured_updates, _MEASURED_SEEDS)
    return {learner: counts for learner, counts in found.items() if counts[0]}


def _parts(settings: EvaluationSettings) -> Sequence[Part]:
    return [
        Part(_name(learner, num_updates, seed), partial(_train_seed, learner, num_updates, seed))
        for learner, (num_updates, num_seeds) in _learners(settings).items()
        for seed in range(num_seeds)
    ]


def _name(learner: Learner, num_updates: int, seed: int) -> str:
    return f"{learner.name.lower()}-{num_updates}-{seed}"


def _show(found: Found, settings: EvaluationSettings) -> Section:
    curves = {
        learner: [found[_name(learner, num_updates, seed)] for seed in range(num_seeds)]
        for learner, (num_updates, num_seeds) in _learners(settings).items()
    }
    known = curves[Learner.VTRACE]
    best = float(np.mean([part["best_known"]["balance"] for part in known]))
    return Section(
        title=FIGURE.title,
        caption=f"From random weights, one greedy decode on {settings.num_target_tasks} unseen tasks of "
        f"{settings.num_tables} tables on {settings.num_ranks} ranks; mean and deviation over "
        f"{write_seeds(len(known))}. Rewards are predicted unless said otherwise: samples for the cost model were "
        "collected before. Scoring is not counted, the start of actors is. The best known plans are those of `auto` "
        f"after {settings.search_s:g} s; they balance at {write_percent(best)}. {_untrained(known)} "
        "AutoShard's paper: 80% balance after 454 s on four GPUs, in which it measured and learned its cost model, "
        "too.",
        figure=line_chart([_panel(curves, axis, title) for axis, title in _AXES.items()]),
        tables=(_crossing_table(curves), _time_table(curves)),
    )


def _untrained(parts: Sequence[Numbers]) -> str:
    first = Summary.of([relative_balance(part, part["points"][0]) for part in parts])
    return f"Networks that have learned nothing are at {write_share(first)} of that."


_AXES: Final = {"training_s": "seconds of training", "num_updates": "updates"}


def _panel(curves: Mapping[Learner, Sequence[Numbers]], axis: str, title: str) -> Panel:
    lines = {}
    for learner, parts in curves.items():
        columns = zip(*(part["points"] for part in parts), strict=True)
        # A logarithmic axis, on which no training has no place.
        points = [(x, column) for column in columns if (x := np.mean([one[axis] for one in column])) > 0]
        lines[str(learner)] = Line(
            x=[float(x) for x, _ in points],
            y=[
                Summary.of([relative_balance(part, one) for part, one in zip(parts, column, strict=True)])
                for _, column in points
            ],
        )
    ends = min(line.x[0] for line in lines.values()), max(line.x[-1] for line in lines.values())
    for planner in (LOOKUP_GREEDY, COST_GREEDY):
        known = curves[Learner.VTRACE]
        level = Summary.of([relative_balance(part, part[planner]) for part in known])
        lines[planner] = Line(x=ends, y=(level, level), is_level=True)
    label = "balance over that of the best known plan"
    return Panel(title=label, lines=lines, x_title=title, x_log=True, is_percent=True)


def _crossing_table(curves: Mapping[Learner, Sequence[Numbers]]) -> Table:
    lines = []
    for learner, parts in curves.items():
        cells = []
        for goal in _GOALS:
            points = [point for part in parts if (point := first_crossing(part, goal)) is not None]
            if len(points) < len(parts):
                cells.append(NONE if not points else f"{len(points)} of {write_seeds(len(parts))}")
                continue
            seconds, updates = ([point[name] for point in points] for name in _AXES)
            cells.append(f"{np.mean(seconds):.1f} s, at most {max(seconds):.1f} ({np.mean(updates):.0f} updates)")
        last = Summary.of([relative_balance(part, part["points"][-1]) for part in parts])
        lines.append((str(learner), *cells, f"{write_percent(last.mean)} ± {100 * last.deviation:.1f}"))
    return Table(
        columns=("learner", *(f"to {goal:.0%}" for goal in _GOALS), "at the end"),
        rows=tuple(lines),
        caption="Training time until a share of the best known balance is reached",
    )


def _time_table(curves: Mapping[Learner, Sequence[Numbers]]) -> Table:
    lines = []
    for learner, parts in curves.items():
        last = [part["points"][-1] for part in parts]
        updates = last[0]["num_updates"]
        spent = [float(np.mean([1000 * point[name] / updates for point in last])) for name in _SPENT]
        whole = float(np.mean([point["training_s"] for point in last]))
        lines.append((str(learner), f"{updates}", f"{whole:.1f}", *(f"{value:.0f}" for value in spent)))
    return Table(
        columns=("learner", "updates", "seconds in all", *(f"{name}, ms" for name in _SPENT.values())),
        rows=tuple(lines),
        caption="Where the time goes, per update",
    )


_SPENT: Final = {"collect_s": "playing episodes", "measure_s": "measuring", "learn_s": "learning"}

FIGURE = Figure(name="fig12-training", title="Training curves (AutoShard, Fig. 12, left)", parts=_parts, show=_show)
