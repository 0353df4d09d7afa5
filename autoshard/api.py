"""What the REST service answers with: each answer once, for the service, its description and its clients."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, Field

#: Digest of a plan's canonical JSON.
PlanId = Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$", description="Digest of the plan's canonical JSON.")]


_NOTES = "How a table list was read, and what was taken for what it leaves open."


class Fault(BaseModel):
    """Why a part of a request could not be answered."""

    type: str = Field(description="The kind of error, as in a problem.")
    detail: str
    field: str | None = None


class ValidationAnswer(BaseModel):
    """Whether a task can be planned for, and its size."""

    is_valid: bool
    faults: list[Fault] = Field(description="The first fault of each document, and all those of a table list.")
    columns: dict[str, str] | None = Field(
        default=None, description="Fields that a table list's columns were read as, empty for ignored ones."
    )
    notes: list[str] = Field(default_factory=list, description=_NOTES)
    num_tables: int | None = None
    table_bytes: int | None = Field(default=None, description="Weights and optimizer states of all tables, once.")
    num_ranks: int | None = None
    hbm_bytes: int | None = Field(default=None, description="Device memory of all ranks together.")


class ComparisonAnswer(BaseModel):
    """Planners side by side."""

    comparison: dict[str, Any] = Field(description="What `autoshard compare --json` prints.")
    plans: dict[str, dict[str, Any]] = Field(description="Plans by planner, of those that found one.")
    failures: dict[str, Fault] = Field(description="Why the others found none, by planner.")
    notes: list[str] = Field(default_factory=list, description=_NOTES)


class PlanAnswer(BaseModel):
    """A plan and its id."""

    id: PlanId
    plan: dict[str, Any] = Field(description="The object of a plan.json (autoshard.plan/1).")
    notes: list[str] = Field(default_factory=list, description=_NOTES)


class PlanSummary(BaseModel):
    """A stored plan, in a list."""

    id: PlanId
    created_at: str = Field(description="When it was first made, UTC (ISO 8601).")
    planner: str = Field(description="Name of the planner.")
    device: str = Field(description="Key of the topology's device.")
    num_tables: int
    num_ranks: int
    step_ms: float = Field(description="Predicted milliseconds of a training step.")


class PlanList(BaseModel):
    """One page of stored plans, the latest first."""

    plans: list[PlanSummary]
    next: str | None = Field(description="The `cursor` of the next page; null on the last.")


class Health(BaseModel):
    """State of the service."""

    status: str


class RemedyAnswer(BaseModel):
    """A single change with which the planner found a plan."""

    field: str = Field(description="What to change, as a dotted path in the body.")
    value: int | str | None = Field(description="What to change it to; null for what is to be left out.")
    text: str = Field(description="The change in words.")
    step_ms: float = Field(description="Predicted milliseconds of a step of the plan that was found.")


class Problem(BaseModel):
    """Problem details (RFC 9457)."""

    type: str = Field(description="`urn:autoshard:problem:` and the kind of error, such as `infeasible`.")
    title: str = Field(description="The kind of error in words.")
    status: int
    detail: str = Field(description="What is wrong here, and what would be accepted.")
    field: str | None = Field(default=None, description="Dotted path of the offending field, if there is one.")
    table: str | None = Field(
        default=None,
        description="Of an infeasible task: the first table without room, where whole tables are placed by falling "
        "size; several share a rank.",
    )
    rank: int | None = Field(default=None, description="The rank that may hold it and has most room left.")
    missing_bytes: int | None = Field(default=None, description="Bytes of device memory that the rank lacks for it.")
    faults: list[Fault] | None = Field(default=None, description="All faults, of a table list that has several.")
    remedies: list[RemedyAnswer] | None = Field(
        default=None, description="Of an infeasible task: changes with which the service found a plan, one by one."
    )


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


class JobAnswer(BaseModel):
    """A job."""

    id: JobId
    kind: JobKind
    state: JobState
    attempt: int = Field(description="1, and 1 more for each retry.")
    created_at: str = Field(description="When it was asked for, UTC (ISO 8601).")
    started_at: str | None = Field(description="When its present attempt began.")
    seen_at: str = Field(description="When its state and log were last known; 5 s ago at most while it runs.")
    finished_at: str | None
    is_cancelling: bool = Field(description="Whether it is to end, and has not yet.")
    progress: str = Field(description="The last line of its log.")
    log: str = Field(description="The end of its log.")
    plan_id: str | None = Field(description="The plan that it made.")
    problem: Problem | None = Field(description="Why it failed.")


class JobSummary(BaseModel):
    """A job, in a list."""

    id: JobId
    kind: JobKind
    state: JobState
    attempt: int
    created_at: str
    progress: str


class JobList(BaseModel):
    """One page of jobs, the latest first."""

    jobs: list[JobSummary]
    next: str | None = Field(description="The `cursor` of the next page; null on the last.")


class ModelSummary(BaseModel):
    """A version as lists show it."""

    kind: str
    name: str
    id: str
    aliases: list[str]
    shipped: bool = Field(description="Whether it came with autoshard.")
    used: bool = Field(description="Whether requests are answered with it.")
    published_at: str
    relative_error: float | None = Field(description="Mean relative error on held-out samples; null if not on record.")
    card: dict[str, Any] | None = Field(default=None, description="Its card, if `cards` asked for it.")


class ModelList(BaseModel):
    """All versions, by kind, name and time; shipped ones last."""

    models: list[ModelSummary]


class ShadowSummary(BaseModel):
    """A candidate's prices of plans that the service made, beside those of the production model."""

    num_plans: int
    median_ratio: float | None = Field(description="Of the candidate's predicted step over the production model's.")
    least_ratio: float | None
    largest_ratio: float | None


