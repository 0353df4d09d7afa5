"""Does jobs; one that was not ended is begun again by another process."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

import structlog

from autoshard.api import JobState, Problem
from server.jobs.child import STOP, ChildWork, run_child
from server.problems import InternalError, StorageError
from server.settings import ServerSettings
from server.storage.jobs import ClaimedJob, JobEnd, JobOrder
from server.storage.storage import Storage
from server.tasks.reply import PlanFacts, Reply

#: Seconds between two looks at a process, at which its log is stored and cancelling is seen.
LOOK_S = 0.5
_LOG_BYTES = 8192
#: Times that a job may be begun: one that ends its service each time would do so for ever.
_MAX_STARTS = 20
_log = structlog.get_logger()
_context = multiprocessing.get_context("spawn")


class JobRunner:
    """Does jobs that were claimed, each in a process of its own.

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

    def forget(self, job_id: str) -> None:
        """Removes the folder of a job, if there is one."""
        shutil.rmtree(self._folder(job_id), ignore_errors=True)

    def _folder(self, job_id: str) -> Path:
        return self._settings.jobs_folder / job_id

    def do(self, job: ClaimedJob) -> Reply | None:
        """Does a job and stores what it made; leaves it if the service stops, or another process has it.

        Returns:
            What it made; None where it was left, cancelled, or ended by another process.
        """
        with structlog.contextvars.bound_contextvars(job=job.run.id):
            _log.info("job begun", kind=job.kind, attempt=job.run.attempt, start=job.num_starts)
            try:
                reply = self._reply(job)
            except _CancelledError:
                self._finish(job, JobEnd(state=JobState.CANCELLED))
            except _AbandonedError:
                pass
            else:
                plan = None if reply.facts is None else (reply.facts, reply.body)
                if self._finish(job, _end_of(reply), plan):
                    return reply
        return None

    def _finish(self, job: ClaimedJob, end: JobEnd, plan: tuple[PlanFacts, bytes] | None = None) -> bool:
        """Ends a job, as soon as the database answers; whether it was unfinished."""
        while True:
            try:
                is_ended = self._storage.finish_job(job, end, plan)
                break
            except StorageError as error:
                _log.warning("job not stored yet", reason=str(error))
                if self._stopping.wait(LOOK_S):
                    return False
        if is_ended:
            _log.info("job ended", attempt=job.run.attempt, state=end.state)
        if end.state is JobState.SUCCEEDED:
            self.forget(job.run.id)
        return is_ended

    def _reply(self, job: ClaimedJob) -> Reply:
        """What a process makes of a job.

        Raises:
            _CancelledError: If somebody cancelled it.
            _AbandonedError: If the service stops, or another process has it.
        """
        if job.num_starts > _MAX_STARTS:
            return Reply.of_error(InternalError(f"its process or service was ended {_MAX_STARTS} times while it ran"))
        folder = self._folder(job.run.id)
        work = ChildWork(
            kind=job.kind,
            request=job.request,
            job_id=job.run.id,
            folder=folder,
            settings=self._settings.of_team(job.team),
        )
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return Reply.of_error(InternalError(f"the job's folder cannot be made: {error.strerror}"))
        ours, theirs = _context.Pipe()
        process = _context.Process(target=run_child, args=(theirs, work))
        process.start()
        theirs.close()
        try:
            is_told = False
            while not ours.poll(LOOK_S):
                if self._look(job, work.log) and not is_told:
                    ours.send_bytes(STOP)
                    is_told = True
            reply = Reply.receive(ours)
            with suppress(StorageError):  # the log's end is told less than what was made
                self._storage.jobs.report(job, self._tail(work.log))
            return reply
        except (EOFError, OSError):
            process.join()
            _log.error("job's process died", exit_code=process.exitcode)
            return Reply.of_error(InternalError(f"the job's process ended before it answered, with {process.exitcode}"))
        finally:
            _end(process)
            ours.close()

    def _look(self, job: ClaimedJob, log: Path) -> bool:
        """Stores the end of the log; whether the search is to end, and raises if the work is."""
        if self._stopping.is_set():
            self._storage.jobs.release(job)
            raise _AbandonedError
        try:
            order = self._storage.jobs.report(job, self._tail(log))
        except StorageError:
            return False  # the job is lost to another run if this lasts, which the next report says
        if order is JobOrder.CANCEL:
            raise _CancelledError
        if order is JobOrder.LEAVE:
            raise _AbandonedError
        return order is JobOrder.STOP

    def _tail(self, log: Path) -> str:
        try:
            with log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - _LOG_BYTES))
                return self._settings.without_folders(file.read(_LOG_BYTES).decode("utf-8", errors="replace"))
        except FileNotFoundError:  # it is just starting
            return ""


class _CancelledError(Exception):
    pass


class _AbandonedError(Exception):
    pass


def _end_of(reply: Reply) -> JobEnd:
    if reply.status != 200:
        return JobEnd(state=JobState.FAILED, problem=Problem.model_validate_json(reply.body))
    if reply.facts is not None:
        return JobEnd(state=JobState.SUCCEEDED, plan_id=reply.facts.id)
    return JobEnd(state=JobState.SUCCEEDED, result=reply.body)


def _end(process: BaseProcess) -> None:
    """Ends a process and all that it started."""
    assert process.pid is not None
    with suppress(ProcessLookupError, PermissionError):
        if os.getpgid(process.pid) == process.pid:  # else it has not made its group yet
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
