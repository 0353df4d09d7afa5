"""Jobs, and schedules that make them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Final

from pydantic import BaseModel, Field

from autoshard.api.problems import Problem, RequestBody, examples
from autoshard.api.tasks import ComparisonBody, PlanBody
from autoshard.core.accepted import MAX_SEED

#: Priorities of jobs; those above 0 are for admins.
Priority = Annotated[int, Field(ge=-9, le=9)]
JobId = Annotated[str, Field(pattern="^[0-9a-f]{32}$", description="The job's id.")]


class JobKind(StrEnum):
    """What a job does."""

    PLAN = "plan"
    COMPARE = "compare"
    COLLECT = "collect"
    CALIBRATE = "calibrate"
    TRAIN_COST = "train-cost"
    TRAIN_POLICY = "train-policy"


class JobState(StrEnum):
    """How far a job is."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether nothing is done any more."""
        return self not in (JobState.QUEUED, JobState.RUNNING)


class JobTask(BaseModel):
    """What a job was asked for, in few words; null is what jobs of its kind do not have."""

    tables: str | None = Field(default=None, description="Name of the bundled table set, or the number of tables.")
    topology: str | None = Field(default=None, description="Name of the bundled topology, or its ranks and device.")
    planner: str | None = Field(default=None, description="Planner, or planners separated by commas.")
    limit_s: int | None = Field(
        default=None, title="limit, s", description="Seconds that it may plan, measure or train for, as it asks."
    )

    @classmethod
    def of(cls, body: RequestBody) -> JobTask:
        """What a request's body asks for."""
        given = dict(body)
        planners = given.get("planners") or [given["planner"]] if "tables" in given else []
        limit_s = given["time_limit_s"] * len(planners) if planners else given.get("seconds")
        return cls(
            tables=_tables_text(given.get("tables")),
            topology=_topology_text(given.get("topology")),
            planner=", ".join(planners)[:_MAX_TEXT] or None,
            limit_s=None if limit_s is None else math.ceil(limit_s),
        )


_MAX_TEXT: Final = 128


def _tables_text(given: Any) -> str | None:
    if given is None or isinstance(given, str):
        return given
    rows = given if isinstance(given, list) else given.get("tables", given.get("rows"))
    return f"{len(rows):,} tables" if isinstance(rows, list) else "a table list"


def _topology_text(given: Any) -> str | None:
    if given is None or isinstance(given, str):
        return given
    return f"{given.get('world_size')} ranks of {given.get('device')}"[:_MAX_TEXT]


class JobSummary(JobTask):
    """A job, in a list."""

    id: Annotated[JobId, Field(title="job")]
    kind: JobKind
    state: JobState
    attempt: int = Field(description="1, and 1 more for each retry.")
    created_at: str = Field(title="made, UTC", description="When it was asked for, UTC (ISO 8601).")
    owner: str = Field(
        description="Who asked for it: a key, a token's subject, a schedule, or an address without keys."
    )
    priority: int = Field(default=0, description="Jobs of a higher one begin first.")
    position: int | None = Field(default=None, description="Its place in the queue, 1 for the next; null once begun.")
    begins_in_s: int | None = Field(
        default=None,
        title="begins in, s",
        description="Seconds until it begins, if the jobs before it take as long as they asked for.",
    )
    progress: str = Field(description="The last line of its log.")


class JobAnswer(JobSummary):
    """A job."""

    started_at: str | None = Field(description="When its present attempt began.")
    seen_at: str = Field(description="When its state and log were last known; 5 s ago at most while it runs.")
    finished_at: str | None
    is_cancelling: bool = Field(description="Whether it is to end, and has not yet.")
    is_stopped: bool = Field(
        default=False, description="Whether its search was to end early: its plan is the best one found until then."
    )
    log: str = Field(description="The end of its log.")
    plan_id: str | None = Field(description="The plan that it made.")
    problem: Problem | None = Field(description="Why it failed.")


class JobChange(RequestBody):
    """What is changed of a job that waits."""

    max_bytes: ClassVar[int] = 1 << 10
    model_config = examples({"priority": 5})

    priority: Priority = Field(description="Jobs of a higher one begin first; above 0, of the scope admin.")


class JobList(BaseModel):
    """One page of jobs, the latest first."""

    jobs: list[JobSummary]
    next: str | None = Field(description="The `cursor` of the next page; null on the last.")


_MAX_TIME_LIMIT_S, _MAX_SECONDS = 3600.0, 86_400.0

