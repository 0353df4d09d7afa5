"""What a shard adds to the sums of a rank that holds it, by name and unit.

Rows are plain numbers, so that they add up and are taken away exactly; `Columns.of` reads them by name.

Shape suffixes: C columns of what is moved, E streams, X `EXCHANGE_PARTS`, K fused kernels, W readers.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.core.step import EXCHANGE_PARTS
from autoshard.evaluation.rank_work import SCATTERED
from autoshard.evaluation.traffic import Stream

MovedArray = NDArray[np.float64]


class Readers(IntEnum):
    """Which ranks read what a rank holds, in the order of axis W."""

    ALL = 0
    NODE = 1
    ITSELF = 2


class Columns:
    """The columns of a task.

    Args:
        num_kernels: Kinds of fused kernels that its shards may run in.

    Attributes:
        dtype: By name: `pair_bytes` (W, E), between a rank that holds a shard and each rank that reads it;
            `scattered_bytes` (2,), of a rank's own samples in the reduce-scatter and in the all-gather, alike on all
            ranks; `synced_bytes` (2,), of gradients that are all-reduced and all-gathered; `reading_ns` (W, X), that
            readers work on what a rank serves; `num_features`, that are served; `input_bytes`, a rank's inputs of a
            batch at its 99th percentile with the gradients of copied rows; `output_bytes`, its outputs then;
            `returned_bytes` (W,), embeddings that readers get back; `row_order_bytes`, of row orders on every rank;
            `num_shards` (K + 2,), by fused kernel, and that need each of `needed_once`: counted, not added up.
    """

    def __init__(self, num_kernels: int) -> None:
        number = np.float64
        self.dtype = np.dtype(
            [
                ("pair_bytes", number, (len(Readers), len(Stream))),
                ("scattered_bytes", number, (len(SCATTERED),)),
                ("synced_bytes", number, (2,)),
                ("reading_ns", number, (len(Readers), len(EXCHANGE_PARTS))),
                ("num_features", number),
                ("input_bytes", number),
                ("output_bytes", number),
                ("returned_bytes", number, (len(Readers),)),
                ("row_order_bytes", number),
                ("num_shards", number, (num_kernels + 2,)),
            ]
        )

    def __len__(self) -> int:
        """C."""
        return self.dtype.itemsize // np.dtype(np.float64).itemsize

    def of(self, moved_C: MovedArray) -> NDArray[Any]:
        """Rows by name: a view, of the shape of `moved_C` without C."""
        return moved_C.view(self.dtype)[..., 0]

    def are(self, *names: str) -> NDArray[np.bool_]:
        """Which columns have one of these names, shape (C,)."""
        marks_C = np.zeros(len(self))
        for name in names:
            self.of(marks_C)[name] = 1.0
        return marks_C > 0
