"""Bodies of jobs: what each kind takes, and what is told about a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

from autoshard.api import JobKind
from autoshard.core.accepted import MAX_SEED
from server.access import Scope
from server.bodies.plans import ComparisonBody, PlanBody

MAX_JOB_TIME_LIMIT_S = 3600.0
_MAX_SECONDS = 86_400.0

_Device = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", description="Key of the device.")]
_Updates = Annotated[int, Field(ge=1, le=10_000_000, description="Number of updates; more take longer.")]
_Seconds = Annotated[float, Field(gt=0, le=_MAX_SECONDS)]
_Seed = Annotated[int, Field(ge=0, le=MAX_SEED)]


class PlanJobBody(PlanBody):
    """A planning task with more time than a request has."""

    time_limit_s: float = Field(
        default=1.0,
        gt=0,
        le=MAX_JOB_TIME_LIMIT_S,
        description="Seconds that a planner which improves its plan may use; more than 60 make a job of a request.",
    )


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class CollectBody(_Closed):
    """Measurements of this machine's kernels, which are added to the service's samples."""

    device: Annotated[str, Field(pattern="^(auto|cpu|cuda)$")] = "auto"
    seconds: _Seconds = Field(default=60.0, description="Seconds to measure for, start-up included.")


class CalibrateBody(_Closed):
    """Measurements of this machine's kernels; the nearest known cost model, fitted to them, becomes the candidate."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"device": "cpu", "seconds": 60.0}]})

    device: Annotated[str, Field(pattern="^(auto|cpu|cuda)$")] = "auto"
    seconds: _Seconds = Field(default=60.0, description="Seconds to measure for; fitting takes some more.")
    updates: _Updates | None = None


class TrainCostBody(_Closed):
    """Training of a device's cost model from the service's samples."""

    device: _Device | None = Field(default=None, description="Null where there are samples of one device only.")
    updates: _Updates | None = None
    seed: _Seed = 0


class TrainPolicyBody(_Closed):
    """Training of a device's policy."""

    device: _Device = "cpu"
    updates: _Updates | None = None
    seconds: _Seconds | None = Field(default=None, description="Seconds to train for.")
    num_tasks: int = Field(default=90, ge=1, le=1 << 16, description="Tasks to train on.")
    num_tables: int = Field(default=80, ge=1, le=2048, description="Tables per task.")
    num_ranks: int = Field(default=8, ge=1, le=1024, description="Ranks per task.")
    seed: _Seed = 0


#: The body of each kind's request.
BODIES: Final[Mapping[JobKind, type[BaseModel]]] = {
    JobKind.PLAN: PlanJobBody,
    JobKind.COMPARE: ComparisonBody,
    JobKind.COLLECT: CollectBody,
    JobKind.CALIBRATE: CalibrateBody,
    JobKind.TRAIN_COST: TrainCostBody,
    JobKind.TRAIN_POLICY: TrainPolicyBody,
}


def scope_of(kind: JobKind) -> Scope:
    """Scope of the keys that a kind of jobs needs."""
    return Scope.PLAN if kind in (JobKind.PLAN, JobKind.COMPARE) else Scope.TRAIN