class AliasChange(BaseModel):
    """A version that an alias named from then on."""

    id: str
    action: str
    at: str
    by: str


class ModelAnswer(ModelSummary):
    """A version with its card."""

    card: dict[str, Any]
    shadow: ShadowSummary
    history: dict[str, list[AliasChange]] = Field(
        description="What the aliases have named, the latest last; as shipped where the registry has given none."
    )


class ModelState(BaseModel):
    """What the aliases of a model name, and have named."""

    kind: str
    name: str
    production: str | None
    candidate: str | None
    history: dict[str, list[AliasChange]]

    @property
    def etag(self) -> str:
        """Changes with the aliases."""
        return f'"{self.production or "none"}-{self.candidate or "none"}-{sum(map(len, self.history.values()))}"'


class FeatureDrift(BaseModel):
    """A feature of which a job sees other numbers of ids than the plan was made for."""

    feature: str
    planned: float = Field(description="Mean ids per sample that the plan was made for.")
    measured: float = Field(description="Mean ids per sample of the job.")


class RunAnswer(BaseModel):
    """A run beside its plan."""

    measured_ms: float = Field(description="Median of the measured steps.")
    predicted_ms: float = Field(description="The plan's predicted step.")
    low_ms: float = Field(description="Lower end of its 90% interval.")
    high_ms: float = Field(description="Upper end of its 90% interval.")
    is_outside: bool = Field(description="Whether the measured step is outside of the interval.")
    features: list[FeatureDrift] = Field(
        description="Features whose mean ids differ by more than 10%, those first that differ by most ids in all "
        "samples and columns."
    )
    drifted_ms: float | None = Field(
        description="The plan's predicted step with the measured mean ids; null where none were sent."
    )
    is_drifted: bool = Field(
        description="Whether to plan anew (POST /v1/plans/{id}/replans with these pooling_factors): the measured step "
        "is outside of the interval, or the mean ids make the predicted step longer or shorter by more than 5%."
    )


class StoredRun(BaseModel):
    """A run, in a list."""

    reported_at: str = Field(description="UTC (ISO 8601).")
    measured_ms: float
    predicted_ms: float
    is_drifted: bool


class RunList(BaseModel):
    """The latest runs of a plan."""

    runs: list[StoredRun]


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
    is_paused: bool = Field(description="Whether it makes no jobs at present.")
    last_fired_at: str | None = Field(description="The time of its last job, UTC (ISO 8601); null if there was none.")
    next_fires_at: str | None = Field(description="The time of the next one; null while it is paused.")


class ScheduleList(BaseModel):
    """All schedules, by name."""

    schedules: list[ScheduleAnswer]


#: Media type of the files.
PARQUET = "application/vnd.apache.parquet"


FileId = Annotated[str, Field(pattern="^[0-9a-f]{64}$", description="SHA-256 of the file.")]


class SamplesAnswer(BaseModel):
    """A file that was added to the service's samples."""

    id: FileId
    kind: str = Field(description="What was measured: kernels, dense or collectives.")
    device: str = Field(description="Key of the device.")
    num_samples: int


class StoredSamples(BaseModel):
    """Samples of one kind and device; copies count as often as they were sent."""

    kind: str
    device: str
    num_samples: int


class QuarantinedFile(BaseModel):
    """A file that was refused, and is kept to be looked at."""

    id: FileId
    detail: str = Field(description="What is wrong with it.")


class SampleList(BaseModel):
    """What the service has been sent or has collected."""

    samples: list[StoredSamples]
    quarantined: list[QuarantinedFile] = Field(description="The latest 64.")
