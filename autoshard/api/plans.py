"""Plans and runs: what is answered, and what is stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, get_args

from pydantic import BaseModel, Field, WithJsonSchema, create_model

from autoshard.api.problems import Fault, RequestBody, examples
from autoshard.api.tasks import FILE_SCHEMA, PlanObject

#: Digest of a plan's canonical JSON.
PlanId = Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$", description="Digest of the plan's canonical JSON.")]
#: Most plans or jobs of a page.
MAX_PAGE: Final = 200
_NOTES: Final = "How a table list was read, and what was taken for what it leaves open."
# A text to look for: without the character that PostgreSQL's texts cannot have.
_Text = Annotated[str, Field(max_length=512, pattern=r"^[^\x00]*$")]
_Count = Annotated[int, Field(ge=1, le=1 << 31)]


class ValidationAnswer(BaseModel):
    """Whether a task can be planned for, and its size."""

    is_valid: bool
    faults: list[Fault] = Field(
        description="The first fault of each document and of the constraints, and all those of a table list."
    )
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

    comparison: Annotated[dict[str, Any], WithJsonSchema({FILE_SCHEMA: "autoshard.comparison/1"})] = Field(
        description="What `autoshard compare --json` prints."
    )
    plans: dict[str, PlanObject] = Field(description="Plans by planner, of those that found one.")
    failures: dict[str, Fault] = Field(description="Why the others found none, by planner.")
    notes: list[str] = Field(default_factory=list, description=_NOTES)


class PlanAnswer(BaseModel):
    """A plan and its id."""

    id: PlanId
    plan: PlanObject = Field(description="The object of a plan.json (autoshard.plan/1).")
    notes: list[str] = Field(default_factory=list, description=_NOTES)
    warnings: list[str] = Field(
        default_factory=list, description="That its search was stopped, or had less than half of its time limit."
    )


class PlanFigures(BaseModel):
    """What is stored of a plan beside the plan.

    Lists show all of them and are filtered by those that are texts and whole numbers: a column of the page, a parameter
    of the request and of the client are made of each.
    """

    planner: str = Field(description="Name of the planner.")
    device: str = Field(description="Key of the topology's device.")
    num_tables: int = Field(title="tables", description="Tables of the plan.")
    num_ranks: int = Field(title="ranks", description="Ranks of the topology.")
    topology: str | None = Field(
        default=None, description="Name of the bundled topology; null for another one, and for plans stored before."
    )
    step_ms: float = Field(title="predicted step, ms", description="Predicted milliseconds of a training step.")


class _StoredPlan(BaseModel):
    id: Annotated[PlanId, Field(title="plan")]
    created_at: str = Field(title="made, UTC", description="When it was first made, UTC (ISO 8601).")
    owner: str = Field(default="", description="Who made it first: a key or a token's subject; empty for plans before.")
    name: str = Field(default="", description="What the team calls it.")
    tags: str = Field(default="", description="Words by which the team finds it, separated by spaces.")


class PlanSummary(PlanFigures, _StoredPlan):
    """A stored plan, in a list."""


class PlanLabels(RequestBody):
    """What a stored plan is called; null leaves it as it is."""

    max_bytes: ClassVar[int] = 4 << 10
    model_config = examples({"name": "ranker, first week", "tags": "ranker nightly"})

    name: Annotated[str, Field(max_length=128, pattern=r"^[^\x00]*$")] | None = None
    tags: Annotated[str, Field(max_length=256, pattern=r"^[^\x00]*$")] | None = Field(
        default=None, description="Words, separated by spaces."
    )


class PlanSearch(BaseModel):
    """Which stored plans a list shows; what is null does not matter."""

    limit: int = Field(default=50, ge=1, le=MAX_PAGE, description="Most plans of a page.")
    cursor: str | None = Field(default=None, max_length=256, description="`next` of the page before.")
    text: _Text | None = Field(
        default=None,
        description="Part of a name, in any case: planner, device, level of the topology or one of the first tables; "
        "or of the plan's own name and tags, in this case.",
    )
    is_deleted: bool = Field(default=False, description="Only plans that were deleted within a day, and no others.")
    owner: _Text | None = Field(default=None, description="Only plans that this key or subject made.")
    id: PlanId | None = Field(default=None, description="Only this plan.")

    @property
    def figures(self) -> dict[str, str | int]:
        """Wanted values by figure."""
        return {name: value for name, value in self if name in PLAN_FILTERS and value is not None}


def _filters() -> Iterator[tuple[str, Any]]:
    kinds: dict[Any, Any] = {str: _Text, int: _Count}
    for name, field in PlanFigures.model_fields.items():
        if kind := next((kinds[one] for one in (*get_args(field.annotation), field.annotation) if one in kinds), None):
            yield name, (kind | None, Field(default=None, description=field.description))


#: Optional fields by the figures by which plans are chosen.
PLAN_FILTERS: Final[Mapping[str, Any]] = dict(_filters())
if TYPE_CHECKING:
    PlanFilter = PlanSearch
else:
    PlanFilter = create_model("PlanFilter", __base__=PlanSearch, **PLAN_FILTERS)
    """As `PlanSearch`, with the figures by which plans are chosen."""


class PlanList(BaseModel):
    """One page of stored plans, the latest first."""

    plans: list[PlanSummary]
    next: str | None = Field(description="The `cursor` of the next page; null on the last.")


class FeatureDrift(BaseModel):
    """A feature of which a job sees other numbers of ids than the plan was made for."""

    feature: str
    planned: float = Field(description="Mean ids per sample that the plan was made for.")
    measured: float = Field(description="Mean ids per sample of the job.")


class RunFigures(BaseModel):
    """What is stored of a run, and listed."""

    measured_ms: float = Field(description="Median of the measured steps.")
    predicted_ms: float = Field(description="The plan's predicted step.")
    is_drifted: bool = Field(
        description="Whether to plan anew (POST /v1/plans/{id}/replans with these pooling_factors): the measured step "
        "is outside of the interval, or the mean ids make the predicted step longer or shorter by more than 5%."
    )


class RunAnswer(RunFigures):
    """A run beside its plan."""

    low_ms: float = Field(description="Lower end of its 90% interval.")
    high_ms: float = Field(description="Upper end of its 90% interval.")
    is_outside: bool = Field(description="Whether the measured step is outside of the interval.")
    features: list[FeatureDrift] = Field(
        description="Features whose mean ids differ by more than 10%, those first that differ by most ids in all "
        "samples and columns."
    )
    drifted_ms: float | None = Field(
        description="The plan's predicted step with the measured mean ids, by how much longer or shorter the service's "
        "models of now find it with these; null where none were sent."
    )


class StoredRun(RunFigures):
    """A run, in a list."""

    reported_at: str = Field(description="UTC (ISO 8601).")


class RunList(BaseModel):
    """The latest runs of a plan."""

    runs: list[StoredRun]
