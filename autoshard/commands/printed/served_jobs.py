"""Jobs of a service (`autoshard.job/1`, `autoshard.jobs/1`): what `autoshard jobs --json` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from autoshard.formats.documents.document import Document
from autoshard.formats.documents.kinds import ANY_TEXT, TEXT, Field, list_of, or_null, record, whole_number

if TYPE_CHECKING:
    from autoshard.api import JobSummary
    from autoshard.client import Job

_FIELDS: Final = (
    Field("id", TEXT, "Its id."),
    Field("kind", TEXT, "What it does: plan, compare, collect, train-cost, ..."),
    Field("state", TEXT, "queued, running, succeeded, failed or cancelled."),
    Field("attempt", whole_number(1), "1, and 1 more for each retry."),
    Field("created_at", TEXT, "When it was asked for, UTC (ISO 8601)."),
    Field("progress", ANY_TEXT, "The last line of its log."),
)
_DETAILS: Final = (
    Field("log", ANY_TEXT, "The end of its log."),
    Field("plan_id", or_null(TEXT), "The plan that it made, if it is there."),
    Field("failure", or_null(ANY_TEXT), "Why it failed, if it did."),
)


def _summary(job: JobSummary | Job) -> dict[str, Any]:
    return {field.name: getattr(job, field.name) for field in _FIELDS}


def _parts(job: Job) -> dict[str, Any]:
    failure = None if job.failure is None else str(job.failure)
    return {**_summary(job), "log": job.log, "plan_id": job.plan_id, "failure": failure}


JOB: Final[Document[Any]] = Document(
    name="job",
    meaning="What `autoshard jobs show`, `wait`, `cancel` and `retry` print with --json: a job of a service.",
    make=dict,
    fields=lambda _: (*_FIELDS, *_DETAILS),
    parts=_parts,
)
JOBS: Final[Document[Any]] = Document(
    name="jobs",
    meaning="What `autoshard jobs --json` prints: jobs of a service, the latest first.",
    make=dict,
    fields=lambda _: (Field("jobs", list_of(record(dict, *_FIELDS, parts=_summary), 0), "The jobs."),),
    parts=lambda found: {"jobs": found},
)
