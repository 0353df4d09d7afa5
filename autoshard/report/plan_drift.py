"""What a plan costs on today's access, and which tables drifted."""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.core import CostBreakdown, CostModels, ShardingPlan, TableSet
from autoshard.core.access.counted import CountedRows
from autoshard.evaluation import evaluate
from autoshard.evaluation.batch_memory import rank_memory
from autoshard.evaluation.drift import cache_hits, distance, hot_rows, on_access
from autoshard.results.plan_drift import DriftedPart, DriftedTable, PlanDrift


def drift_of(
    plan: ShardingPlan,
    now: TableSet,
    costs: CostModels,
    planned: Mapping[str, CountedRows],
    rows_now: Mapping[str, CountedRows],
) -> PlanDrift:
    """Prices a plan on the access that it was made for, and on today's.

    Args:
        plan: The plan.
        now: Its tables as they are looked up, see `with_access`.
        costs: Prices both.
        planned: Rows of the plan, see `planned_rows`.
        rows_now: Those of today.
    """
    today = on_access(plan, now, planned, rows_now)
    first, second = evaluate(plan, costs), evaluate(today, costs)
    tables = _tables(plan, today, planned, rows_now)
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


def _tables(
    plan: ShardingPlan, today: ShardingPlan, planned: Mapping[str, CountedRows], rows_now: Mapping[str, CountedRows]
) -> list[DriftedTable]:
    hot, hits, hits_now = hot_rows(plan), cache_hits(plan), cache_hits(today)
    found = []
    for table in plan.tables.tables:
        name, now = table.name, today.tables[table.name]
        rows, counted = planned.get(name), rows_now.get(name)
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
