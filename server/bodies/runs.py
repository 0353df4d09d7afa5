"""Bodies of measured runs of plans."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

#: Largest number of measured steps and of features of one report.
_MAX_STEPS, MAX_FEATURES = 10_000, 1 << 14

_Ms = Annotated[float, Field(gt=0, le=1e9)]
Pooling = Annotated[float, Field(ge=0, le=1e9)]
PoolingFactors = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=512)], Pooling], Field(max_length=MAX_FEATURES)
]


class RunBody(BaseModel):
    """What a training job measured of a plan that it executes."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        json_schema_extra={"examples": [{"steps_ms": [12.1, 11.8, 12.4], "pooling_factors": {"t0": 1.4}}]},
    )

    steps_ms: list[_Ms] = Field(min_length=1, max_length=_MAX_STEPS, description="Milliseconds of training steps.")
    pooling_factors: PoolingFactors = Field(
        default_factory=dict, description="Mean ids per sample by feature, as the job sees them."
    )


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
