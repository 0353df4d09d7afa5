"""The study `flexshard`, and FlexShard's Fig. 1, 3, 5, 6 and 7: `python -m studies flexshard`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from autoshard.core import Tier
from autoshard.planners.flexshard.equations import FlexMachine, ParetoFrontier, ParetoPoint
from autoshard.report.figures import BLUE, GREEN, GREY, INK, ORANGE, SKY, YELLOW, in_house_style
from autoshard.report.wording import write_percent
from autoshard.table import Table
from studies.frame import OutputOptions, StudyResult
from studies.papers.flexshard.models import Run, TierShare
from studies.papers.flexshard.results import (
    FIG5_MODEL,
    THREE_TIER_GAIN,
    TWO_TIER_GAIN,
    HistoryCosts,
    ModelResult,
    ReplicaCosts,
    all_to_all_fit_ms,
    fig1_costs,
    fig3_costs,
    fig5_frontier,
    fitted_machine,
    model_results,
    rest_of_step_ms,
)

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


SCHEMA = "autoshard.papers.flexshard/1"


def results_tables(
    results: Sequence[ModelResult], frontier: ParetoFrontier, histories: HistoryCosts
) -> tuple[Table, ...]:
    """Tables with the paper's numbers and ours."""
    return (
        _three_tier_table(results),
        _two_tier_table(results),
        _all_to_all_table(results),
        _times_table(results),
        _speedup_table(results),
        _throughput_table(results[0]),
        _histories_table(histories),
        _points_table(frontier),
    )


def results_document(
    machine: FlexMachine,
    results: Sequence[ModelResult],
    frontier: ParetoFrontier,
    histories: HistoryCosts,
    replicas: ReplicaCosts,
) -> dict[str, object]:
    """The numbers behind the tables and images."""
    return {
        "schema": SCHEMA,
        "bandwidths_bytes_per_s": asdict(machine.bandwidths),
        "models": [_model_document(result) for result in results],
        "fig1": {
            "lookups_per_sample": histories.length_N.tolist(),
            "sequence_gb": histories.sequence_gb_N.tolist(),
            "sequence_ms": histories.sequence_ms_N.tolist(),
            "pooled_gb": {str(tables): value for tables, value in histories.pooled_gb.items()},
            "pooled_ms": {str(tables): value for tables, value in histories.pooled_ms.items()},
            "reduced_gb": {str(tables): value for tables, value in histories.reduced_gb.items()},
            "reduced_ms": {str(tables): value for tables, value in histories.reduced_ms.items()},
        },
        "throughput": {
            "model": results[0].model.name,
            "rest_of_step_ms": rest_of_step_ms(results[0].model),
            "gains": {label: list(gains) for label, gains in _gains(results[0]).items()},
        },
        "fig3": {
            "alpha": replicas.alpha_N.tolist(),
            "memory": replicas.memory_N.tolist(),
            "communication": replicas.communication_N.tolist(),
            "memory_neutral": replicas.memory_neutral,
            "communication_neutral": replicas.communication_neutral,
        },
        "fig5": {
            "points": {letter: asdict(point) for letter, point in named_points(frontier).items()},
            "curve": [[point.num_rows, point.memory_bytes, point.communication_s] for point in frontier.curve],
        },
    }


def _model_document(result: ModelResult) -> dict[str, object]:
    def tiers(plans: tuple[dict[Tier, TierShare], dict[Tier, TierShare]]) -> list[dict[str, object]]:
        return [{tier.value: asdict(share) for tier, share in plan.items()} for plan in plans]

    model = result.model
    return {
        "name": model.name,
        "lengths": {
            "neutral": model.neutral_length,
            "measured": model.measured_length,
            "leaving": model.leaving_length,
        },
        "tiers": {name: tiers(getattr(result, name)) for name in ("neutral", "measured", "leaving")},
        "paper": asdict(model),
        "predicted": [asdict(run) for run in result.predicted],
    }


