"""Charts of an evaluation, as plotly figures; every number in them is in its document, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import plotly.graph_objects as go

from autoshard.report.figures import BLUE, GREEN, GREY, GRID, INK, ORANGE, PINK, SKY, YELLOW, in_house_style
from studies.cost_models.ablation import FULL
from studies.cost_models.evaluation import KERNEL, METHODS, Evaluation
from studies.cost_models.evidence import SplitKind

#: Points of a scatter: more overlap, and make the page heavy.
_MOST_POINTS = 2000
#: Methods whose error is drawn against the number of tables, with their colours.
_LINES: Mapping[str, str] = {
    KERNEL: BLUE,
    "autoshard_best": ORANGE,
    "singles_scaled": PINK,
    "pooled_linear": GREEN,
    "boosted_trees": YELLOW,
    "analytic_scaled": GREY,
    "torchrec": SKY,
}


def scatter_figure(evaluation: Evaluation) -> go.Figure:
    """Predicted against measured times of held-out sets, both axes logarithmic: seen tables, and unseen ones."""
    figure = in_house_style(go.Figure(), height=520)
    measured_S = evaluation.evidence.dataset.kernel_ms
    first = {split.kind: split for split in reversed(evaluation.splits)}
    parts = [("sets of seen tables", first[SplitKind.RANDOM].held_out, BLUE)]
    unseen = first.get(SplitKind.HALF) or first.get(SplitKind.MIXED)
    if unseen is not None:
        which = "sets of unseen tables alone" if unseen.kind is SplitKind.HALF else "sets with unseen tables"
        parts.append((which, unseen.unseen, ORANGE))
    ends = [np.inf, 0.0]
    for name, prices, colour in parts:
        priced = prices[KERNEL]
        measured, predicted = measured_S[priced.samples_T][:_MOST_POINTS], priced.ms_T[:_MOST_POINTS]
        ends = [min(ends[0], measured.min(), predicted.min()), max(ends[1], measured.max(), predicted.max())]
        figure.add_scatter(
            name=name,
            x=measured.tolist(),
            y=predicted.tolist(),
            mode="markers",
            marker={"color": colour, "size": 5, "opacity": 0.5},
            hovertemplate="measured %{x:.3g} ms, predicted %{y:.3g} ms<extra></extra>",
        )
    line = {"color": INK, "width": 1.2, "dash": "dot"}
    figure.add_scatter(name="equal", x=ends, y=ends, mode="lines", line=line, hoverinfo="skip")
    margin = (np.log10(ends[1]) - np.log10(ends[0])) * 0.03
    axis = {
        "type": "log",
        "range": [float(np.log10(ends[0]) - margin), float(np.log10(ends[1]) + margin)],
        "dtick": 1,
        "gridcolor": GRID,
        "showline": True,
        "linecolor": GREY,
    }
    figure.update_xaxes(title_text="measured kernel, ms", **axis)
    figure.update_yaxes(title_text="predicted kernel, ms", **axis)
    return figure


def tables_figure(document: Mapping[str, Any]) -> go.Figure:
    """Mean relative error against the number of tables, by method, with the repeat noise as a line."""
    figure = in_house_style(go.Figure(), height=440)
    for method, colour in _LINES.items():
        errors = document["by_tables"].get(method)
        if errors:
            figure.add_scatter(
                name=METHODS[method],
                x=list(errors),
                y=[100 * value for value in errors.values()],
                mode="lines+markers",
                line={"color": colour, "width": 3 if method == KERNEL else 1.8},
                hovertemplate="%{x} tables: %{y:.2f}%<extra>" + METHODS[method] + "</extra>",
            )
    repeated = document["noise"]["repeated"]
    if repeated:
        figure.add_hline(y=100 * repeated, line={"color": INK, "width": 1.2, "dash": "dot"})
        figure.add_annotation(
            x=1,
            xref="paper",
            xanchor="right",
            y=np.log10(100 * repeated),
            yanchor="bottom",
            showarrow=False,
            text=f"noise of repeated sets {100 * repeated:.1f}%",
        )
    figure.update_xaxes(title_text="tables in the set", type="category", showline=True, linecolor=GREY)
    ticks = [0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500]
    figure.update_yaxes(
        title_text="mean relative error, %", type="log", tickvals=ticks, ticktext=[f"{t:g}" for t in ticks]
    )
    figure.update_layout(margin={"t": 76, "r": 24})
    return figure


def ablation_figure(document: Mapping[str, Any]) -> go.Figure:
    """Mean relative error without each group of features, with deviations over seeds."""
    errors = document["ablation"]
    names = sorted(errors, key=lambda name: errors[name]["mean"])
    figure = in_house_style(go.Figure(), height=60 + 36 * len(names))
    means = [100 * errors[name]["mean"] for name in names]
    figure.add_bar(
        x=means,
        y=[f"without {name}" if name != FULL else "full model" for name in names],
        orientation="h",
        marker_color=[ORANGE if name == FULL else BLUE for name in names],
        error_x={"array": [100 * errors[name]["deviation"] for name in names], "color": INK, "thickness": 1.2},
        text=[f" {value:.2f}%" for value in means],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{y}: %{x:.2f}%<extra></extra>",
        showlegend=False,
    )
    figure.update_xaxes(title_text="mean relative error on held-out sets, %", gridcolor=GRID, rangemode="tozero")
    figure.update_layout(margin={"r": 72})
    return figure


def groups_figure(document: Mapping[str, Any]) -> go.Figure:
    """Mean relative error by how sets were chosen, and by the kinds of kernels that they hold."""
    figure = in_house_style(go.Figure(), height=90 + 30 * (len(document["by_source"]) + len(document["by_kind"])))
    for name, groups, colour in (
        ("sets that hold", document["by_kind"], SKY),
        ("sets chosen by", document["by_source"], BLUE),
    ):
        labels = sorted(groups, key=lambda label: groups[label]["relative_error"])
        figure.add_bar(
            name=name,
            x=[100 * groups[label]["relative_error"] for label in labels],
            y=[f"{label} ({groups[label]['num_samples']:,})" for label in labels],
            orientation="h",
            marker_color=colour,
            text=[f" {100 * groups[label]['relative_error']:.1f}%" for label in labels],
            textposition="outside",
            cliponaxis=False,
            hovertemplate="%{y}: %{x:.2f}%<extra></extra>",
        )
    figure.update_xaxes(title_text="mean relative error of the kernel model, %", gridcolor=GRID)
    figure.update_layout(margin={"r": 72, "t": 40}, legend={"traceorder": "reversed"})
    return figure


def coverage_figure(document: Mapping[str, Any]) -> go.Figure:
    """Share of measurements within intervals against what the intervals promise."""
    figure = in_house_style(go.Figure(), height=420)
    line = {"color": INK, "width": 1.2, "dash": "dot"}
    figure.add_scatter(name="as promised", x=[45, 100], y=[45, 100], mode="lines", line=line, hoverinfo="skip")
    for (name, shares), colour in zip(document["interval_coverage"].items(), (BLUE, ORANGE, GREEN), strict=False):
        figure.add_scatter(
            name=name,
            x=[100 * float(level) for level in shares],
            y=[100 * share for share in shares.values()],
            mode="lines+markers",
            line={"color": colour, "width": 2},
            hovertemplate="%{x:.0f}% promised, %{y:.1f}% within<extra></extra>",
        )
    axis = {"ticksuffix": "%", "gridcolor": GRID, "showline": True, "linecolor": GREY}
    figure.update_xaxes(title_text="promised by the interval", **axis)
    figure.update_yaxes(title_text="measurements within", **axis)
    return figure
