"""Charts of plans and comparisons, as plotly figures. Every number in them is also in a table of the page.

Names are escaped: plotly reads `<b>` and the like in texts.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from autoshard.core import CostBreakdown, RankCost, ShardingPlan
from autoshard.evaluation.batch_memory import rank_memory
from autoshard.report.comparison import ranked
from autoshard.results.comparison import ComparedPlan, MeasuredPlan

#: Okabe and Ito's palette, which colour-blind readers can distinguish.
BLUE, SKY, GREEN = "#0072B2", "#56B4E9", "#009E73"
ORANGE, YELLOW, PINK = "#D55E00", "#E69F00", "#CC79A7"
GREY = "#8A8F98"
#: Of texts and of lines that mark a limit.
INK = "#1c2733"
#: Of grids and frames.
GRID = "#e3e7ec"
_FONT = {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13, "color": INK}

#: Label, attribute of a rank's times, and colour of each part.
RANK_PARTS = (
    ("forward kernel", "forward_kernel_ms", BLUE),
    ("backward kernel", "backward_kernel_ms", SKY),
    ("input", "input_ms", GREY),
    ("forward exchange", "forward_exchange_ms", ORANGE),
    ("backward exchange", "backward_exchange_ms", YELLOW),
    ("synchronisation", "sync_ms", PINK),
)


def rank_time_figure(predicted: CostBreakdown, measured: MeasuredPlan | None) -> go.Figure:
    """Stacked bars of the parts of each rank's step; measured kernel times as marks on them."""
    ranks = [str(rank.rank) for rank in predicted.ranks]
    figure = go.Figure()
    for label, attribute, colour in RANK_PARTS:
        values = [getattr(rank, attribute) for rank in predicted.ranks]
        if any(values):
            figure.add_bar(name=label, x=ranks, y=values, marker_color=colour, hovertemplate=_hover("rank %{x}"))
    if measured is not None:
        mark = {"symbol": "diamond", "size": 10, "color": INK, "line": {"color": "white", "width": 1}}
        figure.add_scatter(
            name="measured kernel",
            x=ranks,
            y=measured.kernel_ms_per_rank,
            mode="markers",
            marker=mark,
            hovertemplate=_hover("rank %{x}"),
        )
    _add_line(figure, predicted.floor_kernel_ms, "floor: costliest shard")
    binding = predicted.ranks[predicted.binding_rank]
    total_ms = sum(getattr(binding, attribute) for _, attribute, _ in RANK_PARTS)
    figure.add_annotation(
        x=str(binding.rank), y=total_ms, text=f"rank {binding.rank} binds", ax=0, ay=-22, arrowhead=2, arrowcolor=INK
    )
    return _styled(figure, "rank", "ms per step", barmode="stack")


def executed_figure(predicted: Sequence[RankCost | None], executed: Sequence[Any]) -> go.Figure:
    """Stacked bars of the parts of each process's step, predicted beside executed.

    Args:
        predicted: By process; None where nothing was predicted for one.
        executed: By process, with the same attributes. Parts hold what a process waits for others.
    """
    kinds = [("plan", predicted), ("run", executed)]
    bars = [(str(index), kind, of[index]) for index in range(len(executed)) for kind, of in kinds if of[index]]
    places = [[index for index, _, _ in bars], [kind for _, kind, _ in bars]]
    figure = go.Figure()
    for label, attribute, colour in RANK_PARTS:
        values = [getattr(one, attribute) for _, _, one in bars]
        if any(values):
            figure.add_bar(name=label, x=places, y=values, marker_color=colour, hovertemplate=_hover("rank %{x}"))
    _styled(figure, "rank", "ms per step", barmode="stack")
    return figure.update_xaxes(type="multicategory", nticks=2 * len(executed), tickfont_size=11)


def memory_figure(plan: ShardingPlan, predicted: CostBreakdown) -> go.Figure:
    """Stacked bars of each rank's device memory, with what it has as a mark."""
    memory, gib = rank_memory(plan, predicted), 1 << 30
    ranks = [str(rank.rank) for rank in memory]
    figure = go.Figure()
    for label, values, colour in (
        ("weights and optimizer state", [rank.hbm_bytes / gib for rank in predicted.ranks], GREEN),
        ("training", [(rank.used_bytes - rank.hbm_bytes) / gib for rank in predicted.ranks], YELLOW),
    ):
        figure.add_bar(
            name=label,
            x=ranks,
            y=values,
            marker_color=colour,
            hovertemplate="rank %{x}: %{y:.3g} GiB<extra>%{fullData.name}</extra>",
        )
    capacity = [rank.capacity_bytes / gib for rank in memory]
    size = max(4, min(26, 500 / len(ranks)))
    mark = {"symbol": "line-ew", "size": size, "line": {"color": INK, "width": 3}}
    figure.add_scatter(
        name="capacity",
        x=ranks,
        y=capacity,
        mode="markers",
        marker=mark,
        hovertemplate="rank %{x}: %{y:.3g} GiB<extra>capacity</extra>",
    )
    return _styled(figure, "rank", "GiB", barmode="stack")


