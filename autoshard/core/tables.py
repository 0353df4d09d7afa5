"""Embedding tables and the features that look rows up in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any, Final

import numpy as np

from autoshard.core.accepted import (
    AT_LEAST_0,
    AT_LEAST_1,
    FINITE,
    MAX_BATCH_SIZE,
    MAX_EMBEDDING_DIM,
    MAX_POOLING_FACTOR,
    MAX_ROWS,
    WHOLE,
    Range,
)
from autoshard.core.access import AccessProfile
from autoshard.core.declared import Meaning, Role, Written, check_ranges, declared, values
from autoshard.core.errors import InvalidTableError
from autoshard.core.optimizers import Optimizer
from autoshard.core.quoting import shortened, shown


class DType(StrEnum):
    """Number format of weights and of exchanged values."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"

    @property
    def num_bytes(self) -> int:
        """Bytes per number."""
        return _NUM_BYTES[self]


_NUM_BYTES = {DType.FP32: 4, DType.FP16: 2, DType.BF16: 2, DType.INT8: 1}


class Pooling(StrEnum):
    """How the rows of one bag are reduced; `sequence` keeps them apart."""

    SUM = "sum"
    MEAN = "mean"
    SEQUENCE = "sequence"


#: Bytes that FBGEMM's inference kernels fill rows up to.
_READ_ROW_ALIGNMENT = 16


