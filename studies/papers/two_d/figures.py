"""Fig. 6 and 7 of two-dimensional sparse parallelism, drawn from priced runs."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from autoshard.core.step import StepPart
from autoshard.report.figures import BLUE, GREEN, GREY, ORANGE, PINK, SKY, in_house_style
from studies.papers.two_d.results import Outcome

#: Height of the images in pixels.
HEIGHT = 480


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
