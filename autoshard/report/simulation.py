"""Sweeps of the simulator: a table for the terminal, curves for a page and an image."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType

from autoshard.core.quoting import write_bytes
from autoshard.report.images import FigureReport, Section
from autoshard.report.wording import write_interval, write_ms, write_percent
from autoshard.results.sweep import (
    PointMemory,
    PointStatus,
    PricedPoint,
    SimulatedPoint,
    StepSpread,
    UnpricedPoint,
    scaling_factors,
)
from autoshard.table import Table

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from autoshard.results.sweep_record import SweepRecord

#: Parts of a step in the order in which they stand, with their words.
_PARTS = (
    ("input", "input"),
    ("forward_kernel", "forward kernel"),
    ("forward_exchange", "forward exchange"),
    ("dense_layers", "dense layers"),
    ("backward_exchange", "backward exchange"),
    ("backward_kernel", "backward kernel"),
    ("all_reduce", "all-reduce"),
    ("group_sync", "group sync"),
    ("overhead", "overhead"),
)
_CURVES_PX = 860


def simulation_table(points: Sequence[SimulatedPoint]) -> RenderableType:
    """A line for each point, a second table with the parts of the step, and why points have no figures."""
    blocks: list[RenderableType] = [_point_table(points)]
    parts = _part_table(points)
    if parts.rows:
        blocks += ["", "Parts of the step at their slowest ranks, in ms:", parts]
    reasons = _reasons(points)
    return Group(*blocks, *(["", *reasons] if reasons else []))


def _write_status(simulated: UnpricedPoint) -> str:
    """Status of a point without figures, with the numbers behind it."""
    if simulated.status is PointStatus.DOES_NOT_FIT:
        needed, available = write_bytes(simulated.needed_bytes), write_bytes(simulated.available_bytes)
        return f"does not fit: tables need {needed}, the ranks of a group have {available}: {simulated.reason}"
    return f"{simulated.status.value}: {simulated.reason}"


def simulation_report(record: SweepRecord, title: str) -> FigureReport:
    """The sweep as a page; its first figure is the image."""
    points = record.points
    priced = [one for one in points if isinstance(one, PricedPoint)]
    caption = (
        "Step time with the range from the median to the 99th percentile over sampled batches where they were drawn, "
        "samples per second, throughput per rank over that of the smallest cluster of a curve, and memory of the "
        "fullest rank."
    )
    sections = [
        Section(title="Curves", caption=caption, figure=curves_figure(priced), tables=point_tables(points)),
        Section(
            title="Parts of the step",
            caption="At their slowest ranks; what overlaps counts once in the step, so that bars may be higher.",
            figure=parts_figure(priced),
            tables=(replace(_part_table(points), caption="Milliseconds."),),
        ),
    ]
    models = sorted({f"{kind}: {name}" for one in priced for kind, name in one.models.items()})
    return FigureReport(
        title=title,
        subtitle=f"{len(points)} points, {len(priced)} of them priced",
        sections=tuple(sections),
        provenance=(
            *((name, str(value)) for name, value in record.settings.items()),
            ("models", ", ".join(models) or "none"),
        ),
    )


def curves_figure(points: Sequence[PricedPoint]) -> go.Figure:
    """Four curves over ranks, a colour for each series; over batches, if only these vary."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    from autoshard.report.figures import BLUE, GREEN, GREY, ORANGE, PINK, SKY, YELLOW, in_house_style

    by_batch = _varies_by_batch(points)
    titles = ("step, ms", "samples per second", "scaling factor", "memory of the fullest rank, GiB")
    figure = make_subplots(rows=2, cols=2, subplot_titles=titles, horizontal_spacing=0.08, vertical_spacing=0.14)
    factors = {id(one): factor for one, factor in zip(points, scaling_factors(points), strict=True)}
    colours = (BLUE, ORANGE, GREEN, PINK, SKY, YELLOW, GREY)
    series: dict[str, list[PricedPoint]] = {}
    for one in points:
        series.setdefault(_curve(one, by_batch), []).append(one)
    values: tuple[Callable[[PricedPoint], float], ...] = (
        lambda one: one.step_ms.value,
        lambda one: one.samples_per_s,
        lambda one: factors[id(one)] or 0.0,
        lambda one: one.memory.used_bytes / (1 << 30),
    )
    for number, (name, found) in enumerate(series.items()):
        mine = sorted(found, key=lambda one: _place(one, by_batch))
        colour = colours[number % len(colours)]
        for place, value in enumerate(values):
            curve = go.Scatter(
                x=[_place(one, by_batch) for one in mine],
                y=[value(one) for one in mine],
                name=html.escape(name),
                legendgroup=str(number),
                showlegend=place == 0,
                mode="lines+markers",
                line={"color": colour, "width": 2},
                marker={"size": 7},
                error_y=_bars(mine) if place == 0 else None,
            )
            figure.add_trace(curve, row=place // 2 + 1, col=place % 2 + 1)
    in_house_style(figure, height=_CURVES_PX)
    ticks = sorted({_place(one, by_batch) for one in points})
    figure.update_xaxes(type="log", tickvals=ticks, ticktext=[f"{tick:,}" for tick in ticks], tickangle=0)
    figure.update_xaxes(title_text="global batch" if by_batch else "ranks", row=2)
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(_throughput_axis(points), row=1, col=2)
    figure.update_layout(legend={"y": 1.06}, margin={"t": 90})
    return figure


def _varies_by_batch(points: Sequence[PricedPoint]) -> bool:
    """Whether all points have as many ranks, and not all the same batch."""
    return len({one.point.num_ranks for one in points}) == 1 < len({one.point.global_batch_size for one in points})


def _place(priced: PricedPoint, by_batch: bool) -> int:
    """Where a point stands on the axis."""
    return priced.point.global_batch_size if by_batch else priced.point.num_ranks


def _curve(priced: PricedPoint, by_batch: bool) -> str:
    """Name of the curve that a point is on."""
    point = priced.point
    return f"{point.groups_label}, {point.num_ranks:,} ranks" if by_batch else point.label


def _throughput_axis(points: Sequence[PricedPoint]) -> dict[str, object]:
    """Logarithmic from a decade on, which has three ticks; over a smaller range zero is on the axis."""
    found = [one.samples_per_s for one in points]
    is_log = bool(found) and max(found) >= 10 * min(found)
    return {"tickformat": "~s", **({"type": "log", "rangemode": "normal", "dtick": "D2"} if is_log else {})}


def parts_figure(points: Sequence[PricedPoint]) -> go.Figure:
    """Stacked bars of the parts of each point's step."""
    import plotly.graph_objects as go

    from autoshard.report.figures import BLUE, GREEN, GREY, GRID, INK, ORANGE, PINK, SKY, YELLOW, in_house_style

    colours = (GREY, BLUE, ORANGE, GREEN, YELLOW, SKY, PINK, INK, GRID)
    figure = go.Figure()
    names = [[html.escape(one.point.label) for one in points], [f"{one.point.num_ranks:,}" for one in points]]
    for (part, label), colour in zip(_PARTS, colours, strict=True):
        values = [one.parts_ms.get(part, 0.0) for one in points]
        if any(values):
            figure.add_bar(name=label, x=names, y=values, marker_color=colour)
    figure.update_layout(barmode="stack")
    figure.update_yaxes(title_text="ms")
    return in_house_style(figure)


def _bars(points: Sequence[PricedPoint]) -> dict[str, object] | None:
    spreads = [(one.spread, one.step_ms.value) for one in points if one.spread]
    if len(spreads) < len(points):
        return None
    above = [max(0.0, spread.p99_ms - step_ms) for spread, step_ms in spreads]
    below = [max(0.0, step_ms - spread.p50_ms) for spread, step_ms in spreads]
    return {"type": "data", "array": above, "arrayminus": below, "thickness": 1, "width": 3}


def _point_table(points: Sequence[SimulatedPoint]) -> Table:
    """A line for each point; those without figures have their status."""
    factors = {id(one): factor for one, factor in zip(points, scaling_factors(points), strict=True)}

    def priced(write: Callable[[PricedPoint], str]) -> Callable[[SimulatedPoint], str]:
        return lambda one: write(one) if isinstance(one, PricedPoint) else ""

    def spread(quantile: Callable[[StepSpread], float]) -> Callable[[SimulatedPoint], str]:
        return priced(lambda one: "" if one.spread is None else write_ms(quantile(one.spread)))

    def scaling(one: SimulatedPoint) -> str:
        factor = factors[id(one)]
        return "" if factor is None else write_percent(factor)

    return Table.of(
        points,
        [
            ("series", _series),
            ("ranks", _ranks),
            ("step ms", lambda one: write_ms(one.step_ms.value) if isinstance(one, PricedPoint) else one.status.value),
            ("interval", priced(lambda one: write_interval(one.step_ms))),
            ("p50", spread(lambda one: one.p50_ms)),
            ("p90", spread(lambda one: one.p90_ms)),
            ("p99", spread(lambda one: one.p99_ms)),
            ("samples/s", priced(lambda one: f"{one.samples_per_s:,.0f}")),
            ("scaling", scaling),
            ("imbalance", priced(lambda one: f"{one.imbalance:.2f}")),
            ("memory", priced(lambda one: write_bytes(one.memory.used_bytes))),
            ("of the limit", priced(lambda one: _write_share(one.memory))),
        ],
    )


def _write_share(memory: PointMemory) -> str:
    return write_percent(memory.used_bytes / memory.limit_bytes) if memory.limit_bytes else ""


def _part_table(points: Sequence[SimulatedPoint]) -> Table:
    """Parts of the step of the points that have a plan, in milliseconds."""

    def part(name: str) -> Callable[[PricedPoint], str]:
        return lambda one: write_ms(one.parts_ms.get(name, 0.0))

    priced = [one for one in points if isinstance(one, PricedPoint)]
    return Table.of(priced, [("series", _series), ("ranks", _ranks), *((label, part(name)) for name, label in _PARTS)])


def point_tables(points: Sequence[SimulatedPoint]) -> tuple[Table, ...]:
    """All points with their figures, and why some have none: for pages and notebooks."""
    reasons = [(reason,) for reason in _reasons(points)]
    left_out = Table(columns=("point",), rows=reasons, caption="Points without figures.")
    return (replace(_point_table(points), caption="All points."), *([left_out] if reasons else []))


def _reasons(points: Sequence[SimulatedPoint]) -> list[str]:
    return [
        f"{_series(one)}, {_ranks(one)} ranks: {_write_status(one)}" for one in points if isinstance(one, UnpricedPoint)
    ]


def _ranks(simulated: SimulatedPoint) -> str:
    return f"{simulated.point.num_ranks:,}"


def _series(simulated: SimulatedPoint) -> str:
    """The curve, and the groups of a plan whose planner chose them itself."""
    label = simulated.point.label
    if isinstance(simulated, UnpricedPoint) or simulated.planned_groups == simulated.point.num_groups:
        return label
    return f"{label}, {simulated.planned_groups} groups planned"
