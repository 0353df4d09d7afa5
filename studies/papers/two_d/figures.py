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
