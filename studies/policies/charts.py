"""Charts of the evaluation: bars and lines, with deviations over seeds. Every number in them is in a table, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from autoshard.report.figures import BLUE, GREEN, GREY, GRID, INK, ORANGE, PINK, SKY, YELLOW, in_house_style
from studies.frame import Summary
from studies.policies.lab import AUTO, COST_GREEDY, LOOKUP_GREEDY, POLICY, RANDOM, SAMPLED
from studies.policies.scores import PlannerScores

#: One colour per planner in all charts.
COLOURS: Final[Mapping[str, str]] = {
    RANDOM: GREY,
    "size-greedy": YELLOW,
    "dim-greedy": PINK,
    LOOKUP_GREEDY: SKY,
    COST_GREEDY: GREEN,
    "torchrec": INK,
    POLICY: ORANGE,
    SAMPLED: "#8c2d04",
    AUTO: BLUE,
    "random search": GREY,
}
#: Light enough for dark texts on them.
_BARS: Final = ("#bcdcf0", "#7fb5d9", "#f3c6a5")
_OTHERS: Final = (ORANGE, BLUE, PINK, INK, YELLOW)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of a chart.

    Attributes:
        x: Where its points lie.
        y: Their heights, with deviations.
        is_level: Whether it is a level to compare with, drawn without points.
    """

    x: Sequence[float]
    y: Sequence[Summary]
    is_level: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One of several charts side by side.

    Attributes:
        title: Of the axis that values lie on.
        bars: Groups of bars by name, each with values by label.
        lines: Lines by name.
        x_title: Of the other axis.
        is_percent: Whether values are shares.
        x_ticks: Where it has ticks; anywhere if None.
        x_log: Whether it is logarithmic.
        y_log: Whether the axis of values is.
    """

    title: str
    bars: Mapping[str, Mapping[str, Summary]] = field(default_factory=dict)
    lines: Mapping[str, Line] = field(default_factory=dict)
    x_title: str = ""
    is_percent: bool = False
    x_ticks: Sequence[float] | None = None
    x_log: bool = False
    y_log: bool = False

    def scale(self) -> float:
        """Factor of all values."""
        return 100.0 if self.is_percent else 1.0


def bar_chart(panels: Sequence[Panel]) -> go.Figure:
    """Horizontal bars; labels in the order of the first panel, from top to bottom."""
    labels = list(next(iter(panels[0].bars.values())))
    num_groups = max(len(panel.bars) for panel in panels)
    figure = make_subplots(1, len(panels), shared_yaxes=True, horizontal_spacing=0.06)
    in_house_style(figure, height=110 + (12 + 22 * num_groups) * len(labels))
    for column, panel in enumerate(panels, start=1):
        for index, (name, values) in enumerate(reversed(list(panel.bars.items()))):
            _add_bars(figure, column, panel, name, values, _BARS[index])
        figure.update_xaxes(title_text=panel.title, ticksuffix="%" if panel.is_percent else "", col=column)
        if panel.is_percent:
            figure.update_xaxes(range=[0, 100], dtick=25, col=column)
    order = list(reversed(labels))
    figure.update_yaxes(categoryorder="array", categoryarray=order, gridcolor="white")
    figure.update_layout(
        barmode="group", bargap=0.3, margin={"r": 40, "t": 40}, showlegend=num_groups > 1, legend_traceorder="reversed"
    )
    return figure


def _add_bars(
    figure: go.Figure, column: int, panel: Panel, name: str, values: Mapping[str, Summary], colour: str
) -> None:
    scale, sign = panel.scale(), "%" if panel.is_percent else ""
    figure.add_bar(
        name=name,
        legendgroup=name,
        showlegend=column == 1,
        y=list(values),
        x=[scale * value.mean for value in values.values()],
        orientation="h",
        marker_color=colour,
        error_x={"array": [scale * value.deviation for value in values.values()], "color": INK, "thickness": 1.2},
        text=[f"{scale * value.mean:.{1 if panel.is_percent else 3}f}{sign}" for value in values.values()],
        # At the foot of the bars, where no deviation is drawn.
        textposition="inside",
        insidetextanchor="start",
        insidetextfont={"color": INK},
        constraintext="none",
        textangle=0,
        cliponaxis=False,
        hovertemplate="%{y}: %{x:.4g}" + sign + f"<extra>{name}</extra>",
        row=1,
        col=column,
    )


def line_chart(panels: Sequence[Panel], *, height: int = 420) -> go.Figure:
    """Lines with bands of a deviation, panels side by side, one legend."""
    figure = make_subplots(1, len(panels), horizontal_spacing=0.1)
    in_house_style(figure, height=height)
    shown: set[str] = set()
    for column, panel in enumerate(panels, start=1):
        others = iter(_OTHERS * 3)
        for name, line in panel.lines.items():
            colour = _colour(name) or next(others)
            _add_line(figure, column, panel, name, line, colour, name not in shown)
            shown.add(name)
        suffix = "%" if panel.is_percent else ""
        figure.update_xaxes(
            title_text=panel.x_title,
            type="log" if panel.x_log else "linear",
            dtick=1 if panel.x_log else None,
            tickvals=panel.x_ticks,
            zeroline=False,
            col=column,
        )
        figure.update_yaxes(
            title_text=panel.title, type="log" if panel.y_log else "linear", ticksuffix=suffix, col=column
        )
    figure.update_layout(margin={"t": 64, "r": 24})
    return figure


def score_panels(
    scores: Mapping[float, Mapping[str, PlannerScores]], labels: Mapping[str, str], x_title: str
) -> list[Panel]:
    """Balance and speed-up of planners against something: two panels of lines.

    Args:
        scores: By place on the axis, then by planner; a planner may be missing at some.
        labels: Planners in their order, with what charts call them.
        x_title: Of the axis.
    """
    panels = []
    for name, title in (("balance", "degree of balance"), ("speedup", "speed-up over random")):
        lines = {}
        for planner, label in labels.items():
            known = {x: getattr(of[planner], name) for x, of in scores.items() if planner in of}
            known = {x: value for x, value in known.items() if value is not None}
            lines[label] = Line(x=list(known), y=list(known.values()))
        panels.append(Panel(title=title, lines=lines, x_title=x_title, is_percent=name == "balance"))
    return panels


def dot_chart(panel: Panel) -> go.Figure:
    """Dots with deviations along the axis of values, one line for each label and group, and a line at zero."""
    labels = list(dict.fromkeys(label for values in panel.bars.values() for label in values))
    figure = in_house_style(go.Figure(), height=130 + 28 * len(panel.bars) * len(labels))
    others = iter(_OTHERS * 3)
    for name, values in panel.bars.items():
        colour = _colour(name) or next(others)
        figure.add_scatter(
            name=name,
            y=[list(values), [name] * len(values)],
            x=[panel.scale() * value.mean for value in values.values()],
            mode="markers",
            marker={"color": colour, "size": 10},
            error_x={"array": [panel.scale() * value.deviation for value in values.values()], "thickness": 1.4},
            hovertemplate="%{x:.3g}<extra>%{y}</extra>",
        )
    figure.add_vline(x=0, line={"color": INK, "width": 1.2, "dash": "dot"})
    figure.update_xaxes(title_text=panel.title, gridcolor=GRID, ticksuffix="%" if panel.is_percent else "")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_layout(margin={"t": 16, "r": 24}, showlegend=False)
    return figure


def _colour(name: str) -> str | None:
    """A planner's colour, whatever its options; None for other names."""
    return COLOURS.get(name) or (COLOURS[SAMPLED] if name.startswith(f"{POLICY}, ") else None)


