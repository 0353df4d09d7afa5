"""The `predicted` object of a plan: what it was priced at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from autoshard.core import CostBreakdown, Estimate, LowerBound, RankCost
from autoshard.core.accepted import MAX_WORLD_SIZE
from autoshard.core.errors import FormatError
from autoshard.core.step import CollectiveTime, Overlap, StepCollective, StepPart
from autoshard.formats.documents.kinds import (
    TEXT,
    Field,
    Kind,
    by_name,
    list_of,
    named,
    number_in,
    one_of,
    optional,
    record,
    whole_number,
)


def _estimate(value: float, low: float, high: float) -> Estimate:
    if not low <= value <= high:
        raise FormatError("must satisfy low <= value <= high")
    return Estimate(value=value, low=low, high=high)


_NUMBER: Final = number_in()
_BYTES: Final = whole_number()
ESTIMATE: Final = named(
    "plan",
    "estimate",
    record(
        _estimate,
        Field("value", _NUMBER, "The prediction."),
        Field("low", _NUMBER, "Lower end."),
        Field("high", _NUMBER, "Upper end."),
    ),
    "A predicted value in its 90% interval.",
)
_RANK: Final = record(
    RankCost,
    Field("rank", whole_number(), "The rank."),
    Field("input_ms", _NUMBER, "As parts.input."),
    Field("forward_kernel_ms", _NUMBER, "As parts.forward_kernel."),
    Field("forward_exchange_ms", _NUMBER, "As parts.forward_exchange."),
    Field("backward_exchange_ms", _NUMBER, "As parts.backward_exchange."),
    Field("backward_kernel_ms", _NUMBER, "As parts.backward_kernel."),
    Field("kernel_ms", _NUMBER, "Forward and backward kernels."),
    Field("sync_ms", _NUMBER, "All-reduce and synchronisation."),
    Field("hbm_bytes", _BYTES, "Tables, optimizer states and caches in device memory."),
    Field("ddr_bytes", _BYTES, "Tables and optimizer states in host memory."),
    Field("ssd_bytes", _BYTES, "Tables on disks."),
    Field("activation_bytes", _BYTES, "A batch's inputs and outputs, and gradients of copied rows."),
    optional("training_bytes", _BYTES, "Activations, gradients of the backward pass, and dense layers.", 0),
)
STEP_PARTS: Final[Kind[dict[StepPart, Estimate]]] = record(
    lambda **values: {StepPart(name): estimate for name, estimate in values.items()},
    Field("input", ESTIMATE, "Exchange of ids and lengths."),
    Field("forward_kernel", ESTIMATE, "Lookup and pooling."),
    Field("forward_exchange", ESTIMATE, "Embeddings to the ranks of their samples."),
    Field("backward_exchange", ESTIMATE, "Gradients to the ranks of their rows."),
    Field("backward_kernel", ESTIMATE, "Update of the rows, optimizer included."),
    Field("dense", ESTIMATE, "Dense layers and synchronisation."),
    parts=lambda estimates: {part.value: estimate for part, estimate in estimates.items()},
)
_BOUND: Final = record(
    LowerBound,
    optional("proven_ms", _NUMBER, "Holds for every plan; left out where prices prove nothing.", None),
    optional("estimated_ms", _NUMBER, "Likely to hold; left out where the proven bound is as sharp.", None),
)
_TIME: Final = record(
    CollectiveTime,
    Field("serialised_ms", _NUMBER, "From its start to its end."),
    Field("exposed_ms", _NUMBER, "By how much the step would be shorter without it."),
)


def collective_times(field: Callable[[str, Kind[Any], str], Field]) -> Kind[dict[StepCollective, CollectiveTime]]:
    """Times of the collectives of a step; `field` is `Field` if all are there, `optional` if any may be left out."""
    return record(
        lambda **values: {StepCollective(name): time for name, time in values.items()},
        field("input", _TIME, "Exchange of ids and lengths."),
        field("forward_exchange", _TIME, "Embeddings to the ranks of their samples."),
        field("backward_exchange", _TIME, "Gradients to the ranks of their rows."),
        field("all_reduce", _TIME, "Gradients of dense layers and of tables that are held in several replicas."),
        field("group_sync", _TIME, "Weights and optimizer states of replica groups, per step."),
        parts=lambda times: {collective.value: time for collective, time in times.items()},
    )


_MEANINGS: Final = {
    "binding_rank": "The rank whose kernels take longest, numbered within a replica group.",
    "ranks": "One entry per rank of one replica group, numbered within it: ranks at the same place in their groups "
    "hold the same and take equally long.",
    "overlap": "Which parts of the step were taken to run at the same time: none, pipelined "
    "as in a pipelined run, neo as in Neo's Appendix B, Eq. 1, or neo_prefetch as there and in its Sec. 4.2.",
    "models": "Names of the models behind the prediction: kernel, communication, and where there are any, dense and "
    "step.",
    "sync_ms": "All-reduce of the dense layers' gradients and of tables that are held in several replicas, and "
    "synchronisation of replica groups.",
    "group_sync_ms": "Synchronisation of replica groups alone, per step; left out where there is one group.",
    "parts": "Parts of the step at their slowest ranks; dense holds dense_ms, sync_ms and what belongs to no part.",
    "collectives": "Collectives of the step at their slowest ranks: how long they take, and what of it does not hide.",
    "bounds": "What no plan takes less than: step and parts of it over the sharding types that the planner may choose "
    "from, max_kernel over whole tables on single ranks; left out unless asked for.",
}


def prediction_kind(min_ranks: int = 1, max_ranks: int = MAX_WORLD_SIZE) -> Kind[CostBreakdown]:
    """The prediction for a plan by the ranks of a replica group.

    Optional fields are younger than the schema, and so missing from plans that were written before them.
    """
    last_rank = whole_number(0, max_ranks - 1)
    breakdown = record(
        _breakdown,
        Field("step_ms", ESTIMATE, "One training step."),
        Field("max_kernel_ms", _NUMBER, "Kernel time of the slowest rank."),
        Field("balance", _NUMBER, "Least over most kernel time of a rank (AutoShard)."),
        Field("exchange_balance", _NUMBER, "Least over most exchange time of a rank (OPER)."),
        Field("imbalance", _NUMBER, "Most over mean kernel time of the ranks (2D)."),
        Field("floor_kernel_ms", _NUMBER, "Kernel time of the costliest shard."),
        Field("binding_rank", last_rank, _MEANINGS["binding_rank"]),
        Field("binding_shard", TEXT, "Table of the binding rank's costliest shard."),
        Field("cost_model", TEXT, "The model of kernels."),
        Field("ranks", list_of(_RANK, min_ranks, max_ranks), _MEANINGS["ranks"]),
        optional("overlap", one_of(Overlap), _MEANINGS["overlap"], None),
        optional("models", by_name(TEXT), _MEANINGS["models"], {}),
        optional("dense_ms", _NUMBER, "Dense layers, forward and backward.", None),
        optional("sync_ms", _NUMBER, _MEANINGS["sync_ms"], None),
        optional("group_sync_ms", _NUMBER, _MEANINGS["group_sync_ms"], None),
        optional("parts", STEP_PARTS, _MEANINGS["parts"], {}),
        optional("collectives", collective_times(Field), _MEANINGS["collectives"], {}),
        optional("bounds", by_name(_BOUND), _MEANINGS["bounds"], {}),
    )
    return named("plan", "predicted", breakdown, "What the models predict of a step.")


def _breakdown(*, ranks: tuple[RankCost, ...], **values: Any) -> CostBreakdown:
    for index, cost in enumerate(ranks):
        if cost.rank != index:
            raise FormatError(
                f"must be {index}: ranks are listed in order, got {cost.rank}", field=f"ranks[{index}].rank"
            )
    return CostBreakdown(ranks=ranks, **values)
