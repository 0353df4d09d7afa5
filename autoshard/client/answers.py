"""What the service answers with, as this package's types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from autoshard.client.problems import error_of_fault
from autoshard.core.errors import AutoshardError

if TYPE_CHECKING:
    from autoshard.core import ShardingPlan
    from autoshard.evaluation.measured import ComparedPlan
    from autoshard.improvements import Improvement
    from autoshard.planners.hybrid.explanation import Explanation


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
    """A version of a trained model.

    Attributes:
        kind: What it is for.
        name: Its device.
        id: The version.
        aliases: What names it.
        shipped: Whether it came with the service's autoshard.
        used: Whether requests are answered with it.
        published_at: When, UTC (ISO 8601).
        relative_error: Mean relative error on held-out samples; None if not on record.
        card: Its card; None if it was not asked for.
    """

    kind: str
    name: str
    id: str
    aliases: tuple[str, ...]
    shipped: bool
    used: bool
    published_at: str
    relative_error: float | None
    card: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AliasChange:
    """A version that an alias named from then on: `at` is UTC (ISO 8601), `by` whose change it was, `action` why."""

    id: str
    action: str
    at: str
    by: str


AliasHistory = Mapping[str, tuple[AliasChange, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVersion:
    """A version's card, and what the aliases of its model have named, the latest last."""

    card: Mapping[str, Any]
    history: AliasHistory


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """Ids of the versions of a model that are used and tried, and what its aliases have named, the latest last."""

    kind: str
    name: str
    production: str | None
    candidate: str | None
    history: AliasHistory


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A measured run beside its plan, in milliseconds per step.

    Attributes:
        measured_ms: Median of the measured steps.
        predicted_ms: The plan's predicted step, with its 90% interval in `low_ms` and `high_ms`.
        is_outside: Whether the measured step is outside of the interval.
        drifted_ms: The predicted step with the measured mean ids; None where none were sent.
        features: Planned and measured mean ids by feature, of those that differ by more than 10%.
        is_drifted: Whether to plan anew.
    """

    measured_ms: float
    predicted_ms: float
    low_ms: float
    high_ms: float
    is_outside: bool
    drifted_ms: float | None
    features: Mapping[str, tuple[float, float]]
    is_drifted: bool


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


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """A job, in a list; `progress` is the last line of its log, `created_at` is UTC (ISO 8601)."""

    id: str
    kind: str
    state: str
    attempt: int
    created_at: str
    progress: str

    @property
    def is_final(self) -> bool:
        """Whether nothing is done any more."""
        return self.state not in ("queued", "running")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(JobSummary):
    """A job.

    Attributes:
        started_at: When its present attempt began; None while it waits.
        seen_at: When its state was last known.
        finished_at: When it ended; None before.
        is_cancelling: Whether it is to end, and has not yet.
        log: The end of its log.
        plan_id: The plan that it made.
        failure: Why it failed.
    """

    started_at: str | None
    seen_at: str
    finished_at: str | None
    is_cancelling: bool
    log: str
    plan_id: str | None
    failure: AutoshardError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobList:
    """One page of jobs, the latest first; `next` is the cursor of the next page, None on the last."""

    jobs: tuple[JobSummary, ...]
    next: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A job that is made again and again.

    Attributes:
        name: Its name.
        cron: When: minute, hour, day of month, month and day of week, UTC.
        kind: What its jobs do, as `JobSummary.kind`.
        body: What they are given.
        is_paused: Whether it makes none at present.
        last_fired_at: When it made its last one, UTC (ISO 8601); None if it made none.
        next_fires_at: When it makes the next one; None while it is paused.
    """

    name: str
    cron: str
    kind: str
    body: Mapping[str, Any]
    is_paused: bool
    last_fired_at: str | None
    next_fires_at: str | None


def schedule(document: Mapping[str, Any]) -> Schedule:
    """Reads a schedule."""
    return Schedule(**document)


def stored_plan(document: Mapping[str, Any]) -> StoredPlan:
    """Reads an answer that holds a plan."""
    from autoshard.formats import plan_from_json

    return StoredPlan(id=document["id"], plan=plan_from_json(document["plan"], "plan"))


def plan_list(document: Mapping[str, Any]) -> PlanList:
    """Reads a page of plans."""
    return PlanList(plans=tuple(PlanSummary(**plan) for plan in document["plans"]), next=document["next"])


def run(document: Mapping[str, Any]) -> Run:
    """Reads what is said of a run."""
    features = {one["feature"]: (one["planned"], one["measured"]) for one in document["features"]}
    return Run(**{**document, "features": features})


def comparison(document: Mapping[str, Any]) -> Comparison:
    """Reads an answer with several planners."""
    from autoshard.evaluation.measured import ComparedPlan
    from autoshard.formats import plan_from_json

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
    from pydantic import TypeAdapter

    from autoshard.planners.hybrid.explanation import Explanation

    return TypeAdapter(Explanation).validate_python(document)


def improvements(document: Mapping[str, Any]) -> tuple[Explanation, tuple[Improvement, ...]]:
    """Reads an explanation with the single changes that were planned."""
    from autoshard.improvements import EXPLANATION
    from autoshard.planners.hybrid.explanation import Explanation

    parts = dict(EXPLANATION.from_json(document))
    found = parts.pop("improvements")
    return Explanation(**parts), found


def validation(document: Mapping[str, Any]) -> Validation:
    """Reads whether documents are valid."""
    return Validation(is_valid=document["is_valid"], faults=tuple(fault["detail"] for fault in document["faults"]))


def models(document: Mapping[str, Any]) -> tuple[ModelSummary, ...]:
    """The versions of a list."""
    return tuple(ModelSummary(**{**item, "aliases": tuple(item["aliases"])}) for item in document["models"])


def model_state(document: Mapping[str, Any]) -> ModelState:
    """What the aliases of a model name."""
    named = {name: document[name] for name in ("kind", "name", "production", "candidate")}
    return ModelState(**named, history=_history(document))


def model_version(document: Mapping[str, Any]) -> ModelVersion:
    """A version's card and its model's history."""
    return ModelVersion(card=document["card"], history=_history(document))


def job(document: Mapping[str, Any]) -> Job:
    """Reads a job."""
    told = {item.name: document[item.name] for item in fields(Job) if item.name != "failure"}
    fault = document["problem"]
    return Job(**told, failure=None if fault is None else error_of_fault(fault))


def job_list(document: Mapping[str, Any]) -> JobList:
    """Reads a page of jobs."""
    return JobList(jobs=tuple(JobSummary(**item) for item in document["jobs"]), next=document["next"])


def _history(document: Mapping[str, Any]) -> AliasHistory:
    return {alias: tuple(AliasChange(**change) for change in found) for alias, found in document["history"].items()}