def weight_row_bytes(dtype: DType, optimizer: Optimizer, embedding_dim: int) -> int:
    """Bytes of the weights of one stored row.

    An int8 row has a scale and an offset of its own: of fp32 in trained tables; of fp16 in tables that are only read,
    whose rows are filled up to 16 bytes. A shard of some columns has its own, too.

    Args:
        dtype: The row's number format.
        optimizer: The table's optimizer.
        embedding_dim: Columns of the row.

    Source:
        FBGEMM 1.8, sizes of the weights of `SplitTableBatchedEmbeddingBagsCodegen` and, for rows that are only read,
        of `IntNBitTableBatchedEmbeddingBagsCodegen` with the row alignment of a GPU and of TorchRec on any device.
    """
    is_read_only = optimizer is Optimizer.NONE
    scale_bytes = (4 if is_read_only else 8) if dtype is DType.INT8 else 0
    row_bytes = embedding_dim * dtype.num_bytes + scale_bytes
    return -(-row_bytes // _READ_ROW_ALIGNMENT) * _READ_ROW_ALIGNMENT if is_read_only else row_bytes


class Tier(StrEnum):
    """Label of how a shard's rows are held by ranks (the replicas say it exactly)."""

    TABLE_WISE = "table_wise"
    ROW_WISE = "row_wise"
    TABLE_ROW_WISE = "table_row_wise"
    DATA_PARALLEL = "data_parallel"
    FLEX = "flex"
    REPLICATED = "replicated"


#: Of all tables with their optimizer state.
MAX_TOTAL_BYTES: Final = 2**62
_ROWS: Final = Range(at_least=1, at_most=MAX_ROWS, kind=WHOLE)
_COLUMNS: Final = Range(at_least=1, at_most=MAX_EMBEDDING_DIM, kind=WHOLE)
_POOLING_FACTORS: Final = Range(at_least=0, at_most=MAX_POOLING_FACTOR, kind=FINITE)
_POOLING_VARIANCES: Final = Range(at_least=0, at_most=MAX_POOLING_FACTOR**2, kind=FINITE)
_BATCH_SIZES: Final = Range(at_least=1, at_most=MAX_BATCH_SIZE, kind=WHOLE)
_DENSE_FEATURES: Final = Range(at_least=0, at_most=2**16, kind=WHOLE)
_WIDTHS: Final = Range(at_least=1, at_most=2**20, kind=WHOLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One categorical feature: a bag of ids per sample."""

    name: Annotated[str, Meaning("Used once.", Role.IDENTITY)]
    pooling_factor: Annotated[float, _POOLING_FACTORS, Meaning("Mean number of ids per sample.", Role.PRICE)]
    pooling_variance: Annotated[
        float, _POOLING_VARIANCES, Meaning("Variance of the number of ids per sample.", Role.PRICE)
    ] = 0.0
    pooling_p99: Annotated[
        float | None, _POOLING_FACTORS, Meaning("99th percentile of the number of ids per sample.", Role.PRICE)
    ] = None

    def __post_init__(self) -> None:
        _check_name(self.name, "name")
        check_ranges(self, InvalidTableError, f"{shortened(self.name)}.")


class ImpliedOrder(StrEnum):
    """Order of a table's rows by falling access frequency, without a file that lists it."""

    BY_ID = "by_id"
    """That of the row ids, as in generated batches."""
    ASSUMED = "assumed"
    """Unknown: plans by access rank are made and priced, and need the order before they are worth executing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOrder:
    """File that lists row ids in falling access frequency; the other rows follow by ascending id.

    Attributes:
        file: Name of the Parquet file, beside the file that names it.
        digest: Its SHA-256.
        num_ordered: Ids in it.
    """

    file: str
    digest: str
    num_ordered: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What a planner may not decide about a table."""

    pinned_ranks: Annotated[tuple[int, ...], Meaning("Ranks that may hold the table.")] = ()
    colocate_with: Annotated[tuple[str, ...], Meaning("Tables that share this table's ranks.")] = ()
    forbidden_tiers: Annotated[tuple[Tier, ...], Meaning("Tiers that the table may not have.")] = ()


#: What prices and bytes depend on.
PRICED: Final = Role.PRICE | Role.MEMORY
#: What a stored row depends on, and with it the kernel that serves it.
_OF_ROWS: Final = Role.PRICE | Role.MEMORY | Role.KERNEL | Role.IDENTITY


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTraits:
    """What a table has in common with all that is held of it, and what decides the kernels that serve it."""

    dtype: Annotated[DType, Meaning("Number format of the weights.", _OF_ROWS, Written.REQUIRED)] = DType.FP32
    pooling: Annotated[
        Pooling,
        Meaning(
            "How looked-up rows become one vector per sample; sequence keeps every row.",
            Role.PRICE | Role.IDENTITY,
            Written.REQUIRED,
        ),
    ] = Pooling.SUM
    optimizer: Annotated[Optimizer, Meaning("rowwise_adagrad if left out.", _OF_ROWS, Written.ALWAYS)] = (
        Optimizer.ROWWISE_ADAGRAD
    )


def traits_of(owner: KernelTraits) -> dict[str, Any]:
    """The traits of a table, or of what is held of it, by name."""
    return {one.name: getattr(owner, one.name) for one in declared(KernelTraits)}


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingTable(KernelTraits):
    """One embedding table of the model."""

    name: Annotated[str, Meaning("Used once.", Role.IDENTITY)]
    num_embeddings: Annotated[int, _ROWS, Meaning("Rows.", Role.PRICE | Role.MEMORY | Role.IDENTITY)]
    embedding_dim: Annotated[
        int, _COLUMNS, Meaning("Columns: numbers per row.", Role.PRICE | Role.MEMORY | Role.IDENTITY)
    ]
    features: Annotated[
        tuple[Feature, ...],
        Meaning("What looks rows up in the table; several may share it.", Role.PRICE | Role.IDENTITY),
    ]
    access: Annotated[AccessProfile, Meaning("How often rows are looked up.", Role.PRICE)]
    weighted: Annotated[
        bool,
        Meaning(
            "Whether every lookup has a weight, which its row is multiplied by before a bag is summed up.",
            Role.PRICE | Role.IDENTITY,
        ),
    ] = False
    constraints: Annotated[Constraints, Meaning("Limits that planners keep to.")] = field(default_factory=Constraints)
    row_order: Annotated[
        RowOrder | ImpliedOrder | None,
        Meaning(
            "Which rows are accessed most: by_id (those with the lowest ids), assumed (unknown, but planned with), or "
            "a file that lists them. Without it, planners do not cut the table by access rank."
        ),
    ] = None

    def __post_init__(self) -> None:
        _check_name(self.name, "name")
        check_ranges(self, InvalidTableError)
        if not self.features:
            raise InvalidTableError("needs at least one feature", field="features")
        if self.access.num_rows != self.num_embeddings:
            raise InvalidTableError(
                f"describes {self.access.num_rows} rows, the table has {self.num_embeddings}", field="access"
            )
        if isinstance(self.row_order, RowOrder):
            fits = Range(at_least=1, at_most=self.num_embeddings)
            fits.check(self.row_order.num_ordered, "row_order.num_ordered", InvalidTableError)

    @property
    def pooling_factor(self) -> float:
        """Mean number of lookups per sample, all features together."""
        return sum([feature.pooling_factor for feature in self.features])

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return self.num_embeddings * weight_row_bytes(self.dtype, self.optimizer, self.embedding_dim)

    @property
    def storage_bytes(self) -> int:
        """Bytes of weights and optimizer state."""
        return self.num_embeddings * self.row_bytes(self.embedding_dim)

    def row_bytes(self, embedding_dim: int) -> int:
        """Bytes of weights and optimizer state of one row's part of so many columns."""
        weights = weight_row_bytes(self.dtype, self.optimizer, embedding_dim)
        return weights + self.optimizer.state_bytes_per_row(embedding_dim)

    def name_in_batches(self, feature: str) -> str:
        """Name of the ids that a feature looks up: `f` of `f@table`, whose ids other tables look up, too."""
        return feature.removesuffix(f"@{self.name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLayers:
    """The dense part of a DLRM, so that whole steps can be priced."""

    num_dense_features: Annotated[int, _DENSE_FEATURES, Meaning("Numbers per sample that the bottom MLP takes.")]
    bottom_mlp: Annotated[tuple[Annotated[int, _WIDTHS], ...], Meaning("Widths of its layers.")]
    top_mlp: Annotated[tuple[Annotated[int, _WIDTHS], ...], Meaning("Widths of its layers.")]
    interaction: Annotated[str, Meaning("How dense and embedded features meet.", written=Written.REQUIRED)] = "dot"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSet:
    """The tables of one model and the global batch that they see."""

    batch_size: Annotated[int, _BATCH_SIZES, Meaning("Samples per step over all ranks.")]
    tables: Annotated[
        tuple[EmbeddingTable, ...],
        Meaning("Names of tables differ, and so do names of features over all tables."),
    ]
    dense: Annotated[DenseLayers | None, Meaning("The dense layers, which the predicted step then includes.")] = None
    _alike: Mapping[str, int] | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_ranges(self, InvalidTableError)
        if not self.tables:
            raise InvalidTableError("needs at least one table", field="tables")
        if self.storage_bytes > MAX_TOTAL_BYTES:
            raise InvalidTableError(f"must need at most {MAX_TOTAL_BYTES:,} bytes in total", field="tables")
        for label, names in (
            ("name", [table.name for table in self.tables]),
            ("features", [feature.name for table in self.tables for feature in table.features]),
        ):
            seen: set[str] = set()
            for name in names:
                if name in seen:
                    raise InvalidTableError(f"{shown(name)} is used twice; names must differ", field=f"tables.{label}")
                seen.add(name)

    @property
    def storage_bytes(self) -> int:
        """Bytes of weights and optimizer states of all tables, each held once."""
        return sum(table.storage_bytes for table in self.tables)

    @property
    def shared_features(self) -> dict[str, str]:
        """The name `f` of ids that several tables look up, for each of their features `f@table`."""
        names = {
            feature.name: table.name_in_batches(feature.name) for table in self.tables for feature in table.features
        }
        return {name: ids for name, ids in names.items() if ids != name}

    @property
    def first_alike(self) -> Mapping[str, int]:
        """For each table, by name, the index of the first that is like it in all that prices and bytes depend on."""
        if self._alike is None:
            first: dict[tuple[Any, ...], int] = {}
            found = {
                table.name: first.setdefault(values(table, PRICED), index) for index, table in enumerate(self.tables)
            }
            object.__setattr__(self, "_alike", found)
            return found
        return self._alike

    def __getitem__(self, name: str) -> EmbeddingTable:
        for table in self.tables:
            if table.name == name:
                return table
        raise InvalidTableError(f"no table is named {shown(name)}", field="tables")

    def sample(self, num_tables: int, seed: int) -> TableSet:
        """A task: `num_tables` of the tables, drawn without replacement, in the order that they have here.

        Args:
            num_tables: Size of the task, 1 to the number of tables.
            seed: Same seed, same task.

        Raises:
            InvalidTableError: If there are not that many tables.

        Source:
            AutoShard Sec. 5.1: tasks are random subsets of a pool of tables.
        """
        Range(at_least=1, at_most=len(self.tables)).check(num_tables, "num_tables", InvalidTableError)
        drawn = _generator(seed).choice(len(self.tables), size=num_tables, replace=False)
        return replace(self, tables=tuple(self.tables[index] for index in np.sort(drawn)))

    def redrawn(self, num_tables: int, seed: int) -> TableSet:
        """A task of any size, its tables under new names; with replacement if there are fewer tables.

        Args:
            num_tables: Size of the task, at least 1.
            seed: Same seed, same task.

        Raises:
            InvalidTableError: If the size or the seed is too small.
        """
        AT_LEAST_1.check(num_tables, "num_tables", InvalidTableError)
        is_short = num_tables > len(self.tables)
        drawn = _generator(seed).choice(len(self.tables), size=num_tables, replace=is_short)
        return replace(self, tables=tuple(_renamed(self.tables[index], n) for n, index in enumerate(drawn.tolist())))

    def level(self, costs_ms: Sequence[float], num_tables: int, num_ranks: int) -> TableSet:
        """The tables without those that alone cost more than half of an even share, in tasks drawn from what is left.

        Args:
            costs_ms: Price of each table alone, in the order of the tables.
            num_tables: Tables of a task.
            num_ranks: Ranks of a task.

        Returns:
            All tables if none would be left.
        """
        costs, kept = np.asarray(costs_ms), np.arange(len(self.tables))
        while True:
            # Without the costliest tables, ranks have less to do.
            fewer = kept[costs[kept] <= 0.5 * num_tables / num_ranks * costs[kept].mean()]
            if len(fewer) in (0, len(kept)):
                return replace(self, tables=tuple(self.tables[index] for index in kept.tolist()))
            kept = fewer

    def part(self, number: int, num_parts: int) -> TableSet:
        """Every `num_parts`-th table from the `number`-th on, counted from 1; parts share no table.

        Tables that must share a rank have to be in one part.
        """
        return replace(self, tables=self.tables[number - 1 :: num_parts])

    def assuming_orders(self) -> TableSet:
        """The same model, with the row orders that are unknown taken for known."""
        tables = tuple(
            replace(table, row_order=ImpliedOrder.ASSUMED) if table.row_order is None else table
            for table in self.tables
        )
        return replace(self, tables=tables)

    def scaled(self, divisor: int) -> TableSet:
        """The same model with rows and batch divided alike, so that lookups per row stay as they are.

        Row orders that list ids of the larger tables are dropped.
        """
        AT_LEAST_1.check(divisor, "scale", InvalidTableError)
        tables = tuple(_with_rows(table, max(1, table.num_embeddings // divisor)) for table in self.tables)
        return replace(self, batch_size=max(1, self.batch_size // divisor), tables=tables)

    def held_within(self, num_bytes: int) -> TableSet:
        """The same model with fewer rows in tables that take more bytes, optimizer state included; a row at least."""
        AT_LEAST_1.check(num_bytes, "num_bytes", InvalidTableError)
        tables = tuple(
            table
            if table.storage_bytes <= num_bytes
            else _with_rows(table, max(1, table.num_embeddings * num_bytes // table.storage_bytes))
            for table in self.tables
        )
        return replace(self, tables=tables)


def _generator(seed: int) -> np.random.Generator:
    AT_LEAST_0.check(seed, "seed", InvalidTableError)
    return np.random.default_rng(seed)


def _renamed(table: EmbeddingTable, number: int) -> EmbeddingTable:
    features = tuple(replace(feature, name=f"{feature.name}_{number}") for feature in table.features)
    return replace(table, name=f"{table.name}_{number}", features=features)


def _with_rows(table: EmbeddingTable, num_embeddings: int) -> EmbeddingTable:
    is_listed = isinstance(table.row_order, RowOrder) and num_embeddings < table.num_embeddings
    return replace(
        table,
        num_embeddings=num_embeddings,
        access=table.access.thinned(num_embeddings),
        row_order=None if is_listed else table.row_order,
    )


def _check_name(name: str, label: str) -> None:
    if not isinstance(name, str) or not name or len(name) > 512:
        raise InvalidTableError(f"must be a text of 1 to 512 characters, got {shown(name)}", field=label)
