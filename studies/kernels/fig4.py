"""Kernel times of embedding tables, as in AutoShard's Fig. 4, measured anew: `python -m studies fig4`.

Shape suffixes: S sets of shards, P passes over all sets, C combinations of tables.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import plotly.graph_objects as go
import typer
from plotly.subplots import make_subplots
from pydantic import FiniteFloat, PositiveFloat, PositiveInt

from autoshard import console
from autoshard.commands.arguments import DeviceOption, positive_option
from autoshard.commands.options import command_options
from autoshard.core import AccessProfile, LocalShard
from autoshard.core.choices import Device
from autoshard.core.errors import FormatError, InvalidOptionError
from autoshard.formats import load_tables
from autoshard.formats.stores.drift import corrected_ms
from autoshard.report.figures import BLUE, GREY, GRID, INK, ORANGE, in_house_style
from autoshard.report.images import FigureReport, Section
from autoshard.report.wording import write_ms, write_percent
from autoshard.table import Table
from bench.kernels.harness import Harness, Measurement, Settings
from bench.measuring.arena import free_bytes
from bench.measuring.devices import BenchDevice, find_device
from bench.measuring.robust_stats import MsArray
from bench.sampling.stream import table_wise_pool
from studies.frame import FromOption, Machine, OutputOptions, StudyResult, command_line, read_document, to_document


@dataclass(frozen=True, slots=True, kw_only=True)
class CostGrid:
    """Kernel latency over two properties of a table; None where the table did not fit in memory.

    Attributes:
        columns: The property along the horizontal axis.
        lines: The property along the vertical axis.
        forward_ms: For each of `lines`, one latency per column.
        backward_ms: As `forward_ms`, with the fused optimizer.

    Raises:
        FormatError: If the latencies are not as many as that.
    """

    columns: tuple[PositiveFloat, ...]
    lines: tuple[PositiveFloat, ...]
    forward_ms: tuple[tuple[PositiveFloat | None, ...], ...]
    backward_ms: tuple[tuple[PositiveFloat | None, ...], ...]

    def __post_init__(self) -> None:
        for name in ("forward_ms", "backward_ms"):
            shape = [len(line) for line in getattr(self, name)]
            if shape != [len(self.columns)] * len(self.lines):
                raise FormatError(f"must be {len(self.lines)} lists of {len(self.columns)} numbers", field=name)

    @property
    def kernel_ms(self) -> tuple[tuple[float | None, ...], ...]:
        """Forward plus backward."""
        pairs = (zip(*parts, strict=True) for parts in zip(self.forward_ms, self.backward_ms, strict=True))
        return tuple(
            tuple(None if forward is None or backward is None else forward + backward for forward, backward in line)
            for line in pairs
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SumOfSingles:
    """Sets of tables: their fused kernel, and the sum of the kernels of the single tables.

    Raises:
        FormatError: If there are no sets, or not as many numbers of both kinds.
    """

    single_sum_ms: tuple[PositiveFloat, ...]
    fused_ms: tuple[PositiveFloat, ...]

    def __post_init__(self) -> None:
        if not self.fused_ms or len(self.fused_ms) != len(self.single_sum_ms):
            raise FormatError(f"must be {len(self.single_sum_ms)} numbers, at least 1", field="fused_ms")

    @property
    def fitted_ratio(self) -> float:
        """Slope of the line through the origin that fits the fused kernels best, by least squares."""
        single_ms, fused_ms = np.array(self.single_sum_ms), np.array(self.fused_ms)
        return float(single_ms @ fused_ms / (single_ms @ single_ms))

    @property
    def mean_error(self) -> float:
        """Mean over sets of how far that line is off, relative to the fused kernel."""
        single_ms, fused_ms = np.array(self.single_sum_ms), np.array(self.fused_ms)
        return float(np.mean(np.abs(self.fitted_ratio * single_ms / fused_ms - 1)))

    @property
    def ratios(self) -> tuple[float, ...]:
        """Each fused kernel over its sum."""
        return tuple(fused / single for fused, single in zip(self.fused_ms, self.single_sum_ms, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fig4:
    """The numbers of AutoShard's Fig. 4.

    Attributes:
        machine: Machine and software.
        num_bags: Batch of every table.
        num_rounds: Runs of each set that were counted, per pass.
        num_passes: Times that every set was measured; latencies are medians over passes.
        median_spread: Standard deviation of single runs over their mean, in the middle of the sets.
        fixed_pooling_factor: Of the tables of `sizes`.
        fixed_num_embeddings: Of the tables of `lookups`.
        fixed_embedding_dim: Of the tables of `lookups`.
        tables_per_combination: Tables in each set of `combinations`.
        sizes: Panel (a): a column per number of rows, a line per embedding dim.
        lookups: Panel (b): a column per ratio of accessed rows, a line per pooling factor.
        combinations: Panel (c).
    """

    machine: Machine
    num_bags: PositiveInt
    num_rounds: PositiveInt
    num_passes: PositiveInt
    median_spread: FiniteFloat
    fixed_pooling_factor: PositiveInt
    fixed_num_embeddings: PositiveInt
    fixed_embedding_dim: PositiveInt
    tables_per_combination: PositiveInt
    sizes: CostGrid
    lookups: CostGrid
    combinations: SumOfSingles


FIG4_SCHEMA = "autoshard.figures.fig4/1"

_WIDTH, _HEIGHT = 1440, 500
_TITLES = ("(a) Rows and dimension, ms", "(b) Accessed rows and lookups, ms", "(c) Several tables in one kernel")
#: Light to dark, one hue: the numbers in the cells stay readable.
_COLOURS = ((0.0, "#eef5fa"), (0.5, "#7fb5d9"), (1.0, "#00507e"))


def fig4_result(fig4: Fig4) -> StudyResult:
    """Numbers, page and image of measured tables."""
    captions = (_sizes_caption(fig4), _lookups_caption(fig4), _combinations_caption(fig4))
    tables = (
        _grid_table(fig4.sizes, "embedding dim", "rows"),
        _grid_table(fig4.lookups, "pooling factor", "accessed rows"),
        _combinations_table(fig4),
    )
    page = FigureReport(
        title="What an embedding table costs",
        subtitle=f"AutoShard's Fig. 4 on {fig4.machine.device_name}, batch {fig4.num_bags:,}, fp32",
        sections=tuple(
            Section(title=title, caption=caption, figure=_panels(fig4, [index]), tables=(table,))
            for index, (title, caption, table) in enumerate(zip(_TITLES, captions, tables, strict=True))
        ),
        provenance=(
            *fig4.machine.described(),
            ("Runs of each set", f"{fig4.num_rounds} counted, {fig4.num_passes} times over"),
            ("Spread of single runs", f"{write_percent(fig4.median_spread)} in the middle of the sets"),
        ),
    )
    return StudyResult(
        name="fig4",
        document=to_document(fig4, FIG4_SCHEMA) | {"captions": list(captions)},
        page=page,
        images={"": _panels(fig4, [0, 1, 2])},
        width=_WIDTH,
    )


def _panels(fig4: Fig4, wanted: Sequence[int]) -> go.Figure:
    """The panels of these numbers side by side; titles only where there are several."""
    titles = [f"<b>{_TITLES[index]}</b>" for index in wanted] if len(wanted) > 1 else None
    figure = make_subplots(1, len(wanted), subplot_titles=titles, horizontal_spacing=0.075)
    in_house_style(figure, height=_HEIGHT if titles else 420)
    for column, index in enumerate(wanted, start=1):
        if index == 0:
            names = (f"rows of the table (pooling factor {fig4.fixed_pooling_factor}, all rows alike)", "embedding dim")
            _add_heat_map(figure, column, fig4.sizes, [_power(value) for value in fig4.sizes.columns], names)
        elif index == 1:
            rows = _power(fig4.fixed_num_embeddings)
            names = (f"accessed share of the rows ({rows} of dim {fig4.fixed_embedding_dim})", "pooling factor")
            _add_heat_map(figure, column, fig4.lookups, [_power(value) for value in fig4.lookups.columns], names)
        else:
            _add_scatter(figure, column, fig4)
    if titles:  # the legend belongs to the last panel, whose lower right corner is empty
        legend = {"orientation": "v", "x": 1.0, "xanchor": "right", "y": 0.03, "yanchor": "bottom"}
        figure.update_layout(margin={"t": 40, "r": 24}, legend=legend)
    else:
        figure.update_layout(margin={"t": 48 if wanted[0] == 2 else 12, "r": 24})  # room for the legend
    return figure


def _add_heat_map(
    figure: go.Figure, column: int, grid: CostGrid, labels: Sequence[str], names: tuple[str, str]
) -> None:
    kernel_ms = grid.kernel_ms
    figure.add_heatmap(
        z=[[None if value is None else math.log10(value) for value in line] for line in kernel_ms],
        x=list(labels),
        y=[f"{value:g}" for value in grid.lines],
        text=[[_cell(value) for value in line] for line in kernel_ms],
        texttemplate="%{text}",
        textfont={"size": 13},
        colorscale=_COLOURS,
        showscale=False,
        xgap=2,
        ygap=2,
        hovertemplate="%{x}, %{y}: %{text} ms<extra></extra>",
        row=1,
        col=column,
    )
    figure.update_xaxes(title_text=names[0], type="category", showgrid=False, row=1, col=column)
    figure.update_yaxes(title_text=names[1], type="category", showgrid=False, row=1, col=column)


def _add_scatter(figure: go.Figure, column: int, fig4: Fig4) -> None:
    data = fig4.combinations
    end_ms = 1.08 * max(*data.single_sum_ms, *data.fused_ms)
    ratio = data.fitted_ratio
    for name, slope, line in (
        ("equal", 1.0, {"color": INK, "width": 1.5, "dash": "dot"}),
        (f"fit: {ratio:.2f} × sum", ratio, {"color": ORANGE, "width": 2}),
    ):
        far_ms = end_ms / max(1.0, slope)
        figure.add_scatter(
            name=name,
            x=[0, far_ms],
            y=[0, slope * far_ms],
            mode="lines",
            line=line,
            hoverinfo="skip",
            row=1,
            col=column,
        )
    figure.add_scatter(
        name=f"{fig4.tables_per_combination} tables of MetaSyn",
        x=data.single_sum_ms,
        y=data.fused_ms,
        mode="markers",
        marker={"color": BLUE, "size": 8, "opacity": 0.75, "line": {"color": "white", "width": 1}},
        hovertemplate="sum %{x:.3g} ms, fused %{y:.3g} ms<extra></extra>",
        row=1,
        col=column,
    )
    axis = {"range": [0, end_ms], "row": 1, "col": column, "showline": True, "linecolor": GREY}
    figure.update_xaxes(title_text="sum of the single tables' kernels, ms", gridcolor=GRID, **axis)
    figure.update_yaxes(title_text="fused kernel, ms", **axis)


def _grid_table(grid: CostGrid, line_name: str, column_name: str) -> Table:
    headers = tuple(f"{value:,.10g}" for value in grid.columns)
    lines = (
        (f"{line_name} {label:g}", *(_cell(value) for value in values))
        for label, values in zip(grid.lines, grid.kernel_ms, strict=True)
    )
    return Table(
        columns=(f"by {column_name}", *headers),
        rows=tuple(lines),
        caption="Kernel milliseconds, forward and backward.",
    )


def _combinations_table(fig4: Fig4) -> Table:
    data = fig4.combinations
    lines = (
        (str(number), write_ms(single), write_ms(fused), f"{fused / single:.3f}")
        for number, (single, fused) in enumerate(zip(data.single_sum_ms, data.fused_ms, strict=True), start=1)
    )
    return Table(
        columns=("set", "sum of single tables, ms", "fused kernel, ms", "fused over sum"),
        rows=tuple(lines),
        caption=f"Sets of {fig4.tables_per_combination} tables; forward and backward.",
    )


def _sizes_caption(fig4: Fig4) -> str:
    grid = fig4.sizes
    by_dim = _growth([list(line) for line in zip(*grid.kernel_ms, strict=True)])
    by_rows = _growth([list(line) for line in grid.kernel_ms])
    missing = sum(value is None for line in grid.kernel_ms for value in line)
    text = (
        f"Kernel milliseconds, forward and backward, of one table. From dimension {grid.lines[0]:g} to "
        f"{grid.lines[-1]:g} the time grows {by_dim:.1f} times, from the smallest to the largest table "
        f"{by_rows:.1f} times (medians over the other axis)."
    )
    return text + (f" {missing} tables did not fit in memory." if missing else "")


def _lookups_caption(fig4: Fig4) -> str:
    grid = fig4.lookups
    by_lookups = _growth([list(line) for line in zip(*grid.kernel_ms, strict=True)])
    last = grid.kernel_ms[-1]
    ratio = last[-1] / last[0] if last[0] and last[-1] else math.nan
    return (
        f"Kernel milliseconds, forward and backward, of one table. From {grid.lines[0]:g} to {grid.lines[-1]:g} "
        f"lookups per bag the time grows {by_lookups:.1f} times (median over the ratios). At {grid.lines[-1]:g} "
        f"lookups, a table of which all rows are accessed takes {ratio:.1f} times as long as one of which "
        f"{grid.columns[0]:g} of the rows are."
    )


def _combinations_caption(fig4: Fig4) -> str:
    data = fig4.combinations
    low, high = min(data.ratios), max(data.ratios)
    return (
        f"{len(data.fused_ms)} sets of {fig4.tables_per_combination} random MetaSyn tables. The fused kernel takes "
        f"{data.fitted_ratio:.2f} times the sum of its tables' kernels, {low:.2f} to {high:.2f} times from set to set; "
        f"the sum, scaled by that ratio, is off by {write_percent(data.mean_error)} on average."
    )


def _growth(lines: Sequence[Sequence[float | None]]) -> float:
    """Last over first value of the lines, the median over those that have both."""
    ratios = [line[-1] / line[0] for line in lines if line[0] and line[-1]]
    if not ratios:  # the largest did not fit: as far as the values go
        return _growth([[value for value in line if value] for line in lines if any(line)])
    return float(np.median(ratios))


def _cell(value: float | None) -> str:
    return "–" if value is None else write_ms(value)


def _power(value: float) -> str:
    """A power of ten as plotly writes it, any other number in full."""
    exponent = math.log10(value)
    if not math.isclose(exponent, round(exponent), abs_tol=1e-9):
        return f"{value:,g}"
    return f"10<sup>{round(exponent)}</sup>".replace("-", "−")


#: Sets that share their rounds at most: all of them, where memory allows.
_MAX_GROUP_SETS = 4096
#: Share of the memory for a group's weights that one table may take.
_LARGEST_TABLE = 1 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TableGrid:
    """Tables that are measured.

    Source:
        AutoShard Sec. 3.1 and 3.2: pooling factor 32 and uniform ids in panel (a), 10^6 rows of dimension 32 in
        panel (b), 50 combinations of 10 MetaSyn tables in panel (c). Differs: weights are fp32, and a CPU gets a
        smaller batch; the marks of the axes are not published.
    """

    num_bags: int
    """Batch of every table."""
    num_embeddings: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
    embedding_dims: tuple[int, ...] = (16, 32, 64, 128, 256)
    pooling_factors: tuple[int, ...] = (1, 4, 16, 32, 64, 128)
    accessed_ratios: tuple[float, ...] = (0.0001, 0.001, 0.01, 0.1, 1.0)
    fixed_pooling_factor: int = 32
    fixed_num_embeddings: int = 1_000_000
    fixed_embedding_dim: int = 32
    num_combinations: int = 50
    tables_per_combination: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_bags", "num_combinations"):
            if getattr(self, name) < 1:
                raise InvalidOptionError(f"must be at least 1, got {getattr(self, name)}", field=name)

    @classmethod
    def for_device(cls, device: BenchDevice) -> TableGrid:
        """The usual grid of a device."""
        return cls(num_bags=65_536 if device.is_cuda else 1_024)

    def up_to(self, max_rows: int) -> TableGrid:
        """The same without tables of more rows."""
        rows = tuple(count for count in self.num_embeddings if count <= max_rows)
        return replace(self, num_embeddings=rows, fixed_num_embeddings=min(self.fixed_num_embeddings, max_rows))

    def uniform(self, num_embeddings: int, embedding_dim: int, pooling_factor: float, ratio: float) -> LocalShard:
        """A table of which a share of the rows is looked up, all alike."""
        return LocalShard(
            table="table",
            num_embeddings=num_embeddings,
            embedding_dim=embedding_dim,
            num_bags=self.num_bags,
            pooling_factor=float(pooling_factor),
            access=AccessProfile.uniform(num_embeddings, ratio),
        )

    def sizes(self) -> list[list[LocalShard]]:
        """The tables of panel (a): a line per dimension, a column per number of rows."""
        return [
            [self.uniform(rows, dim, self.fixed_pooling_factor, 1.0) for rows in self.num_embeddings]
            for dim in self.embedding_dims
        ]

    def lookups(self) -> list[list[LocalShard]]:
        """The tables of panel (b): a line per pooling factor, a column per ratio of accessed rows."""
        rows, dim = self.fixed_num_embeddings, self.fixed_embedding_dim
        return [
            [self.uniform(rows, dim, pooling_factor, ratio) for ratio in self.accessed_ratios]
            for pooling_factor in self.pooling_factors
        ]

    def combinations(self) -> list[tuple[LocalShard, ...]]:
        """The sets of panel (c): random tables of MetaSyn, with rows divided as its batch is."""
        tables = load_tables("metasyn")
        pool = table_wise_pool(
            replace(tables.scaled(max(1, tables.batch_size // self.num_bags)), batch_size=self.num_bags)
        )
        rng = np.random.default_rng(self.seed)
        chosen_C = (
            rng.choice(len(pool), self.tables_per_combination, replace=False) for _ in range(self.num_combinations)
        )
        return [tuple(pool[index] for index in chosen) for chosen in chosen_C]

    def cells(self) -> list[LocalShard]:
        """The tables of panels (a) and (b), each once."""
        return list(dict.fromkeys(shard for line in (*self.sizes(), *self.lookups()) for shard in line))


def measure_fig4(
    harness: Harness,
    grid: TableGrid,
    *,
    seconds: float | None = None,
    command: str = "",
    advance: Callable[[float], None] = lambda _: None,
) -> Fig4:
    """Measures the three panels of AutoShard's Fig. 4, all in the same interleaved rounds where memory allows.

    Args:
        harness: Measures.
        grid: Tables to measure; those that are too large for the device are left out.
        seconds: Measure again and again for this long, at least once, and take medians; None for once.
        command: Command of the measurement, for the record.
        advance: Receives the number of sets after each group, of `num_sets(grid)` a pass.

    Raises:
        DeviceError: If a combination of tables does not fit in memory.
    """
    largest_bytes = int(free_bytes(harness.device.device) * _LARGEST_TABLE)
    combinations = grid.combinations()
    singles = dict.fromkeys(shard for shards in combinations for shard in shards)
    tables = [*(shard for shard in grid.cells() if shard.weight_bytes <= largest_bytes), *singles]
    rows = {shard: index for index, shard in enumerate(tables)}
    sets = [*((shard,) for shard in tables), *combinations]
    measured, forward_ms_S, backward_ms_S = _measure_passes(harness, sets, seconds, advance)

    def grid_of(lines: Sequence[Sequence[LocalShard]], columns: Sequence[float], labels: Sequence[float]) -> CostGrid:
        forward = tuple(_cells(line, rows, forward_ms_S) for line in lines)
        backward = tuple(_cells(line, rows, backward_ms_S) for line in lines)
        return CostGrid(columns=tuple(columns), lines=tuple(labels), forward_ms=forward, backward_ms=backward)

    kernel_ms_S = forward_ms_S + backward_ms_S
    single_sum_ms = [sum(float(kernel_ms_S[rows[shard]]) for shard in shards) for shards in combinations]
    return Fig4(
        machine=Machine.this(harness.device, command),
        num_bags=grid.num_bags,
        num_rounds=harness.settings.rounds.num_measured,
        num_passes=len(measured) // len(sets),
        median_spread=float(np.median([result.spread for result in measured])),
        fixed_pooling_factor=grid.fixed_pooling_factor,
        fixed_num_embeddings=grid.fixed_num_embeddings,
        fixed_embedding_dim=grid.fixed_embedding_dim,
        tables_per_combination=grid.tables_per_combination,
        sizes=grid_of(grid.sizes(), grid.num_embeddings, grid.embedding_dims),
        lookups=grid_of(grid.lookups(), grid.accessed_ratios, grid.pooling_factors),
        combinations=SumOfSingles(
            single_sum_ms=tuple(single_sum_ms), fused_ms=tuple(kernel_ms_S[len(tables) :].tolist())
        ),
    )


def num_sets(grid: TableGrid) -> int:
    """Sets that one pass measures, on a device that holds all of them."""
    singles = {shard for shards in grid.combinations() for shard in shards}
    return len(grid.cells()) + len(singles) + grid.num_combinations


def _cells(line: Sequence[LocalShard], rows: dict[LocalShard, int], ms_S: MsArray) -> tuple[float | None, ...]:
    return tuple(float(ms_S[rows[shard]]) if shard in rows else None for shard in line)


def _measure_passes(
    harness: Harness, sets: Sequence[Sequence[LocalShard]], seconds: float | None, advance: Callable[[float], None]
) -> tuple[list[Measurement], MsArray, MsArray]:
    """All measurements, and the steady forward and backward latency of each set, the median over passes."""
    started, measured = time.monotonic(), harness.measure(sets, advance)
    while seconds is not None and time.monotonic() - started < seconds:
        measured += harness.measure(sets, advance)
    forward_ms_S, backward_ms_S = (np.median(ms.reshape(-1, len(sets)), axis=0) for ms in corrected_ms(measured))
    return measured, forward_ms_S, backward_ms_S


@command_options()
class Fig4Options:
    """Options of the study `fig4`."""

    device: DeviceOption = Device.AUTO
    seconds: Annotated[float | None, positive_option("Repeat for about this long and take medians.")] = None
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Batch of every table.", show_default="1,024 on a CPU, 65,536 on a GPU")
    ] = None
    max_rows: Annotated[int, typer.Option(min=1000, help="Leave out tables of panel (a) with more rows.")] = 10_000_000
    combinations: Annotated[int, typer.Option(min=1, help="Sets of tables in panel (c).")] = 50
    from_file: FromOption = None

    def grid(self, device: BenchDevice) -> TableGrid:
        """Tables to measure on a device."""
        grid = replace(TableGrid.for_device(device).up_to(self.max_rows), num_combinations=self.combinations)
        return grid if self.batch_size is None else replace(grid, num_bags=self.batch_size)


def main(options: Fig4Options, output: OutputOptions) -> None:
    """Measures what embedding tables cost on this machine and draws it as AutoShard's Fig. 4.

    Example:
        python -m studies fig4 -o docs/figures
    """
    if options.from_file is not None:
        fig4 = read_document(options.from_file, Fig4, FIG4_SCHEMA)
    else:
        target = find_device(options.device)
        grid = options.grid(target)
        harness = Harness(target, replace(Settings.for_device(target), max_group_sets=_MAX_GROUP_SETS))
        command = command_line("fig4", options)
        with console.progress("Measuring sets", num_sets(grid)) as advance:
            fig4 = measure_fig4(harness, grid, seconds=options.seconds, command=command, advance=advance)
    output.write(fig4_result(fig4))
