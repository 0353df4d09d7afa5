"""What the runtime does not execute, of plans that can be made and priced."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autoshard.core import (
    DType,
    EmbeddingTable,
    Exchange,
    MemoryLevel,
    Optimizer,
    PlacedShard,
    Pooling,
    ShardingPlan,
    TableSet,
)
from autoshard.core.declared import Role, undecided
from autoshard.core.errors import InvalidPlanError
from autoshard.core.machine import device_family
from autoshard.core.quoting import shown
from autoshard.evaluation.traffic import ID_BYTES, id_width, is_weighted

#: FBGEMM trains these; bf16 weights train neither on a CPU nor on a GPU (1.6, on an H200), int8 weights not on a CPU.
TRAINED_DTYPES = (DType.FP32, DType.FP16)
TRAINED_OPTIMIZERS = tuple(one for one in Optimizer if one is not Optimizer.NONE)
#: Fields of tables that the runtime does what they say of; others of a kernel have to have their defaults.
_EXECUTED = ("dtype", "optimizer", "num_embeddings", "embedding_dim", "name", "pooling", "features", "weighted")
_OF_RUNS = Role.KERNEL | Role.IDENTITY
#: FBGEMM's kernels load four numbers at a time.
DIM_MULTIPLE = 4
#: Tables that a note names.
_MOST_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionFault:
    """Why a plan is not executed.

    Attributes:
        field: Place in the plan.
        reason: What would be executed, and what is there.
        table: Name of the table.
    """

    field: str
    reason: str
    table: str

    @property
    def error(self) -> InvalidPlanError:
        """What the runtime raises."""
        return InvalidPlanError(self.reason, field=self.field)


def plan_faults(plan: ShardingPlan) -> Iterator[ExecutionFault]:
    """All that keeps a valid plan from being executed, on devices of any kind."""
    for index, placed in enumerate(plan.shards):
        yield from _shard_faults(placed, f"shards[{index}]")
    yield from _weight_faults(plan.tables, "tables.tables")
    for index, table in enumerate(plan.tables.tables):
        yield from _kernel_faults(table, f"tables.tables[{index}]")
        if plan.replica_groups.moment_scale != 1.0 and table.optimizer.has_decaying_moments:
            reason = (
                f"must be 1 with tables of {table.optimizer}, whose moments are means, not sums; got "
                f"{plan.replica_groups.moment_scale:g}"
            )
            yield ExecutionFault(field="replica_groups.moment_scale", reason=reason, table=table.name)


def is_fused_on_gpu(optimizer: Optimizer, dtype: DType) -> bool:
    """Whether FBGEMM's kernels of GPUs train rows so; else torch does.

    They train with Adam fp32 weights alone (1.6, on an H200). Those of LAMB make a row NaN that is first looked up
    without a gradient, as a masked place of a sequence is.
    """
    return not optimizer.scales_by_norms and (dtype is DType.FP32 or not optimizer.has_decaying_moments)


def level_fault(table: EmbeddingTable, level: MemoryLevel) -> ExecutionFault | None:
    """Why rows of a table are not trained in a memory level of a GPU; a CPU's levels are one memory."""
    if level is MemoryLevel.HBM or is_fused_on_gpu(table.optimizer, table.dtype):
        return None
    reason = (
        f"must be hbm on a GPU for table {shown(table.name)}, whose {table.dtype} weights are trained with "
        f"{table.optimizer}, got {level}"
    )
    return ExecutionFault(field="memory.level", reason=reason, table=table.name)


def plan_note(plan: ShardingPlan) -> str:
    """Says what keeps a plan from being executed on its topology's devices; empty if nothing does."""
    faults = list(plan_faults(plan))
    if device_family(plan.topology.device) != "cpu":
        found = (level_fault(one.shard.table, one.memory.level) for one in plan.shards)
        faults += [one for one in found if one is not None]
    return _note("this plan", faults)


def tables_note(tables: TableSet) -> str:
    """Says what keeps plans of some tables from being executed, however they are held; empty if nothing does."""
    faults = list(_weight_faults(tables, "tables"))
    for index, table in enumerate(tables.tables):
        faults += _dim_faults(table.name, table.embedding_dim, f"tables[{index}].embedding_dim")
        faults += _kernel_faults(table, f"tables[{index}]")
    return _note("plans of these tables", faults)


