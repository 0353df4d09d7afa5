"""The study `repeatability`: how far measurements of the same sets lie apart."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import numpy as np
import plotly.graph_objects as go
import typer
from plotly.subplots import make_subplots

from autoshard import console
from autoshard.commands.arguments import DeviceOption, positive_option
from autoshard.commands.options import command_options
from autoshard.core.choices import Device
from autoshard.report.figures import BLUE, GREY, ORANGE, in_house_style
from autoshard.report.images import FigureReport, Section
from autoshard.report.wording import write_ms, write_percent
from autoshard.table import Table
from bench.measuring.devices import find_device
from studies.frame import (
    FromOption,
    OutputOptions,
    StudyResult,
    command_line,
    read_document,
    to_document,
)
from studies.kernels.repeatability import Repeatability, Run, Verdict, measure_repeatability, settings_of, verdicts

SCHEMA = "autoshard.figures.repeatability/1"

_ROW_HEIGHT = 300
#: Deviations within the bound.
_BAND = {"fillcolor": BLUE, "opacity": 0.12, "line_width": 0, "layer": "below"}
_COLUMNS = (
    *("settings", "tables", "kernel ms", "measured", "raw CoV", "robust", "corrected CoV", "robust"),
    *("spread within", "bound", "verdict"),
)


def repeatability_result(found: Repeatability) -> StudyResult:
    """Numbers, page and image of repeated measurements."""
    rows = verdicts(found)
    figure = _figure(found, rows)
    page = FigureReport(
        title="How well samples repeat themselves",
        subtitle=f"The same sets for {found.seconds:,.0f} s on {found.machine.device_name}",
        facts=tuple(
            (
                f"{row.num_tables} tables, {row.settings} settings",
                write_percent(row.corrected.plain),
                f"raw {write_percent(row.raw.plain)}; bound {write_percent(found.bound)}, {_word(row)}",
            )
            for row in rows
            if row.num_tables == found.runs[0].sets[0].num_tables
        ),
        sections=(
            Section(
                title="Measurements over time",
                caption=_caption(found, rows),
                figure=figure,
                tables=(
                    Table(
                        columns=_COLUMNS,
                        rows=tuple(_cells(found, row) for row in rows),
                        caption="CoV: standard deviation over mean; robust: by the median absolute deviation.",
                    ),
                    _reference_table(found, rows),
                ),
            ),
        ),
        provenance=found.machine.described(),
    )
    summary = [{**asdict(row), "bound": found.bound} for row in rows]
    return StudyResult(
        name="repeatability",
        document=to_document(found, SCHEMA) | {"verdicts": summary},
        page=page,
        images={"": figure},
    )


def _cells(found: Repeatability, row: Verdict) -> tuple[str, ...]:
    return (
        row.settings,
        str(row.num_tables),
        write_ms(row.median_ms),
        str(row.num_measurements),
        *_both(row.raw.plain, row.raw.robust),
        *_both(row.corrected.plain, row.corrected.robust),
        write_percent(row.median_spread),
        write_percent(found.bound),
        _word(row),
    )


def _both(plain: float, robust: float) -> tuple[str, str]:
    return f"{plain:.2%}", f"{robust:.2%}"


def _word(row: Verdict) -> str:
    return "met" if row.is_met else "missed"


def _reference_table(found: Repeatability, rows: list[Verdict]) -> Table:
    by_name = {row.settings: row for row in rows}
    return Table(
        columns=(
            "settings",
            "rounds",
            "sets in a group",
            "reference ms",
            "CoV",
            "robust",
            "largest over smallest",
            "per minute",
        ),
        rows=tuple(
            (
                run.settings,
                str(run.num_rounds),
                str(run.group_sets),
                write_ms(float(np.median(run.sets[0].reference_ms))),
                *_both(by_name[run.settings].drift.variation.plain, by_name[run.settings].drift.variation.robust),
                write_percent(by_name[run.settings].drift.range, signed=True),
                f"{by_name[run.settings].drift.per_minute:+.2%}",
            )
            for run in found.runs
        ),
        caption="The reference kernel, measured in the same rounds: drift of the machine.",
    )


def _caption(found: Repeatability, rows: list[Verdict]) -> str:
    met = sum(row.is_met for row in rows)
    worst = max(rows, key=lambda row: row.corrected.plain)
    drifts = "; ".join(f"{name} {_drift_text(row)}" for name, row in {row.settings: row for row in rows}.items())
    return (
        f"Latency of one set of {found.runs[0].sets[0].num_tables} tables over time, relative to its median: as "
        "measured, and after each measurement is divided by the reference of its own rounds. The band is the bound of "
        f"{write_percent(found.bound)}. Below, the coefficients of variation of sets of several sizes: after "
        f"correction {met} of {len(rows)} keep the bound; the widest has {write_percent(worst.corrected.plain)} "
        f"({_tables(worst.num_tables)}, {worst.settings} settings). The reference meanwhile: {drifts}."
    )


def _drift_text(row: Verdict) -> str:
    drift = row.drift
    return (
        f"CoV {write_percent(drift.variation.plain)}, largest {write_percent(drift.range)} above smallest, "
        f"{drift.per_minute:+.2%} per minute"
    )


def _figure(found: Repeatability, rows: list[Verdict]) -> go.Figure:
    num_runs = len(found.runs)
    series = [
        f"<b>{run.settings} settings: {run.sets[0].num_tables} tables, {run.num_rounds} runs each time</b>"
        for run in found.runs
    ]
    figure = make_subplots(
        num_runs + 1,
        1,
        subplot_titles=[*series, "<b>coefficient of variation, by tables of the set</b>"],
        vertical_spacing=0.13 if num_runs > 1 else 0.2,
    )
    in_house_style(figure, height=_ROW_HEIGHT * (num_runs + 1) + 60)
    for row, run in enumerate(found.runs, start=1):
        _add_series(figure, row, run, found.bound)
        figure.update_yaxes(title_text="off the median", tickformat="+.0%", range=_range(found), row=row, col=1)
    _add_variations(figure, num_runs + 1, found, rows)
    figure.update_layout(margin={"t": 84, "r": 24}, legend={"y": 1.06}, barmode="group", bargap=0.35)
    return figure


def _add_series(figure: go.Figure, row: int, run: Run, bound: float) -> None:
    minutes = [elapsed / 60 for elapsed in run.elapsed_s]
    watched = run.sets[0]
    for name, latency_ms, colour, width in (
        ("reference", watched.reference_ms, GREY, 1.2),
        ("raw", watched.raw_ms, ORANGE, 1.5),
        ("corrected", watched.corrected_ms, BLUE, 2.2),
    ):
        figure.add_scatter(
            name=name,
            legendgroup=name,
            showlegend=row == 1,
            x=minutes,
            y=latency_ms / np.median(latency_ms) - 1,
            mode="lines",
            line={"color": colour, "width": width, "dash": "dot" if name == "reference" else "solid"},
            hovertemplate="%{x:.1f} min: %{y:+.1%}<extra>" + name + "</extra>",
            row=row,
            col=1,
        )
    # Only now: plotly leaves out marks of a chart that has no lines yet.
    figure.add_hrect(y0=-bound, y1=bound, row=row, col=1, **_BAND)
    figure.update_xaxes(title_text="minutes", rangemode="tozero", row=row, col=1)


def _add_variations(figure: go.Figure, row: int, found: Repeatability, rows: list[Verdict]) -> None:
    rows = sorted(rows, key=lambda verdict: (verdict.settings, verdict.num_tables))
    labels = [[verdict.settings for verdict in rows], [_tables(verdict.num_tables) for verdict in rows]]
    for name, values, colour in (
        ("raw", [verdict.raw.plain for verdict in rows], ORANGE),
        ("corrected", [verdict.corrected.plain for verdict in rows], BLUE),
    ):
        figure.add_bar(
            name=name,
            legendgroup=name,
            showlegend=False,
            x=labels,
            y=values,
            marker_color=colour,
            text=[f"{value:.1%}" for value in values],
            textposition="outside",
            cliponaxis=False,
            hovertemplate="%{x}: %{y:.2%}<extra>" + name + "</extra>",
            row=row,
            col=1,
        )
    band = {"name": f"bound {write_percent(found.bound)}", "showlegend": True, **_BAND}
    figure.add_hrect(y0=0, y1=found.bound, row=row, col=1, **band)
    figure.update_yaxes(title_text="CoV", tickformat=".0%", rangemode="tozero", row=row, col=1)


def _range(found: Repeatability) -> tuple[float, float]:
    """Ends of the axis of all series: they can be compared by eye, and the band of the bound is in sight."""
    lines = [line for run in found.runs for line in (run.sets[0].reference_ms, run.sets[0].raw_ms)]
    lines += [run.sets[0].corrected_ms for run in found.runs]
    off = np.concatenate([line / np.median(line) - 1 for line in lines])
    return 1.1 * min(float(off.min()), -found.bound), 1.1 * max(float(off.max()), found.bound)


def _tables(count: int) -> str:
    return f"{count} table{'' if count == 1 else 's'}"


@command_options()
class RepeatabilityOptions:
    """Options of the study `repeatability`."""

    seconds: Annotated[float, positive_option("How long to measure.")] = 600.0
    tables: Annotated[int, typer.Option(min=1, help="Tables of the set that is watched first.")] = 8
    device: DeviceOption = Device.AUTO
    scale: Annotated[
        int | None, typer.Option(help="Divide rows and batch.", show_default="64 on a CPU, 1 on a GPU")
    ] = None
    from_file: FromOption = None


def main(options: RepeatabilityOptions, output: OutputOptions) -> None:
    """Measures the same sets over and over, and reports how far the samples lie apart.

    Example:
        python -m studies repeatability --seconds 600 -o docs/figures
    """
    if options.from_file is not None:
        found = read_document(options.from_file, Repeatability, SCHEMA)
    else:
        target = find_device(options.device)
        with console.progress("Measuring, seconds", options.seconds) as advance:
            found = measure_repeatability(
                target,
                settings_of(target),
                num_tables=options.tables,
                seconds=options.seconds,
                scale=options.scale,
                command=command_line("repeatability", options),
                advance=advance,
            )
    output.write(repeatability_result(found))