def _three_tier_table(results: Sequence[ModelResult]) -> Table:
    def off(result: ModelResult) -> float:
        return result.neutral[1][Tier.FLEX].num_rows / result.model.flexed.num_rows - 1

    return Table.of(
        results,
        (
            ("3-tier", lambda one: one.model.name),
            ("data-parallel, paper", lambda one: _rows(one.model.replicated)),
            ("ours", lambda one: _rows(one.neutral[1][Tier.DATA_PARALLEL])),
            ("Flex, paper", lambda one: _rows(one.model.flexed)),
            ("ours", lambda one: _rows(one.neutral[1][Tier.FLEX])),
            ("Flex rows off by", lambda one: write_percent(off(one), signed=True)),
        ),
        caption="Table 5, rows and coverage, with L from the paper's neutral 2-tier rows.",
    )


def _two_tier_table(results: Sequence[ModelResult]) -> Table:
    lines = []
    for result in results:
        paper = result.model.two_tier
        cells = [result.model.name, _rows(paper)]
        lengths = (result.model.measured_length, result.model.leaving_length)
        for length, (plan, _) in zip(lengths, (result.measured, result.leaving), strict=True):
            share = plan[Tier.DATA_PARALLEL]
            off = write_percent(share.num_rows / paper.num_rows - 1, signed=True)
            cells += [f"{length:.1f}", _rows(share), off]
        lines.append(tuple(cells))
    return Table(
        columns=("2-tier", "paper", "L, volume as it is", "rows", "off by", "L, volume that leaves", "rows", "off by"),
        rows=tuple(lines),
        caption="Table 5, 2-tier rows with L from Table 6's measured row-wise volumes.",
    )


def _all_to_all_table(results: Sequence[ModelResult]) -> Table:
    lines = []
    machine = fitted_machine()
    for result in results:
        fits = all_to_all_fit_ms(result.model, machine)
        for name, run, fit_ms in zip(("RW", "2-tier", "3-tier"), result.model.runs, fits, strict=True):
            off = write_percent(fit_ms / run.all_to_all_ms - 1, signed=True)
            lines.append((f"{result.model.name} {name}", f"{run.all_to_all_ms:.0f}", f"{fit_ms:.0f}", off))
    return Table(
        columns=("global all-to-all, ms", "paper", "ours", "off by"),
        rows=tuple(lines),
        caption="Table 6, measured volumes at the bandwidth of RM-1's row-wise run.",
    )


def _times_table(results: Sequence[ModelResult]) -> Table:
    def cells(paper: Run, ours: Run) -> list[str]:
        names = ("all_to_all_ms", "intra_ms", "all_reduce_ms", "cross_ms")
        pairs = ((getattr(paper, name), getattr(ours, name)) for name in names)
        return [f"{of_paper:.0f} / {of_ours:.1f}" if of_ours else "" for of_paper, of_ours in pairs]

    lines = []
    for result in results:
        runs = zip(("2-tier", "3-tier"), result.model.runs[1:], result.predicted[1:], strict=True)
        for name, paper, ours in runs:
            volumes = f"{paper.volume / 1e6:.0f} / {ours.volume / 1e6:.0f}"
            lines.append((f"{result.model.name} {name}", volumes, *cells(paper, ours)))
    return Table(
        columns=(
            "paper / ours",
            "volume, millions",
            "all-to-all, ms",
            "within nodes, ms",
            "all-reduce, ms",
            "across nodes, ms",
        ),
        rows=tuple(lines),
        caption="Table 6 predicted: our plans from the measured row-wise volume, at bandwidths of RM-1's runs.",
    )


def _speedup_table(results: Sequence[ModelResult]) -> Table:
    lines = []
    for result in results:
        ways = [(is_measured, is_hidden) for is_hidden in (True, False) for is_measured in (True, False)]
        speedups = [result.speedups(is_measured=measured, is_hidden=hidden) for measured, hidden in ways]
        for index, name in enumerate(("2-tier", "3-tier")):
            reductions = result.measured_reductions[index], result.predicted_reductions[index]
            cells = [write_percent(share) for share in reductions] + [f"{pair[index]:.2f}" for pair in speedups]
            lines.append((f"{result.model.name} {name}", *cells))
    return Table(
        columns=("", "saved, paper", "ours", "speed-up, paper", "ours", "nothing hidden, paper", "ours"),
        rows=tuple(lines),
        caption="Fig. 6 and 7: global all-to-all saved, and communication of row-wise steps over that of tiered ones.",
    )