_Device = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="Key of the device.")]
_Updates = Annotated[int, Field(ge=1, le=10_000_000, description="Number of updates; more take longer.")]
_Seconds = Annotated[float, Field(gt=0, le=_MAX_SECONDS)]
_Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]


class PlanJobBody(PlanBody):
    """A planning task with more time than a request has."""

    time_limit_s: float = Field(
        default=1.0,
        gt=0,
        le=_MAX_TIME_LIMIT_S,
        description="Seconds that a planner which improves its plan may use; more than 60 make a job of a request.",
    )


class _SettingsBody(RequestBody):
    """Numbers and names, whose parsing holds up nobody."""

    max_bytes: ClassVar[int] = 4 << 10


class CollectBody(_SettingsBody):
    """Measurements of this machine's kernels, which are added to the service's samples."""

    device: Annotated[str, Field(pattern="^(auto|cpu|cuda)$")] = "auto"
    seconds: _Seconds = Field(default=60.0, description="Seconds to measure for, start-up included.")


class CalibrateBody(_SettingsBody):
    """Measurements of this machine's kernels; the nearest known cost model, fitted to them, becomes the candidate."""

    model_config = examples({"device": "cpu", "seconds": 60.0})

    device: Annotated[str, Field(pattern="^(auto|cpu|cuda)$")] = "auto"
    seconds: _Seconds = Field(default=60.0, description="Seconds to measure for; fitting takes some more.")
    updates: _Updates | None = None


class TrainCostBody(_SettingsBody):
    """Training of a device's cost model from the service's samples; the model becomes the candidate."""

    device: _Device | None = Field(default=None, description="Null where there are samples of one device only.")
    updates: _Updates | None = None
    seed: _Seed = 0


class TrainPolicyBody(_SettingsBody):
    """Training of the policy of any device, or of one, which becomes the candidate."""

    device: _Device = Field(default="any", description="`any` for one policy that serves all devices.")
    updates: _Updates | None = None
    seconds: _Seconds | None = Field(default=None, description="Most seconds to search and to learn for.")
    num_tasks: int = Field(default=240, ge=1, le=1 << 16, description="Tasks to train on.")
    search_seconds: float = Field(default=2.0, gt=0, le=3600, description="Seconds of the search of each task.")
    seed: _Seed = 0


#: The body of each kind's request.
JOB_BODIES: Final[Mapping[JobKind, type[RequestBody]]] = {
    JobKind.PLAN: PlanJobBody,
    JobKind.COMPARE: ComparisonBody,
    JobKind.COLLECT: CollectBody,
    JobKind.CALIBRATE: CalibrateBody,
    JobKind.TRAIN_COST: TrainCostBody,
    JobKind.TRAIN_POLICY: TrainPolicyBody,
}


ScheduleName = Annotated[str, Field(pattern="^[a-z0-9][a-z0-9-]{0,63}$", description="The schedule's name.")]


class ScheduledKind(StrEnum):
    """Kinds of jobs that a schedule makes: those of the scope `train`."""

    COLLECT = JobKind.COLLECT.value
    CALIBRATE = JobKind.CALIBRATE.value
    TRAIN_COST = JobKind.TRAIN_COST.value
    TRAIN_POLICY = JobKind.TRAIN_POLICY.value


class ScheduleAnswer(BaseModel):
    """A schedule."""

    name: ScheduleName
    cron: str
    kind: ScheduledKind
    body: dict[str, Any]
    owner: str = Field(description="Who made it.")
    is_paused: bool = Field(description="Whether it makes no jobs at present.")
    last_fired_at: str | None = Field(description="The time of its last job, UTC (ISO 8601); null if there was none.")
    next_fires_at: str | None = Field(description="The time of the next one; null while it is paused.")


class ScheduleList(BaseModel):
    """All schedules, by name."""

    schedules: list[ScheduleAnswer]


class ScheduleBody(RequestBody):
    """A job that is to be made again and again."""

    max_bytes: ClassVar[int] = 16 << 10
    model_config = examples({"name": "nightly", "cron": "0 3 * * *", "kind": "collect", "body": {"seconds": 600.0}})

    name: ScheduleName
    cron: str = Field(
        max_length=128,
        description="Minute, hour, day of month, month and day of week, UTC; six fields begin with the second.",
    )
    kind: Annotated[ScheduledKind, Field(strict=False, description="What its jobs do.")]
    body: dict[str, Any] = Field(default_factory=dict, description="The body of `POST /v1/jobs/{kind}`.")
