"""Requests to the service, and how their answers are read: what both clients have in common."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel

from autoshard.api import (
    JobList,
    ModelAnswer,
    ModelList,
    ModelState,
    ModelSummary,
    PlanList,
    RunAnswer,
    SamplesAnswer,
    ScheduleAnswer,
    ScheduleList,
    ValidationAnswer,
)
from autoshard.client import answers
from autoshard.client.answers import Job, ServedComparison, StoredPlan
from autoshard.core.choices import Overlap, Risk

if TYPE_CHECKING:
    from autoshard.client.tasks import ComparisonTask, PlanTask, Replan, SimulationTask
    from autoshard.core import ShardingPlan, TableSet, Topology
    from autoshard.results.explanation import Explanation, Improvement
    from autoshard.results.plan_diff import PlanDiff
    from autoshard.results.sweep_record import SweepRecord

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
_PLANS = "/v1/plans"
_JOBS = "/v1/jobs"
_SCHEDULES = "/v1/schedules"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """One request.

    Attributes:
        method: HTTP method.
        path: Path of the service.
        read: Reads the answer.
        body: JSON body of a request that makes something; None without one.
        parameters: Of the query.
        content: A Parquet file, instead of a JSON body.
    """

    method: str
    path: str
    read: Callable[[httpx.Response], T]
    body: Mapping[str, Any] | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    content: bytes | None = None

    def arguments(self) -> dict[str, Any]:
        """The request as arguments of httpx's clients; the same ones each time that it is sent."""
        sent: dict[str, Any] = {"method": self.method, "url": self.path, "params": dict(self.parameters)}
        if self.content is not None:
            sent |= {"content": self.content, "headers": {"Content-Type": "application/vnd.apache.parquet"}}
        if self.body is not None:
            sent |= {"json": dict(self.body), "headers": {"Idempotency-Key": uuid.uuid4().hex}}
        return sent


def plan(task: PlanTask) -> Call[StoredPlan | Job]:
    """Makes a plan; a job where it may take longer than a request."""
    from autoshard.client.tasks import body_of

    return Call(method="POST", path=_PLANS, body=body_of(task), read=_plan_or_job)


def replan(plan_id: str, change: Replan) -> Call[StoredPlan]:
    """Plans anew for a changed task."""
    from autoshard.client.tasks import body_of

    return Call(method="POST", path=f"{_PLANS}/{plan_id}/replans", body=body_of(change), read=_plan)


def send_samples(content: bytes) -> Call[int]:
    """Sends a file of samples; the number of samples in it."""
    return Call(
        method="POST",
        path="/v1/samples",
        content=content,
        read=lambda answer: read_as(SamplesAnswer)(answer).num_samples,
    )


def report_run(plan_id: str, steps_ms: Sequence[float], pooling_factors: Mapping[str, float]) -> Call[RunAnswer]:
    """Reports what a training job measured."""
    body = {"steps_ms": list(steps_ms), "pooling_factors": dict(pooling_factors)}
    path = f"{_PLANS}/{plan_id}/runs"
    return Call(method="POST", path=path, body=body, read=read_as(RunAnswer))


def evaluate(given: ShardingPlan, overlap: Overlap | None, risk: Risk) -> Call[StoredPlan]:
    """Prices a plan and stores it."""
    from autoshard.client.tasks import json_of

    body = {"plan": json_of(given), "overlap": json_of(overlap), "risk": risk.value}
    return Call(method="POST", path="/v1/evaluations", body=body, read=_plan)


def compare(task: ComparisonTask) -> Call[ServedComparison]:
    """Plans with several planners."""
    from autoshard.client.tasks import body_of

    return Call(
        method="POST",
        path="/v1/comparisons",
        body=body_of(task),
        read=lambda response: answers.comparison(response.content),
    )


def simulate(task: SimulationTask) -> Call[SweepRecord]:
    """Plans for other clusters and batch sizes."""
    from autoshard.client.tasks import body_of
    from autoshard.results.sweep_record import SIMULATION

    return Call(
        method="POST",
        path="/v1/simulations",
        body=body_of(task),
        read=lambda response: SIMULATION.from_json(response.json()),
    )


def validate(tables: TableSet | str | None, topology: Topology | str | None) -> Call[ValidationAnswer]:
    """Checks tables, a topology, or both."""
    from autoshard.client.tasks import json_of

    return Call(
        method="POST",
        path="/v1/validations",
        body={"tables": json_of(tables), "topology": json_of(topology)},
        read=read_as(ValidationAnswer),
    )


def read_plan(plan_id: str) -> Call[StoredPlan]:
    """Reads a stored plan."""
    return Call(method="GET", path=f"{_PLANS}/{plan_id}", read=_plan)


def delete_plan(plan_id: str) -> Call[None]:
    """Deletes a stored plan."""
    return Call(method="DELETE", path=f"{_PLANS}/{plan_id}", read=lambda _: None)


def list_plans(**chosen: str | int | None) -> Call[PlanList]:
    """Lists stored plans; what is None does not matter."""
    parameters = {name: value for name, value in chosen.items() if value is not None}
    return Call(method="GET", path=_PLANS, parameters=parameters, read=read_as(PlanList))


def explain(plan_id: str, tables: Sequence[str], risk: Risk) -> Call[Explanation]:
    """Explains a stored plan."""
    return Call(
        method="GET",
        path=f"{_PLANS}/{plan_id}/explanation",
        parameters={"table": list(tables), "risk": risk.value},
        read=lambda response: answers.explanation(response.json()),
    )


