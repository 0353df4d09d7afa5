"""The models of Neo's Table 3: what the paper says of them, and what is chosen where it says nothing.

Shape suffixes: N tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np

from autoshard.core import AccessProfile, DenseLayers, EmbeddingTable, Feature, ImpliedOrder, TableSet
from autoshard.core.dense import dense_shapes
from autoshard.core.tables import DType
from studies.papers.drawn import FloatArray, normal_quantiles, scaled_to

#: Ranks of the paper's cluster.
FULL_RANKS: Final = 128
#: Standard deviations of the logarithms of tables' rows, lookups and dims, where these vary. Chosen, for all models.
ROWS_DEVIATION, POOLING_DEVIATION, DIMS_DEVIATION = 1.5, 0.75, 0.8
#: Dense features. Chosen, for all models.
NUM_DENSE_FEATURES = 1000
#: Numbers of rows that tables have; those of one size have one access curve.
_NUM_SIZES = 100
#: Dims are multiples of this.
_DIM_STEP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Massive:
    """A model's few tables that no rank can hold.

    Attributes:
        num_tables: How many. Chosen.
        num_embeddings: "~10B rows" (Sec. 8.5).
    """

    num_tables: int
    num_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperModel:
    """A column of Table 3.

    Attributes:
        name: Its letter.
        num_parameters: Of the tables.
        flops: Floating-point operations of a sample's forward pass. The paper has "MFLOPS per sample": it fits twice
            the products of layers of the published number and mean size, as those of a forward pass are.
        num_tables: Chosen; the paper has the order of magnitude.
        dims: Smallest, largest and mean embedding dim.
        mean_pooling: Lookups per sample and table in the mean.
        num_layers: Of all perceptrons.
        local_batch: Samples of a rank.
        paper_qps: Samples per second on 128 ranks.
        paper_scaling: Throughput per rank on 128 ranks over that on 8 (Sec. 8.3); None where it is not published.
        massive: Tables that no rank can hold.
    """

    name: str
    num_parameters: float
    flops: float
    num_tables: int
    dims: tuple[int, int, float]
    mean_pooling: float
    num_layers: int
    local_batch: int
    paper_qps: float
    paper_scaling: float | None = None
    massive: Massive | None = None

    def tables(self, num_ranks: int, dtype: DType, local_batch: int | None = None) -> TableSet:
        """Its tables and dense layers.

        Args:
            num_ranks: With fewer than 128, tables have as many rows fewer: "we reduce the embedding table cardinality"
                (Sec. 8.3).
            dtype: Of the tables.
            local_batch: Samples of a rank; those of Table 3 if left out.
        """
        tables = tuple(replace(table, dtype=dtype) for table in _drawn_tables(self, num_ranks))
        width = sum(table.embedding_dim for table in tables)
        return TableSet(
            batch_size=num_ranks * (local_batch or self.local_batch), tables=tables, dense=self.dense_layers(width)
        )

    def dense_layers(self, embedding_width: int) -> DenseLayers:
        """Perceptrons of one width, half of the layers before the interaction, with the published operations.

        Args:
            embedding_width: Columns of all embeddings, which the first layer of the top perceptron takes in.
        """
        num_bottom = self.num_layers // 2

        def layers(width: int) -> DenseLayers:
            return DenseLayers(
                num_dense_features=NUM_DENSE_FEATURES,
                bottom_mlp=(width,) * num_bottom,
                top_mlp=(*(width,) * (self.num_layers - num_bottom - 1), 1),
                interaction="concat",
            )

        def flops(width: int) -> float:
            return sum(shape.forward_flops for shape in dense_shapes(layers(width), (embedding_width,), 1))

        return layers(round(_root(flops, self.flops, 1.0, 20_000.0)))


def _root(rising: Callable[[int], float], value: float, low: float, high: float) -> float:
    while high - low > 0.5:
        middle = (low + high) / 2
        low, high = (middle, high) if rising(round(middle)) < value else (low, middle)
    return high


@lru_cache(maxsize=16)
def _drawn_tables(model: PaperModel, num_ranks: int) -> tuple[EmbeddingTable, ...]:
    """Evenly spaced quantiles of the distributions, paired at random; massive tables come first."""
    rng, count = np.random.default_rng(0), model.num_tables
    dims_N = rng.permutation(_dims(model))
    pooling_N = scaled_to(np.exp(POOLING_DEVIATION * normal_quantiles(count)), model.mean_pooling * count)
    pooling_N = rng.permutation(pooling_N)
    rows_N = _rows(model, rng, dims_N) * num_ranks / FULL_RANKS
    curve_of = {rows: AccessProfile.uniform(rows) for rows in sorted({round(rows) for rows in rows_N})}
    return tuple(
        EmbeddingTable(
            row_order=ImpliedOrder.BY_ID,
            name=f"t{index}",
            num_embeddings=round(rows),
            embedding_dim=int(dim),
            features=(Feature(name=f"f{index}", pooling_factor=float(pooling)),),
            access=curve_of[round(rows)],
        )
        for index, (rows, dim, pooling) in enumerate(zip(rows_N, dims_N, pooling_N, strict=True))
    )


def _dims(model: PaperModel) -> FloatArray:
    """Lognormal between the published ends, with the published mean; shape (N,)."""
    least, most, mean = model.dims
    deviates_N = np.exp(DIMS_DEVIATION * normal_quantiles(model.num_tables))

    def drawn(median: float) -> FloatArray:
        return np.clip(np.round(median * deviates_N / _DIM_STEP) * _DIM_STEP, least, most)

    return drawn(_root(lambda median: float(drawn(median).mean()), mean, 1.0, 1000.0))


def _rows(model: PaperModel, rng: np.random.Generator, dims_N: FloatArray) -> FloatArray:
    """Rows of each table, shape (N,); those of one size are alike."""
    massive, count = model.massive or Massive(num_tables=0, num_embeddings=1), model.num_tables
    sizes_N = rng.permutation(np.exp(ROWS_DEVIATION * np.resize(normal_quantiles(_NUM_SIZES), count)))
    is_massive_N = np.arange(count) < massive.num_tables
    rest = model.num_parameters - float(dims_N[is_massive_N].sum()) * massive.num_embeddings
    sizes_N[~is_massive_N] = scaled_to((sizes_N * dims_N)[~is_massive_N], rest) / dims_N[~is_massive_N]
    sizes_N[is_massive_N] = massive.num_embeddings
    return np.asarray(sizes_N)


MODEL_A: Final = PaperModel(
    name="A",
    num_parameters=793e9,
    flops=638e6,
    num_tables=1000,
    dims=(4, 384, 93.0),
    mean_pooling=15.0,
    num_layers=20,
    local_batch=512,
    paper_qps=1.2e6,
    paper_scaling=0.50,
)
MODEL_F: Final = PaperModel(
    name="F",
    num_parameters=12e12,
    flops=5e6,
    num_tables=44,
    dims=(256, 256, 256.0),
    mean_pooling=20.0,
    num_layers=7,
    local_batch=512,
    paper_qps=1.7e6,
    massive=Massive(num_tables=4, num_embeddings=10_000_000_000),
)
MODEL_I: Final = PaperModel(
    name="I",
    num_parameters=332e9,
    flops=60e6,
    num_tables=120,
    dims=(92, 92, 92.0),
    mean_pooling=70.0,
    num_layers=43,
    local_batch=2048,
    paper_qps=3.4e6,
    paper_scaling=0.75,
)
