"""The `predicted` object of a plan: what it was priced at."""

from __future__ import annotations

from dataclasses import fields as fields_of
from typing import Any

from autoshard.core import CostBreakdown, Estimate, RankCost
from autoshard.core.errors import FormatError
from autoshard.formats.fields import Fields

_ESTIMATE_FIELDS = tuple(item.name for item in fields_of(Estimate))
_RANK_FIELDS = tuple(item.name for item in fields_of(RankCost))
_NUMBERS = ("max_kernel_ms", "balance", "exchange_balance", "imbalance", "floor_kernel_ms")


def prediction_from_json(plan: Fields, group_size: int) -> CostBreakdown:
    """Reads `predicted` of a plan whose replica groups have `group_size` ranks.

    Raises:
        FormatError: If it does not follow the schema.
    """
    fields = plan.fields("predicted", required=[item.name for item in fields_of(CostBreakdown)])
    path = fields.at("ranks")
    ranks = tuple(
        _rank_from_json(value, f"{path}[{index}]", index)
        for index, value in enumerate(fields.items("ranks", minimum=group_size, maximum=group_size))
    )
    return CostBreakdown(
        step_ms=_estimate_from_json(fields),
        binding_rank=fields.whole("binding_rank", maximum=group_size - 1),
        binding_shard=fields.text("binding_shard"),
        cost_model=fields.text("cost_model"),
        ranks=ranks,
        **{name: fields.number(name) for name in _NUMBERS},
    )


def prediction_to_json(predicted: CostBreakdown) -> dict[str, object]:
    """The `predicted` object of a breakdown."""
    written = {item.name: getattr(predicted, item.name) for item in fields_of(CostBreakdown)}
    written["step_ms"] = {name: getattr(predicted.step_ms, name) for name in _ESTIMATE_FIELDS}
    written["ranks"] = [{name: getattr(rank, name) for name in _RANK_FIELDS} for rank in predicted.ranks]
    return written


def _estimate_from_json(predicted: Fields) -> Estimate:
    fields = predicted.fields("step_ms", required=_ESTIMATE_FIELDS)
    estimate = Estimate(**{name: fields.number(name) for name in _ESTIMATE_FIELDS})
    if not estimate.low <= estimate.value <= estimate.high:
        raise FormatError("must satisfy low <= value <= high", field=fields.path)
    return estimate


def _rank_from_json(value: object, path: str, rank: int) -> RankCost:
    fields = Fields(value, path, required=_RANK_FIELDS)
    values: dict[str, Any] = {
        name: fields.number(name) if name.endswith("_ms") else fields.whole(name) for name in _RANK_FIELDS
    }
    if values["rank"] != rank:
        raise FormatError(f"must be {rank}: ranks are listed in order, got {values['rank']}", field=fields.at("rank"))
    return RankCost(**values)
