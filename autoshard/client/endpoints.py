"""Requests to the service, once for both clients.

A request is a generator: it yields what is to be sent, or the seconds to wait for, receives what came of it, and
returns the answer. A client runs it: one sends and waits in its thread, the other in asyncio's.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from functools import update_wrapper, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, overload
from urllib.parse import quote

import httpx
from pydantic import BaseModel

from autoshard.api import (
    PARQUET,
    AuditList,
    EvaluationBody,
    JobChange,
    JobList,
    KeyBody,
    KeyList,
    KeyMade,
    KeySummary,
    ModelAnswer,
    ModelList,
    ModelState,
    ModelSummary,
    PlanFilter,
    PlanList,
    PromotionBody,
    RollbackBody,
    RunAnswer,
    RunBody,
    SamplesAnswer,
    ScheduleAnswer,
    ScheduleBody,
    ScheduleList,
    ValidationAnswer,
    ValidationBody,
)
from autoshard.client import answers
from autoshard.client.answers import Job, ServedComparison, StoredPlan
from autoshard.client.problems import ServiceError, error_of
from autoshard.client.retries import Retries
from autoshard.client.tasks import as_body
from autoshard.core.choices import MOST_EXPLAINED, Alias, Overlap, Risk
from autoshard.core.errors import AutoshardError, InvalidOptionError
from autoshard.core.quoting import shown

if TYPE_CHECKING:
    from autoshard.client.tasks import ComparisonTask, PlanTask, Replan, SimulationTask
    from autoshard.core import ShardingPlan, TableSet, Topology
    from autoshard.results.explanation import Explanation, Improvement
    from autoshard.results.plan_diff import PlanDiff
    from autoshard.results.sweep_record import SweepRecord

P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
Outcome = httpx.Response | httpx.TransportError | None
#: Arguments of httpx's `request`, or seconds, and what came of them.
Exchange = Generator[dict[str, Any] | float, Outcome, T]
Read = Callable[[httpx.Response], T]
_PLANS, _JOBS, _SCHEDULES, _MODELS, _KEYS = "/v1/plans", "/v1/jobs", "/v1/schedules", "/v1/models", "/v1/keys"
#: Seconds between two looks at a job.
_LOOK_S = 0.5


class _Client(Protocol):
    def _run(self, exchange: Exchange[T]) -> T: ...


class _AsyncClient(Protocol):
    def _run(self, exchange: Exchange[T]) -> Coroutine[Any, Any, T]: ...


class Endpoint(Generic[P, T]):
    """A method of both clients: `Client` returns the answer, `AsyncClient` returns it to who awaits it."""

    def __init__(self, exchange: Callable[Concatenate[Any, P], Exchange[T]]) -> None:
        self.exchange = exchange
        update_wrapper(cast("Any", self), exchange)

    @overload
    def __get__(self, client: _Client, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: _AsyncClient, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __get__(self, client: ServiceEndpoints | None, owner: type) -> Endpoint[P, T]: ...
    def __get__(self, client: Any, owner: type) -> Any:
        if client is None:
            return self

        @wraps(self.exchange)
        def send(*arguments: P.args, **options: P.kwargs) -> Any:
            return client._run(self.exchange(client, *arguments, **options))

        return send


def check_address(url: str) -> None:
    """Refuses what is no address of a service.

    Raises:
        InvalidOptionError: If it does not begin with http:// or https://.
    """
    if not url.startswith(("http://", "https://")):
        raise InvalidOptionError(
            f"must be the address of a service, such as http://localhost:8000, got {shown(url)}", field="server"
        )


class ServiceEndpoints:
    """What both clients ask. All methods raise errors of `autoshard.core.errors`, or a ServiceError.

    Args:
        url: Address of the service, such as `http://localhost:8000`.
        retries: When a request is sent again.
    """

    def __init__(self, url: str, retries: Retries | None) -> None:
        check_address(url)
        self._url = url
        self._retries = retries or Retries()
        self._answered = False

    @Endpoint
    def plan(self, task: PlanTask) -> Exchange[StoredPlan]:
        """Makes a plan, which the service stores; waits for the job where it makes one of a long task."""
        made = yield from self._post(_PLANS, _plan_or_job, as_body(task))
        if isinstance(made, StoredPlan):
            return made
        job = yield from self._ended(made.id, lambda _: None)
        if job.plan_id is None:
            raise job.failure or AutoshardError(f"the job {job.id} was {job.state}")
        return (yield from self._get(f"{_PLANS}/{job.plan_id}", answers.stored_plan))

    @Endpoint
    def wait_for(self, job_id: str, on_progress: Callable[[Job], None] = lambda _: None) -> Exchange[Job]:
        """Waits until a job has ended; `on_progress` gets it each time that it is looked at."""
        return self._ended(job_id, on_progress)

    @Endpoint
    def replan(self, plan_id: str, change: Replan) -> Exchange[StoredPlan]:
        """Makes a new plan for a stored plan's tables and a changed task."""
        return self._post(f"{_PLANS}/{plan_id}/replans", answers.stored_plan, as_body(change))

    @Endpoint
    def send_samples(self, file: Path) -> Exchange[int]:
        """Sends a file of a store of samples, of which the service trains and calibrates; the number of its samples."""
        content, headers = file.read_bytes(), {"Content-Type": PARQUET}
        sent = {"method": "POST", "url": "/v1/samples", "content": content, "headers": headers}
        return (yield from self._exchange(sent, _as(SamplesAnswer))).num_samples

    @Endpoint
    def report_run(
        self, plan_id: str, steps_ms: Sequence[float], *, pooling_factors: Mapping[str, float] | None = None
    ) -> Exchange[RunAnswer]:
        """Reports the steps that a training job measured, and the mean ids per sample that it sees by feature."""
        body = as_body(RunBody, steps_ms=steps_ms, pooling_factors=pooling_factors or {})
        return self._post(f"{_PLANS}/{plan_id}/runs", _as(RunAnswer), body)

    @Endpoint
    def evaluate(
        self, plan: ShardingPlan, *, overlap: Overlap | None = None, risk: Risk | None = None
    ) -> Exchange[StoredPlan]:
        """Prices a plan, for what it was made for if `risk` is None; the service stores it."""
        body = as_body(EvaluationBody, plan=plan, overlap=overlap, risk=risk)
        return self._post("/v1/evaluations", answers.stored_plan, body)

    @Endpoint
    def compare(self, task: ComparisonTask) -> Exchange[ServedComparison]:
        """Plans with several planners."""
        return self._post("/v1/comparisons", answers.comparison, as_body(task))

    @Endpoint
    def simulate(self, task: SimulationTask) -> Exchange[SweepRecord]:
        """Plans and prices combinations of clusters and batch sizes."""
        from autoshard.results.sweep_record import SIMULATION

        return self._post("/v1/simulations", lambda found: SIMULATION.from_json(found.json()), as_body(task))

    @Endpoint
    def validate(
        self,
        tables: TableSet | str | None = None,
        topology: Topology | str | None = None,
        *,
        constraints: Mapping[str, Mapping[str, Sequence[int | str]]] | None = None,
    ) -> Exchange[ValidationAnswer]:
        """Checks tables, a topology, or both; `constraints` by table take the place of the tables' own."""
        body = as_body(ValidationBody, tables=tables, topology=topology, constraints=constraints or {})
        return self._post("/v1/validations", _as(ValidationAnswer), body)

    @Endpoint
    def read_plan(self, plan_id: str) -> Exchange[StoredPlan]:
        """Reads a stored plan."""
        return self._get(f"{_PLANS}/{plan_id}", answers.stored_plan)

    @Endpoint
    def delete_plan(self, plan_id: str) -> Exchange[None]:
        """Deletes a stored plan, which can be restored for a day."""
        return self._delete(f"{_PLANS}/{plan_id}")

    @Endpoint
    def restore_plan(self, plan_id: str) -> Exchange[None]:
        """Brings back a plan that was deleted within a day."""
        return self._post(f"{_PLANS}/{plan_id}/restore", lambda _: None, {})

    @Endpoint
    def list_plans(
        self, /, *, limit: int = 50, cursor: str | None = None, text: str | None = None, **figures: str | int | None
    ) -> Exchange[PlanList]:
        """One page of stored plans, the latest first.

        Args:
            limit: Most plans of the page.
            cursor: `next` of the page before.
            text: Part of a name: planner, device, level of the topology or one of the first tables.
            figures: Wanted values of `autoshard.api.PlanFigures`, such as `planner="neo"` or `num_ranks=8`.
        """
        for name in figures:
            if name not in PlanFilter.model_fields:
                known = ", ".join(PlanFilter.model_fields)
                raise InvalidOptionError(f"is nothing that plans are listed by; there are: {known}", field=name)
        return self._get(_PLANS, _as(PlanList), limit=limit, cursor=cursor, text=text, **figures)

    @Endpoint
    def explain(
        self, plan_id: str, *, tables: Sequence[str] = (), most: int = MOST_EXPLAINED, risk: Risk | None = None
    ) -> Exchange[Explanation]:
        """Compares the sharding of a stored plan's tables with its alternatives.

        Args:
            plan_id: The plan's id.
            tables: Tables to explain; without any, those of which a batch reads most bytes.
            most: How many of these; 0 for all.
            risk: The predicted time that prices; None for what the plan was made for.
        """
        path = f"{_PLANS}/{plan_id}/explanation"
        return self._get(path, answers.explanation, table=list(tables), most=most, risk=risk)

    @Endpoint
    def improve(
        self, plan_id: str, *, tables: Sequence[str] = (), most: int = MOST_EXPLAINED, risk: Risk | None = None
    ) -> Exchange[tuple[Explanation, tuple[Improvement, ...]]]:
        """As `explain`, and plans with single changes of the plan's task, most samples per second first."""
        path = f"{_PLANS}/{plan_id}/improvements"
        return self._get(path, answers.improvements, table=list(tables), most=most, risk=risk)

    @Endpoint
    def diff(self, plan_id: str, other_id: str) -> Exchange[PlanDiff]:
        """Compares two stored plans."""
        from autoshard.results.plan_diff import DIFF

        return self._get(f"{_PLANS}/{plan_id}/diff/{other_id}", lambda found: DIFF.from_json(found.json()))

    @Endpoint
    def report(self, plan_id: str) -> Exchange[str]:
        """The page of a stored plan, in HTML."""
        return self._get(f"{_PLANS}/{plan_id}/report", lambda found: found.text)

    @Endpoint
    def list_models(
        self, kind: str | None = None, name: str | None = None, *, cards: bool = False
    ) -> Exchange[tuple[ModelSummary, ...]]:
        """Versions of trained models, of one kind and device if these are given, with their cards if asked for."""
        found = yield from self._get(_MODELS, _as(ModelList), kind=kind, name=name, cards="true" if cards else None)
        return tuple(found.models)

    @Endpoint
    def read_model_state(self, kind: str, name: str) -> Exchange[ModelState]:
        """What the aliases of a model name, and have named."""
        return self._get(_at(_MODELS, kind, name), _as(ModelState))

    @Endpoint
    def read_model(self, kind: str, name: str, version: str) -> Exchange[ModelAnswer]:
        """A version's card."""
        return self._get(_at(_MODELS, kind, name, "versions", version), _as(ModelAnswer))

    @Endpoint
    def promote_model(
        self, kind: str, name: str, version: str, *, alias: str = Alias.PRODUCTION, force: bool = False
    ) -> Exchange[ModelState]:
        """Has an alias name a version; `force` where it was worse when trained, or not compared in the shadow."""
        body = as_body(PromotionBody, version=version, alias=alias, force=force)
        return self._post(_at(_MODELS, kind, name, "promotions"), _as(ModelState), body)

    @Endpoint
    def roll_back_model(self, kind: str, name: str, *, alias: str = Alias.PRODUCTION) -> Exchange[ModelState]:
        """Gives an alias back to the version that had it before."""
        body = as_body(RollbackBody, alias=alias)
        return self._post(_at(_MODELS, kind, name, "rollbacks"), _as(ModelState), body)

    @Endpoint
    def make_job(self, kind: str, body: Mapping[str, Any], *, priority: int = 0) -> Exchange[Job]:
        """Makes a job of a kind (`plan`, `compare`, `collect`, `calibrate`, `train-cost`, `train-policy`).

        Those of a higher priority, from -9 to 9, begin first; above 0 needs the scope `admin`.
        """
        path = _at(_JOBS, kind)
        return self._post(f"{path}?priority={priority}" if priority else path, _as(Job), body)

    @Endpoint
    def list_jobs(
        self,
        *,
        limit: int = 50,
        cursor: str | None = None,
        kind: str | None = None,
        state: str | None = None,
        plan_id: str | None = None,
    ) -> Exchange[JobList]:
        """One page of jobs, the latest first; `plan_id` for those that made a plan."""
        return self._get(_JOBS, _as(JobList), limit=limit, cursor=cursor, kind=kind, state=state, plan_id=plan_id)

    @Endpoint
    def read_job(self, job_id: str) -> Exchange[Job]:
        """Reads how far a job is."""
        return self._get(_at(_JOBS, job_id), _as(Job))

    @Endpoint
    def read_job_result(self, job_id: str) -> Exchange[Mapping[str, Any]]:
        """Reads what a job made that has succeeded, as the service's document."""
        return self._get(_at(_JOBS, job_id, "result"), lambda found: found.json())

    @Endpoint
    def cancel_job(self, job_id: str) -> Exchange[Job]:
        """Cancels a job."""
        return self._post(_at(_JOBS, job_id, "cancel"), _as(Job))

    @Endpoint
    def delete_job(self, job_id: str) -> Exchange[None]:
        """Deletes a job that has ended; a plan that it made stays."""
        return self._delete(_at(_JOBS, job_id))

    @Endpoint
    def stop_job(self, job_id: str) -> Exchange[Job]:
        """Stops the search of a job, which succeeds soon, with the best plan found until then."""
        return self._post(_at(_JOBS, job_id, "stop"), _as(Job))

    @Endpoint
    def prioritise_job(self, job_id: str, priority: int) -> Exchange[Job]:
        """Gives a job that waits another priority, as `make_job` does."""
        sent = {"method": "PATCH", "url": _at(_JOBS, job_id), "json": as_body(JobChange, priority=priority)}
        return self._exchange(sent, _as(Job))

    @Endpoint
    def retry_job(self, job_id: str) -> Exchange[Job]:
        """Begins another attempt of a job that failed or was cancelled."""
        return self._post(_at(_JOBS, job_id, "retry"), _as(Job))

    @Endpoint
    def make_schedule(
        self, name: str, cron: str, kind: str, body: Mapping[str, Any] | None = None
    ) -> Exchange[ScheduleAnswer]:
        """Has jobs made again and again, such as `make_schedule("nightly", "0 3 * * *", "collect", {"seconds": 600})`.

        Args:
            name: Small letters, digits and hyphens.
            cron: Minute, hour, day of month, month and day of week, UTC; six fields begin with the second.
            kind: `collect`, `calibrate`, `train-cost` or `train-policy`.
            body: What its jobs are given, as for `make_job`; nothing if None.
        """
        made = as_body(ScheduleBody, name=name, cron=cron, kind=kind, body=body or {})
        return self._post(_SCHEDULES, _as(ScheduleAnswer), made)

    @Endpoint
    def list_schedules(self) -> Exchange[tuple[ScheduleAnswer, ...]]:
        """All schedules, by name."""
        return tuple((yield from self._get(_SCHEDULES, _as(ScheduleList))).schedules)

    @Endpoint
    def read_schedule(self, name: str) -> Exchange[ScheduleAnswer]:
        """Reads a schedule."""
        return self._get(_at(_SCHEDULES, name), _as(ScheduleAnswer))

    @Endpoint
    def pause_schedule(self, name: str) -> Exchange[ScheduleAnswer]:
        """Has a schedule make no jobs until `resume_schedule`."""
        return self._post(_at(_SCHEDULES, name, "pause"), _as(ScheduleAnswer))

    @Endpoint
    def resume_schedule(self, name: str) -> Exchange[ScheduleAnswer]:
        """Has a schedule make jobs again."""
        return self._post(_at(_SCHEDULES, name, "resume"), _as(ScheduleAnswer))

    @Endpoint
    def delete_schedule(self, name: str) -> Exchange[None]:
        """Deletes a schedule; jobs that it made go on."""
        return self._delete(_at(_SCHEDULES, name))

    @Endpoint
    def make_key(self, name: str, scopes: Sequence[str], *, team: str | None = None) -> Exchange[KeyMade]:
        """Makes a key of the service, whose secret the answer tells this once.

        Args:
            name: Whom or what it is for.
            scopes: `read`, `plan`, `train`, `admin`, or several.
            team: Whose plans, jobs and samples it sees; None for the team of who makes it.
        """
        return self._post(_KEYS, _as(KeyMade), as_body(KeyBody, name=name, scopes=list(scopes), team=team))

    @Endpoint
    def list_keys(self) -> Exchange[tuple[KeySummary, ...]]:
        """All keys, also those that have ended, the oldest first."""
        return tuple((yield from self._get(_KEYS, _as(KeyList))).keys)

    @Endpoint
    def revoke_key(self, key_id: str) -> Exchange[None]:
        """Ends a key: its next request is refused."""
        return self._delete(_at(_KEYS, key_id))

    @Endpoint
    def list_audit(self, /, **search: Any) -> Exchange[AuditList]:
        """One page of the audit log, the latest first; arguments are fields of `autoshard.api.AuditSearch`."""
        return self._get("/v1/audit", _as(AuditList), **search)

    def _ended(self, job_id: str, on_progress: Callable[[Job], None]) -> Exchange[Job]:
        while True:
            job = yield from self._get(_at(_JOBS, job_id), _as(Job))
            on_progress(job)
            if job.state.is_final:
                return job
            yield _LOOK_S

    def _get(self, path: str, read: Read[T], **parameters: object) -> Exchange[T]:
        given = {name: value for name, value in parameters.items() if value is not None}
        return self._exchange({"method": "GET", "url": path, "params": given}, read)

    def _delete(self, path: str) -> Exchange[None]:
        return self._exchange({"method": "DELETE", "url": path}, lambda _: None)

    def _post(self, path: str, read: Read[T], body: Mapping[str, Any] | None = None) -> Exchange[T]:
        sent: dict[str, Any] = {"method": "POST", "url": path}
        if body is not None:
            sent |= {"json": dict(body), "headers": {"Idempotency-Key": uuid.uuid4().hex}}
        return self._exchange(sent, read)

    def _exchange(self, sent: dict[str, Any], read: Read[T]) -> Exchange[T]:
        """Sends a request, again where the service turned it away for now, and reads the answer.

        Raises:
            AutoshardError: If the answer is an error, or there was none.
        """
        attempt = 0
        while True:
            outcome = yield sent
            assert outcome is not None
            self._answered |= isinstance(outcome, httpx.Response)
            wait_s = self._retries.wait_s(attempt, outcome, answered=self._answered)
            if wait_s is None:
                return self._read(outcome, read)
            yield wait_s
            attempt += 1

    def _read(self, outcome: httpx.Response | httpx.TransportError, read: Read[T]) -> T:
        if isinstance(outcome, httpx.TransportError):
            start = ""
            if isinstance(outcome, httpx.ConnectError | httpx.ConnectTimeout):
                start = "; `autoshard serve` starts a service, --server or the client's URL names one"
            raise ServiceError(f"does not answer: {outcome}{start}", source=self._url) from outcome
        if not outcome.is_success:
            raise error_of(outcome, self._url)
        try:
            return read(outcome)
        except ValueError as error:  # pydantic's and JSON's
            raise ServiceError("answers as no service of this version of autoshard does", source=self._url) from error


def _at(path: str, *names: str) -> str:
    return "/".join((path, *(quote(name, safe=":") for name in names)))


def _as(kind: type[M]) -> Read[M]:
    """Reads an answer as what the service says it is."""
    return lambda response: kind.model_validate_json(response.content)


def _plan_or_job(response: httpx.Response) -> StoredPlan | Job:
    return _as(Job)(response) if response.status_code == httpx.codes.ACCEPTED else answers.stored_plan(response)
