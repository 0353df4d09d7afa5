"""FlexShard's Fig. 1, 3, 5, 6 and 7, drawn from numbers of `results`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from autoshard.planners.flexshard.equations import ParetoFrontier, ParetoPoint
from autoshard.report.figures import BLUE, GREEN, GREY, INK, ORANGE, SKY, YELLOW, in_house_style
from studies.papers.flexshard.results import FIG5_MODEL, HistoryCosts, ModelResult, ReplicaCosts

#: Height of the images in pixels.
HEIGHT = 480
_TABLE_COLOURS = (SKY, GREEN, YELLOW, ORANGE)
#: The share of rows in Fig. 5's left part, and the distance of its marks.
_FIRST_ROWS, _MARK = 0.012, 0.001


def fig1_figure(costs: HistoryCosts) -> go.Figure:
    """Memory and communication of one step against the length of all histories, kept or summed by either collective."""
    figure = make_subplots(1, 2, horizontal_spacing=0.1)
    in_house_style(figure, height=HEIGHT)
    panels = (
        (1, "dynamic memory per rank, GB", costs.sequence_gb_N, costs.pooled_gb, costs.reduced_gb),
        (2, "communication per step, ms", costs.sequence_ms_N, costs.pooled_ms, costs.reduced_ms),
    )
    for column, title, sequence_N, pooled, reduced in panels:
        figure.add_scatter(
            name="sequences, 1 to 8 tables",
            x=costs.length_N,
            y=sequence_N,
            mode="lines",
            line={"color": BLUE, "width": 3},
            showlegend=column == 1,
            row=1,
            col=column,
        )
        for by_tables, collective, dash in ((reduced, "reduce-scatter", "solid"), (pooled, "all-to-all", "dot")):
            for (tables, value), colour in zip(by_tables.items(), _TABLE_COLOURS, strict=True):
                figure.add_scatter(
                    name=f"{tables} table{'s' if tables > 1 else ''} summed, {collective}",
                    x=costs.length_N[[0, -1]],
                    y=[value, value],
                    mode="lines",
                    line={"color": colour, "width": 2, "dash": dash},
                    showlegend=column == 1,
                    row=1,
                    col=column,
                )
        figure.update_xaxes(title_text="lookups per sample, of all tables", row=1, col=column)
        # The first table's line is well above the bottom, one lookup far below it.
        lowest, highest = min(reduced.values()) / 20, 2 * float(sequence_N[-1])
        figure.update_yaxes(title_text=title, type="log", dtick=1, range=np.log10([lowest, highest]), row=1, col=column)
    return figure


def fig3_figure(costs: ReplicaCosts) -> go.Figure:
    """Costs of replicating over those of splitting, with the neutral points."""
    figure = in_house_style(go.Figure(), height=HEIGHT)
    curves = (
        ("memory", costs.memory_N, BLUE, costs.memory_neutral),
        ("communication", costs.communication_N, ORANGE, costs.communication_neutral),
    )
    for name, ratio_N, colour, neutral in curves:
        figure.add_scatter(name=name, x=costs.alpha_N, y=ratio_N, mode="lines", line={"color": colour, "width": 3})
        figure.add_scatter(
            name=f"{name}-neutral, alpha = {neutral:.3g}",
            x=[neutral],
            y=[1.0],
            mode="markers",
            marker={"color": colour, "size": 12, "symbol": "diamond", "line": {"color": "white", "width": 1}},
        )
    figure.add_hline(y=1.0, line={"color": INK, "width": 1.5, "dash": "dot"})
    figure.update_xaxes(title_text="alpha = lookups per sample and row", type="log", exponentformat="power", dtick=1)
    figure.update_yaxes(title_text="data-parallel over row-wise", type="log", exponentformat="power", dtick=1)
    return figure


def fig5_figure(frontier: ParetoFrontier) -> go.Figure:
    """Memory against communication as rows are replicated: the hottest 1.2% of them, and all."""
    titles = (f"<b>the hottest {100 * _FIRST_ROWS:.1f}% of the rows</b>", "<b>all rows</b>")
    figure = make_subplots(1, 2, subplot_titles=titles, horizontal_spacing=0.1)
    in_house_style(figure, height=HEIGHT)
    rows, communication, memory = (
        np.array([getattr(point, name) for point in frontier.curve])
        for name in ("num_rows", "communication_s", "memory_bytes")
    )
    total = FIG5_MODEL.num_rows
    near = np.append(rows[rows < _FIRST_ROWS * total], _FIRST_ROWS * total)
    for column, shown in ((1, near), (2, rows)):
        figure.add_scatter(
            name="rows by falling frequency",
            x=np.interp(shown, rows, communication) * 1e3,
            y=np.interp(shown, rows, memory) / 1e9,
            mode="lines",
            line={"color": BLUE, "width": 3},
            showlegend=False,
            row=1,
            col=column,
        )
    marked = np.arange(_MARK, _FIRST_ROWS + _MARK / 2, _MARK) * total
    figure.add_scatter(
        name=f"every {100 * _MARK:.1f}% of the rows",
        x=np.interp(marked, rows, communication) * 1e3,
        y=np.interp(marked, rows, memory) / 1e9,
        mode="markers",
        marker={"color": SKY, "size": 9, "line": {"color": BLUE, "width": 1}},
        row=1,
        col=1,
    )
    a, b, c, d = named_points(frontier).values()
    _add_points(figure, 1, (("A", a, "top center"), ("B", b, "top right")))
    far = (("A", a, "bottom right"), ("B", b, "bottom left"), ("C", c, "top center"), ("D", d, "middle left"))
    _add_points(figure, 2, far)
    for column in (1, 2):
        figure.add_hline(y=0.0, line={"color": INK, "width": 1, "dash": "dot"}, row=1, col=column)
        figure.update_xaxes(title_text="communication over row-wise, ms per step", zeroline=False, row=1, col=column)
        figure.update_yaxes(title_text="memory over row-wise, GB per rank", row=1, col=column)
    figure.update_layout(margin_t=72, legend_y=1.1)
    return figure


def named_points(frontier: ParetoFrontier) -> dict[str, ParetoPoint]:
    """Fig. 5's points by their letters."""
    return {
        "A": frontier.most_memory_saved,
        "B": frontier.memory_neutral,
        "C": frontier.most_communication_saved,
        "D": frontier.whole_table,
    }


