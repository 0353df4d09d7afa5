"""Repeatability of measurements, the same sets over and over: `python -m studies repeatability`.

Shape suffixes: N measurements of a set, one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import numpy as np
import plotly.graph_objects as go
import typer
from numpy.typing import ArrayLike
from plotly.subplots import make_subplots
from pydantic import FiniteFloat, NonNegativeFloat, PositiveFloat, PositiveInt

from autoshard import console
from autoshard.commands.arguments import DeviceOption, positive_option
from autoshard.commands.options import command_options
from autoshard.core import LocalShard
from autoshard.core.choices import Device
from autoshard.core.errors import FormatError, InvalidOptionError
from autoshard.formats import load_tables
from autoshard.formats.stores.drift import divide_out_drift
from autoshard.report.figures import BLUE, GREY, ORANGE, in_house_style
from autoshard.report.images import FigureReport, Section
from autoshard.report.wording import write_ms, write_percent
from autoshard.table import Table
from bench.kernels.harness import Harness, Measurement, Settings
from bench.measuring.devices import BenchDevice, find_device
from bench.measuring.robust_stats import SIGMA_PER_DEVIATION, MsArray
from bench.sampling.stream import table_wise_pool
from studies.frame import FromOption, Machine, OutputOptions, StudyResult, command_line, read_document, to_document


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """How far repeated measurements of one thing lie apart, relative to where they lie."""

    plain: float
    """Standard deviation over mean."""
    robust: float
    """The same by median absolute deviation and median, which single hiccups leave alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """How a reference changed over time.

    Attributes:
        variation: Of its latencies.
        range: Largest latency over the smallest, less 1.
        per_minute: Slope of a line through the latencies, relative to their mean.
    """

    variation: Variation
    range: float
    per_minute: float


def variation(latency_ms_N: ArrayLike) -> Variation:
    """Coefficient of variation of two or more latencies."""
    latency_ms = np.asarray(latency_ms_N, dtype=np.float64)
    assert latency_ms.size > 1
    middle_ms = np.median(latency_ms)
    robust = SIGMA_PER_DEVIATION * np.median(np.abs(latency_ms - middle_ms)) / middle_ms
    return Variation(plain=float(latency_ms.std(ddof=1) / latency_ms.mean()), robust=float(robust))


def drift_of(reference_ms_N: ArrayLike, elapsed_s_N: Sequence[float]) -> Drift:
    """Drift of a reference that was measured at these times, at least twice."""
    reference_ms, minutes = np.asarray(reference_ms_N, dtype=np.float64), np.asarray(elapsed_s_N) / 60
    slope_ms = np.polyfit(minutes, reference_ms, 1)[0]
    return Drift(
        variation=variation(reference_ms),
        range=float(reference_ms.max() / reference_ms.min() - 1),
        per_minute=float(slope_ms / reference_ms.mean()),
    )


#: Largest coefficient of variation of a sample, after drift correction, that a machine should keep to.
BOUND_CPU = 0.03
BOUND_GPU = 0.01

