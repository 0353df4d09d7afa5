"""The study `oper`: OPER's results as tables beside the paper's and as JSON, and its Fig. 8 and 10.

Shape suffixes: R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from autoshard.report.figures import BLUE, GREY, INK, ORANGE, in_house_style
from autoshard.report.wording import write_percent
from autoshard.table import Table
from studies.frame import OutputOptions, StudyResult
from studies.papers.oper.results import (
    ALPHA,
    BATCH_PER_RANK,
    INFERENCE,
    LINK_GAP,
    MODES,
    RATIO,
    SETTINGS,
    TRAINING,
    FloatArray,
    LinkCosts,
    LinkTraffic,
    MethodLoads,
    RankTraffic,
    Reference,
    SearchTime,
    against_exact,
    avazu,
    costs_by_link,
    exchange_by_memory,
    exchange_by_threshold,
    kaggle,
    links,
    loads_by_method,
    search_times,
    terabyte,
)

SCHEMA = "autoshard.papers.oper/1"
#: Table 2: mean exchange per link in MB.
PAPER_MEANS = {
    "Avazu": (2.50, 0.16, 0.15, 0.13, 0.12, 0.10, 0.10),
    "Criteo Kaggle": (3.25, 0.46, 0.30, 0.24, 0.20, 0.19, 0.18),
    "Criteo Terabyte": (13.00, 0.95, 0.84, 0.73, 0.66, 0.57, 0.52),
}
#: Table 2: variance over links.
PAPER_VARIANCES = {
    "Avazu": (1.4e-1, 2.0e-5, 6.4e-5, 6.1e-5, 1.0e-4, 1.3e-4, 7.3e-5),
    "Criteo Kaggle": (2.0e-7, 6.9e-2, 8.9e-4, 1.3e-3, 4.6e-5, 2.8e-5, 1.3e-5),
    "Criteo Terabyte": (8.4e-4, 4.2e-3, 1.5e-3, 1.6e-3, 1.2e-3, 2.7e-3, 5.6e-3),
}
#: Table 3: seconds, most, least, in a unit that the paper does not name.
PAPER_LINES = (
    (15.8, 48.6, 34.8),
    (28.4, 42.3, 33.9),
    (41.5, 38.4, 33.9),
    (120.3, 34.1, 33.8),
    (235.2, 34.2, 33.9),
)
#: Table 3's solver at 5%: most and least.
PAPER_SOLVER = (35.2, 32.9)
#: Table 3's line at the paper's own threshold: its mean is the unit in which all lines are compared.
_UNIT_LINE = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperResults:
    """All that is computed.

    Attributes:
        by_memory: Table 2 by name of the data and mode.
        by_threshold: Table 3, lines of each mode and share of extra memory.
        references: Against CP-SAT.
        searches: Times.
        by_link: Fig. 8.
        by_method: Fig. 10 by name of the data and of the method.
    """

    by_memory: Mapping[str, Mapping[str, Sequence[LinkTraffic]]]
    by_threshold: Sequence[Sequence[RankTraffic]]
    references: Sequence[Reference]
    searches: Sequence[SearchTime]
    by_link: LinkCosts
    by_method: Mapping[str, Mapping[str, MethodLoads]]


def results_tables(results: OperResults) -> tuple[Table, ...]:
    """Tables with the paper's numbers and ours."""
    return (
        *(_memory_table(name, by_mode) for name, by_mode in results.by_memory.items()),
        _even_table(results.by_threshold),
        *(_threshold_table(lines) for lines in results.by_threshold),
        _reference_table(results.references),
        _search_table(results.searches),
        _link_table(results.by_link),
        *(_method_table(name, methods) for name, methods in results.by_method.items()),
    )


