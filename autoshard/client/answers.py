"""Answers of the service that clients read as this package's types; all others are those of `autoshard.api`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from autoshard.api import ComparisonAnswer, JobAnswer, PlanAnswer
from autoshard.client.problems import error_of_fault
from autoshard.core.errors import AutoshardError

if TYPE_CHECKING:
    from autoshard.core import ShardingPlan
    from autoshard.results.comparison import ComparedPlan
    from autoshard.results.explanation import Explanation, Improvement


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPlan:
    """A plan with the id under which the service has it.

    Attributes:
        id: Digest of the plan.
        plan: The plan.
        notes: How a table list was read, and what was taken for what it leaves open, such as its batch size.
        warnings: What its search did not have of its time.
    """

    id: str
    plan: ShardingPlan
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedComparison:
    """Planners side by side.

    Attributes:
        document: The service's own document (`autoshard.comparison/1`).
        rows: A row for each planner.
        notes: As of `StoredPlan`.
    """

    document: Mapping[str, Any]
    rows: tuple[ComparedPlan, ...]
    notes: tuple[str, ...] = ()


class Job(JobAnswer):
    """A job, and its failure as an error of this package."""

    @property
    def failure(self) -> AutoshardError | None:
        """Why it failed."""
        return None if self.problem is None else error_of_fault(self.problem)


def stored_plan(found: httpx.Response) -> StoredPlan:
    """Reads an answer that holds a plan."""
    from autoshard.formats import plan_from_json

    answer = PlanAnswer.model_validate_json(found.content)
    return StoredPlan(
        id=answer.id,
        plan=plan_from_json(answer.plan, "plan"),
        notes=tuple(answer.notes),
        warnings=tuple(answer.warnings),
    )


def comparison(found: httpx.Response) -> ServedComparison:
    """Reads an answer with several planners."""
    from autoshard.formats import plan_from_json
    from autoshard.results.comparison import ComparedPlan

    answer = ComparisonAnswer.model_validate_json(found.content)
    rows = []
    for row in answer.comparison["planners"]:
        planner = row["planner"]
        plan, fault = answer.plans.get(planner), answer.failures.get(planner)
        rows.append(
            ComparedPlan(
                planner=planner,
                planning_s=row["planning_s"],
                plan=None if plan is None else plan_from_json(plan, f"plans.{planner}"),
                failure=None if fault is None else error_of_fault(fault),
            )
        )
    return ServedComparison(document=answer.comparison, rows=tuple(rows), notes=tuple(answer.notes))


def explanation(found: httpx.Response) -> Explanation:
    """Reads an explanation."""
    from pydantic import TypeAdapter

    from autoshard.results.explanation import Explanation

    return TypeAdapter(Explanation).validate_json(found.content)


def improvements(found: httpx.Response) -> tuple[Explanation, tuple[Improvement, ...]]:
    """Reads an explanation with the single changes that were planned."""
    from autoshard.results.explanation import EXPLANATION, Explanation

    parts = dict(EXPLANATION.from_json(found.json()))
    changes = parts.pop("improvements")
    return Explanation(**parts), changes
