"""`autoshard jobs`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard.commands.arguments import KEY_VARIABLE, open_client
from autoshard.commands.options import Needs, command_options
from autoshard.console import JsonOption, emit, log, working
from autoshard.core.errors import InvalidOptionError
from autoshard.core.quoting import shown
from autoshard.table import Column, Table, facts

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autoshard.api import JobSummary
    from autoshard.client import Client, Job

_DEFAULT_SERVER = "http://localhost:8000"
_FAILED = 1
#: Jobs that are asked for at a time, and printed.
_MAX_LINES = 200


class JobAction(StrEnum):
    """What to do with jobs."""

    LIST = "list"
    SHOW = "show"
    WAIT = "wait"
    STOP = "stop"
    CANCEL = "cancel"
    PRIORITISE = "prioritise"
    RETRY = "retry"


@command_options()
class JobsOptions:
    """What to do with which jobs of a service."""

    action: Annotated[JobAction, typer.Argument(help="What to do.", show_default=True)] = JobAction.LIST
    job: Annotated[str | None, typer.Argument(help="Id of the job.", show_default=False)] = None
    server: Annotated[
        str, typer.Option(metavar="URL", help=f"The service (`autoshard serve`); ${KEY_VARIABLE} holds a key of it.")
    ] = _DEFAULT_SERVER
    kind: Annotated[
        str | None,
        typer.Option(help="Only jobs of this kind: plan, compare, collect, calibrate, train-cost, train-policy."),
        Needs("list", lambda options: options.action is JobAction.LIST),
    ] = None
    state: Annotated[
        str | None,
        typer.Option(help="Only jobs in this state: queued, running, succeeded, failed, cancelled."),
        Needs("list", lambda options: options.action is JobAction.LIST),
    ] = None

    priority: Annotated[
        int | None,
        typer.Option(
            min=-9, max=9, help="Jobs of a higher one begin first; above 0 needs the scope admin.", show_default=False
        ),
        Needs("prioritise", lambda options: options.action is JobAction.PRIORITISE),
    ] = None

    def __post_init__(self) -> None:
        if self.action is JobAction.LIST and self.job is not None:
            raise InvalidOptionError(f"takes none, got {shown(self.job)}", field="job", source=str(self.action))
        if self.action is not JobAction.LIST and self.job is None:
            raise InvalidOptionError("needs the id of a job", field="job", source=str(self.action))
        if self.action is JobAction.PRIORITISE and self.priority is None:
            raise InvalidOptionError("is needed, from -9 to 9", field="--priority", source=str(self.action))


def jobs(options: JobsOptions, as_json: JsonOption = False) -> None:
    """Lists the jobs of a service, and shows, awaits, stops, cancels, prioritises or retries one.

    `wait` follows a job to its end, and exits with 1 if it was not done. `stop` ends a search, and keeps the best plan.
    `prioritise` changes when a job begins that waits.

    Example:
        autoshard jobs --server http://localhost:8000 --state running
        autoshard jobs wait 0123456789abcdef0123456789abcdef
        autoshard jobs prioritise 0123456789abcdef0123456789abcdef --priority 5
    """
    with open_client(options.server) as client:
        if options.action is JobAction.LIST:
            found = _all_jobs(client, options)
            emit({"jobs": [one.model_dump(mode="json") for one in found]}, _listed(found), as_json=as_json, kind="jobs")
            return
        assert options.job is not None
        job = _done(client, options, options.job)
    emit(job.model_dump(mode="json"), _details(job), as_json=as_json, kind="job")
    if options.action is JobAction.WAIT and job.state != "succeeded":
        raise typer.Exit(_FAILED)


def _all_jobs(client: Client, options: JobsOptions) -> list[JobSummary]:
    page = client.list_jobs(kind=options.kind, state=options.state, limit=_MAX_LINES)
    found = page.jobs
    while page.next is not None:
        page = client.list_jobs(kind=options.kind, state=options.state, limit=_MAX_LINES, cursor=page.next)
        found = found + page.jobs
    return found


def _done(client: Client, options: JobsOptions, job_id: str) -> Job:
    """The job after what is to be done with it."""
    action = options.action
    if options.priority is not None:
        return client.prioritise_job(job_id, options.priority)
    if action is JobAction.STOP:
        return client.stop_job(job_id)
    if action is JobAction.CANCEL:
        return client.cancel_job(job_id)
    if action is JobAction.RETRY:
        return client.retry_job(job_id)
    if action is JobAction.SHOW:
        return client.read_job(job_id)
    last = ""

    def tell(job: Job) -> None:
        nonlocal last
        if job.progress and job.progress != last:
            last = job.progress
            log(last)

    with working(f"Waiting for the job {job_id}"):
        return client.wait_for(job_id, tell)


def _listed(found: Sequence[JobSummary]) -> RenderableType:
    if not found:
        return "No jobs."
    table = Table.of(
        found,
        [
            ("job", lambda job: job.id),
            (Column("kind"), lambda job: job.kind),
            (Column("state"), lambda job: job.state),
            ("attempt", lambda job: job.attempt),
            (Column("asked for"), lambda job: job.created_at),
            (Column("progress"), lambda job: job.progress),
        ],
        is_boxed=True,
    )
    return table.first(_MAX_LINES, "older job")


def _details(job: Job) -> Table:
    rows = {
        "job": job.id,
        "kind": job.kind,
        "state": job.state,
        "attempt": job.attempt,
        "asked for": job.created_at,
        "priority": job.priority,
        "place in the queue": job.position,
        "plan": job.plan_id,
        "failure": job.failure,
        "log": job.log,
    }
    return facts([(name, value) for name, value in rows.items() if value])
