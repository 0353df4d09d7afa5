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
    Estimate,
    KernelCosts,
    MemoryLevel,
    RankCost,
    ShardingPlan,
)
from autoshard.core.costs import MsArray
from autoshard.core.errors import InvalidPlanError
from autoshard.evaluation.traffic import Traffic, plan_traffic


def evaluate(plan: ShardingPlan, costs: Costs) -> CostBreakdown:
    """Predicted cost of one training step's embedding part, per rank and in total.

    Kernels come from the cost model: all shards of a rank run fused. Each collective waits for the slowest rank of
    the stage before it, so that a step is

        input distribution + forward kernel + forward exchange
            + max(backward exchange + backward kernel, synchronisation of replicas)

    with every stage at its slowest rank.

    Args:
        plan: Any valid plan of one replica group.
        costs: Models to price it with.

    Returns:
        The breakdown. The interval of `step_ms` is that of the kernels; collectives have none.

    Raises:
        ModelError: If the cost model cannot price a shard.
        InvalidPlanError: If the plan is replicated over groups of ranks, which is not priced yet.

    Source:
        Neo Appendix B, Eq. 1 without the dense layers: neither MLPs nor interaction nor the all-reduce of their
        gradients are counted, so nothing hides behind them. `balance` is AutoShard Sec. 4.3, and 0 if a rank
        holds nothing; `imbalance` is from 2D, `exchange_balance` from OPER.
    """
    if plan.replica_groups.num_groups != 1:
        raise InvalidPlanError("plans over several groups cannot be priced", field="replica_groups.num_groups")
    kernels = _price_kernels(plan, costs.kernel)
    traffic = plan_traffic(plan)
    stages = _price_stages(plan, costs, traffic)
    kernel_ms_R = kernels.costs.kernel_ms_S
    exchange_ms_R = stages.forward_ms_R + stages.backward_ms_R
    return CostBreakdown(
        step_ms=_step_ms(kernels.costs, stages),
        max_kernel_ms=float(kernel_ms_R.max()),
        balance=_min_over_max(kernel_ms_R, empty=0.0),
        exchange_balance=_min_over_max(exchange_ms_R, empty=1.0),
        imbalance=float(kernel_ms_R.max() / kernel_ms_R.mean()) if kernel_ms_R.any() else 1.0,
        floor_kernel_ms=kernels.floor_ms,
        binding_rank=kernels.binding_rank,
        binding_shard=kernels.binding_shard,
        cost_model=costs.kernel.name,
        ranks=_rank_costs(plan, kernels.costs, stages, traffic),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernels:
    costs: KernelCosts
    floor_ms: float
    binding_rank: int
    binding_shard: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stages:
    input_ms_R: MsArray
    forward_ms_R: MsArray
    backward_ms_R: MsArray
    sync_ms_R: MsArray


def _price_kernels(plan: ShardingPlan, model: CostModel) -> _Kernels:
    held = plan.local_shards()
    flat = [shard for shards in held for shard in shards]
    owner_N = np.repeat(np.arange(len(held)), [len(shards) for shards in held])
    codes_NH = model.encode(flat)
    codes_RH = np.zeros((len(held), codes_NH.shape[1]), dtype=np.float32)
    np.add.at(codes_RH, owner_N, codes_NH)
    costs = model.price_parts(codes_RH)
    alone_ms_N = model.price(codes_NH)
    # A rank without shards is never the slowest, even where nothing costs anything.
    binding = int(np.where(np.bincount(owner_N, minlength=len(held)) > 0, costs.kernel_ms_S, -1.0).argmax())
    on_binding = np.flatnonzero(owner_N == binding)
    costliest = on_binding[alone_ms_N[on_binding].argmax()]
    return _Kernels(
        costs=costs,
        floor_ms=float(alone_ms_N.max()),
        binding_rank=binding,
        binding_shard=flat[costliest].table,
    )


def _price_stages(plan: ShardingPlan, costs: Costs, traffic: Traffic) -> _Stages:
    def all_to_all(sent_bytes_RR: MsArray) -> MsArray:
        return costs.comm.all_to_all_ms(sent_bytes_RR, plan.topology)

    return _Stages(
        # Ids can only travel once the lengths have told how many there are (Neo Sec. 7.1).
        input_ms_R=all_to_all(traffic.lengths_RR) + all_to_all(traffic.ids_RR),
        forward_ms_R=all_to_all(traffic.forward_RR),
        backward_ms_R=all_to_all(traffic.backward_RR),
        sync_ms_R=np.array([costs.comm.all_reduce_ms(float(size), plan.topology) for size in traffic.sync_R]),
    )


def _step_ms(kernels: KernelCosts, stages: _Stages) -> Estimate:
    forward_ms = kernels.forward_ms_S.max() + stages.forward_ms_R.max()
    backward_ms = stages.backward_ms_R.max() + kernels.backward_ms_S.max()
    value = float(stages.input_ms_R.max() + forward_ms + max(backward_ms, stages.sync_ms_R.max()))
    kernel_ms = float(kernels.forward_ms_S.max() + kernels.backward_ms_S.max())
    worst = int(kernels.kernel_ms_S.argmax())
    slowest_ms = float(kernels.kernel_ms_S[worst])
    below = kernel_ms * (1 - float(kernels.low_ms_S[worst]) / slowest_ms) if slowest_ms > 0 else 0.0
    above = kernel_ms * (float(kernels.high_ms_S[worst]) / slowest_ms - 1) if slowest_ms > 0 else 0.0
    return Estimate(value=value, low=value - below, high=value + above)


def _rank_costs(plan: ShardingPlan, kernels: KernelCosts, stages: _Stages, traffic: Traffic) -> tuple[RankCost, ...]:
    ranks = []
    activation_R = traffic.activation_bytes()
    for rank, shards in enumerate(plan.local_shards()):
        held = {level: sum(shard.memory_bytes for shard in shards if shard.level is level) for level in MemoryLevel}
        ranks.append(
            RankCost(
                rank=rank,
                input_ms=float(stages.input_ms_R[rank]),
                forward_kernel_ms=float(kernels.forward_ms_S[rank]),
                forward_exchange_ms=float(stages.forward_ms_R[rank]),
                backward_exchange_ms=float(stages.backward_ms_R[rank]),
                backward_kernel_ms=float(kernels.backward_ms_S[rank]),
                kernel_ms=float(kernels.kernel_ms_S[rank]),
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