def results_document(results: OperResults) -> dict[str, object]:
    """The numbers behind the tables and images."""
    return {
        "schema": SCHEMA,
        "alpha": ALPHA,
        "batch_per_rank": BATCH_PER_RANK,
        "link_gap": LINK_GAP,
        "table2_mib": {
            name: {mode: [asdict(one) for one in traffic] for mode, traffic in by_mode.items()}
            for name, by_mode in results.by_memory.items()
        },
        "table3_mib": [asdict(one) | {"balance": one.balance} for lines in results.by_threshold for one in lines],
        "cp_sat_mib": [
            {field.name: getattr(one, field.name) for field in fields(one) if field.name != "loads"}
            for one in results.references
        ],
        "searches": [asdict(one) for one in results.searches],
        "fig8_ms": {name: getattr(results.by_link, name).tolist() for name in LinkCosts.__dataclass_fields__},
        "fig10_mib": {
            data: {
                method: {name: getattr(loads, name).tolist() for name in MethodLoads.__dataclass_fields__}
                for method, loads in methods.items()
            }
            for data, methods in results.by_method.items()
        },
    }


def _memory_table(name: str, by_mode: Mapping[str, Sequence[LinkTraffic]]) -> Table:
    paper, variances = PAPER_MEANS[name], PAPER_VARIANCES[name]
    inference, training = by_mode[INFERENCE], by_mode[TRAINING]

    def of_first(first: float, mean: float, ratio: float) -> str:
        return f"1/{first / mean:.1f}" if ratio else ""

    lines = tuple(
        (
            f"{100 * ours.ratio:g}%",
            f"{mean:.2f}",
            f"{ours.mean:.2f}",
            f"{trained.mean:.2f}",
            of_first(paper[0], mean, ours.ratio),
            of_first(inference[0].mean, ours.mean, ours.ratio),
            of_first(training[0].mean, trained.mean, ours.ratio),
            f"{variance:.1e}",
            f"{ours.variance:.1e}",
            f"{trained.variance:.1e}",
            write_percent(trained.used),
        )
        for mean, variance, ours, trained in zip(paper, variances, inference, training, strict=True)
    )
    ways = ("paper", "inference", "training")
    return Table(
        columns=(
            "extra memory",
            *(f"mean, {way}" for way in ways),
            *(f"of the first, {way}" for way in ways),
            *(f"variance, {way}" for way in ways),
            "used, training",
        ),
        rows=lines,
        caption=f"Table 2, {name}: exchange per link and step, MB (ours: MiB), planned for inference and for training.",
    )


def _even_table(by_setting: Sequence[Sequence[RankTraffic]]) -> Table:
    """Most and least loaded rank over the mean of the two at threshold 0.1%, for the paper and each setting."""
    paper = [(most, least) for _, most, least in PAPER_LINES]
    ours = [[(one.most, one.least) for one in lines] for lines in by_setting]

    def shares(pairs: Sequence[tuple[float, float]], line: int) -> str:
        unit = sum(pairs[_UNIT_LINE]) / 2
        most, least = pairs[line]
        return f"{most / unit:.3f} / {least / unit:.3f}"

    return Table(
        columns=("most / least", "paper", *(_setting(lines) for lines in by_setting)),
        rows=tuple(
            (one.label, shares(paper, line), *(shares(pairs, line) for pairs in ours))
            for line, one in enumerate(by_setting[0])
        ),
        caption="Table 3, Criteo Kaggle: exchange of the most and the least loaded rank, over the mean of the two at "
        "threshold 0.1%.",
    )


def _threshold_table(traffic: Sequence[RankTraffic]) -> Table:
    lines = tuple(
        (
            one.label,
            f"{seconds:.1f}",
            f"{one.cpu_s:.2f}",
            write_percent(least / most),
            write_percent(one.balance),
            f"{one.most:.3f}",
            f"{one.least:.3f}",
            str(one.num_shards),
        )
        for (seconds, most, least), one in zip(PAPER_LINES, traffic, strict=True)
    )
    return Table(
        columns=("threshold", "s, paper", "ours", "balance, paper", "ours", "most, MiB", "least, MiB", "shards"),
        rows=lines,
        caption=f"Table 3, Criteo Kaggle, {_setting(traffic)}, groups as the threshold makes them.",
    )


