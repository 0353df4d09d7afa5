"""Predicted against measured kernel times, of ranks and of samples."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from autoshard.core import CostBreakdown, Estimate, RankCost
from autoshard.core.step import StepPart
from autoshard.report.figures import BLUE, INK, in_house_style
from autoshard.results.comparison import MeasuredPlan


def predicted_interval(rank: RankCost, predicted: CostBreakdown) -> Estimate:
    """Kernel time of a rank with its 90% interval: that of the step's slowest rank, by parts."""
    parts = (
        (StepPart.FORWARD_KERNEL, rank.forward_kernel_ms),
        (StepPart.BACKWARD_KERNEL, rank.backward_kernel_ms),
    )
    low = high = 0.0
    for name, value_ms in parts:
        part = predicted.parts.get(name)
        scale = value_ms / part.value if part is not None and part.value > 0 else 0.0
        low += part.low * scale if part is not None and scale else value_ms
        high += part.high * scale if part is not None and scale else value_ms
    return Estimate(value=rank.kernel_ms, low=low, high=high)


def accuracy_figure(predicted: CostBreakdown, measured: MeasuredPlan) -> go.Figure:
    """A mark for each rank, with the 90% interval of its prediction; exact ones are on the line."""
    estimates = [predicted_interval(rank, predicted) for rank in predicted.ranks]
    values = list(measured.kernel_ms_per_rank)
    figure = _against(values, estimates, [f"rank {rank.rank}" for rank in predicted.ranks])
    figure.update_xaxes(rangemode="tozero")
    figure.update_yaxes(rangemode="tozero")
    return figure


def held_out_figure(measured_ms: Sequence[float], predicted_ms: Sequence[Estimate]) -> go.Figure:
    """A mark for each sample that was kept from training, with the 90% interval of its prediction, on log scales.

    Args:
        measured_ms: Kernel time of each sample, forward plus backward, above 0; at least one.
        predicted_ms: What the model says of each.
    """
    labels = [f"sample {number}" for number in range(len(measured_ms))]
    lowest_ms = min([*measured_ms, *(one.value for one in predicted_ms)])
    figure = _against(list(measured_ms), predicted_ms, labels, from_ms=lowest_ms)
    figure.update_traces(marker_size=6, marker_opacity=0.6, selector={"mode": "markers"})
    figure.update_layout(height=640)
    figure.update_xaxes(type="log", exponentformat="B")
    figure.update_yaxes(type="log", exponentformat="B")
    return figure


def _against(
    values: list[float], estimates: Sequence[Estimate], labels: Sequence[str], *, from_ms: float = 0.0
) -> go.Figure:
    """Marks with intervals, and the line of exact predictions from a time on."""
    figure = in_house_style(go.Figure())
    figure.add_scatter(
        name="predicted kernel, 90% interval",
        x=values,
        y=[one.value for one in estimates],
        error_y={
            "type": "data",
            "array": [one.high - one.value for one in estimates],
            "arrayminus": [one.value - one.low for one in estimates],
            "thickness": 1,
            "width": 3,
        },
        text=list(labels),
        mode="markers",
        marker={"color": BLUE, "size": 9},
        hovertemplate="%{text}: measured %{x:.3g} ms, predicted %{y:.3g} ms<extra></extra>",
    )
    ends = [from_ms, max(*values, *(one.value for one in estimates), 1e-9)]
    line = {"color": INK, "width": 1.5, "dash": "dot"}
    figure.add_scatter(name="as measured", x=ends, y=ends, mode="lines", line=line, hoverinfo="skip")
    figure.update_xaxes(title_text="measured, ms", gridcolor="#e3e7ec")
    figure.update_yaxes(title_text="predicted, ms")
    return figure
