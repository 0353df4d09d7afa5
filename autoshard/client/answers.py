"""What the service answers with, as this package's types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from autoshard.client.problems import error_of_fault
from autoshard.core import ShardingPlan
from autoshard.evaluation.measured import ComparedPlan
from autoshard.formats import plan_from_json
from autoshard.planners.hybrid.explanation import Explanation

_EXPLANATION = TypeAdapter(Explanation)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPlan:
    """A plan with the id under which the service has it."""

    id: str
    plan: ShardingPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """A stored plan, in a list; `created_at` is UTC (ISO 8601)."""

    id: str
    created_at: str
    planner: str
    device: str
    num_tables: int
    num_ranks: int
    step_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanList:
    """One page of stored plans, the latest first; `next` is the cursor of the next page, None on the last."""

    plans: tuple[PlanSummary, ...]
    next: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """A version of a trained model; `relative_error` is on held-out samples, None if not on record."""

    kind: str
    name: str
    id: str
    aliases: tuple[str, ...]
    shipped: bool
    used: bool
    published_at: str
    relative_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """Ids of the versions of a model that are used and tried."""

    kind: str
    name: str
    production: str | None
    candidate: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Planners side by side; the first is the service's own document (`autoshard.comparison/1`)."""

    document: Mapping[str, Any]
    rows: tuple[ComparedPlan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Whether documents can be read: `faults` are texts, the first fault of each."""

    is_valid: bool
    faults: tuple[str, ...]


def stored_plan(document: Mapping[str, Any]) -> StoredPlan:
    """Reads an answer that holds a plan."""
    return StoredPlan(id=document["id"], plan=plan_from_json(document["plan"], "plan"))


def plan_list(document: Mapping[str, Any]) -> PlanList:
    """Reads a page of plans."""
    return PlanList(plans=tuple(PlanSummary(**plan) for plan in document["plans"]), next=document["next"])


def comparison(document: Mapping[str, Any]) -> Comparison:
    """Reads an answer with several planners."""
    rows = []
    for row in document["comparison"]["planners"]:
        planner = row["planner"]
        plan, fault = document["plans"].get(planner), document["failures"].get(planner)
        rows.append(
            ComparedPlan(
                planner=planner,
                planning_s=row["planning_s"],
                plan=None if plan is None else plan_from_json(plan, f"plans.{planner}"),
                failure=None if fault is None else error_of_fault(fault),
            )
        )
    return Comparison(document=document["comparison"], rows=tuple(rows))


def explanation(document: Mapping[str, Any]) -> Explanation:
    """Reads an explanation."""
    return _EXPLANATION.validate_python(document)


def validation(document: Mapping[str, Any]) -> Validation:
    """Reads whether documents are valid."""
    return Validation(is_valid=document["is_valid"], faults=tuple(fault["detail"] for fault in document["faults"]))


def models(document: Mapping[str, Any]) -> tuple[ModelSummary, ...]:
    """The versions of a list."""
    return tuple(ModelSummary(**{**item, "aliases": tuple(item["aliases"])}) for item in document["models"])


def model_state(document: Mapping[str, Any]) -> ModelState:
    """What the aliases of a model name."""
    return ModelState(**{name: document[name] for name in ("kind", "name", "production", "candidate")})
