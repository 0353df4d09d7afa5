"""Which process holds what of a plan, and which plans can be executed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoshard.core import EmbeddingTable, Exchange, MemoryLevel, PlacedShard, Pooling, ShardingPlan
from autoshard.core.errors import InvalidOptionError, InvalidPlanError
from autoshard.core.quoting import shown
from autoshard.evaluation.validator import validate_plan
from autoshard.runtime.engine.groups import GroupOrder
from autoshard.runtime.engine.holdings import TRAINED_DTYPES, TRAINED_OPTIMIZERS, Holding, Ownership, holdings_of

#: FBGEMM's kernels load four numbers at a time.
_DIM_MULTIPLE = 4


def ownership_of(plan: ShardingPlan, num_processes: int) -> Ownership:
    """Who holds what of a plan in each of its replica groups, ranks folded onto the processes.

    Args:
        plan: The plan; rank r of a group runs on process `r % n` of its n processes.
        num_processes: All processes that execute it.

    Raises:
        InvalidPlanError: If the plan is not valid, or holds a table in a way that is not executed.
        InvalidOptionError: If there are more processes than ranks, or none.
    """
    world_size = plan.topology.world_size
    if not 1 <= num_processes <= world_size:
        raise InvalidOptionError(f"must be in [1, {world_size}], the plan's ranks; got {num_processes}", field="nproc")
    validate_plan(plan)
    group_size = len(GroupOrder.of(plan.replica_groups, num_processes).groups[0])
    for index, placed in enumerate(plan.shards):
        _check_shard(placed, f"shards[{index}]")
    for index, table in enumerate(plan.tables.tables):
        _check_table(table, f"tables.tables[{index}]")
    group = plan.of_one_group()
    holdings = holdings_of(group, group_size)
    _check_folding(holdings, group_size, world_size)
    return Ownership(
        tables=plan.tables,
        num_processes=group_size,
        plan_world_size=group.topology.world_size,
        holdings=holdings,
    )


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


def _check_folding(holdings: Sequence[Holding], num_processes: int, world_size: int) -> None:
    """Refuses to run several ranks on a process that would hold different parts of replicas of the same rows."""
    for one in holdings:
        if one.is_replicated and any(
            sum(process in of for of in one.sync_groups()) > 1 for process in range(num_processes)
        ):
            raise InvalidOptionError(
                f"must be {world_size}, one for each rank: with fewer, a process would hold different parts of the "
                f"replicas of table {shown(one.of.name)}",
                field="nproc",
            )


def _check_shard(placed: PlacedShard, field: str) -> None:
    _check_memory(placed, f"{field}.memory")
    if placed.shard.embedding_dim % _DIM_MULTIPLE:
        raise InvalidPlanError(
            f"must be a multiple of {_DIM_MULTIPLE} columns to be executed, got {placed.shard.embedding_dim}",
            field=f"{field}.columns",
        )
    if placed.shard.table.pooling is Pooling.SEQUENCE and placed.exchange is not Exchange.ROWS:
        raise InvalidPlanError(
            f"must be rows for sequence table {shown(placed.shard.table.name)}, got {placed.exchange}",
            field=f"{field}.exchange",
        )


def _check_memory(placed: PlacedShard, field: str) -> None:
    memory = placed.memory
    if memory.level is MemoryLevel.SSD:
        raise InvalidPlanError("must be hbm or ddr, which the runtime holds tables in; got ssd", field=f"{field}.level")
    if memory.level is MemoryLevel.HBM and memory.cache_bytes:
        raise InvalidPlanError("must be 0: hbm has no cache before it", field=f"{field}.cache_bytes")
    if memory.level is MemoryLevel.DDR and len(placed.replicas) > 1:
        raise InvalidPlanError(
            "must be hbm for rows that several ranks have replicas of, got ddr", field=f"{field}.level"
        )
    if memory.cache_dtype not in (None, placed.shard.table.dtype):
        raise InvalidPlanError(
            f"must be that of the table, {placed.shard.table.dtype}, got {memory.cache_dtype}",
            field=f"{field}.cache_dtype",
        )


def check_levels(owners: Ownership, device: torch.device) -> None:
    """Refuses rows outside of the device's memory where the device is a CPU, which has no other.

    Raises:
        InvalidPlanError: If there are any.
    """
    for one in owners.holdings:
        if device.type == "cpu" and one.memory.level is not MemoryLevel.HBM:
            raise InvalidPlanError(
                f"table {shown(one.of.name)} lies in {one.memory.level}, behind the memory of a GPU: "
                "a CPU has only its own memory, which plans call hbm",
                field="memory.level",
            )


def _check_table(table: EmbeddingTable, field: str) -> None:
    if table.dtype not in TRAINED_DTYPES:
        accepted = " and ".join(TRAINED_DTYPES)
        raise InvalidPlanError(f"the runtime trains {accepted} weights, got {table.dtype}", field=f"{field}.dtype")
    if table.optimizer not in TRAINED_OPTIMIZERS:
        accepted = ", ".join(TRAINED_OPTIMIZERS)
        raise InvalidPlanError(f"the runtime fuses {accepted}; got {table.optimizer}", field=f"{field}.optimizer")