def planners_figure(rows: Sequence[ComparedPlan]) -> go.Figure:
    """Bars per planner, the fastest first: predicted steps, and kernels of the slowest rank, also measured ones."""
    planned = [row for row in ranked(rows) if row.plan is not None]
    names = [html.escape(row.planner) for row in planned]
    steps_ms = [row.plan.predicted.step_ms.value if row.plan and row.plan.predicted else None for row in planned]
    bars = [
        ("predicted step", steps_ms, GREY),
        ("predicted kernels, slowest rank", [row.predicted_max_ms for row in planned], SKY),
    ]
    if any(row.measured for row in planned):
        measured_ms = [row.measured.max_kernel_ms if row.measured else None for row in planned]
        bars.append(("measured kernels, slowest rank", measured_ms, BLUE))
    figure = go.Figure()
    for label, values, colour in bars:
        figure.add_bar(name=label, x=names, y=values, marker_color=colour, hovertemplate=_hover("%{x}"))
    floors = [row.plan.predicted.floor_kernel_ms for row in planned if row.plan and row.plan.predicted]
    if floors:
        _add_line(figure, min(floors), "floor of kernels: costliest shard")
    return _styled(figure, "", "ms", barmode="group")


def planner_ranks_figure(row: ComparedPlan, highest_ms: float) -> go.Figure:
    """Small bars of each rank's kernel time in one planner's plan: measured where replayed, else predicted.

    Args:
        row: The planner's line.
        highest_ms: Upper end of the axis, so that several such charts can be compared by eye.
    """
    assert row.plan is not None
    if row.measured is not None:
        parts = (("forward", row.measured.forward_ms_R, BLUE), ("backward", row.measured.backward_ms_R, SKY))
    else:
        ranks_ = row.plan.prices.ranks
        parts = (
            ("forward", tuple(rank.forward_kernel_ms for rank in ranks_), BLUE),
            ("backward", tuple(rank.backward_kernel_ms for rank in ranks_), SKY),
        )
    figure = go.Figure()
    for label, values, colour in parts:
        ranks = [str(rank) for rank in range(len(values))]
        figure.add_bar(name=label, x=ranks, y=values, marker_color=colour, hovertemplate=_hover("rank %{x}"))
    _styled(figure, "rank", "ms", barmode="stack")
    figure.update_layout(height=210, showlegend=False, margin={"l": 48, "r": 8, "t": 8, "b": 40})
    figure.update_yaxes(range=[0, highest_ms * 1.05 or 1])
    return figure


def _hover(place: str) -> str:
    return place + ": %{y:.3g} ms<extra>%{fullData.name}</extra>"


def _add_line(figure: go.Figure, value_ms: float, label: str) -> None:
    line = {"color": INK, "width": 1.5, "dash": "dot"}
    figure.add_hline(y=value_ms, line=line, name=f"{label}, {value_ms:.3g} ms", showlegend=True)


def _styled(figure: go.Figure, x_title: str, y_title: str, *, barmode: str) -> go.Figure:
    figure.update_layout(barmode=barmode, bargap=0.25)
    # Of hundreds of ranks, outlines would be wider than bars.
    figure.update_traces(marker_line_width=0, selector={"type": "bar"})
    figure.update_xaxes(title_text=x_title, type="category", **({"nticks": 10, "tickangle": 0} if x_title else {}))
    figure.update_yaxes(title_text=y_title, rangemode="tozero")
    return in_house_style(figure)


def in_house_style(figure: go.Figure, *, height: int = 380) -> go.Figure:
    """Gives a figure, of one chart or several, the fonts, colours and margins that all reports share.

    Args:
        figure: Changed in place.
        height: In pixels; the width is the reader's.

    Returns:
        The figure.
    """
    figure.update_layout(
        height=height,
        font=_FONT,
        paper_bgcolor="white",
        plot_bgcolor="white",
        margin={"l": 64, "r": 16, "t": 16, "b": 56},
        showlegend=True,
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
    )
    figure.update_xaxes(title_font_size=13, automargin=True)
    figure.update_yaxes(title_font_size=13, gridcolor=GRID, zerolinecolor=GRID, automargin=True)
    return figure
