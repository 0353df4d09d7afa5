"""Runs of plans: what training jobs measured, beside what was predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from autoshard.api import FeatureDrift, RunAnswer, RunBody
from autoshard.core import Feature, ShardingPlan, TableSet
from autoshard.core.errors import InputError
from autoshard.core.quoting import shown
from autoshard.evaluation import evaluate
from autoshard.evaluation.drift import held_of
from autoshard.planning import plan_costs
from server.tasks.context import TaskContext
from server.tasks.inputs import stored_plan
from server.tasks.reply import Reply

#: Relative differences of mean ids and of predicted steps that count.
_FEATURE_SHARE, _STEP_SHARE = 0.1, 0.05


def answer_run(body: RunBody, context: TaskContext, stored: bytes) -> Reply:
    """Compares a run with its plan."""
    plan = stored_plan(stored)
    predicted, measured_ms = plan.prices.step_ms, median(body.steps_ms)
    is_outside = not predicted.low <= measured_ms <= predicted.high
    drifted_ms = _drifted_ms(plan, body.pooling_factors, context) if body.pooling_factors else None
    is_longer = drifted_ms is not None and abs(drifted_ms / predicted.value - 1) > _STEP_SHARE
    answer = RunAnswer(
        measured_ms=measured_ms,
        predicted_ms=predicted.value,
        low_ms=predicted.low,
        high_ms=predicted.high,
        is_outside=is_outside,
        features=_drifts(plan.tables, body.pooling_factors),
        drifted_ms=drifted_ms,
        is_drifted=is_outside or is_longer,
    )
    return Reply(status=200, body=answer.model_dump_json().encode())


def with_pooling(tables: TableSet, pooling_factors: Mapping[str, float]) -> TableSet:
    """Tables of which some features have other mean ids per sample; their spread grows alike.

    Raises:
        InputError: If there is no such feature, or a table cannot have so many ids.
    """
    known = {feature.name for table in tables.tables for feature in table.features}
    for name in pooling_factors:
        if name not in known:
            raise InputError(f"is of no feature of the plan's tables, got {shown(name)}", field="pooling_factors")
    changed = [
        replace(
            table,
            features=tuple(
                _scaled(feature, pooling_factors.get(feature.name, feature.pooling_factor))
                for feature in table.features
            ),
        )
        for table in tables.tables
    ]
    return replace(tables, tables=tuple(changed))


def _scaled(feature: Feature, pooling_factor: float) -> Feature:
    if not feature.pooling_factor:
        return replace(feature, pooling_factor=pooling_factor)
    scale = pooling_factor / feature.pooling_factor
    return replace(
        feature,
        pooling_factor=pooling_factor,
        pooling_variance=feature.pooling_variance * scale**2,
        pooling_p99=None if feature.pooling_p99 is None else feature.pooling_p99 * scale,
    )


def _drifted_ms(plan: ShardingPlan, pooling_factors: Mapping[str, float], context: TaskContext) -> float:
    """The plan's predicted step, longer or shorter by what today's models say of other mean ids per sample."""
    predicted, costs = plan.prices, plan_costs(plan, context.registry, risk=plan.risk)
    plans = (plan, held_of(plan, with_pooling(plan.tables, pooling_factors)))
    planned_ms, drifted_ms = (evaluate(one, costs, overlap=predicted.overlap).step_ms.value for one in plans)
    return predicted.step_ms.value * drifted_ms / planned_ms


def _drifts(tables: TableSet, pooling_factors: Mapping[str, float]) -> list[FeatureDrift]:
    """Features with other mean ids per sample, those first that change most ids times columns."""
    found = [
        (
            abs(pooling_factors[feature.name] - feature.pooling_factor) * table.embedding_dim,
            FeatureDrift(feature=feature.name, planned=feature.pooling_factor, measured=pooling_factors[feature.name]),
        )
        for table in tables.tables
        for feature in table.features
        if feature.name in pooling_factors
        and abs(pooling_factors[feature.name] - feature.pooling_factor) > _FEATURE_SHARE * feature.pooling_factor
    ]
    return [drift for _, drift in sorted(found, key=lambda one: -one[0])]