def _add_points(figure: go.Figure, column: int, points: Sequence[tuple[str, ParetoPoint, str]]) -> None:
    figure.add_scatter(
        name="points of interest",
        x=[point.communication_s * 1e3 for _, point, _ in points],
        y=[point.memory_bytes / 1e9 for _, point, _ in points],
        text=[f"<b>{label}</b>" for label, _, _ in points],
        textposition=[place for _, _, place in points],
        textfont={"size": 16},
        mode="markers+text",
        marker={"color": ORANGE, "size": 13, "symbol": "diamond", "line": {"color": "white", "width": 1}},
        cliponaxis=False,
        showlegend=column == 1,
        row=1,
        col=column,
    )


def fig6_figure(results: Sequence[ModelResult]) -> go.Figure:
    """Share of the global all-to-all that is saved: measured, predicted by the paper, and here."""
    names = [f"{result.model.name}<br>{tiers}-tier" for result in results for tiers in (2, 3)]
    bars = (
        ("measured (Table 6)", [share for one in results for share in one.measured_reductions], GREY),
        (
            "predicted by the paper (Table 5)",
            [share for one in results for share in (one.model.two_tier.coverage, one.model.three_tier_coverage)],
            SKY,
        ),
        ("predicted here", [share for one in results for share in one.predicted_reductions], BLUE),
    )
    figure = in_house_style(go.Figure(), height=HEIGHT)
    for name, shares, colour in bars:
        _add_bars(figure, name, names, [100 * share for share in shares], colour, "%{y:.0f}")
    figure.update_yaxes(title_text="global all-to-all saved, %", range=[0, 100])
    return figure


def fig7_figure(results: Sequence[ModelResult]) -> go.Figure:
    """Communication of row-wise steps over that of 2-tier and 3-tier ones: measured and predicted."""
    names = [f"{result.model.name}<br>{tiers}-tier" for result in results for tiers in (2, 3)]
    figure = in_house_style(go.Figure(), height=HEIGHT)
    bars = (
        ("measured (Table 6), overlappable parts hidden", True, True, GREY),
        ("predicted here, hidden", False, True, BLUE),
        ("measured, nothing hidden", True, False, "#c3c7cd"),
        ("predicted here, nothing hidden", False, False, SKY),
    )
    for name, is_measured, is_hidden, colour in bars:
        speedups = [result.speedups(is_measured=is_measured, is_hidden=is_hidden) for result in results]
        _add_bars(figure, name, names, [value for pair in speedups for value in pair], colour, "%{y:.1f}")
    figure.add_hline(y=1.0, line={"color": INK, "width": 1, "dash": "dot"})
    figure.update_yaxes(title_text="row-wise communication over tiered", rangemode="tozero")
    return figure


def _add_bars(
    figure: go.Figure, name: str, names: Sequence[str], values: Sequence[float], colour: str, text: str
) -> None:
    figure.add_bar(
        name=name,
        x=names,
        y=values,
        marker_color=colour,
        texttemplate=text,
        textposition="outside",
        textfont={"size": 11},
        cliponaxis=False,
    )
