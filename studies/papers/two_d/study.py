"""The study `two-d`, and Fig. 6 and 7 of two-dimensional sparse parallelism: `python -m studies two-d`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import plotly.graph_objects as go
import typer
from plotly.subplots import make_subplots

from autoshard import console
from autoshard.commands.options import command_options
from autoshard.core.step import StepPart
from autoshard.planners.replica_groups import ReplicaGroupsPlanner
from autoshard.report.figures import BLUE, GREEN, GREY, ORANGE, PINK, SKY, in_house_style
from autoshard.table import Table
from studies.frame import OutputOptions, StudyResult
from studies.papers.two_d.document import choice_table, document, fig2_table, memory_table, table1, table2
from studies.papers.two_d.results import (
    CTR_RUNS,
    EXFM_RUNS,
    FULL_RUNS,
    GROUPED_RUNS,
    WITHIN_RUN,
    Outcome,
    Run,
    outcome,
    request_of,
)

#: Height of the images in pixels.
HEIGHT = 480


def fig2_figure(full: Sequence[Outcome]) -> go.Figure:
    """Latencies of slowest ranks and lookups' memory of the fullest, against GPUs, as far as they fit."""
    fits = [one for one in full if not one.out_of_memory]
    figure = make_subplots(1, 2, horizontal_spacing=0.12)
    in_house_style(figure, height=HEIGHT)
    sizes = [one.run.world_size for one in fits]
    curves = (
        ("computation", [one.kernels_ms for one in fits], {256: 100.0, 1024: 200.0}, BLUE, 1),
        ("all-to-all", [one.all_to_all_ms for one in fits], {1024: 600.0}, GREEN, 1),
        ("memory of lookups", [one.lookup_bytes / 1e9 for one in fits], {256: 4.0, 1024: 15.0}, ORANGE, 2),
    )
    for name, values, published, colour, column in curves:
        line = {"color": colour, "width": 3}
        figure.add_scatter(name=name, x=sizes, y=values, mode="lines+markers", line=line, row=1, col=column)
        marker = {"color": colour, "size": 11, "symbol": "circle-open", "line": {"width": 2}}
        figure.add_scatter(
            name=f"{name}, paper",
            x=list(published),
            y=list(published.values()),
            mode="markers",
            marker=marker,
            row=1,
            col=column,
        )
    figure.update_xaxes(title_text="GPUs", type="log", tickvals=sizes)
    figure.update_yaxes(title_text="ms per step", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="GB", rangemode="tozero", row=1, col=2)
    return figure


def fig6_figure(models: Sequence[Sequence[Outcome]]) -> go.Figure:
    """Kernel costs of the slowest rank by number of groups, a panel for each model."""
    figure = make_subplots(1, len(models), horizontal_spacing=0.1)
    in_house_style(figure, height=HEIGHT)
    for column, found in enumerate(models, start=1):
        groups = [str(one.run.num_groups) for one in found]
        bars = (
            ("ids to owners", [one.parts_ms[StepPart.INPUT] for one in found], SKY),
            ("embedding computation", [one.kernels_ms for one in found], BLUE),
            ("embedding all-to-all", [one.exchange_ms for one in found], GREEN),
            ("table all-reduce", [one.group_sync_ms for one in found], PINK),
        )
        for name, values, colour in bars:
            figure.add_bar(
                name=name, x=groups, y=values, marker_color=colour, showlegend=column == 1, row=1, col=column
            )
        figure.update_xaxes(title_text=f"{found[0].run.model.name}: groups", type="category", row=1, col=column)
        figure.update_yaxes(title_text="ms per step", row=1, col=column)
    figure.update_layout(barmode="stack")
    return figure


def fig7_figure(full: Sequence[Outcome], grouped: Sequence[Outcome]) -> go.Figure:
    """Samples per second against GPUs, with the paper's marks."""
    figure = in_house_style(go.Figure(), height=HEIGHT)
    for name, found, colour in (
        ("full model parallelism", full, ORANGE),
        ("groups of 256 GPUs", grouped, BLUE),
    ):
        fits = [one for one in found if not one.out_of_memory]
        sizes = [one.run.world_size for one in fits]
        figure.add_scatter(
            name=name, x=sizes, y=[one.qps for one in fits], mode="lines", line={"color": colour, "width": 3}
        )
        published = [one for one in found if one.run.paper_qps is not None]
        figure.add_scatter(
            name=f"{name}, paper",
            x=[one.run.world_size for one in published],
            y=[one.run.paper_qps for one in published],
            mode="markers",
            marker={"color": colour, "size": 11, "symbol": "circle-open", "line": {"width": 2}},
        )
    ends = [grouped[0], grouped[-1]]
    figure.add_scatter(
        name="linear",
        x=[one.run.world_size for one in ends],
        y=[grouped[0].qps * one.run.world_size / grouped[0].run.world_size for one in ends],
        mode="lines",
        line={"color": GREY, "dash": "dot"},
    )
    figure.update_xaxes(title_text="GPUs", type="log", dtick=0.30103)
    figure.update_yaxes(title_text="samples per second", type="log", dtick=0.30103)
    return figure


@command_options()
class TwoDOptions:
    """Options of the study `two-d`."""

    choose: Annotated[bool, typer.Option(help="Also let the planner choose the groups of CTR.")] = True


def main(options: TwoDOptions, output: OutputOptions) -> None:
    """Plans and prices 2D's runs, prints its Tables 1 and 2 beside them, and draws its Fig. 2, 6 and 7.

    Example:
        python -m studies two-d -o docs/figures
    """
    runs = {
        "ctr": CTR_RUNS,
        "exfm": EXFM_RUNS,
        "full": FULL_RUNS,
        "grouped": GROUPED_RUNS,
        "within_nodes": (WITHIN_RUN,),
    }
    found = {name: [_logged(run) for run in of_table] for name, of_table in runs.items()}
    full, grouped, (within,) = found["full"], found["grouped"], found["within_nodes"]
    notes = [
        f"16 groups laid within nodes: {within.qps:.3g} samples per second, {100 * within.factor(full[0]):.1f}%; laid "
        f"across nodes: {grouped[-1].qps:.3g}."
    ]
    notes += [
        f"{one.run.world_size:,} GPUs in {one.run.num_groups} group: {one.out_of_memory}"
        for one in (*full, *grouped)
        if one.out_of_memory
    ]
    tables = (
        table1(found["ctr"]),
        table1(found["exfm"]),
        table2(full, grouped),
        memory_table(full, grouped),
        fig2_table(full),
    )
    output.write(
        StudyResult(
            name="two-d",
            document=document(found),
            tables=(*tables, _choice()) if options.choose else tables,
            notes=tuple(notes),
            images={
                "-fig2": fig2_figure(full),
                "-fig6": fig6_figure([found["ctr"], found["exfm"]]),
                "-fig7": fig7_figure(full, grouped),
            },
        )
    )


def _choice() -> Table:
    plan = ReplicaGroupsPlanner().plan(request_of(CTR_RUNS[0]))
    assert plan.provenance is not None, "this planner names what it tried"
    return choice_table(f"{CTR_RUNS[0].model.name} on {CTR_RUNS[0].world_size} GPUs", plan.provenance)


def _logged(run: Run) -> Outcome:
    found = outcome(run)
    console.log(
        f"{run.model.name}, {run.world_size:,} GPUs in {run.num_groups} groups: "
        + (found.out_of_memory or f"step {found.step_ms:.0f} ms, priced in {found.pricing_s:.2f} s")
    )
    return found
