"""The `predicted` object of a plan: what it was priced at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from autoshard.core import CostBreakdown, Estimate, RankCost
from autoshard.core.accepted import MAX_WORLD_SIZE
from autoshard.core.errors import FormatError
from autoshard.core.step import CollectiveTime, StepCollective, StepPart
from autoshard.formats.documents.kinds import (
    Field,
    Kind,
    fields_of,
    list_of,
    named,
    record,
    whole_number,
)


def _estimate(value: float, low: float, high: float) -> Estimate:
    if not low <= value <= high:
        raise FormatError("must satisfy low <= value <= high")
    return Estimate(value=value, low=low, high=high)


ESTIMATE: Final = named(
    "plan",
    "estimate",
    record(_estimate, *fields_of(Estimate)),
    "A predicted value in its 90% interval.",
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
_TIME: Final = record(CollectiveTime, *fields_of(CollectiveTime))


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


def prediction_kind(min_ranks: int = 1, max_ranks: int = MAX_WORLD_SIZE) -> Kind[CostBreakdown]:
    """The prediction for a plan by the ranks of a replica group."""
    listed = fields_of(
        CostBreakdown,
        known={Estimate: ESTIMATE},
        binding_rank=whole_number(0, max_ranks - 1),
        ranks=list_of(record(RankCost, *fields_of(RankCost)), min_ranks, max_ranks),
        parts=STEP_PARTS,
        collectives=collective_times(Field),
    )
    return named("plan", "predicted", record(_breakdown, *listed), "What the models predict of a step.")


def _breakdown(*, ranks: tuple[RankCost, ...], **values: Any) -> CostBreakdown:
    for index, cost in enumerate(ranks):
        if cost.rank != index:
            raise FormatError(
                f"must be {index}: ranks are listed in order, got {cost.rank}", field=f"ranks[{index}].rank"
            )
    return CostBreakdown(ranks=ranks, **values)