def improve(plan_id: str, tables: Sequence[str], risk: Risk) -> Call[tuple[Explanation, tuple[Improvement, ...]]]:
    """Explains a stored plan, and plans with single changes of its task."""
    return Call(
        method="GET",
        path=f"{_PLANS}/{plan_id}/improvements",
        parameters={"table": list(tables), "risk": risk.value},
        read=lambda response: answers.improvements(response.json()),
    )


def diff(plan_id: str, other_id: str) -> Call[PlanDiff]:
    """Compares two stored plans."""
    from autoshard.results.diff_json import DIFF

    return Call(
        method="GET",
        path=f"{_PLANS}/{plan_id}/diff/{other_id}",
        read=lambda response: DIFF.from_json(response.json()),
    )


def report(plan_id: str) -> Call[str]:
    """Draws a stored plan's page."""
    return Call(method="GET", path=f"{_PLANS}/{plan_id}/report", read=lambda response: response.text)


def list_models(kind: str | None, name: str | None, *, cards: bool) -> Call[tuple[ModelSummary, ...]]:
    """Versions of trained models."""
    given = {"kind": kind, "name": name, "cards": "true" if cards else None}
    chosen = {key: value for key, value in given.items() if value is not None}

    def read(response: httpx.Response) -> tuple[ModelSummary, ...]:
        return tuple(read_as(ModelList)(response).models)

    return Call(method="GET", path="/v1/models", parameters=chosen, read=read)


def read_model_state(kind: str, name: str) -> Call[ModelState]:
    """What the aliases of a model name."""
    return Call(method="GET", path=_model(kind, name), read=read_as(ModelState))


def read_model(kind: str, name: str, version: str) -> Call[ModelAnswer]:
    """A version's card."""
    path = f"{_model(kind, name)}/versions/{version}"
    return Call(method="GET", path=path, read=read_as(ModelAnswer))


def promote_model(kind: str, name: str, version: str, alias: str, *, force: bool) -> Call[ModelState]:
    """Has an alias name a version."""
    body = {"version": version, "alias": alias, "force": force}
    return Call(method="POST", path=f"{_model(kind, name)}/promotions", body=body, read=read_as(ModelState))


def roll_back_model(kind: str, name: str, alias: str) -> Call[ModelState]:
    """Gives an alias back to the version that had it before."""
    return Call(method="POST", path=f"{_model(kind, name)}/rollbacks", body={"alias": alias}, read=read_as(ModelState))


def make_job(kind: str, body: Mapping[str, Any]) -> Call[Job]:
    """Makes a job."""
    return Call(method="POST", path=f"{_JOBS}/{quote(kind, safe='')}", body=body, read=read_as(Job))


def list_jobs(**chosen: str | int | None) -> Call[JobList]:
    """Lists jobs; what is None does not matter."""
    parameters = {name: value for name, value in chosen.items() if value is not None}
    return Call(method="GET", path=_JOBS, parameters=parameters, read=read_as(JobList))


def read_job(job_id: str) -> Call[Job]:
    """Reads a job."""
    return Call(method="GET", path=_of_job(job_id), read=read_as(Job))


def read_job_result(job_id: str) -> Call[Mapping[str, Any]]:
    """Reads what a job made."""
    return Call(method="GET", path=f"{_of_job(job_id)}/result", read=lambda answer: answer.json())


def cancel_job(job_id: str) -> Call[Job]:
    """Cancels a job."""
    return Call(method="POST", path=f"{_of_job(job_id)}/cancel", read=read_as(Job))


def retry_job(job_id: str) -> Call[Job]:
    """Begins another attempt of a job."""
    return Call(method="POST", path=f"{_of_job(job_id)}/retry", read=read_as(Job))


def make_schedule(name: str, cron: str, kind: str, body: Mapping[str, Any]) -> Call[ScheduleAnswer]:
    """Makes a schedule."""
    made = {"name": name, "cron": cron, "kind": kind, "body": body}
    return Call(method="POST", path=_SCHEDULES, body=made, read=read_as(ScheduleAnswer))


def list_schedules() -> Call[tuple[ScheduleAnswer, ...]]:
    """Lists all schedules."""

    def read(response: httpx.Response) -> tuple[ScheduleAnswer, ...]:
        return tuple(read_as(ScheduleList)(response).schedules)

    return Call(method="GET", path=_SCHEDULES, read=read)


def read_schedule(name: str) -> Call[ScheduleAnswer]:
    """Reads a schedule."""
    return Call(method="GET", path=_of_schedule(name), read=read_as(ScheduleAnswer))


def pause_schedule(name: str, *, is_paused: bool) -> Call[ScheduleAnswer]:
    """Has a schedule make no jobs, or make them again."""
    return Call(
        method="POST", path=f"{_of_schedule(name)}/{'pause' if is_paused else 'resume'}", read=read_as(ScheduleAnswer)
    )


def delete_schedule(name: str) -> Call[None]:
    """Deletes a schedule."""
    return Call(method="DELETE", path=_of_schedule(name), read=lambda _: None)


def _of_schedule(name: str) -> str:
    return f"{_SCHEDULES}/{quote(name, safe='')}"


def _of_job(job_id: str) -> str:
    return f"{_JOBS}/{quote(job_id, safe='')}"


def _model(kind: str, name: str) -> str:
    return f"/v1/models/{quote(kind, safe=':')}/{quote(name, safe=':')}"


def read_as(kind: type[M]) -> Callable[[httpx.Response], M]:
    """Reads an answer as what the service says it is."""
    return lambda response: kind.model_validate_json(response.content)


def _plan_or_job(response: httpx.Response) -> StoredPlan | Job:
    return read_as(Job)(response) if response.status_code == httpx.codes.ACCEPTED else _plan(response)


def _plan(response: httpx.Response) -> StoredPlan:
    return answers.stored_plan(response.content)
