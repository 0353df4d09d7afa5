"""AutoShard's Fig. 12, right: how long planning takes, by the number of tables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from autoshard.report.images import Section
from autoshard.runtime.processes.threads import intra_op_threads
from autoshard.table import Table
from studies.frame import Numbers, Summary
from studies.policies.charts import Line, Panel, line_chart
from studies.policies.lab import (
    AUTO,
    COST_GREEDY,
    LOOKUP_GREEDY,
    POLICY,
    SAMPLED,
    EvaluationSettings,
    Figure,
    Found,
    Lab,
    Part,
    Size,
)
from studies.policies.scores import label, write_seconds

_PLANNERS = (LOOKUP_GREEDY, COST_GREEDY, POLICY, SAMPLED, AUTO)


def _time_size(size: Size, lab: Lab) -> Numbers:
    num_tables, num_ranks = size
    request = lab.request(
        lab.pool.sample(num_tables, lab.target_seeds()[0]),
        lab.topology(num_ranks),
        policies=lab.policy_registry(0),
    )
    with intra_op_threads(1):
        return {planner: lab.time_planner(planner, request) for planner in _PLANNERS}


def _parts(settings: EvaluationSettings) -> Sequence[Part]:
    return [Part(_name(size), partial(_time_size, size)) for size in settings.inference]


def _name(size: Size) -> str:
    return f"{size[0]}-{size[1]}"


def _show(found: Found, settings: EvaluationSettings) -> Section:
    lines = {
        label(planner, settings): Line(
            x=[num_tables for num_tables, _ in settings.inference],
            y=[Summary(mean=1000 * found[_name(size)][planner], deviation=0.0) for size in settings.inference],
        )
        for planner in _PLANNERS
    }
    panel = Panel(
        title="planning, ms",
        lines=lines,
        x_title="tables",
        x_ticks=[num_tables for num_tables, _ in settings.inference],
        x_log=True,
        y_log=True,
    )
    rows = tuple(
        (f"{size[0]} on {size[1]}", *(write_seconds(found[_name(size)][planner]) for planner in _PLANNERS))
        for size in settings.inference
    )
    table = Table(
        columns=("tables on ranks", *(label(planner, settings) for planner in _PLANNERS)),
        rows=rows,
        caption=f"From tables to plan, median of {settings.num_timed} runs",
    )
    return Section(
        title=FIGURE.title,
        caption="From tables to plan on one core, encoding of the tables included, models loaded before. `auto` "
        f"searches for as long as it may, {settings.auto_s:g} s here. AutoShard's paper: hundreds of tables in seconds "
        "on one core.",
        figure=line_chart([panel]),
        tables=(table,),
    )


FIGURE = Figure(name="fig12-inference", title="Planning time (AutoShard, Fig. 12, right)", parts=_parts, show=_show)
