"""Numbers and tables drawn for models whose details are not published.

Shape suffixes: N numbers or tables.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from autoshard.core import AccessProfile, EmbeddingTable, Feature, ImpliedOrder

FloatArray = NDArray[np.float64]


def normal_quantiles(count: int) -> FloatArray:
    """Evenly spaced quantiles of the standard normal distribution, rising; shape (N,)."""
    return np.array([NormalDist().inv_cdf((index + 0.5) / count) for index in range(count)])


def scaled_to(values_N: FloatArray, total: float) -> FloatArray:
    """The same proportions with another sum."""
    return values_N * (total / float(values_N.sum()))


def drawn_tables(
    rows_N: FloatArray, dims_N: FloatArray, pooling_N: FloatArray, profile_of: Callable[[int], AccessProfile]
) -> tuple[EmbeddingTable, ...]:
    """Tables of one feature each, their rows in the order of accesses.

    Args:
        rows_N: Rows of each table, which are rounded.
        dims_N: Embedding dims.
        pooling_N: Lookups per sample in the mean.
        profile_of: Access profile by the number of rows, made once for each.
    """
    profiles = {rows: profile_of(rows) for rows in sorted({round(rows) for rows in rows_N})}
    return tuple(
        EmbeddingTable(
            row_order=ImpliedOrder.BY_ID,
            name=f"t{index}",
            num_embeddings=round(rows),
            embedding_dim=int(dim),
            features=(Feature(name=f"f{index}", pooling_factor=float(pooling)),),
            access=profiles[round(rows)],
        )
        for index, (rows, dim, pooling) in enumerate(zip(rows_N, dims_N, pooling_N, strict=True))
    )
