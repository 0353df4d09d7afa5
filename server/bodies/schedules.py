"""Bodies of schedules: jobs that are made again and again, at times that a cron expression says."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any

from croniter import CroniterError, croniter
from pydantic import BaseModel, ConfigDict, Field

from autoshard.core.errors import InputError
from autoshard.core.quoting import shown
from server.bodies.jobs import JobKind

ScheduleName = Annotated[str, Field(pattern="^[a-z0-9][a-z0-9-]{0,63}$", description="The schedule's name.")]
#: Numbers, names of days and months, and signs; no field that begins with H or R, which would be drawn at random.
_FIELD = r"(?![HhRr])[0-9A-Za-z*/,?#-]+"
_CRON = re.compile(rf"{_FIELD}( {_FIELD}){{4,5}}")


class ScheduledKind(StrEnum):
    """Kinds of jobs that a schedule makes: those of the scope `train`."""

    COLLECT = JobKind.COLLECT.value
    CALIBRATE = JobKind.CALIBRATE.value
    TRAIN_COST = JobKind.TRAIN_COST.value
    TRAIN_POLICY = JobKind.TRAIN_POLICY.value


class ScheduleBody(BaseModel):
    """A job that is to be made again and again."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "examples": [{"name": "nightly", "cron": "0 3 * * *", "kind": "collect", "body": {"seconds": 600.0}}]
        },
    )

    name: ScheduleName
    cron: str = Field(
        max_length=128,
        description="Minute, hour, day of month, month and day of week, UTC; six fields begin with the second.",
    )
    kind: Annotated[ScheduledKind, Field(strict=False, description="What its jobs do.")]
    body: dict[str, Any] = Field(default_factory=dict, description="The body of `POST /v1/jobs/{kind}`.")


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


def next_time(cron: str) -> str:
    """When a cron expression fires next, UTC (ISO 8601).

    Raises:
        InputError: If it is none, or never fires.
    """
    try:
        if not _CRON.fullmatch(cron):
            raise CroniterError
        found: datetime = croniter(cron, datetime.now(UTC), second_at_beginning=True).get_next(datetime)
    except CroniterError as error:
        raise InputError(
            "must be five fields (minute, hour, day of month, month, day of week), or six with the second first, of a "
            f"time that comes, such as `0 3 * * *`; got {shown(cron)}",
            field="cron",
        ) from error
    return found.isoformat(timespec="seconds")
