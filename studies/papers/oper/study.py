"""The study `oper`, and OPER's Fig. 8 and 10: `python -m studies oper`.

Shape suffixes: R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from autoshard.report.figures import BLUE, GREY, INK, ORANGE, in_house_style
from studies.frame import OutputOptions, StudyResult
from studies.papers.oper.document import OperResults, results_document, results_tables
from studies.papers.oper.reference import against_exact
from studies.papers.oper.results import (
    MODES,
    RATIO,
    SETTINGS,
    FloatArray,
    LinkCosts,
    MethodLoads,
    costs_by_link,
    exchange_by_memory,
    exchange_by_threshold,
    links,
    loads_by_method,
    search_times,
)
from studies.papers.oper.tasks import avazu, kaggle, terabyte

#: Height of the images in pixels.
HEIGHT = 480
FIG10_HEIGHT = 1080


def fig8_figure(costs: LinkCosts) -> go.Figure:
    """Cost of a row over each link, and of the exchange over each link with and without copies, as heat maps."""
    panels = (
        ("a row", costs.fetch_ms_RR),
        ("exchange without copies", costs.alone_ms_RR),
        ("exchange with 5% for copies", costs.copied_ms_RR),
    )
    titles = [f"<b>{title}</b>" for title, _ in panels]
    figure = make_subplots(1, len(panels), subplot_titles=titles, horizontal_spacing=0.06)
    in_house_style(figure, height=HEIGHT)
    highest = max(float(links(_over_least(matrix_RR)).max()) for _, matrix_RR in panels)
    for column, (_, matrix_RR) in enumerate(panels, start=1):
        shown_RR = _over_least(matrix_RR)
        ranks = [str(rank) for rank in range(len(shown_RR))]
        figure.add_heatmap(
            x=ranks,
            y=ranks,
            z=shown_RR,
            text=[["" if np.isnan(value) else f"{value:.2f}" for value in row] for row in shown_RR],
            texttemplate="%{text}",
            zmin=1.0,
            zmax=highest,
            colorscale=[[0.0, "#eaf3f9"], [1.0, BLUE]],
            showscale=False,
            row=1,
            col=column,
        )
        figure.update_xaxes(title_text="from rank", type="category", showgrid=False, row=1, col=column)
        figure.update_yaxes(
            title_text="to rank", type="category", autorange="reversed", showgrid=False, row=1, col=column
        )
    figure.update_layout(margin={"t": 40})
    return figure


def _over_least(matrix_RR: FloatArray) -> FloatArray:
    """The matrix over its least entry between two ranks; the diagonal is left empty."""
    shown_RR = matrix_RR / links(matrix_RR).min()
    np.fill_diagonal(shown_RR, np.nan)
    return shown_RR


def fig10_figure(loads: Mapping[str, Mapping[str, MethodLoads]]) -> go.Figure:
    """Mean, with the least and the most, of memory and lookups per rank and of exchange per link, by method."""
    panels = (
        ("memory, GiB", "memory_R", 1 / 1024),
        ("lookups, MiB", "lookups_R", 1.0),
        ("exchange, MiB", "links", 1.0),
    )
    titles = [f"<b>{data}: {title}</b>" for data in loads for title, _, _ in panels]
    figure = make_subplots(
        len(loads), len(panels), subplot_titles=titles, horizontal_spacing=0.07, vertical_spacing=0.14
    )
    in_house_style(figure, height=FIG10_HEIGHT)
    for row, methods in enumerate(loads.values(), start=1):
        for column, (_, attribute, unit) in enumerate(panels, start=1):
            values = [getattr(one, attribute) * unit for one in methods.values()]
            means = [float(value.mean()) for value in values]
            figure.add_bar(
                x=list(methods),
                y=means,
                marker_color=[ORANGE if name.startswith("OPER") else GREY for name in methods],
                error_y={
                    "type": "data",
                    "symmetric": False,
                    "array": [float(value.max()) - mean for value, mean in zip(values, means, strict=True)],
                    "arrayminus": [mean - float(value.min()) for value, mean in zip(values, means, strict=True)],
                    "color": INK,
                    "thickness": 1.5,
                    "width": 6,
                },
                row=row,
                col=column,
            )
            figure.update_xaxes(tickangle=45, row=row, col=column)
            figure.update_yaxes(rangemode="tozero", row=row, col=column)
    figure.update_layout(showlegend=False, margin={"t": 40}, bargap=0.35)
    return figure


def main(output: OutputOptions) -> None:
    """Plans OPER's data sets, prints its Tables 2 and 3 beside ours, and draws its Fig. 8 and 10.

    CP-SAT takes three or four minutes of it; it needs `pip install 'autoshard[exact]'`.

    Example:
        python -m studies oper -o docs/figures
    """
    # First, while this process has little memory of its own.
    searches = search_times()
    data = {"Avazu": avazu(), "Criteo Kaggle": kaggle(), "Criteo Terabyte": terabyte()}
    references = [against_exact(name, tables, ratio) for name, tables in data.items() for ratio in (0.0, RATIO)]
    exact = {one.data: one.loads for one in references if one.ratio == RATIO}
    results = OperResults(
        by_memory={name: {mode: exchange_by_memory(tables, mode) for mode in MODES} for name, tables in data.items()},
        by_threshold=[exchange_by_threshold(mode, ratio) for mode, ratio in SETTINGS],
        references=references,
        searches=searches,
        by_link=costs_by_link(),
        by_method={name: {**loads_by_method(tables), "CP-SAT": exact[name]} for name, tables in data.items()},
    )
    output.write(
        StudyResult(
            name="oper",
            document=results_document(results),
            tables=results_tables(results),
            images={"-fig8": fig8_figure(results.by_link), "-fig10": fig10_figure(results.by_method)},
        )
    )
