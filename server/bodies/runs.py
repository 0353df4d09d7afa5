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