def _setting(traffic: Sequence[RankTraffic]) -> str:
    one = traffic[0]
    return f"{one.mode}, {100 * one.ratio:g}% extra memory" if one.ratio else "no copies"


def _reference_table(references: Sequence[Reference]) -> Table:
    most, least = PAPER_SOLVER
    above, balance = PAPER_LINES[0][1] / most - 1, least / most
    return Table.of(
        references,
        (
            ("data", lambda one: one.data),
            ("extra memory", lambda one: f"{100 * one.ratio:g}%"),
            ("OPER, MiB", lambda one: f"{one.oper:.3f}"),
            ("CP-SAT, MiB", lambda one: f"{one.exact:.3f}"),
            ("bound, MiB", lambda one: f"{one.bound:.3f}"),
            ("OPER above", lambda one: write_percent(one.oper / one.exact - 1, signed=True)),
            ("CP-SAT's balance", lambda one: write_percent(one.least / one.exact)),
            ("its s", lambda one: f"{one.cpu_s:.0f}"),
        ),
        caption=(
            "Table 3's solver at threshold 5%, for inference: exchange of the most loaded rank. "
            f"The paper, on Criteo Kaggle: OPER {above:+.0%}, the solver's balance {balance:.1%}, 3.8 hours."
        ),
    )


def _search_table(searches: Sequence[SearchTime]) -> Table:
    return Table.of(
        searches,
        (
            ("search at threshold 0.1%", lambda one: one.label),
            ("million rows", lambda one: f"{one.num_rows / 1e6:,.1f}"),
            ("ranks", lambda one: str(one.num_ranks)),
            ("s of one core", lambda one: f"{one.cpu_s:.1f}"),
            ("peak GiB", lambda one: f"{one.peak_gib:.2f}"),
            ("exchange balance", lambda one: f"{one.exchange_balance:.4f}"),
            ("memory balance", lambda one: f"{one.memory_balance:.4f}"),
            ("shards", lambda one: str(one.num_shards)),
        ),
        caption="Search from access curves until groups balance to 0.99 (the paper: 120 s on Criteo Kaggle).",
    )


def _link_table(costs: LinkCosts) -> Table:
    def spread(values: list[float]) -> str:
        return f"{max(values) / min(values):.3f}"

    lines = []
    for label, matrix_RR in (
        ("a row", costs.fetch_ms_RR),
        ("exchange without copies", costs.alone_ms_RR),
        ("exchange with 5% for copies", costs.copied_ms_RR),
    ):
        each = links(matrix_RR)
        per_rank = (matrix_RR.sum(axis=1) - matrix_RR.diagonal()).tolist()
        lines.append((label, spread(each.tolist()), spread(per_rank), f"{float(each.sum()):.3g}"))
    return Table(
        columns=("Fig. 8, largest over least", "of the links", "of the ranks", "sum, ms"),
        rows=tuple(lines),
        caption="Criteo Kaggle on 2 nodes of 4 ranks. The paper: links 4.21, cost of the exchange about 1.01.",
    )


def _method_table(name: str, methods: Mapping[str, MethodLoads]) -> Table:
    lines = []
    for method, loads in methods.items():
        cells = [method]
        for values in (loads.memory_R / 1024, loads.lookups_R, loads.links):
            cells += [f"{float(value):.3g}" for value in (values.min(), values.mean(), values.max())]
        lines.append(tuple(cells))
    return Table(
        columns=(
            "Fig. 10",
            *("memory GiB, least", "mean", "most"),
            *("lookups MiB, least", "mean", "most"),
            *("link MiB, least", "mean", "most"),
        ),
        rows=tuple(lines),
        caption=f"{name} on 8 ranks: memory and lookups per rank, exchange per link.",
    )


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
