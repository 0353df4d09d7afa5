"""The synthetic models and their published times.

Configurations: NVIDIA-Merlin/distributed-embeddings, examples/benchmarks/synthetic_models/config_v3.py. Times: the
README beside it, in milliseconds per step on DGX-A100, global batch 65,536, Adagrad.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from autoshard.core import AccessProfile, EmbeddingTable, Feature, ImpliedOrder, Optimizer, TableSet
from autoshard.formats import load_tables

BATCH_SIZE: Final = 65536
ALPHA: Final = 1.05

#: Milliseconds by number of GPUs.
PUBLISHED_MS: Final[Mapping[str, Mapping[int, float]]] = {
    "tiny": {1: 24.433, 8: 5.537, 16: 4.867},
    "small": {1: 67.355, 8: 17.203, 16: 12.461, 32: 11.839},
    "medium": {8: 63.393, 16: 46.636, 32: 37.732, 128: 27.329},
    "large": {32: 67.57, 128: 37.934},
    "jumbo": {128: 124.3},
}

#: Slices of tables with more elements than this: the README's own command line for `large`. Tiny and small fit without.
COLUMN_SLICE_THRESHOLD: Final = 1280 * 1048576


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticModel:
    """One of the models.

    Attributes:
        tables: Its tables; a shared one has a feature of one id and one of many.
        mlp: Widths of the layers, the last one that gives the logit left out.
        num_numerical: Dense inputs.
        stride: Of the pooling that stands for the interaction; None for concatenation alone.
        slice_threshold: Elements above which tables are cut by columns; None if they are not.
    """

    tables: TableSet
    mlp: tuple[int, ...]
    num_numerical: int
    stride: int | None
    slice_threshold: int | None

    @property
    def num_features(self) -> int:
        """Features of all tables."""
        return sum(len(table.features) for table in self.tables.tables)

    @property
    def width(self) -> int:
        """Columns of all features side by side."""
        return sum(table.embedding_dim * len(table.features) for table in self.tables.tables)


# Number of tables, ids of the features, rows, columns.
_Group = tuple[int, tuple[int, ...], int, int]
_LARGE: tuple[_Group, ...] = (
    (40, (1, 100), 100_000, 64),
    (16, (1, 100), 15_000_000, 64),
    (1, (1, 100), 200_000_000, 128),
    (1, (1,), 200_000_000, 128),
    (100, (1,), 10, 32),
    (100, (1,), 10_000, 32),
    (160, (1,), 100_000, 64),
    (50, (1,), 500_000, 64),
    (144, (1,), 15_000_000, 64),
)
_JUMBO: tuple[_Group, ...] = (
    (50, (1, 200), 100_000, 128),
    (24, (1, 200), 20_000_000, 128),
    (1, (1, 200), 400_000_000, 256),
    (1, (1,), 400_000_000, 256),
    (100, (1,), 10, 32),
    (200, (1,), 10_000, 64),
    (350, (1,), 100_000, 128),
    (80, (1,), 1_000_000, 128),
    (216, (1,), 20_000_000, 128),
)


def synthetic_model(name: str) -> SyntheticModel:
    """A model by its name in `PUBLISHED_MS`."""
    if name in ("large", "jumbo"):
        tables = _tables(_LARGE if name == "large" else _JUMBO)
    else:
        tables = load_tables(f"nvidia-{name}")
    mlp, num_numerical, stride = {
        "tiny": ((256, 128), 10, None),
        "small": ((512, 256, 128), 10, None),
        "medium": ((1024, 512, 256, 128), 25, 7),
        "large": ((2048, 1024, 512, 256), 100, 8),
        "jumbo": ((2048, 1024, 512, 256), 200, 20),
    }[name]
    threshold = None if name in ("tiny", "small") else COLUMN_SLICE_THRESHOLD
    return SyntheticModel(tables=tables, mlp=mlp, num_numerical=num_numerical, stride=stride, slice_threshold=threshold)


def _tables(groups: tuple[_Group, ...]) -> TableSet:
    made: list[EmbeddingTable] = []
    for num_tables, lengths, num_rows, dim in groups:
        access = AccessProfile.zipf(num_rows, ALPHA)
        for _ in range(num_tables):
            name = f"t{len(made)}"
            features = tuple(
                Feature(name=f"{name}-{index}", pooling_factor=float(length)) for index, length in enumerate(lengths)
            )
            made.append(
                EmbeddingTable(
                    row_order=ImpliedOrder.BY_ID,
                    name=name,
                    num_embeddings=num_rows,
                    embedding_dim=dim,
                    features=features,
                    access=access,
                    optimizer=Optimizer.ADAGRAD,
                )
            )
    return TableSet(batch_size=BATCH_SIZE, tables=tuple(made))