def _add_line(
    figure: go.Figure, column: int, panel: Panel, name: str, line: Line, colour: str, in_legend: bool
) -> None:
    scale = panel.scale()
    means = [scale * value.mean for value in line.y]
    deviations = [scale * value.deviation for value in line.y]
    place: dict[str, Any] = {"row": 1, "col": column}
    if any(deviations) and not line.is_level:
        upper = [mean + deviation for mean, deviation in zip(means, deviations, strict=True)]
        # Nothing that is drawn can be below 0.
        lower = [max(0.0, mean - deviation) for mean, deviation in zip(means, deviations, strict=True)]
        figure.add_scatter(
            x=[*line.x, *reversed(line.x)],
            y=[*upper, *reversed(lower)],
            fill="toself",
            fillcolor=colour,
            opacity=0.15,
            line={"width": 0},
            mode="lines",
            hoverinfo="skip",
            showlegend=False,
            legendgroup=name,
            **place,
        )
    figure.add_scatter(
        name=name,
        legendgroup=name,
        showlegend=in_legend,
        x=list(line.x),
        y=means,
        mode="lines" if line.is_level else "lines+markers",
        line={"color": colour, "width": 2, "dash": "dash" if line.is_level else "solid"},
        hovertemplate="%{x:.4g}: %{y:.4g}<extra>%{fullData.name}</extra>",
        **place,
    )
