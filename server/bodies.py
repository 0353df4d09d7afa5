"""Request and answer bodies."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autoshard.core.accepted import MAX_SEED
from autoshard.core.errors import FormatError

MAX_TIME_LIMIT_S = 60.0

_Name = Annotated[str, Field(min_length=1, max_length=512)]
_Option = bool | int | float | Annotated[str, Field(max_length=512)]


#: Digest of a plan's canonical JSON.
PlanId = Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$", description="Digest of the plan's canonical JSON.")]


class PlanBody(BaseModel):
    """A planning task."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        json_schema_extra={"examples": [{"tables": "criteo-kaggle", "topology": "cpu-8", "planner": "cost-greedy"}]},
    )

    tables: _Name | dict[str, Any] = Field(
        description="The object of a tables.json (autoshard.tables/1), or the name of a bundled table set."
    )
    topology: _Name | dict[str, Any] = Field(
        description="The object of a topology.json (autoshard.topology/1), or the name of a bundled topology."
    )
    planner: _Name = Field(default="auto", description="Name of the planner.")
    options: dict[str, _Option] = Field(default_factory=dict, description="The planner's own options.")
    time_limit_s: float = Field(
        default=1.0, gt=0, le=MAX_TIME_LIMIT_S, description="Seconds that a planner which improves its plan may use."
    )
    payload: Annotated[str, Field(max_length=512)] = Field(
        default="fp32",
        description="Number format in which embeddings and their gradients travel: fp32, fp16, bf16 or int8; or one "
        "for each, FORWARD/BACKWARD, such as fp16/bf16.",
    )
    start: dict[str, Any] | None = Field(
        default=None,
        description="The object of a plan.json (autoshard.plan/1) of the same tables to start from: the answer is no "
        "slower.",
    )
    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="Same seed, same plan, time limits aside.")


class PlanAnswer(BaseModel):
    """A plan and its id."""

    id: PlanId
    plan: dict[str, Any] = Field(description="The object of a plan.json (autoshard.plan/1).")


class PlanFacts(BaseModel):
    """What is stored of a plan, beside the plan."""

    id: str
    planner: str
    device: str
    num_tables: int
    num_ranks: int
    step_ms: float
    search_text: str


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


class Problem(BaseModel):
    """Problem details (RFC 9457)."""

    type: str = Field(description="`urn:autoshard:problem:` and the kind of error, such as `infeasible`.")
    title: str = Field(description="The kind of error in words.")
    status: int
    detail: str = Field(description="What is wrong here, and what would be accepted.")
    field: str | None = Field(default=None, description="Dotted path of the offending field, if there is one.")


def parse_plan_body(document: object) -> PlanBody:
    """Checks a parsed body.

    Raises:
        FormatError: If a field is missing, unknown or of the wrong kind; the text names the first one.
    """
    try:
        return PlanBody.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise FormatError(_message(first["type"], first["msg"]), field=_path(first["loc"]) or None) from None


def _message(kind: str, message: str) -> str:
    known = {
        "missing": "is missing",
        "extra_forbidden": f"is unknown; the body takes: {', '.join(PlanBody.model_fields)}",
    }
    return known.get(kind, message[:1].lower() + message[1:])


def _path(location: tuple[int | str, ...]) -> str:
    if len(location) > 1 and location[0] != "options":
        location = location[:1]  # what follows is pydantic's name of a union's branch
    elif len(location) > 2:
        location = location[:2]
    return ".".join(str(part)[:100] for part in location)
