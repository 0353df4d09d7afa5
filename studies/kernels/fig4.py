"""Kernel times of embedding tables, as in AutoShard's Fig. 4, measured anew: `python -m studies fig4`.

Shape suffixes: S sets of shards, P passes over all sets, C combinations of tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import typer

from autoshard import console
from autoshard.commands.arguments import DeviceOption, positive_option
from autoshard.commands.options import command_options
from autoshard.core import AccessProfile, LocalShard
from autoshard.core.choices import Device
from autoshard.core.errors import InvalidOptionError
from autoshard.formats import load_tables
from autoshard.formats.stores.drift import corrected_ms
from bench.kernels.harness import Harness, Measurement, Settings
from bench.measuring.arena import free_bytes
from bench.measuring.devices import BenchDevice, find_device
from bench.measuring.robust_stats import MsArray
from bench.sampling.stream import table_wise_pool
from studies.frame import FromOption, Machine, OutputOptions, command_line, read_document
from studies.kernels.fig4_report import FIG4_SCHEMA, CostGrid, Fig4, SumOfSingles, fig4_result

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
