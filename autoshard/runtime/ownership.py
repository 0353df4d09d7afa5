"""Which process holds which table: the part of a plan that the runtime executes today."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.core import (
    DType,
    EmbeddingTable,
    MemoryLevel,
    Optimizer,
    PlacedShard,
    Pooling,
    ShardingPlan,
    TableSet,
    Tier,
)
from autoshard.core.errors import InvalidOptionError, InvalidPlanError
from autoshard.evaluation.validator import validate_plan

_EXECUTED = (
    "the runtime executes table_wise shards: a whole table on one rank, as `autoshard plan --set tiers=table_wise` has "
    "them"
)
#: FBGEMM trains these; bf16 and int8 weights do not train on a CPU.
_TRAINED_DTYPES = (DType.FP32, DType.FP16)
_TRAINED_OPTIMIZERS = (Optimizer.SGD, Optimizer.ROWWISE_ADAGRAD, Optimizer.ADAGRAD)
#: FBGEMM's kernels load four numbers at a time.
_DIM_MULTIPLE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOwners:
    """The process that holds each table.

    Attributes:
        tables: The plan's tables.
        num_processes: Processes that execute the plan.
        plan_world_size: Ranks that the plan was made for; rank r runs on process `r % num_processes`.
        owner_T: Process of each table, in the order of `tables`.
    """

    tables: TableSet
    num_processes: int
    plan_world_size: int
    owner_T: tuple[int, ...]

    @classmethod
    def of_plan(cls, plan: ShardingPlan, num_processes: int) -> TableOwners:
        """Reads the owners from a plan, folding its ranks onto the processes.

        Raises:
            InvalidPlanError: If the plan is not valid, or holds a table in a way that is not executed.
            InvalidOptionError: If there are more processes than ranks, or none.
        """
        world_size = plan.topology.world_size
        if not 1 <= num_processes <= world_size:
            raise InvalidOptionError(
                f"must be in [1, {world_size}], the plan's ranks; got {num_processes}", field="nproc"
            )
        validate_plan(plan, to_execute=True)
        _check_whole_plan(plan)
        for index, placed in enumerate(plan.shards):
            _check_shard(placed, f"shards[{index}]")
        for index, table in enumerate(plan.tables.tables):
            _check_table(table, f"tables.tables[{index}]")
        rank_of = {placed.shard.table.name: placed.replicas[0][0] for placed in plan.shards}
        return cls(
            tables=plan.tables,
            num_processes=num_processes,
            plan_world_size=world_size,
            owner_T=tuple(rank_of[table.name] % num_processes for table in plan.tables.tables),
        )

    @property
    def is_folded(self) -> bool:
        """Whether a process runs several ranks of the plan."""
        return self.num_processes != self.plan_world_size

    @property
    def identity(self) -> tuple[object, ...]:
        """All that processes have to agree on, whose `repr` is equal if and only if it is."""
        tables = tuple(
            (table.name, table.num_embeddings, table.embedding_dim, table.dtype, table.pooling, table.optimizer)
            for table in self.tables.tables
        )
        features = tuple(tuple(feature.name for feature in table.features) for table in self.tables.tables)
        return tables, features, self.owner_T, self.num_processes

    def owner(self, name: str) -> int:
        """Process that holds the table of this name."""
        return self.owner_T[self.tables.tables.index(self.tables[name])]

    def tables_of(self, process: int) -> tuple[EmbeddingTable, ...]:
        """Tables that a process holds, in the plan's order."""
        pairs = zip(self.tables.tables, self.owner_T, strict=True)
        return tuple(table for table, owner in pairs if owner == process)

    def plan_ranks_of(self, process: int) -> tuple[int, ...]:
        """Ranks of the plan that a process runs."""
        return tuple(range(process, self.plan_world_size, self.num_processes))


def even_share(batch_size: int, num_processes: int) -> int:
    """Samples per process of a global batch.

    Raises:
        InvalidOptionError: If they do not come out even.
    """
    if batch_size % num_processes:
        raise InvalidOptionError(
            f"must be a multiple of the {num_processes} processes, got {batch_size}", field="batch_size"
        )
    return batch_size // num_processes


def _check_whole_plan(plan: ShardingPlan) -> None:
    if plan.replica_groups.num_groups != 1:
        raise InvalidPlanError(
            f"the runtime executes plans of one replica group, got {plan.replica_groups.num_groups}",
            field="replica_groups.num_groups",
        )
    for label, dtype in (("forward", plan.payload.forward), ("backward", plan.payload.backward)):
        if dtype is not DType.FP32:
            raise InvalidPlanError(f"the runtime exchanges fp32, got {dtype}", field=f"payload.{label}")


def _check_shard(placed: PlacedShard, field: str) -> None:
    shard = placed.shard
    if placed.tier is not Tier.TABLE_WISE:
        raise InvalidPlanError(f"{_EXECUTED}; got {placed.tier}", field=f"{field}.tier")
    if len(placed.replicas) != 1 or len(placed.replicas[0]) != 1:
        raise InvalidPlanError(f"{_EXECUTED}; got {placed.replicas}", field=f"{field}.replicas")
    if shard.num_embeddings != shard.table.num_embeddings:
        got = f"rows {shard.rows.start} to {shard.rows.stop} of {shard.table.num_embeddings}"
        raise InvalidPlanError(f"{_EXECUTED}; got {got}", field=f"{field}.rows")
    if shard.embedding_dim != shard.table.embedding_dim:
        got = f"columns {shard.columns[0]} to {shard.columns[1]} of {shard.table.embedding_dim}"
        raise InvalidPlanError(f"{_EXECUTED}; got {got}", field=f"{field}.columns")
    if placed.memory.level is not MemoryLevel.HBM or placed.memory.cache_bytes:
        raise InvalidPlanError(
            f"the runtime holds tables in the device's memory (hbm), without a cache; got {placed.memory.level}",
            field=f"{field}.memory",
        )


def _check_table(table: EmbeddingTable, field: str) -> None:
    if table.pooling is Pooling.SEQUENCE:
        raise InvalidPlanError(
            f"the runtime executes sum and mean pooling; {table.name!r} is a sequence table", field=f"{field}.pooling"
        )
    if table.dtype not in _TRAINED_DTYPES:
        accepted = " and ".join(_TRAINED_DTYPES)
        raise InvalidPlanError(f"the runtime trains {accepted} weights, got {table.dtype}", field=f"{field}.dtype")
    if table.optimizer not in _TRAINED_OPTIMIZERS:
        accepted = ", ".join(_TRAINED_OPTIMIZERS)
        raise InvalidPlanError(f"the runtime fuses {accepted}; got {table.optimizer}", field=f"{field}.optimizer")
    if table.embedding_dim % _DIM_MULTIPLE:
        raise InvalidPlanError(
            f"must be a multiple of {_DIM_MULTIPLE} to be executed, got {table.embedding_dim}",
            field=f"{field}.embedding_dim",
        )
