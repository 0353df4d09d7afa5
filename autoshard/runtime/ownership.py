"""Which process holds what of a plan, and which plans can be executed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from autoshard.core import ShardingPlan, TableSet
from autoshard.core.errors import InputError, InvalidOptionError
from autoshard.core.optimizers import BadGradients, UpdateSettings
from autoshard.core.quoting import shown
from autoshard.evaluation.executable import is_fused_on_gpu, level_fault, plan_faults
from autoshard.runtime.engine.holdings import GroupOrder, Holding, Ownership, holdings_of
from autoshard.validator import validate_plan

if TYPE_CHECKING:
    import torch


def ownership_of(plan: ShardingPlan, num_processes: int, frozen: Collection[str] = ()) -> Ownership:
    """Who holds what of a plan in each of its replica groups, ranks folded onto the processes.

    Args:
        plan: The plan; rank r of a group runs on process `r % n` of its n processes.
        num_processes: All processes that execute it.
        frozen: Names of tables that are only looked up.

    Raises:
        InvalidPlanError: If the plan is not valid, or holds a table in a way that is not executed.
        InvalidOptionError: If there are more processes than ranks, or none.
        InputError: If a frozen table is none of the plan.
    """
    world_size = plan.topology.world_size
    if not 1 <= num_processes <= world_size:
        raise InvalidOptionError(f"must be in [1, {world_size}], the plan's ranks; got {num_processes}", field="nproc")
    validate_plan(plan)
    group_size = len(GroupOrder.of(plan.replica_groups, num_processes).groups[0])
    for fault in plan_faults(plan):
        raise fault.error
    names = [table.name for table in plan.tables.tables]
    for name in frozen:
        if name not in names:
            raise InputError(f"must be tables of the plan, got {shown(name)}", field="frozen")
    group = plan.of_one_group()
    holdings = tuple(replace(one, is_trained=one.of.name not in frozen) for one in holdings_of(group, group_size))
    _check_folding(holdings, group_size, world_size)
    return Ownership(
        tables=plan.tables,
        num_processes=group_size,
        plan_world_size=group.topology.world_size,
        holdings=holdings,
    )


def check_updates(tables: TableSet, settings: UpdateSettings) -> None:
    """Refuses settings of updates that the optimizer of a table does not have.

    Raises:
        InvalidOptionError: Naming the setting.
    """
    for optimizer in dict.fromkeys(table.optimizer for table in tables.tables):
        settings.check_optimizer(optimizer)


def check_skipping(tables: TableSet, settings: UpdateSettings, device: torch.device) -> None:
    """Refuses to skip steps where kernels of FBGEMM would move rows without a gradient.

    Raises:
        InvalidOptionError: If a table's optimizer does that.
    """
    for table in tables.tables if device.type == "cuda" and settings.on_bad_gradients is BadGradients.SKIP else ():
        if settings.moves_without_gradient(table.optimizer) and is_fused_on_gpu(table.optimizer, table.dtype):
            raise InvalidOptionError(
                f"must be error, clip or ignore on a GPU for table {shown(table.name)}, whose updates move rows "
                "without a gradient; got skip",
                field="on_bad_gradients",
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


def check_levels(owners: Ownership, device: torch.device) -> None:
    """Refuses rows in a memory level of a GPU in which they are not trained; a CPU's levels are one memory.

    Raises:
        InvalidPlanError: If there are any.
    """
    for one in owners.holdings if device.type == "cuda" else ():
        if (fault := level_fault(one.of, one.memory.level)) is not None:
            raise fault.error
