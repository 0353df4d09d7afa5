"""Prices a plan, whoever made it.

Shape suffixes: R ranks of a replica group, M shards as ranks hold them, U distinct small tables, H width of a code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autoshard.core import (
    CostBreakdown,
    CostModel,
    CostModels,
    KernelCosts,
    MemoryLevel,
    RankCost,
    ShardingPlan,
)
from autoshard.core.costs import MsArray
from autoshard.core.held import PlacedArrays, sums_by_rank
from autoshard.core.step import EXCHANGE_PARTS, PART_INDEX, Overlap
from autoshard.evaluation.batch_memory import BatchMemory
from autoshard.evaluation.cached_rows import behind_caches, in_device_memory
from autoshard.evaluation.group_sync import group_sync_ms
from autoshard.evaluation.rank_work import RankWork
from autoshard.evaluation.step_price import StepPrice, StepPricer, price_plan_step
from autoshard.evaluation.traffic import Traffic, plan_traffic
from autoshard.evaluation.unseen_kernels import UnseenKernelsModel, pricing
from autoshard.evaluation.upper_end import UpperEndKernels


def evaluate(plan: ShardingPlan, costs: CostModels, *, overlap: Overlap | None = None) -> CostBreakdown:
    """Predicted cost of one training step, per rank and in total.

    Kernels come from the cost model: all shards of a rank run fused. Each collective waits for the slowest rank of
    the stage before it, so every stage counts at its slowest rank. Dense layers are priced where the plan's tables
    describe them; else neither they nor the all-reduce of their gradients count.

    `step_ms` is what the runtime takes, as far as `costs.step` knows it; ranks, `max_kernel_ms` and balances are
    what the models of the parts say. Kernels on rows behind caches are priced as `behind_caches` says, and the caches
    count as device memory. So do, as activations, a batch's inputs and outputs and the gradients of rows that are held
    more than once.

    A plan over several replica groups is that of one group, its ranks, its links and its share of the batch: all
    groups do alike at the same time, and ranks, balances and memory are those of one. What is added is the
    synchronisation of weights and optimizer states with the other groups; dense layers' gradients meet over the whole
    world.

    Args:
        plan: Any valid plan.
        costs: Models to price it with.
        overlap: Which parts hide behind each other. Left out: what the runtime does that the step model was calibrated
            on; without one nothing, as the runtime does unless it is asked for more. The answer says which.

    Returns:
        The breakdown. The interval of `step_ms` combines those of kernels, collectives and dense layers.

    Raises:
        ModelError: If the cost model cannot price a shard.
        InvalidPlanError: If replica groups do not divide the ranks, or have no equal share of each node; or if the
            dense layers make no model.

    Source:
        Neo Appendix B, Eq. 1, for `Overlap.NEO`; `StepTimes.step_ms` for the others. `balance` is AutoShard Sec. 4.3,
        and 0 if a rank holds nothing; `imbalance` is from 2D, `exchange_balance` from OPER. Replica groups: 2D Sec.
        3.1 and 5, Eq. 1.
    """
    return breakdown_of(plan, price_with_kernels(plan, costs, overlap=overlap))


def breakdown_of(plan: ShardingPlan, priced: PricedPlan) -> CostBreakdown:
    """As `evaluate`, of a plan that has been priced."""
    group, kernels, step = plan.of_one_group(), priced.kernels, priced.step
    kernel_ms_R = kernels.costs.kernel_ms_S
    _, forward_ms_R, backward_ms_R = step.stages.exchange_ms_XBR
    exchange_ms_R = forward_ms_R + backward_ms_R
    return CostBreakdown(
        step_ms=step.step_ms,
        max_kernel_ms=float(kernel_ms_R.max()),
        balance=_min_over_max(kernel_ms_R, empty=0.0),
        exchange_balance=_min_over_max(exchange_ms_R, empty=1.0),
        imbalance=float(kernel_ms_R.max() / kernel_ms_R.mean()) if kernel_ms_R.any() else 1.0,
        floor_kernel_ms=float(kernels.alone_ms_U.max()),
        binding_rank=kernels.binding_rank,
        binding_shard=kernels.binding_shard,
        cost_model=step.models["kernel"],
        ranks=_rank_costs(priced, BatchMemory.of(group, priced.traffic)),
        overlap=step.overlap,
        models=step.models,
        dense_ms=step.times.dense_layers,
        sync_ms=step.times.all_reduce + step.times.group_sync,
        group_sync_ms=step.times.group_sync if plan.replica_groups.num_groups > 1 else None,
        parts=step.parts,
        collectives=step.times.collectives(step.overlap),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPrices:
    """Priced kernels of a replica group.

    Attributes:
        held: What the ranks hold.
        costs: Of each rank.
        alone_ms_U: Time of each distinct small table alone.
        binding_rank: The slowest rank.
        binding_shard: Table of its costliest shard.
    """

    held: PlacedArrays
    costs: KernelCosts
    alone_ms_U: MsArray
    binding_rank: int
    binding_shard: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedPlan:
    """A plan's step, and what is behind it of one of its replica groups.

    Attributes:
        kernels: Of each rank.
        traffic: What ranks send.
        step: The whole.
    """

    kernels: KernelPrices
    traffic: Traffic
    step: StepPrice


def price_step(plan: ShardingPlan, costs: CostModels, *, overlap: Overlap | None = None) -> StepPrice:
    """The step of `evaluate` with all its parts, the overlap, and the names of the models behind it."""
    return price_with_kernels(plan, costs, overlap=overlap).step


def price_with_kernels(plan: ShardingPlan, costs: CostModels, *, overlap: Overlap | None = None) -> PricedPlan:
    """As `price_step`, with what is behind it, of one replica group."""
    group = plan.of_one_group()
    if isinstance(costs.kernel, UnseenKernelsModel | UpperEndKernels):
        # Without a kernel model that prices none of the plan's shards.
        locals_ = [in_device_memory(local) for local in group.arrays.locals_U]
        costs = replace(costs, kernel=pricing(costs.kernel, locals_))
    kernels, traffic = _price_kernels(group, costs.kernel), plan_traffic(group)
    work, sync_ms_R = RankWork.of(group, traffic), group_sync_ms(plan, kernels.held, costs.comm)
    pricer = StepPricer(plan.tables, group.topology, costs, world=plan.topology, overlap=overlap)
    return PricedPlan(
        kernels=kernels,
        traffic=traffic,
        step=price_plan_step(pricer, plan, work, kernels.costs, sync_ms_R),
    )


def _price_kernels(group: ShardingPlan, model: CostModel) -> KernelPrices:
    held, num_ranks = group.arrays, group.group_size
    if any(local.level is not MemoryLevel.HBM for local in held.locals_U):
        model = behind_caches(model, group.topology)
    codes_UH = model.encode(held.locals_U)
    costs = model.predict_parts(sums_by_rank(codes_UH[held.local_M], held.ranks_M, num_ranks))
    alone_ms_U = model.predict_ms(codes_UH)
    # A rank without shards is never the slowest, even where nothing costs anything.
    binding = int(np.where(held.counts(num_ranks) > 0, costs.kernel_ms_S, -1.0).argmax())
    # Shards share the arrays of their ranks.
    holds = {key: binding in ranks for key, ranks in {id(ranks): ranks for ranks in held.ranks_M}.items()}
    on_binding = [number for number, ranks in enumerate(held.ranks_M) if holds[id(ranks)]]
    costliest = on_binding[int(alone_ms_U[held.local_M[on_binding]].argmax())]
    return KernelPrices(
        held=held,
        costs=costs,
        alone_ms_U=alone_ms_U,
        binding_rank=binding,
        binding_shard=held.table_of(costliest),
    )


def _held_bytes(held: PlacedArrays, num_ranks: int) -> dict[MemoryLevel, list[int]]:
    """Weights, optimizer states and caches of each rank by level, exact to the byte."""
    bytes_U = [local.held_bytes for local in held.locals_U]
    found = {}
    for level in MemoryLevel:
        of_level = [one[level] for one in bytes_U]
        # Sums of absurd sizes would wrap around in 64-bit integers.
        is_small = max(of_level) * len(held.ranks_M) < 2**62
        bytes_M = np.array(of_level, dtype=np.int64 if is_small else object)[held.local_M]
        found[level] = sums_by_rank(bytes_M, held.ranks_M, num_ranks).tolist()
    return found


def _rank_costs(priced: PricedPlan, memory: BatchMemory) -> tuple[RankCost, ...]:
    kernels, step = priced.kernels, priced.step
    num_ranks = len(memory.activation_R)
    costs, held = kernels.costs, _held_bytes(kernels.held, num_ranks)
    input_ms_R, forward_ms_R, backward_ms_R = (step.parts_ms_PR[PART_INDEX[part]] for part in EXCHANGE_PARTS)
    # Lists, since worlds may have 100,000 ranks: arrays are a hundred times slower to read number by number.
    times_R = [
        part_R.tolist()
        for part_R in (
            input_ms_R,
            costs.forward_ms_S,
            forward_ms_R,
            backward_ms_R,
            costs.backward_ms_S,
            costs.kernel_ms_S,
            step.stages.sync_ms_BR + step.group_sync_ms_R,
        )
    ]
    return tuple(
        RankCost(
            rank=rank,
            input_ms=input_ms,
            forward_kernel_ms=forward_kernel_ms,
            forward_exchange_ms=forward_exchange_ms,
            backward_exchange_ms=backward_exchange_ms,
            backward_kernel_ms=backward_kernel_ms,
            kernel_ms=kernel_ms,
            sync_ms=sync_ms,
            hbm_bytes=held[MemoryLevel.HBM][rank],
            ddr_bytes=held[MemoryLevel.DDR][rank],
            ssd_bytes=held[MemoryLevel.SSD][rank],
            activation_bytes=round(activation_bytes),
            training_bytes=round(training_bytes),
        )
        for rank, (
            input_ms,
            forward_kernel_ms,
            forward_exchange_ms,
            backward_exchange_ms,
            backward_kernel_ms,
            kernel_ms,
            sync_ms,
            activation_bytes,
            training_bytes,
        ) in enumerate(zip(*times_R, memory.activation_R.tolist(), memory.training_R.tolist(), strict=True))
    )


def _min_over_max(values_R: MsArray, *, empty: float) -> float:
    return float(values_R.min() / values_R.max()) if values_R.max() > 0 else empty
