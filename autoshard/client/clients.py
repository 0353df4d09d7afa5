"""Clients of the REST service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import httpx

from autoshard.api import (
    JobList,
    ModelAnswer,
    ModelState,
    ModelSummary,
    PlanList,
    RunAnswer,
    ScheduleAnswer,
    ValidationAnswer,
)
from autoshard.client import calls
from autoshard.client.answers import Job, ServedComparison, StoredPlan
from autoshard.client.calls import Call
from autoshard.client.problems import ServiceError, error_of
from autoshard.client.retries import Retries
from autoshard.core.choices import Overlap, Risk
from autoshard.core.errors import AutoshardError, InvalidOptionError
from autoshard.core.quoting import shown

if TYPE_CHECKING:
    from autoshard.client.tasks import ComparisonTask, PlanTask, Replan, SimulationTask
    from autoshard.core import ShardingPlan, TableSet, Topology
    from autoshard.results.explanation import Explanation, Improvement
    from autoshard.results.plan_diff import PlanDiff
    from autoshard.results.sweep_record import SweepRecord

T = TypeVar("T")
#: Longest wait for an answer: in the queue, for the planner's limit, and beyond it.
_TIMEOUT_S = 180.0
#: Seconds between two looks at a job.
_LOOK_S = 0.5


class Client:
    """A client that waits for its answers. All methods raise errors of `autoshard.core.errors`, or a ServiceError.

    Args:
        url: Address of the service, such as `http://localhost:8000`.
        key: Secret of a key; None for a service without keys.
        retries: When a request is sent again.
        transport: What carries requests; None for the network.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        retries: Retries | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._url = url
        self._retries = retries or Retries()
        self._answered = False
        self._http = httpx.Client(
            base_url=_checked(url), headers=_headers(key), timeout=_TIMEOUT_S, transport=transport
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def plan(self, task: PlanTask) -> StoredPlan:
        """Makes a plan, which the service stores; waits for the job where it makes one of a long task."""
        made = self._answer(calls.plan(task))
        return self.read_plan(_plan_of(self.wait_for(made.id))) if isinstance(made, Job) else made

    def wait_for(self, job_id: str, on_progress: Callable[[Job], None] = lambda _: None) -> Job:
        """Waits until a job has ended; `on_progress` gets it each time that it is looked at."""
        while True:
            job = self.read_job(job_id)
            on_progress(job)
            if job.state.is_final:
                return job
            time.sleep(_LOOK_S)

    def replan(self, plan_id: str, change: Replan) -> StoredPlan:
        """Makes a new plan for a stored plan's tables and a changed task."""
        return self._answer(calls.replan(plan_id, change))

    def send_samples(self, file: Path) -> int:
        """Sends a file of a store of samples, of which the service trains and calibrates; the number of its samples."""
        return self._answer(calls.send_samples(file.read_bytes()))

    def report_run(
        self, plan_id: str, steps_ms: Sequence[float], *, pooling_factors: Mapping[str, float] | None = None
    ) -> RunAnswer:
        """Reports the steps that a training job measured, and the mean ids per sample that it sees by feature."""
        return self._answer(calls.report_run(plan_id, steps_ms, pooling_factors or {}))

    def evaluate(self, plan: ShardingPlan, *, overlap: Overlap | None = None, risk: Risk = Risk.MEAN) -> StoredPlan:
        """Prices a plan; the service stores it."""
        return self._answer(calls.evaluate(plan, overlap, risk))

    def compare(self, task: ComparisonTask) -> ServedComparison:
        """Plans with several planners."""
        return self._answer(calls.compare(task))

    def simulate(self, task: SimulationTask) -> SweepRecord:
        """Plans and prices combinations of clusters and batch sizes."""
        return self._answer(calls.simulate(task))

    def validate(
        self, tables: TableSet | str | None = None, topology: Topology | str | None = None
    ) -> ValidationAnswer:
        """Checks tables, a topology, or both."""
        return self._answer(calls.validate(tables, topology))

    def read_plan(self, plan_id: str) -> StoredPlan:
        """Reads a stored plan."""
        return self._answer(calls.read_plan(plan_id))

    def delete_plan(self, plan_id: str) -> None:
        """Deletes a stored plan."""
        self._answer(calls.delete_plan(plan_id))

    def list_plans(
        self,
        *,
        limit: int = 50,
        cursor: str | None = None,
        planner: str | None = None,
        device: str | None = None,
        num_ranks: int | None = None,
        text: str | None = None,
    ) -> PlanList:
        """One page of stored plans, the latest first."""
        call = calls.list_plans(
            limit=limit, cursor=cursor, planner=planner, device=device, num_ranks=num_ranks, text=text
        )
        return self._answer(call)

    def explain(self, plan_id: str, *, tables: Sequence[str] = (), risk: Risk = Risk.MEAN) -> Explanation:
        """Compares the sharding of a stored plan's tables with its alternatives."""
        return self._answer(calls.explain(plan_id, tables, risk))

    def improve(
        self, plan_id: str, *, tables: Sequence[str] = (), risk: Risk = Risk.MEAN
    ) -> tuple[Explanation, tuple[Improvement, ...]]:
        """Explains a stored plan, and plans with single changes of its task, most samples per second first."""
        return self._answer(calls.improve(plan_id, tables, risk))

    def diff(self, plan_id: str, other_id: str) -> PlanDiff:
        """Compares two stored plans."""
        return self._answer(calls.diff(plan_id, other_id))

    def report(self, plan_id: str) -> str:
        """The page of a stored plan, in HTML."""
        return self._answer(calls.report(plan_id))

    def list_models(
        self, kind: str | None = None, name: str | None = None, *, cards: bool = False
    ) -> tuple[ModelSummary, ...]:
        """Versions of trained models, of one kind and device if these are given, with their cards if asked for."""
        return self._answer(calls.list_models(kind, name, cards=cards))

    def read_model_state(self, kind: str, name: str) -> ModelState:
        """What the aliases of a model name, and have named."""
        return self._answer(calls.read_model_state(kind, name))

    def read_model(self, kind: str, name: str, version: str) -> ModelAnswer:
        """A version's card."""
        return self._answer(calls.read_model(kind, name, version))

    def promote_model(
        self, kind: str, name: str, version: str, *, alias: str = "production", force: bool = False
    ) -> ModelState:
        """Has an alias name a version; `force` where a cost model was not compared in the shadow."""
        return self._answer(calls.promote_model(kind, name, version, alias, force=force))

    def roll_back_model(self, kind: str, name: str, *, alias: str = "production") -> ModelState:
        """Gives an alias back to the version that had it before."""
        return self._answer(calls.roll_back_model(kind, name, alias))

    def make_job(self, kind: str, body: Mapping[str, Any]) -> Job:
        """Makes a job of a kind (`plan`, `compare`, `collect`, `calibrate`, `train-cost`, `train-policy`)."""
        return self._answer(calls.make_job(kind, body))

    def list_jobs(
        self, *, limit: int = 50, cursor: str | None = None, kind: str | None = None, state: str | None = None
    ) -> JobList:
        """One page of jobs, the latest first."""
        return self._answer(calls.list_jobs(limit=limit, cursor=cursor, kind=kind, state=state))

    def read_job(self, job_id: str) -> Job:
        """Reads how far a job is."""
        return self._answer(calls.read_job(job_id))

    def read_job_result(self, job_id: str) -> Mapping[str, Any]:
        """Reads what a job made that has succeeded, as the service's document."""
        return self._answer(calls.read_job_result(job_id))

    def cancel_job(self, job_id: str) -> Job:
        """Cancels a job."""
        return self._answer(calls.cancel_job(job_id))

    def retry_job(self, job_id: str) -> Job:
        """Begins another attempt of a job that failed or was cancelled."""
        return self._answer(calls.retry_job(job_id))

    def make_schedule(self, name: str, cron: str, kind: str, body: Mapping[str, Any] | None = None) -> ScheduleAnswer:
        """Has jobs made again and again, such as `make_schedule("nightly", "0 3 * * *", "collect", {"seconds": 600})`.

        Args:
            name: Small letters, digits and hyphens.
            cron: Minute, hour, day of month, month and day of week, UTC; six fields begin with the second.
            kind: `collect`, `calibrate`, `train-cost` or `train-policy`.
            body: What its jobs are given, as for `make_job`; nothing if None.
        """
        return self._answer(calls.make_schedule(name, cron, kind, body or {}))

    def list_schedules(self) -> tuple[ScheduleAnswer, ...]:
        """All schedules, by name."""
        return self._answer(calls.list_schedules())

    def read_schedule(self, name: str) -> ScheduleAnswer:
        """Reads a schedule."""
        return self._answer(calls.read_schedule(name))

    def pause_schedule(self, name: str) -> ScheduleAnswer:
        """Has a schedule make no jobs until `resume_schedule`."""
        return self._answer(calls.pause_schedule(name, is_paused=True))

    def resume_schedule(self, name: str) -> ScheduleAnswer:
        """Has a schedule make jobs again."""
        return self._answer(calls.pause_schedule(name, is_paused=False))

    def delete_schedule(self, name: str) -> None:
        """Deletes a schedule; jobs that it made go on."""
        self._answer(calls.delete_schedule(name))

    def _answer(self, call: Call[T]) -> T:
        arguments, attempt = call.arguments(), 0
        while True:
            try:
                outcome: httpx.Response | httpx.TransportError = self._http.request(**arguments)
            except httpx.TransportError as error:
                outcome = error
            self._answered |= isinstance(outcome, httpx.Response)
            wait_s = self._retries.wait_s(attempt, outcome, answered=self._answered)
            if wait_s is None:
                return _read(call, outcome, self._url)
            time.sleep(wait_s)
            attempt += 1


class AsyncClient:
    """A client for asyncio; arguments and methods are those of `Client`, to be awaited."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        retries: Retries | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = url
        self._retries = retries or Retries()
        self._answered = False
        self._http = httpx.AsyncClient(
            base_url=_checked(url), headers=_headers(key), timeout=_TIMEOUT_S, transport=transport
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """As `Client.close`."""
        await self._http.aclose()

    async def plan(self, task: PlanTask) -> StoredPlan:
        """As `Client.plan`."""
        made = await self._answer(calls.plan(task))
        return await self.read_plan(_plan_of(await self.wait_for(made.id))) if isinstance(made, Job) else made

    async def wait_for(self, job_id: str, on_progress: Callable[[Job], None] = lambda _: None) -> Job:
        """As `Client.wait_for`."""
        while True:
            job = await self.read_job(job_id)
            on_progress(job)
            if job.state.is_final:
                return job
            await asyncio.sleep(_LOOK_S)

    async def replan(self, plan_id: str, change: Replan) -> StoredPlan:
        """As `Client.replan`."""
        return await self._answer(calls.replan(plan_id, change))

    async def send_samples(self, file: Path) -> int:
        """As `Client.send_samples`."""
        return await self._answer(calls.send_samples(file.read_bytes()))

    async def report_run(
        self, plan_id: str, steps_ms: Sequence[float], *, pooling_factors: Mapping[str, float] | None = None
    ) -> RunAnswer:
        """As `Client.report_run`."""
        return await self._answer(calls.report_run(plan_id, steps_ms, pooling_factors or {}))

    async def evaluate(
        self, plan: ShardingPlan, *, overlap: Overlap | None = None, risk: Risk = Risk.MEAN
    ) -> StoredPlan:
        """As `Client.evaluate`."""
        return await self._answer(calls.evaluate(plan, overlap, risk))

    async def compare(self, task: ComparisonTask) -> ServedComparison:
        """As `Client.compare`."""
        return await self._answer(calls.compare(task))

    async def simulate(self, task: SimulationTask) -> SweepRecord:
        """As `Client.simulate`."""
        return await self._answer(calls.simulate(task))

    async def validate(
        self, tables: TableSet | str | None = None, topology: Topology | str | None = None
    ) -> ValidationAnswer:
        """As `Client.validate`."""
        return await self._answer(calls.validate(tables, topology))

    async def read_plan(self, plan_id: str) -> StoredPlan:
        """As `Client.read_plan`."""
        return await self._answer(calls.read_plan(plan_id))

    async def delete_plan(self, plan_id: str) -> None:
        """As `Client.delete_plan`."""
        await self._answer(calls.delete_plan(plan_id))

    async def list_plans(
        self,
        *,
        limit: int = 50,
        cursor: str | None = None,
        planner: str | None = None,
        device: str | None = None,
        num_ranks: int | None = None,
        text: str | None = None,
    ) -> PlanList:
        """As `Client.list_plans`."""
        call = calls.list_plans(
            limit=limit, cursor=cursor, planner=planner, device=device, num_ranks=num_ranks, text=text
        )
        return await self._answer(call)

    async def explain(self, plan_id: str, *, tables: Sequence[str] = (), risk: Risk = Risk.MEAN) -> Explanation:
        """As `Client.explain`."""
        return await self._answer(calls.explain(plan_id, tables, risk))

    async def improve(
        self, plan_id: str, *, tables: Sequence[str] = (), risk: Risk = Risk.MEAN
    ) -> tuple[Explanation, tuple[Improvement, ...]]:
        """As `Client.improve`."""
        return await self._answer(calls.improve(plan_id, tables, risk))

    async def diff(self, plan_id: str, other_id: str) -> PlanDiff:
        """As `Client.diff`."""
        return await self._answer(calls.diff(plan_id, other_id))

    async def report(self, plan_id: str) -> str:
        """As `Client.report`."""
        return await self._answer(calls.report(plan_id))

    async def list_models(
        self, kind: str | None = None, name: str | None = None, *, cards: bool = False
    ) -> tuple[ModelSummary, ...]:
        """As `Client.list_models`."""
        return await self._answer(calls.list_models(kind, name, cards=cards))

    async def read_model_state(self, kind: str, name: str) -> ModelState:
        """As `Client.read_model_state`."""
        return await self._answer(calls.read_model_state(kind, name))

    async def read_model(self, kind: str, name: str, version: str) -> ModelAnswer:
        """As `Client.read_model`."""
        return await self._answer(calls.read_model(kind, name, version))

    async def promote_model(
        self, kind: str, name: str, version: str, *, alias: str = "production", force: bool = False
    ) -> ModelState:
        """As `Client.promote_model`."""
        return await self._answer(calls.promote_model(kind, name, version, alias, force=force))

    async def roll_back_model(self, kind: str, name: str, *, alias: str = "production") -> ModelState:
        """As `Client.roll_back_model`."""
        return await self._answer(calls.roll_back_model(kind, name, alias))

    async def make_job(self, kind: str, body: Mapping[str, Any]) -> Job:
        """As `Client.make_job`."""
        return await self._answer(calls.make_job(kind, body))

    async def list_jobs(
        self, *, limit: int = 50, cursor: str | None = None, kind: str | None = None, state: str | None = None
    ) -> JobList:
        """As `Client.list_jobs`."""
        return await self._answer(calls.list_jobs(limit=limit, cursor=cursor, kind=kind, state=state))

    async def read_job(self, job_id: str) -> Job:
        """As `Client.read_job`."""
        return await self._answer(calls.read_job(job_id))

    async def read_job_result(self, job_id: str) -> Mapping[str, Any]:
        """As `Client.read_job_result`."""
        return await self._answer(calls.read_job_result(job_id))

    async def cancel_job(self, job_id: str) -> Job:
        """As `Client.cancel_job`."""
        return await self._answer(calls.cancel_job(job_id))

    async def retry_job(self, job_id: str) -> Job:
        """As `Client.retry_job`."""
        return await self._answer(calls.retry_job(job_id))

    async def make_schedule(
        self, name: str, cron: str, kind: str, body: Mapping[str, Any] | None = None
    ) -> ScheduleAnswer:
        """As `Client.make_schedule`."""
        return await self._answer(calls.make_schedule(name, cron, kind, body or {}))

    async def list_schedules(self) -> tuple[ScheduleAnswer, ...]:
        """As `Client.list_schedules`."""
        return await self._answer(calls.list_schedules())

    async def read_schedule(self, name: str) -> ScheduleAnswer:
        """As `Client.read_schedule`."""
        return await self._answer(calls.read_schedule(name))

    async def pause_schedule(self, name: str) -> ScheduleAnswer:
        """As `Client.pause_schedule`."""
        return await self._answer(calls.pause_schedule(name, is_paused=True))

    async def resume_schedule(self, name: str) -> ScheduleAnswer:
        """As `Client.resume_schedule`."""
        return await self._answer(calls.pause_schedule(name, is_paused=False))

    async def delete_schedule(self, name: str) -> None:
        """As `Client.delete_schedule`."""
        await self._answer(calls.delete_schedule(name))

    async def _answer(self, call: Call[T]) -> T:
        arguments, attempt = call.arguments(), 0
        while True:
            try:
                outcome: httpx.Response | httpx.TransportError = await self._http.request(**arguments)
            except httpx.TransportError as error:
                outcome = error
            self._answered |= isinstance(outcome, httpx.Response)
            wait_s = self._retries.wait_s(attempt, outcome, answered=self._answered)
            if wait_s is None:
                return _read(call, outcome, self._url)
            await asyncio.sleep(wait_s)
            attempt += 1


def _plan_of(job: Job) -> str:
    """The id of the plan that a job made.

    Raises:
        AutoshardError: If it made none.
    """
    if job.plan_id is None:
        raise job.failure or AutoshardError(f"the job {job.id} was {job.state}")
    return job.plan_id


def _checked(url: str) -> str:
    """The address, if it is one of HTTP.

    Raises:
        InvalidOptionError: If it is none.
    """
    if not url.startswith(("http://", "https://")):
        raise InvalidOptionError(
            f"must be the address of a service, such as http://localhost:8000, got {shown(url)}", field="server"
        )
    return url


def _headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def _read(call: Call[T], outcome: httpx.Response | httpx.TransportError, url: str) -> T:
    """The answer's value.

    Raises:
        AutoshardError: If it is an error, or there was none.
    """
    if isinstance(outcome, httpx.TransportError):
        start = ""
        if isinstance(outcome, httpx.ConnectError | httpx.ConnectTimeout):
            start = "; `autoshard serve` starts a service, --server or the client's URL names one"
        raise ServiceError(f"does not answer: {outcome}{start}", source=url) from outcome
    if outcome.is_success:
        try:
            return call.read(outcome)
        except ValueError as error:  # pydantic's and JSON's
            raise ServiceError("answers as no service of this version of autoshard does", source=url) from error
    raise error_of(outcome, url)
