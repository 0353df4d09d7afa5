"""The active loop's curve as a chart, a page and a file of numbers."""

from __future__ import annotations

from typing import Final

import plotly.graph_objects as go

from autoshard.report.figures import BLUE, GREY, GRID, ORANGE, in_house_style
from autoshard.report.images import FigureReport, Section
from autoshard.table import Table
from studies.cost_models.active import SCHEMA, Progress
from studies.frame import StudyResult, to_document

_COLOURS: Final = {"uncertain": BLUE, "random": ORANGE}
_NAMES: Final = {"uncertain": "where the model is least certain", "random": "random sets"}
_WIDTH, _HEIGHT = 960, 440


def active_result(progress: Progress) -> StudyResult:
    """Numbers, page and image of the rounds of a loop."""
    figure = curve_figure(progress)
    page = FigureReport(
        title="Error against samples",
        subtitle=f"Cost model of {progress.device}, tested on {len(progress.held_out):,} held-out sets",
        sections=(
            Section(
                title="Held-out error after each round",
                caption="The held-out sets were drawn before the first round from sets that no model chose; they are "
                "the same for all points, and none was trained on.",
                figure=figure,
                tables=(_rounds_table(progress),),
            ),
        ),
    )
    document = to_document(progress, SCHEMA)
    return StudyResult(name="active", document=document, page=page, images={"": figure}, width=_WIDTH)


def curve_figure(progress: Progress) -> go.Figure:
    """Mean relative error against samples that were trained on, one curve per way of choosing them."""
    figure = in_house_style(go.Figure(), height=_HEIGHT)
    for arm, colour in _COLOURS.items():
        rounds = progress.of(arm)
        if rounds:
            figure.add_scatter(
                name=_NAMES[arm],
                x=[found.num_samples for found in rounds],
                y=[100 * found.relative_error for found in rounds],
                mode="lines+markers",
                line={"color": colour, "width": 2.5},
                hovertemplate="%{x:,} samples: %{y:.2f}%<extra></extra>",
            )
    figure.update_xaxes(title_text="samples trained on", gridcolor=GRID, showline=True, linecolor=GREY)
    figure.update_yaxes(title_text="mean relative error on held-out sets, %", rangemode="tozero")
    return figure


def _rounds_table(progress: Progress) -> Table:
    return Table.of(
        progress.rounds,
        (
            ("samples chosen", lambda one: one.arm),
            ("trained on", lambda one: f"{one.num_samples:,}"),
            ("relative error", lambda one: f"{one.relative_error:.2%}"),
            ("MAE, ms", lambda one: f"{one.mae_ms:.3f}"),
            ("Kendall's tau", lambda one: f"{one.kendall_tau:.3f}"),
            ("seconds collected", lambda one: f"{one.collect_s:.0f}"),
        ),
        caption="Rounds",
    )
