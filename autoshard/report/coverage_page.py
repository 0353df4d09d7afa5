"""The HTML report of what benchmark samples cover: pair plots, samples per region, and what is missing."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from autoshard.report.figures import BLUE, GREEN, GREY, GRID, INK, ORANGE, PINK, SKY, YELLOW, in_house_style
from autoshard.report.rendering import chart_markup, render_page
from autoshard.table import Table

#: Points that the pair plots show at most; more make the page slow and show no more.
MOST_POINTS = 1500
_COLOURS = (BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, GREY, INK)
#: Light enough for dark numbers on all of it.
_SCALE = ((0.0, "#f3f7fa"), (0.001, "#dcecf7"), (1.0, SKY))


@dataclass(frozen=True, slots=True, kw_only=True)
class PairAxis:
    """One feature of the pair plots; `is_log` puts it on a logarithmic scale."""

    name: str
    is_log: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionMap:
    """Samples by the ranges of two features.

    Attributes:
        title: Heading.
        x_name: First feature.
        y_name: Second feature.
        x_labels: Its ranges.
        y_labels: Likewise.
        samples: By (index of the x range, index of the y range); others have none.
        wanted: Shards of a pool, likewise; their cells are marked where there are no samples.
    """

    title: str
    x_name: str
    y_name: str
    x_labels: tuple[str, ...]
    y_labels: tuple[str, ...]
    samples: Mapping[tuple[int, ...], int]
    wanted: Mapping[tuple[int, ...], int]


def coverage_page(
    *,
    title: str,
    subtitle: str,
    facts: Sequence[tuple[str, str, str]],
    axes: Sequence[PairAxis],
    points: Mapping[str, Sequence[Sequence[float]]],
    maps: Sequence[RegionMap],
    missing: Sequence[Table],
    listings: Sequence[Table],
) -> str:
    """The page.

    Args:
        title: Heading.
        subtitle: A line below it.
        facts: Label, value and note of each number at the top.
        axes: Features of the pair plots.
        points: By group, one number per axis for each point.
        maps: Samples per region.
        missing: Tables of what is missing, shown first.
        listings: Tables shown last.
    """
    charts = []
    for index, item in enumerate(maps):
        label = f"Samples by {item.x_name} and {item.y_name}; every number is written in its cell."
        chart = chart_markup(region_figure(item), f"chart-map-{index}")
        charts.append({"title": item.title, "label": label, "chart": chart})
    shown = subsample(points)
    num_shown, num_points = sum(map(len, shown.values())), sum(map(len, points.values()))
    note = "" if num_shown == num_points else f" {num_shown:,} of {num_points:,} samples, drawn evenly."
    return render_page(
        "coverage.html.j2",
        title=title,
        subtitle=subtitle,
        facts=[{"label": label, "value": value, "note": note_} for label, value, note_ in facts],
        pair_chart=chart_markup(pair_figure(axes, shown), "chart-pairs") if num_points else None,
        pair_note=note,
        maps=charts,
        has_pool=any(item.wanted for item in maps),
        missing=missing,
        listings=listings,
    )


def coverage_figures(
    axes: Sequence[PairAxis], points: Mapping[str, Sequence[Sequence[float]]], maps: Sequence[RegionMap]
) -> dict[str, go.Figure]:
    """The pictures of the page by name: pair plots if there are points, then samples per region."""
    pairs = {"pairs": pair_figure(axes, subsample(points))} if any(points.values()) else {}
    return pairs | {"-".join(item.title.lower().replace(":", "").split()): region_figure(item) for item in maps}


def pair_figure(axes: Sequence[PairAxis], points: Mapping[str, Sequence[Sequence[float]]]) -> go.Figure:
    """Every feature against every other one, one colour per group."""
    last = len(axes) - 1
    figure = make_subplots(last, last, shared_xaxes="columns", shared_yaxes="rows", specs=_lower_triangle(last))
    for index, (group, rows) in enumerate(points.items()):
        columns = np.array(rows, dtype=float).reshape(-1, len(axes)).T
        for y, x in _pairs(last):
            figure.add_scatter(
                name=html.escape(group),
                legendgroup=group,
                showlegend=(y, x) == (0, 0),
                x=_rounded(columns[x]),
                y=_rounded(columns[y + 1]),
                mode="markers",
                marker={"size": 4, "opacity": 0.55, "color": _COLOURS[index % len(_COLOURS)]},
                row=y + 1,
                col=x + 1,
            )
    in_house_style(figure, height=820)
    for y, x in _pairs(last):
        place = {"row": y + 1, "col": x + 1}
        figure.update_xaxes(_scale(axes[x]), title_text=html.escape(axes[x].name) if y == last - 1 else None, **place)
        figure.update_yaxes(_scale(axes[y + 1]), title_text=html.escape(axes[y + 1].name) if x == 0 else None, **place)
    figure.update_xaxes(gridcolor=GRID, zeroline=False, exponentformat="B", nticks=4)
    figure.update_yaxes(zeroline=False, exponentformat="B", nticks=4)
    figure.update_layout(legend={"orientation": "v", "x": 0.62, "y": 0.98, "yanchor": "top", "itemsizing": "constant"})
    figure.update_layout(legend_title_text="chosen by", hovermode="closest")
    return figure


def _pairs(last: int) -> list[tuple[int, int]]:
    """Rows and columns of the pair plots: each pair of features once."""
    return [(y, x) for y in range(last) for x in range(y + 1)]


def _lower_triangle(last: int) -> list[list[dict[str, object] | None]]:
    return [[{} if x <= y else None for x in range(last)] for y in range(last)]


def _scale(axis: PairAxis) -> dict[str, str]:
    return {"type": "log" if axis.is_log else "linear"}


def region_figure(item: RegionMap) -> go.Figure:
    """A heat map of samples, the number in each cell; cells that are wanted and empty are marked."""
    counts = np.zeros((len(item.y_labels), len(item.x_labels)), dtype=int)
    texts = np.full(counts.shape, "", dtype=object)
    for (x, y), number in item.samples.items():
        counts[y, x] = number
        texts[y, x] = f"{number:,}"
    missing = [place for place in item.wanted if place not in item.samples]
    figure = go.Figure()
    figure.add_heatmap(
        z=np.log1p(counts).tolist(),
        x=list(item.x_labels),
        y=list(item.y_labels),
        text=texts.tolist(),
        texttemplate="%{text}",
        textfont={"color": INK},
        colorscale=_SCALE,
        showscale=False,
        xgap=2,
        ygap=2,
        hovertemplate=f"{item.x_name} %{{x}}, {item.y_name} %{{y}}: %{{text}} samples<extra></extra>",
    )
    if missing:
        figure.add_scatter(
            x=[item.x_labels[place[0]] for place in missing],
            y=[item.y_labels[place[1]] for place in missing],
            mode="markers",
            marker={"symbol": "x", "size": 10, "color": ORANGE},
            hovertemplate="%{x}, %{y}: in the pool, not measured<extra></extra>",
        )
    in_house_style(figure, height=330)
    figure.update_layout(font_size=12, margin={"l": 8, "r": 8, "t": 8, "b": 8}, showlegend=False)
    for axes, name, labels in (
        (figure.update_xaxes, item.x_name, item.x_labels),
        (figure.update_yaxes, item.y_name, item.y_labels),
    ):
        axes(title_text=name, type="category", categoryarray=list(labels), showgrid=False)
    figure.update_xaxes(tickangle=-40)
    return figure


def subsample(points: Mapping[str, Sequence[Sequence[float]]]) -> Mapping[str, Sequence[Sequence[float]]]:
    """At most about `MOST_POINTS` of the points, each group's share kept, and at least one of each."""
    total = sum(map(len, points.values()))
    if total <= MOST_POINTS:
        return points
    rng = np.random.default_rng(0)
    shown = {}
    for group, rows in points.items():
        kept = max(1, len(rows) * MOST_POINTS // total)
        shown[group] = [rows[index] for index in np.sort(rng.permutation(len(rows))[:kept])]
    return shown


def _rounded(column: np.ndarray) -> list[float]:
    """Four digits are more than a dot shows, and make the file a third as large."""
    return [float(f"{value:.4g}") for value in column]
