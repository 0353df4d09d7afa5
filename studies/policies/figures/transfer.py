"""AutoShard's Fig. 11: policies of small tasks on large ones, without training anew."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from autoshard.report.images import NumberTable, Section
from studies.frame import Numbers
from studies.policies.charts import line_chart, score_panels
from studies.policies.figure import Figure, Found, Part
from studies.policies.lab import HEURISTICS, POLICY, SAMPLED, Lab
from studies.policies.settings import EvaluationSettings, Size
from studies.policies.summaries import NONE, by_planner, label, write_factor, write_seeds, write_share

_PLANNERS = (*HEURISTICS, POLICY, SAMPLED)


def _plan_size(size: Size, seed: int, lab: Lab) -> Numbers:
    num_tables, num_ranks = size
    draw = partial(lab.pool.sample, num_tables)
    return lab.plan_tests(_PLANNERS, seed, num_ranks, lab.policy_registry(seed), draw)


def _parts(settings: EvaluationSettings) -> Sequence[Part]:
    return [
        Part(_name(size, seed), partial(_plan_size, size, seed))
        for seed in range(settings.num_seeds)
        for size in settings.transfer
    ]


def _name(size: Size, seed: int) -> str:
    return f"{size[0]}-{size[1]}-{seed}"


def _show(found: Found, settings: EvaluationSettings) -> Section:
    scores = {
        size: by_planner([found[_name(size, seed)] for seed in range(settings.num_seeds)], _PLANNERS)
        for size in settings.transfer
    }
    labels = {planner: label(planner, settings) for planner in _PLANNERS}
    panels = score_panels({size[0]: of for size, of in scores.items()}, labels, "tables")
    columns = ("tables on ranks", *labels.values())
    tables = (
        _table(scores, columns, "balance", "Predicted balance"),
        _table(scores, columns, "speedup", "Predicted speed-up over random"),
    )
    return Section(
        title=FIGURE.title,
        caption=f"Policies of Fig. 8, trained on {settings.num_tables} tables and {settings.num_ranks} ranks, on "
        f"{settings.num_test_tasks} tasks of each size; means and deviations over {write_seeds(settings.num_seeds)}. "
        "Predicted by the cost model. AutoShard's paper, measured: balance falls with the number of tables for all, "
        "and the policy stays well above the heuristics, which in its figure do not include greedy on the cost model.",
        figure=line_chart(panels),
        tables=tables,
    )


def _table(scores: dict[Size, dict], columns: tuple[str, ...], name: str, caption: str) -> NumberTable:
    write = write_share if name == "balance" else write_factor
    lines = tuple(
        (f"{size[0]} on {size[1]}", *(write(getattr(of[one], name)) if one in of else NONE for one in _PLANNERS))
        for size, of in scores.items()
    )
    return NumberTable(columns=columns, lines=lines, caption=caption)


FIGURE = Figure(name="fig11", title="Larger tasks (AutoShard, Fig. 11)", parts=_parts, show=_show)
