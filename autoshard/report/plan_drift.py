"""What a plan costs on today's access, and which tables drifted."""

from __future__ import annotations

from autoshard.core import CostBreakdown, CostModels, ShardingPlan
from autoshard.evaluation import evaluate
from autoshard.evaluation.batch_memory import rank_memory
from autoshard.evaluation.drift import AccessedPlan, cache_hits, distance, hot_rows
from autoshard.results.plan_drift import DriftedPart, DriftedTable, PlanDrift


def drift_of(accessed: AccessedPlan, costs: CostModels) -> PlanDrift:
    """Prices a plan on the access that it was made for, and on today's.

    Args:
        accessed: The plan and today's access.
        costs: Prices both.
    """
    plan, today = accessed.plan, accessed.today
    first, second = evaluate(plan, costs), evaluate(today, costs)
    tables = _tables(accessed, today)
    return PlanDrift(
        step_ms_planned=first.step_ms,
        step_ms_now=second.step_ms,
        change=second.step_ms.value / first.step_ms.value - 1.0 if first.step_ms.value else 0.0,
        free_bytes_planned=_least_free(plan, first),
        free_bytes_now=_least_free(today, second),
        parts=tuple(
            DriftedPart(name=part.value, planned_ms=one.value, now_ms=second.parts[part].value)
            for part, one in first.parts.items()
        ),
        tables=tuple(sorted(tables, key=lambda one: -one.distance * max(one.lookups_planned, one.lookups_now))),
    )


def _least_free(plan: ShardingPlan, priced: CostBreakdown) -> int:
    return min(one.free_bytes for one in rank_memory(plan, priced))


def _tables(accessed: AccessedPlan, today: ShardingPlan) -> list[DriftedTable]:
    plan = accessed.plan
    hot, hits, hits_now = hot_rows(plan), cache_hits(plan), cache_hits(today)
    found = []
    for table in plan.tables.tables:
        name, now = table.name, today.tables[table.name]
        rows, counted = accessed.planned.get(name), accessed.rows_now.get(name)
        num_hot = hot.get(name)
        found.append(
            DriftedTable(
                table=name,
                distance=min(1.0, distance(table.access, now.access, rows, counted)),
                is_by_rows=rows is not None and counted is not None,
                lookups_planned=table.pooling_factor,
                lookups_now=now.pooling_factor,
                hot_rows=num_hot,
                hot_share_planned=None if num_hot is None else table.access.slice(0, num_hot)[1],
                hot_share_now=None if num_hot is None else now.access.slice(0, num_hot)[1],
                cache_hits_planned=hits.get(name),
                cache_hits_now=hits_now.get(name),
            )
        )
    return found
