"""Does jobs, one step after the other; both steps may be begun again by another process."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import structlog

from autoshard.api import JobState, Problem
from server.access import Principal
from server.jobs.child import ChildWork, run_child
from server.problems import InternalError, StorageError, problem_of
from server.settings import ServerSettings
from server.storage.jobs import ClaimedJob, JobEnd, JobRun
from server.storage.storage import Storage
from server.tasks.reply import PlanFacts, Reply

#: Seconds between two looks at a process, at which its log is stored and cancelling is seen.
LOOK_S = 0.5
_LOG_BYTES = 8192
#: Who finished a job, in the audit log.
ACTOR = Principal(name="job")
_log = structlog.get_logger()
_context = multiprocessing.get_context("spawn")

Outcome = dict[str, Any]


class AbandonedError(BaseException):
    """A run that goes on elsewhere. No `Exception`: the workflow has not failed, and is resumed."""


class JobRunner:
    """The steps of a job's workflow.

    Args:
        storage: Holds jobs, and gets what they make.
        settings: Limits, models and folders.
    """

    def __init__(self, storage: Storage, settings: ServerSettings) -> None:
        self._storage = storage
        self._settings = settings
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Ends what runs now; it is left to be resumed."""
        self._stopping.set()

    def work(self, job_id: str, attempt: int) -> Outcome:
        """Step 1: does the work in a process of its own.

        Returns:
            What `finish` takes, as JSON.

        Raises:
            AbandonedError: If the service stops, or another run has the job.
        """
        job = self._storage.jobs.claim(JobRun(id=job_id, attempt=attempt))
        if job is None:
            return {}  # cancelled while it waited
        with structlog.contextvars.bound_contextvars(job=job_id):
            _log.info("job begun", kind=job.kind, attempt=attempt)
            return self._outcome(job)

    def finish(self, job_id: str, attempt: int, outcome: Mapping[str, Any]) -> None:
        """Step 2: stores what the work made and ends the job, in one transaction, once."""
        if not outcome:
            return
        facts = outcome.get("facts")
        body = str(outcome["body"]).encode()
        end = JobEnd(
            state=JobState(outcome["state"]),
            plan_id=facts and facts["id"],
            result=body if outcome["state"] == JobState.SUCCEEDED and not facts else None,
            problem=Problem.model_validate_json(body) if outcome["state"] == JobState.FAILED else None,
        )
        plan = None if facts is None else (PlanFacts(**facts), body)
        if self._storage.finish_job(JobRun(id=job_id, attempt=attempt), end, plan, ACTOR):
            _log.info("job ended", job=job_id, attempt=attempt, state=end.state)
        if end.state is JobState.SUCCEEDED:
            shutil.rmtree(self._settings.jobs_folder / job_id, ignore_errors=True)

    def _outcome(self, job: ClaimedJob) -> Outcome:
        folder = self._settings.jobs_folder / job.run.id
        folder.mkdir(parents=True, exist_ok=True)
        work = ChildWork(kind=job.kind, request=job.request, job_id=job.run.id, folder=folder, settings=self._settings)
        ours, theirs = _context.Pipe()
        process = _context.Process(target=run_child, args=(theirs, work))
        process.start()
        theirs.close()
        try:
            while not ours.poll(LOOK_S):
                self._look(job, work.log)
            reply = Reply.receive(ours)
            with suppress(StorageError):  # the log's end is told less than what was made
                self._storage.jobs.report(job, _tail(work.log))
        except _CancelledError:
            return {"state": JobState.CANCELLED, "body": ""}
        except (EOFError, OSError):
            reply = None
        finally:
            _end(process)
            ours.close()
        return _outcome_of(reply or _died(process))

    def _look(self, job: ClaimedJob, log: Path) -> None:
        """Stores the end of the log; raises if the work is to end."""
        if self._stopping.is_set():
            self._storage.jobs.release(job)
            raise AbandonedError
        try:
            goes_on = self._storage.jobs.report(job, _tail(log))
        except StorageError:
            return  # the job is lost to another run if this lasts, which the next report says
        if not goes_on:
            raise _CancelledError if self._storage.jobs.is_cancelled(job.run) else AbandonedError


class _CancelledError(Exception):
    pass


def _outcome_of(reply: Reply) -> Outcome:
    state = JobState.SUCCEEDED if reply.status == 200 else JobState.FAILED
    facts = None if reply.facts is None else reply.facts.model_dump()
    return {"state": state, "body": reply.body.decode(), "facts": facts}


def _died(process: BaseProcess) -> Reply:
    _log.error("job's process died", exit_code=process.exitcode)
    problem = problem_of(InternalError(f"the job's process ended before it answered, with {process.exitcode}"))
    return Reply(status=500, body=problem.model_dump_json(exclude_none=True).encode())


def _end(process: BaseProcess) -> None:
    """Ends a process and all that it started."""
    assert process.pid is not None
    with suppress(ProcessLookupError, PermissionError):
        if os.getpgid(process.pid) == process.pid:  # else it has not made its group yet
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _tail(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LOG_BYTES))
            return file.read(_LOG_BYTES).decode("utf-8", errors="replace")
    except FileNotFoundError:  # it is just starting
        return ""
