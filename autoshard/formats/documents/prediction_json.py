"""The `predicted` object of a plan: what it was priced at."""

from __future__ import annotations

from dataclasses import fields as fields_of
from typing import Any

from autoshard.core import CostBreakdown, Estimate, RankCost
from autoshard.core.errors import FormatError
from autoshard.core.quoting import shortened
from autoshard.core.step import Overlap, StepPart
from autoshard.formats.documents.fields import Fields, text
from autoshard.formats.documents.json_document import join

_ESTIMATE_FIELDS = tuple(item.name for item in fields_of(Estimate))
_RANK_FIELDS = tuple(item.name for item in fields_of(RankCost))
_NUMBERS = ("max_kernel_ms", "balance", "exchange_balance", "imbalance", "floor_kernel_ms")
#: Younger than the schema, and so missing from plans that were written before them.
_OPTIONAL = ("overlap", "models", "dense_ms", "sync_ms", "group_sync_ms", "parts")
_REQUIRED = tuple(item.name for item in fields_of(CostBreakdown) if item.name not in _OPTIONAL)
_PARTS = tuple(part.value for part in StepPart)


def prediction_from_json(plan: Fields, group_size: int) -> CostBreakdown:
    """Reads `predicted` of a plan whose replica groups have `group_size` ranks.

    Raises:
        FormatError: If it does not follow the schema.
    """
    fields = plan.fields("predicted", required=_REQUIRED, optional=_OPTIONAL)
    path = fields.at("ranks")
    ranks = tuple(
        _rank_from_json(value, f"{path}[{index}]", index)
        for index, value in enumerate(fields.items("ranks", minimum=group_size, maximum=group_size))
    )
    return CostBreakdown(
        step_ms=_estimate_from_json(fields, "step_ms"),
        binding_rank=fields.whole("binding_rank", maximum=group_size - 1),
        binding_shard=fields.text("binding_shard"),
        cost_model=fields.text("cost_model"),
        ranks=ranks,
        overlap=fields.choice("overlap", Overlap, Overlap.NONE) if "overlap" in fields else None,
        models=_models_from_json(fields),
        dense_ms=fields.number("dense_ms") if "dense_ms" in fields else None,
        sync_ms=fields.number("sync_ms") if "sync_ms" in fields else None,
        group_sync_ms=fields.number("group_sync_ms") if "group_sync_ms" in fields else None,
        parts=_parts_from_json(fields) if "parts" in fields else {},
        **{name: fields.number(name) for name in _NUMBERS},
    )


def prediction_to_json(predicted: CostBreakdown) -> dict[str, object]:
    """The `predicted` object of a breakdown."""
    written = {item.name: getattr(predicted, item.name) for item in fields_of(CostBreakdown)}
    written["step_ms"] = _estimate_to_json(predicted.step_ms)
    written["ranks"] = [{name: getattr(rank, name) for name in _RANK_FIELDS} for rank in predicted.ranks]
    written["models"] = dict(predicted.models)
    written["parts"] = {part.value: _estimate_to_json(predicted.parts[part]) for part in predicted.parts}
    return {name: value for name, value in written.items() if name in _REQUIRED or value not in (None, {})}


def _models_from_json(predicted: Fields) -> dict[str, str]:
    path = predicted.at("models")
    return {
        text(name, path): text(model, join(path, shortened(name)))
        for name, model in predicted.mapping("models").items()
    }


def _parts_from_json(predicted: Fields) -> dict[StepPart, Estimate]:
    fields = predicted.fields("parts", required=_PARTS)
    return {part: _estimate_from_json(fields, part.value) for part in StepPart}


def _estimate_to_json(estimate: Estimate) -> dict[str, float]:
    return {name: getattr(estimate, name) for name in _ESTIMATE_FIELDS}


def _estimate_from_json(holder: Fields, name: str) -> Estimate:
    fields = holder.fields(name, required=_ESTIMATE_FIELDS)
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
