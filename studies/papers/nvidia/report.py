"""Predicted beside published step times: numbers, table, figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import plotly.graph_objects as go
from scipy.stats import kendalltau

from autoshard.report.figures import BLUE, GREY, INK, ORANGE, in_house_style
from autoshard.report.images import FigureReport, Section
from autoshard.table import Table
from studies.frame import StudyResult
from studies.papers.nvidia.hardware import A100, HOROVOD_CYCLE_S
from studies.papers.nvidia.program import MACHINE, Prediction

SCHEMA = "autoshard.nvidia-steps/1"
_WIDTH, _HEIGHT = 1000, 560


def rank_correlation(predictions: Sequence[Prediction]) -> float:
    """Kendall's tau of predicted and published steps."""
    published = [one.published_ms for one in predictions]
    return float(kendalltau(published, [one.predicted_ms for one in predictions]).statistic)


def steps_result(predictions: Sequence[Prediction], listed: Sequence[Prediction]) -> StudyResult:
    """Numbers, page and image.

    Args:
        predictions: All points.
        listed: Those that the check is made on.
    """
    figure = steps_figure(predictions)
    tau, worst = rank_correlation(listed), max(listed, key=lambda one: abs(one.error))
    caption = (
        f"{MACHINE}, global batch 65,536, Adagrad. Kendall's tau {tau:.3f} and errors up to {abs(worst.error):.1%} "
        f"over the {len(listed)} points of {', '.join(dict.fromkeys(one.model for one in listed))}."
    )
    page = FigureReport(
        title="NVIDIA's synthetic models: steps as published and as predicted",
        subtitle="from published hardware figures and the kernels of the published program; nothing is fitted",
        sections=(Section(title="Steps", caption=caption, figure=figure, tables=(steps_table(predictions),)),),
        facts=(
            ("Kendall's tau", f"{tau:.3f}", f"{rank_correlation(predictions):.3f} over all points"),
            ("largest error", f"{worst.error:+.1%}", f"{worst.model} on {worst.num_ranks}, of {len(listed)} points"),
        ),
    )
    document = steps_document(predictions, listed)
    return StudyResult(name="nvidia-steps", document=document, page=page, images={"": figure}, width=_WIDTH)


def steps_document(predictions: Sequence[Prediction], listed: Sequence[Prediction]) -> dict[str, object]:
    """The numbers, as JSON."""
    return {
        "schema": SCHEMA,
        "machine": MACHINE,
        "gpu": asdict(A100),
        "horovod_cycle_s": HOROVOD_CYCLE_S,
        "kendall_tau": rank_correlation(listed),
        "kendall_tau_of_all": rank_correlation(predictions),
        "points": [
            {
                "model": one.model,
                "num_ranks": one.num_ranks,
                "published_ms": one.published_ms,
                "predicted_ms": one.predicted_ms,
                "error": one.error,
                "fused_ms": one.fused_ms,
                "parts_ms": asdict(one.times),
            }
            for one in predictions
        ],
    }


def steps_table(predictions: Sequence[Prediction]) -> Table:
    """A line for each point."""
    return Table.of(
        predictions,
        (
            ("point", lambda one: f"{one.model}, {one.num_ranks}"),
            ("published ms", lambda one: f"{one.published_ms:.2f}"),
            ("predicted ms", lambda one: f"{one.predicted_ms:.2f}"),
            ("error", lambda one: f"{one.error:+.1%}"),
            ("kernels", lambda one: f"{one.times.forward_kernel + one.times.backward_kernel:.2f}"),
            ("exchanges", lambda one: f"{one.times.forward_exchange + one.times.backward_exchange:.2f}"),
            ("dense", lambda one: f"{one.times.dense_layers + one.times.overhead:.2f}"),
            ("fused kernels ms", lambda one: f"{one.fused_ms:.2f}"),
        ),
        caption="Milliseconds per step by model and number of GPUs, and of the same placement with fused kernels",
    )


def steps_figure(predictions: Sequence[Prediction]) -> go.Figure:
    """Published and predicted steps side by side, with the tolerance."""
    names = [[one.model for one in predictions], [str(one.num_ranks) for one in predictions]]
    figure = go.Figure()
    published = [one.published_ms for one in predictions]
    tolerance = {"type": "percent", "value": 35, "color": INK, "thickness": 1.2, "width": 4}
    figure.add_bar(name="published, ±35%", x=names, y=published, marker_color=GREY, error_y=tolerance)
    figure.add_bar(name="predicted", x=names, y=[one.predicted_ms for one in predictions], marker_color=BLUE)
    figure.add_bar(name="with fused kernels", x=names, y=[one.fused_ms for one in predictions], marker_color=ORANGE)
    in_house_style(figure, height=_HEIGHT)
    figure.update_layout(barmode="group", bargap=0.2)
    figure.update_yaxes(title_text="ms per step", type="log", dtick="D2")
    figure.update_xaxes(title_text="GPUs")
    return figure
