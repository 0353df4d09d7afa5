"""Prices a plan, whoever made it.

Shape suffixes: R ranks, N shards as ranks hold them, H width of a code.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoshard.core import (
    CostBreakdown,
    CostModel,
    Costs,
    KernelCosts,
    LocalShard,
    MemoryLevel,
    RankCost,
    ShardingPlan,
)
from autoshard.core.costs import MsArray
from autoshard.core.errors import InvalidPlanError
from autoshard.core.step import Overlap
from autoshard.evaluation.step_price import Stages, StepPrice, compose_step
from autoshard.evaluation.traffic import Traffic, plan_traffic


def evaluate(plan: ShardingPlan, costs: Costs, *, overlap: Overlap | None = None) -> CostBreakdown:
    """Predicted cost of one training step, per rank and in total.

    Kernels come from the cost model: all shards of a rank run fused. Each collective waits for the slowest rank of
    the stage before it, so every stage counts at its slowest rank. Dense layers are priced where the plan's tables
    describe them; else neither they nor the all-reduce of their gradients count.

    `step_ms` is what the runtime takes, as far as `costs.step` knows it; ranks, `max_kernel_ms` and balances are
    what the models of the parts say.

    Args:
        plan: Any valid plan of one replica group.
        costs: Models to price it with.
        overlap: Which parts hide behind each other. Left out: what the runtime does that the step model was calibrated
            on; without one nothing, as in the runtime's thin engine. The answer says which.

    Returns:
        The breakdown. The interval of `step_ms` combines those of kernels, collectives and dense layers.

    Raises:
        ModelError: If the cost model cannot price a shard.
        InvalidPlanError: If the plan is replicated over groups of ranks, which is not priced yet, or its dense layers
            make no model.

    Source:
        Neo Appendix B, Eq. 1, for `Overlap.NEO`. `balance` is AutoShard Sec. 4.3, and 0 if a rank holds nothing;
        `imbalance` is from 2D, `exchange_balance` from OPER.
    """
    kernels, traffic, stages = _priced(plan, costs)
    kernel_ms_R = kernels.costs.kernel_ms_S
    exchange_ms_R = stages.forward_ms_R + stages.backward_ms_R
    step = compose_step(plan, costs, kernels.costs, traffic, stages, overlap)
    return CostBreakdown(
        step_ms=step.step_ms,
        max_kernel_ms=float(kernel_ms_R.max()),
        balance=_min_over_max(kernel_ms_R, empty=0.0),
        exchange_balance=_min_over_max(exchange_ms_R, empty=1.0),
        imbalance=float(kernel_ms_R.max() / kernel_ms_R.mean()) if kernel_ms_R.any() else 1.0,
        floor_kernel_ms=kernels.floor_ms,
        binding_rank=kernels.binding_rank,
        binding_shard=kernels.binding_shard,
        cost_model=costs.kernel.name,
        ranks=_rank_costs(kernels, stages, traffic),
        overlap=step.overlap,
        models=step.models,
        dense_ms=step.times.dense_layers,
        sync_ms=step.times.all_reduce,
        parts=step.parts,
    )


def price_step(plan: ShardingPlan, costs: Costs, *, overlap: Overlap | None = None) -> StepPrice:
    """The step of `evaluate` with all its parts, the overlap, and the names of the models behind it."""
    kernels, traffic, stages = _priced(plan, costs)
    return compose_step(plan, costs, kernels.costs, traffic, stages, overlap)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernels:
    held: tuple[tuple[LocalShard, ...], ...]
    """What each rank holds."""
    costs: KernelCosts
    floor_ms: float
    binding_rank: int
    binding_shard: str


def _priced(plan: ShardingPlan, costs: Costs) -> tuple[_Kernels, Traffic, Stages]:
    if plan.replica_groups.num_groups != 1:
        raise InvalidPlanError("plans over several groups cannot be priced", field="replica_groups.num_groups")
    traffic = plan_traffic(plan)
    return _price_kernels(plan, costs.kernel), traffic, Stages.of(plan, costs, traffic)


def _price_kernels(plan: ShardingPlan, model: CostModel) -> _Kernels:
    held = plan.local_shards()
    flat = [shard for shards in held for shard in shards]
    owner_N = np.repeat(np.arange(len(held)), [len(shards) for shards in held])
    # Replicas of a shard are one object on all of their ranks.
    first_of = {id(shard): index for index, shard in reversed(list(enumerate(flat)))}
    distinct, which_N = np.unique([first_of[id(shard)] for shard in flat], return_inverse=True)
    codes_NH = model.encode([flat[index] for index in distinct])[which_N]
    codes_RH = np.zeros((len(held), codes_NH.shape[1]), dtype=np.float32)
    np.add.at(codes_RH, owner_N, codes_NH)
    costs = model.price_parts(codes_RH)
    alone_ms_N = model.price(codes_NH)
    # A rank without shards is never the slowest, even where nothing costs anything.
    binding = int(np.where(np.bincount(owner_N, minlength=len(held)) > 0, costs.kernel_ms_S, -1.0).argmax())
    on_binding = np.flatnonzero(owner_N == binding)
    costliest = on_binding[alone_ms_N[on_binding].argmax()]
    return _Kernels(
        held=held,
        costs=costs,
        floor_ms=float(alone_ms_N.max()),
        binding_rank=binding,
        binding_shard=flat[costliest].table,
    )


def _rank_costs(kernels: _Kernels, stages: Stages, traffic: Traffic) -> tuple[RankCost, ...]:
    ranks = []
    activation_R = traffic.activation_bytes()
    costs = kernels.costs
    for rank, shards in enumerate(kernels.held):
        held = {level: sum(shard.memory_bytes for shard in shards if shard.level is level) for level in MemoryLevel}
        ranks.append(
            RankCost(
                rank=rank,
                input_ms=float(stages.input_ms_R[rank]),
                forward_kernel_ms=float(costs.forward_ms_S[rank]),
                forward_exchange_ms=float(stages.forward_ms_R[rank]),
                backward_exchange_ms=float(stages.backward_ms_R[rank]),
                backward_kernel_ms=float(costs.backward_ms_S[rank]),
                kernel_ms=float(costs.kernel_ms_S[rank]),
                sync_ms=float(stages.sync_ms_R[rank]),
                hbm_bytes=held[MemoryLevel.HBM],
                ddr_bytes=held[MemoryLevel.DDR],
                ssd_bytes=held[MemoryLevel.SSD],
                activation_bytes=round(float(activation_R[rank])),
            )
        )
    return tuple(ranks)


def _min_over_max(values_R: MsArray, *, empty: float) -> float:
    return float(values_R.min() / values_R.max()) if values_R.max() > 0 else empty