#: Other sizes that are measured, so that one set alone does not decide.
_OTHER_SIZES = (1, 4, 15)
_LARGEST_SIZE = 15
_MIN_MEASUREMENTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One set, measured over and over.

    Attributes:
        num_tables: Tables of the set.
        forward_ms: One latency per measurement.
        backward_ms: As `forward_ms`.
        reference_forward_ms: The reference in the same rounds.
        reference_backward_ms: As `reference_forward_ms`.
        spread: Spread of the single runs within each measurement.

    Raises:
        FormatError: If these are not equally many.
    """

    num_tables: PositiveInt
    forward_ms: tuple[PositiveFloat, ...]
    backward_ms: tuple[PositiveFloat, ...]
    reference_forward_ms: tuple[PositiveFloat, ...]
    reference_backward_ms: tuple[PositiveFloat, ...]
    spread: tuple[NonNegativeFloat, ...]

    def __post_init__(self) -> None:
        for name in ("backward_ms", "reference_forward_ms", "reference_backward_ms", "spread"):
            if len(getattr(self, name)) != len(self.forward_ms):
                raise FormatError(f"must be {len(self.forward_ms)} numbers, as forward_ms", field=name)

    @property
    def raw_ms(self) -> MsArray:
        """Forward plus backward as measured; shape (N,)."""
        return np.add(self.forward_ms, self.backward_ms)

    @property
    def reference_ms(self) -> MsArray:
        """Forward plus backward of the reference; shape (N,)."""
        return np.add(self.reference_forward_ms, self.reference_backward_ms)

    @property
    def corrected_ms(self) -> MsArray:
        """The latencies with the drift of the machine divided out, of forward and backward apart; shape (N,)."""
        forward_ms = divide_out_drift(self.forward_ms, self.reference_forward_ms)
        return np.asarray(forward_ms + divide_out_drift(self.backward_ms, self.reference_backward_ms))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All repetitions with one kind of settings.

    Attributes:
        settings: Name of the settings: `collecting` or `usual`.
        num_rounds: Runs that are counted, per measurement.
        group_sets: Sets that shared the rounds of each measurement, besides the reference.
        elapsed_s: When each measurement ended.
        sets: The watched sets, that of the chosen size first.

    Raises:
        FormatError: If there are fewer than 3 measurements, no sets, or lists of different lengths.
    """

    settings: str
    num_rounds: PositiveInt
    group_sets: PositiveInt
    elapsed_s: tuple[FiniteFloat, ...]
    sets: tuple[Series, ...]

    def __post_init__(self) -> None:
        if len(self.elapsed_s) < _MIN_MEASUREMENTS:
            raise FormatError(f"must be {_MIN_MEASUREMENTS} or more, got {len(self.elapsed_s)}", field="elapsed_s")
        if not self.sets:
            raise FormatError("must hold at least one set", field="sets")
        if {len(watched.forward_ms) for watched in self.sets} != {len(self.elapsed_s)}:
            raise FormatError(f"must hold {len(self.elapsed_s)} measurements each, as elapsed_s", field="sets")


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeatability:
    """Repeated measurements of the same sets.

    Attributes:
        machine: Machine and software.
        seconds: Time used.
        bound: Largest coefficient of variation that the device should keep to.
        runs: One per kind of settings; their measurements took turns.
    """

    machine: Machine
    seconds: PositiveFloat
    bound: PositiveFloat
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Variation of the measurements of one set with one kind of settings.

    Attributes:
        settings: Name of the settings.
        num_tables: Tables of the set.
        num_measurements: How often it was measured.
        median_ms: Where its corrected latencies lie.
        raw: Variation of the latencies as measured.
        corrected: Variation after dividing out the drift.
        median_spread: Spread of the single runs within a measurement, in the middle.
        drift: Of the reference, meanwhile.
        is_met: Whether the plain corrected variation keeps the bound.
    """

    settings: str
    num_tables: int
    num_measurements: int
    median_ms: float
    raw: Variation
    corrected: Variation
    median_spread: float
    drift: Drift
    is_met: bool


def verdicts(found: Repeatability) -> list[Verdict]:
    """One verdict for each set with each kind of settings."""
    return [
        Verdict(
            settings=run.settings,
            num_tables=series.num_tables,
            num_measurements=len(run.elapsed_s),
            median_ms=float(np.median(series.corrected_ms)),
            raw=variation(series.raw_ms),
            corrected=(corrected := variation(series.corrected_ms)),
            median_spread=float(np.median(series.spread)),
            drift=drift_of(series.reference_ms, run.elapsed_s),
            is_met=corrected.plain <= found.bound,
        )
        for run in found.runs
        for series in run.sets
    ]


def settings_of(device: BenchDevice) -> dict[str, Settings]:
    """The settings that samples are measured with, by name; on a GPU both kinds are the same."""
    collecting, usual = Settings.for_collecting(device), Settings.for_device(device)
    return {"collecting": collecting} if collecting == usual else {"collecting": collecting, "usual": usual}


def measure_repeatability(
    device: BenchDevice,
    settings: Mapping[str, Settings],
    *,
    num_tables: int = 8,
    seconds: float = 600.0,
    scale: int | None = None,
    command: str = "",
    advance: Callable[[float], None] = lambda _: None,
) -> Repeatability:
    """Measures fixed sets of MetaSyn tables over and over, as `autoshard collect` measures them.

    Each measurement shares its rounds with as many other sets, new ones every time, as a group of the collector has.
    The kinds of settings take turns, so that slow phases of the machine affect them alike.

    Args:
        device: Where to measure.
        settings: Kinds of settings, by name.
        num_tables: Tables of the set that is watched first; sets of 1, 4 and 15 are watched beside it.
        seconds: Time to use; at least 3 measurements are made with each kind, however long they take.
        scale: Divisor of MetaSyn's rows and batch; by default 64 on a CPU and 1 on a GPU.
        command: Command of the measurement, for the record.
        advance: Receives the seconds of each measurement.

    Raises:
        InvalidOptionError: If an argument is out of its range.
        DeviceError: If a set does not fit in memory.
    """
    pool = table_wise_pool(load_tables("metasyn").scaled((1 if device.is_cuda else 64) if scale is None else scale))
    if not 1 <= num_tables <= len(pool):
        raise InvalidOptionError(f"must be in [1, {len(pool)}], got {num_tables}", field="tables")
    if not seconds > 0:
        raise InvalidOptionError(f"must be above 0, got {seconds}", field="seconds")
    rng = np.random.default_rng(0)
    sizes = [num_tables, *(size for size in _OTHER_SIZES if size != num_tables)]
    watched = [_drawn(pool, size, rng) for size in sizes]
    harnesses = {name: Harness(device, kind) for name, kind in settings.items()}
    groups: dict[str, list[list[Measurement]]] = {name: [] for name in settings}
    times: dict[str, list[float]] = {name: [] for name in settings}
    started = last = time.monotonic()
    for name in _turns(list(settings), lambda: time.monotonic() - started >= seconds):
        num_others = max(0, settings[name].max_group_sets - len(watched))
        others = [_drawn(pool, int(rng.integers(1, _LARGEST_SIZE + 1)), rng) for _ in range(num_others)]
        groups[name].append(harnesses[name].measure([*watched, *others])[: len(watched)])
        now = time.monotonic()
        times[name].append(round(now - started, 3))
        advance(now - last)
        last = now
    return Repeatability(
        machine=Machine.this(device, command),
        seconds=last - started,
        bound=BOUND_GPU if device.is_cuda else BOUND_CPU,
        runs=tuple(_run(name, kind, sizes, groups[name], times[name]) for name, kind in settings.items()),
    )


def _drawn(pool: Sequence[LocalShard], size: int, rng: np.random.Generator) -> tuple[LocalShard, ...]:
    return tuple(pool[index] for index in rng.choice(len(pool), min(size, len(pool)), replace=False))


def _turns(names: Sequence[str], is_over: Callable[[], bool]) -> Iterator[str]:
    """The names in turn, until time is up and each has had enough turns."""
    turn = 0
    while turn < _MIN_MEASUREMENTS or not is_over():
        yield from names
        turn += 1


def _run(
    name: str, settings: Settings, sizes: Sequence[int], groups: Sequence[Sequence[Measurement]], times: Sequence[float]
) -> Run:
    by_set = list(zip(*groups, strict=True))
    return Run(
        settings=name,
        num_rounds=settings.rounds.num_measured,
        group_sets=max(settings.max_group_sets, len(sizes)),
        elapsed_s=tuple(times),
        sets=tuple(
            Series(
                num_tables=size,
                forward_ms=tuple(result.forward_ms for result in results),
                backward_ms=tuple(result.backward_ms for result in results),
                reference_forward_ms=tuple(result.reference_forward_ms for result in results),
                reference_backward_ms=tuple(result.reference_backward_ms for result in results),
                spread=tuple(result.spread for result in results),
            )
            for size, results in zip(sizes, by_set, strict=True)
        ),
    )


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
