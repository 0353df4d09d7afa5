"""Bodies of schedules: jobs that are made again and again, at times that a cron expression says."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Any

from croniter import CroniterError, croniter
from pydantic import BaseModel, ConfigDict, Field

from autoshard.api import ScheduledKind, ScheduleName
from autoshard.core.errors import InputError
from autoshard.core.quoting import shown

#: Numbers, names of days and months, and signs; no field that begins with H or R, which would be drawn at random.
_FIELD = r"(?![HhRr])[0-9A-Za-z*/,?#-]+"
_CRON = re.compile(rf"{_FIELD}( {_FIELD}){{4,5}}")


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
