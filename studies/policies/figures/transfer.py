"""AutoShard's Fig. 11: policies of small tasks on large ones, without training anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from autoshard.report.images import Section
from autoshard.table import Table
from studies.frame import Numbers
from studies.policies.charts import Panel, line_chart, score_panels
from studies.policies.lab import HEURISTICS, POLICY, SAMPLED, EvaluationSettings, Figure, Found, Lab, Part, Size
from studies.policies.scores import (
    NONE,
    PlannerScores,
    by_planner,
    ceiling,
    joined,
    label,
    replayed,
    write_factor,
    write_seeds,
    write_share,
)

_PLANNERS = (*HEURISTICS, POLICY, SAMPLED)


def _plan_size(size: Size, seed: int, lab: Lab) -> Numbers:
    num_tables, num_ranks = size
    draw = partial(lab.pool.sample, num_tables)
    return lab.plan_tests(_PLANNERS, seed, num_ranks, lab.policy_registry(seed), draw)


def _replay_task(size: Size, seed: int, index: int, lab: Lab) -> Numbers:
    """Replays all plans of one task of a seed."""
    request = lab.test_request(seed, index, size)
    return replayed(lab, {name: lab.plan(name, request) for name in _PLANNERS})


def _parts(settings: EvaluationSettings) -> Sequence[Part]:
    sizes = [
        Part(_name(size, seed), partial(_plan_size, size, seed))
        for seed in range(settings.num_seeds)
        for size in settings.transfer
    ]
    tasks = product(range(settings.num_tasks_replayed), range(settings.num_seeds), settings.transfer)
    replays = [
        Part(_replay_name(size, seed, index), partial(_replay_task, size, seed, index)) for index, seed, size in tasks
    ]
    return [*sizes, *replays]


def _name(size: Size, seed: int) -> str:
    return f"{size[0]}-{size[1]}-{seed}"


def _replay_name(size: Size, seed: int, index: int) -> str:
    return f"replay-{_name(size, seed)}-{index}"


def _show(found: Found, settings: EvaluationSettings) -> Section:
    seeds = range(settings.num_seeds)
    parts = {size: [found[_name(size, seed)] for seed in seeds] for size in settings.transfer}
    panels, tables = _shown(parts, settings, "Predicted")
    tasks = range(settings.num_tasks_replayed)
    note = "Predicted by the cost model."
    if tasks:
        replays = {
            size: [joined([found[_replay_name(size, seed, index)] for index in tasks]) for seed in seeds]
            for size in settings.transfer
        }
        measured_panels, measured_tables = _shown(replays, settings, "Measured")
        panels, tables = [*measured_panels, *panels], [*tables, *measured_tables]
        device_name = replays[settings.transfer[0]][0]["device_name"]
        note = (
            f"Predicted by the cost model, and {len(tasks)} of the tasks of each size and seed replayed on "
            f"{device_name}, all plans of a task in the same interleaved rounds, beside as many ranks with identical "
            "work (ceiling)."
        )
    return Section(
        title=FIGURE.title,
        caption=f"Policies of Fig. 8, trained on {settings.num_tables} tables and {settings.num_ranks} ranks, on "
        f"{settings.num_test_tasks} tasks of each size; means and deviations over {write_seeds(settings.num_seeds)}. "
        f"{note} AutoShard's paper, measured: balance falls with the number of tables for all, "
        "and the policy stays well above the heuristics, which in its figure do not include greedy on the cost model.",
        figure=line_chart(panels),
        tables=tuple(tables),
    )


def _shown(
    parts: Mapping[Size, Sequence[Numbers]], settings: EvaluationSettings, how: str
) -> tuple[list[Panel], list[Table]]:
    """Panels and tables of what was predicted or measured; `parts` are those of each seed, by size."""
    labels = {planner: label(planner, settings) for planner in _PLANNERS}
    scores = {size: by_planner(of, _PLANNERS) for size, of in parts.items()}
    panels = score_panels({size[0]: of for size, of in scores.items()}, labels, "tables")
    columns = ("tables on ranks", *labels.values())
    balance = _table(scores, columns, "balance", f"{how} balance")
    if all("ceilings" in part for of in parts.values() for part in of):
        lines = [(*line, write_share(ceiling(of))) for line, of in zip(balance.lines, parts.values(), strict=True)]
        balance = replace(balance, columns=(*columns, "identical ranks (ceiling)"), rows=tuple(lines))
    return [replace(panel, title=f"{how.lower()} {panel.title}") for panel in panels], [
        balance,
        _table(scores, columns, "speedup", f"{how} speed-up over random"),
    ]


def _table(scores: dict[Size, dict[str, PlannerScores]], columns: tuple[str, ...], name: str, caption: str) -> Table:
    write = write_share if name == "balance" else write_factor
    lines = tuple(
        (f"{size[0]} on {size[1]}", *(write(getattr(of[one], name)) if one in of else NONE for one in _PLANNERS))
        for size, of in scores.items()
    )
    return Table(columns=columns, rows=lines, caption=caption)


FIGURE = Figure(name="fig11", title="Larger tasks (AutoShard, Fig. 11)", parts=_parts, show=_show)