def _gains(result: ModelResult) -> dict[str, tuple[float, float]]:
    """Gains in throughput by where the times of communication come from and whether Flex's are hidden."""
    rest_ms = rest_of_step_ms(result.model)
    return {
        f"{source} times, Flex {way}": result.gains(rest_ms, is_measured=is_measured, is_hidden=is_hidden)
        for source, is_measured in (("Table 6's", True), ("predicted", False))
        for way, is_hidden in (("hidden", True), ("not hidden", False))
    }


def _throughput_table(result: ModelResult) -> Table:
    lines = {"the paper": (TWO_TIER_GAIN, THREE_TIER_GAIN), **_gains(result)}
    return Table.of(
        lines.items(),
        (
            ("gain", lambda line: line[0]),
            ("2-tier", lambda line: f"{line[1][0]:+.0%}"),
            ("3-tier", lambda line: f"{line[1][1]:+.0%}"),
        ),
        caption=(
            f"Sec. 6.2, {result.model.name}: throughput over row-wise, with "
            f"{rest_of_step_ms(result.model):.0f} ms for the "
            "rest of a step, from the paper's 2-tier gain."
        ),
    )


def _histories_table(histories: HistoryCosts) -> Table:
    longest_gb, longest_ms = float(histories.sequence_gb_N[-1]), float(histories.sequence_ms_N[-1])
    lines = [(f"kept, {histories.length_N[-1]:,.0f} lookups", f"{longest_gb:.3g}", f"{longest_ms:.3g}", "", "")]
    for label, by_gb, by_ms in (
        ("reduce-scatter", histories.reduced_gb, histories.reduced_ms),
        ("all-to-all", histories.pooled_gb, histories.pooled_ms),
    ):
        lines += [
            (
                f"{tables} summed, {label}",
                f"{memory_gb:.3g}",
                f"{by_ms[tables]:.3g}",
                f"{longest_gb / memory_gb:.0f}",
                f"{longest_ms / by_ms[tables]:.0f}",
            )
            for tables, memory_gb in by_gb.items()
        ]
    return Table(
        columns=("histories", "memory, GB", "communication, ms", "memory, times less", "communication, times less"),
        rows=tuple(lines),
        caption="Fig. 1, 32 ranks, row-wise, dimension 256.",
    )


def _points_table(frontier: ParetoFrontier) -> Table:
    return Table.of(
        named_points(frontier).items(),
        (
            ("point", lambda named: named[0]),
            ("rows replicated", lambda named: f"{named[1].num_rows:,.0f}"),
            ("coverage", lambda named: write_percent(named[1].coverage)),
            ("memory, GB per rank", lambda named: f"{named[1].memory_bytes / 1e9:+.2f}"),
            ("communication, ms per step", lambda named: f"{named[1].communication_s * 1e3:+.1f}"),
        ),
        caption="Fig. 5, on RM-1: over row-wise sharding.",
    )


def _rows(share: TierShare) -> str:
    return f"{share.num_rows:,} ({write_percent(share.coverage)})"


def main(output: OutputOptions) -> None:
    """Plans FlexShard's four models, prints its Tables 5 and 6 beside them, and draws its Fig. 1, 3, 5, 6 and 7.

    Example:
        python -m studies flexshard -o docs/figures
    """
    machine = fitted_machine()
    results = model_results()
    frontier, histories, replicas = fig5_frontier(machine), fig1_costs(machine), fig3_costs(machine)
    output.write(
        StudyResult(
            name="flexshard",
            document=results_document(machine, results, frontier, histories, replicas),
            tables=results_tables(results, frontier, histories),
            images={
                "-fig1": fig1_figure(histories),
                "-fig3": fig3_figure(replicas),
                "-fig5": fig5_figure(frontier),
                "-fig6": fig6_figure(results),
                "-fig7": fig7_figure(results),
            },
        )
    )
