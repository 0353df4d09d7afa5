"""How far a plan may be above the best: lower bounds of the space that it was chosen from."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from autoshard.core import CostModels, LowerBound, MemoryBytes, ShardingPlan, Topology
from autoshard.core.step import EMBEDDING_PARTS
from autoshard.planners.bounds.kernel_relaxation import KernelRelaxation
from autoshard.planners.bounds.step_relaxation import StepBounds, StepRelaxation
from autoshard.planners.hybrid.option_offers import space_of
from autoshard.planners.hybrid.starts import is_searchable, layout_of
from autoshard.planners.planner import PlanRequest
from autoshard.planners.space.layout import Layout, Limits
from autoshard.planners.space.options import BY_ACCESS_RANK, ShardingType
from autoshard.planners.space.placement import PlacementProblem, is_table_wise

#: Larger worlds have no bounds: what all ranks move is priced for each column of it.
_MAX_RANKS = 4096
#: Names of bounds besides those of parts.
STEP, MAX_KERNEL = "step", "max_kernel"


def plan_bounds(
    plan: ShardingPlan, costs: CostModels, names: Collection[ShardingType] = tuple(ShardingType)
) -> dict[str, LowerBound]:
    """What no plan of a space takes less than, by name: the step, its parts, and kernels of whole tables.

    The space has the given sharding types of every table, and the ways in which the plan holds them. Rows that may be
    cut by how often they are looked up are so at few places, and searches cut them anywhere: bounds are estimates then.
    Kernels have a bound of their own where the plan places whole tables on single ranks, over plans that do so, too.

    Args:
        plan: A valid plan.
        costs: Models that price steps.
        names: Sharding types that the plan was chosen from.

    Returns:
        No step where the plan's was priced with another overlap than the models say. Nothing for plans with several
        replica groups, with copies on some of the ranks only or with very many shards, which the space lacks, and for
        worlds of more than 4,096 ranks.
    """
    if plan.topology.world_size > _MAX_RANKS or plan.replica_groups.num_groups > 1 or not is_searchable(plan):
        return {}
    request = PlanRequest(tables=plan.tables, topology=plan.topology, costs=costs, payload=plan.payload)
    space = space_of(request, names)
    limits = Limits.of(space)
    layout = layout_of(space, limits, plan)
    if layout is None:
        return {}
    # Tables of absurd sizes have no finite times, and a bound of 0.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        has_cuts = not set(BY_ACCESS_RANK).isdisjoint(names) and any(one.row_order for one in plan.tables.tables)
        bounds = _of_step(StepRelaxation(space, limits.capacity_RM), layout, has_cuts=has_cuts)
        if plan.predicted and plan.predicted.overlap not in (None, space.prices.overlap):
            del bounds[STEP]
        if is_table_wise(plan):
            bounds[MAX_KERNEL] = _of_kernels(plan, costs)
    return bounds


def _of_step(relaxation: StepRelaxation, layout: Layout, *, has_cuts: bool) -> dict[str, LowerBound]:
    proven = relaxation.bounds() if relaxation.is_proven else None
    estimated = None
    if not (relaxation.is_proven and relaxation.is_exact):
        estimated = relaxation.bounds(relaxation.kernel_factors(layout.codes_RH))
    if has_cuts:
        proven, estimated = None, estimated or proven
    return {
        name: LowerBound(proven_ms=_named(proven, index), estimated_ms=_named(estimated, index))
        for index, name in enumerate([STEP, *map(str, EMBEDDING_PARTS)], -1)
    }


def _named(bounds: StepBounds | None, index: int) -> float | None:
    """A part's bound by index, or that of the step at -1."""
    if bounds is None:
        return None
    return bounds.step_ms if index < 0 else bounds.parts_ms[index]


def _of_kernels(plan: ShardingPlan, costs: CostModels) -> LowerBound:
    # Behind caches kernels are no faster than in device memory.
    topology = _in_one_level(plan.topology)
    problem = PlacementProblem.table_wise(plan.tables, topology, costs.kernel, plan.payload)
    relaxation = KernelRelaxation(problem)
    proven_ms = relaxation.max_ms() if relaxation.is_proven else None
    if relaxation.is_proven and relaxation.is_exact:
        return LowerBound(proven_ms=proven_ms)
    factor = relaxation.factor(problem.ranks_of(plan))
    return LowerBound(proven_ms=proven_ms, estimated_ms=relaxation.max_ms(factor))


def _in_one_level(topology: Topology) -> Topology:
    """Devices that hold what the memory below them would, too."""

    def joined(memory: MemoryBytes) -> MemoryBytes:
        return MemoryBytes(hbm=memory.hbm + memory.ddr + memory.ssd)

    overrides = tuple((rank, joined(memory)) for rank, memory in topology.overrides)
    return replace(topology, memory_bytes=joined(topology.memory_bytes), overrides=overrides)
