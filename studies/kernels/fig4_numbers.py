"""Numbers of AutoShard's Fig. 4."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pydantic import FiniteFloat, PositiveFloat, PositiveInt

from autoshard.core.errors import FormatError
from studies.frame import Machine


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