def _note(what: str, faults: Iterable[ExecutionFault]) -> str:
    """One line: the first fault of each field, with the tables that have it."""
    by_field: dict[str, list[ExecutionFault]] = {}
    for fault in faults:
        by_field.setdefault(fault.field.rpartition("]")[2], []).append(fault)
    told = []
    for alike in by_field.values():
        names = list(dict.fromkeys(fault.table for fault in alike))
        more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
        named = f"{', '.join(map(shown, names[:_MOST_NAMED]))}{more}"
        told.append(f"{alike[0].field}: {alike[0].reason} (tables {named})")
    return f"`autoshard run` does not execute {what}: {'; '.join(told)}" if told else ""


def _shard_faults(placed: PlacedShard, field: str) -> Iterator[ExecutionFault]:
    table, memory = placed.shard.table, placed.memory
    if memory.level is MemoryLevel.SSD:
        reason = "must be hbm or ddr: FBGEMM's public builds have no kernels for rows on disks; got ssd"
        yield ExecutionFault(field=f"{field}.memory.level", reason=reason, table=table.name)
    if memory.level is MemoryLevel.HBM and memory.cache_bytes:
        reason = "must be 0: hbm has no cache before it"
        yield ExecutionFault(field=f"{field}.memory.cache_bytes", reason=reason, table=table.name)
    if memory.level is MemoryLevel.DDR and len(placed.replicas) > 1:
        reason = "must be hbm for rows that several ranks have replicas of, got ddr"
        yield ExecutionFault(field=f"{field}.memory.level", reason=reason, table=table.name)
    if memory.cache_dtype not in (None, table.dtype):
        reason = f"must be that of the table, {table.dtype}, got {memory.cache_dtype}"
        yield ExecutionFault(field=f"{field}.memory.cache_dtype", reason=reason, table=table.name)
    yield from _dim_faults(table.name, placed.shard.embedding_dim, f"{field}.columns")
    if table.pooling is Pooling.SEQUENCE and placed.exchange is not Exchange.ROWS:
        reason = f"must be rows for sequence table {shown(table.name)}, got {placed.exchange}"
        yield ExecutionFault(field=f"{field}.exchange", reason=reason, table=table.name)


def _dim_faults(table: str, dim: int, field: str) -> Iterator[ExecutionFault]:
    if dim % DIM_MULTIPLE:
        reason = f"must be a multiple of {DIM_MULTIPLE} columns to be executed, got {dim}"
        yield ExecutionFault(field=field, reason=reason, table=table)


def _weight_faults(tables: TableSet, field: str) -> Iterator[ExecutionFault]:
    """Weighted lookups of means, which torch does not have either, and of rows whose number leaves a weight no room."""
    for index, table in enumerate(tables.tables if is_weighted(tables.tables) else ()):
        if table.pooling is Pooling.MEAN:
            reason = f"must be sum or sequence where lookups of any table are weighted, got {table.pooling}"
            yield ExecutionFault(field=f"{field}[{index}].pooling", reason=reason, table=table.name)
        if id_width([table.num_embeddings]) > ID_BYTES:
            reason = f"must be at most 2^31 where lookups of any table are weighted, got {table.num_embeddings}"
            yield ExecutionFault(field=f"{field}[{index}].num_embeddings", reason=reason, table=table.name)


def _kernel_faults(table: EmbeddingTable, field: str) -> Iterator[ExecutionFault]:
    if table.dtype not in TRAINED_DTYPES:
        reason = f"the runtime trains {' and '.join(TRAINED_DTYPES)} weights, got {table.dtype}"
        yield ExecutionFault(field=f"{field}.dtype", reason=reason, table=table.name)
    if table.optimizer not in TRAINED_OPTIMIZERS:
        reason = f"the runtime trains with {', '.join(TRAINED_OPTIMIZERS)}; got {table.optimizer}"
        yield ExecutionFault(field=f"{field}.optimizer", reason=reason, table=table.name)
    for name in undecided(table, _EXECUTED, _OF_RUNS):
        reason = f"the runtime does not execute it, got {getattr(table, name)}"
        yield ExecutionFault(field=f"{field}.{name}", reason=reason, table=table.name)
