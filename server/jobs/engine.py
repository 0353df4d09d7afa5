"""Jobs as durable workflows of DBOS, in the service's database: a step that has ended is not done again."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable
from typing import Any, Final

import structlog
from dbos import DBOS, DBOSConfig, Serializer, SetWorkflowID, StepOptions

from autoshard.api import JobState
from server.jobs.runner import ACTOR, JobRunner
from server.jobs.schedules import POLL_S, JobSchedules
from server.problems import InternalError, StorageError, problem_of
from server.settings import ServerSettings
from server.storage.jobs import JobEnd, JobRun
from server.storage.storage import Storage

_QUEUE = "jobs"
_WORKFLOW = "job"
#: Version of the workflow's steps: workflows of another one are left to the processes that know it.
_VERSION = "1"
_FINAL = ("SUCCESS", "ERROR", "CANCELLED", "MAX_RECOVERY_ATTEMPTS_EXCEEDED")
#: Seconds without a sign from a job's run after which another one resumes it, and between two such looks.
LOST_S, _SWEEP_S = 10.0, 2.0
#: A database that does not answer for a moment, such as SQLite's file while what another process left in it is undone,
#: fails no job.
_RETRIES: Final[StepOptions] = {
    "retries_allowed": True,
    "max_attempts": 8,
    "interval_seconds": 0.5,
    "backoff_rate": 2.0,
    "should_retry": lambda error: isinstance(error, StorageError),
}
_log = structlog.get_logger()


class JobEngine:
    """Has jobs done, in this process or in another one of the same database.

    Args:
        storage: Holds the jobs.
        settings: Limits, models and folders.
    """

    def __init__(self, storage: Storage, settings: ServerSettings) -> None:
        self._storage = storage
        self._settings = settings
        self._runner = JobRunner(storage, settings)
        self.schedules = JobSchedules(storage, self.enqueue, _RETRIES)
        self._stopping = threading.Event()
        self._sweeper = threading.Thread(target=self._sweep, name="lost-jobs", daemon=True)
        self._workflow: Callable[[str, int], None] | None = None

    def start(self) -> None:
        """Begins to do jobs, those first that a process left which was killed."""
        url = self._storage.database.url
        DBOS(
            config=DBOSConfig(
                name="autoshard",
                system_database_url=url.render_as_string(hide_password=False),
                application_version=_VERSION,
                executor_id=uuid.uuid4().hex,
                serializer=_JsonSerializer(),
                log_level="CRITICAL",
                sys_db_pool_size=5,
                scheduler_polling_interval_sec=POLL_S,
                run_migrations=self._storage.database.is_sqlite,  # else `autoshard db upgrade` did
            )
        )
        self._workflow = DBOS.workflow(name=_WORKFLOW)(_workflow(self._runner))
        self.schedules.register()
        DBOS.launch()
        DBOS.register_queue(_QUEUE, worker_concurrency=self._settings.num_jobs, polling_interval_sec=0.5)
        self._sweeper.start()

    def stop(self) -> None:
        """Ends what runs here; it is resumed by the next process, or another one."""
        if self._workflow is None:
            return
        self._stopping.set()
        self._runner.stop()
        self._sweeper.join()
        DBOS.destroy(workflow_completion_timeout_sec=3, destroy_registry=True)

    def enqueue(self, run: JobRun) -> None:
        """Has an attempt of a stored job done; nothing changes where that was said before."""
        assert self._workflow is not None
        with SetWorkflowID(_workflow_id(run)):
            DBOS.enqueue_workflow(_QUEUE, self._workflow, run.id, run.attempt)

    def _sweep(self) -> None:
        """Resumes jobs whose process was killed, and enqueues those of one that was killed before it could."""
        while not self._stopping.wait(_SWEEP_S):
            try:
                for run in self._storage.jobs.take_lost(LOST_S):
                    self._resume(run)
                self.schedules.resume_lost()
            except StorageError as error:
                _log.warning("lost jobs not looked for", reason=str(error))

    def _resume(self, run: JobRun) -> None:
        status = DBOS.get_workflow_status(_workflow_id(run))
        if status is None:
            self.enqueue(run)
        elif status.status in _FINAL:
            problem = problem_of(InternalError("the job's steps failed; the service's log says more"))
            self._storage.finish_job(run, JobEnd(state=JobState.FAILED, problem=problem), None, ACTOR)
        elif status.status == "PENDING":
            _log.warning("job resumed", job=run.id, attempt=run.attempt)
            DBOS.resume_workflow(_workflow_id(run), queue_name=_QUEUE)


def _workflow(runner: JobRunner) -> Callable[[str, int], None]:
    def do_job(job_id: str, attempt: int) -> None:
        outcome = DBOS.run_step({"name": "work", **_RETRIES}, runner.work, job_id, attempt)
        DBOS.run_step({"name": "finish", **_RETRIES}, runner.finish, job_id, attempt, outcome)

    return do_job


def _workflow_id(run: JobRun) -> str:
    return f"{run.id}.{run.attempt}"


class _JsonSerializer(Serializer):
    """Arguments and results of steps as JSON texts; DBOS's own would pickle them."""

    def serialize(self, data: Any) -> str:
        return json.dumps(data, default=repr)

    def deserialize(self, serialized_data: str) -> Any:
        return json.loads(serialized_data)

    def name(self) -> str:
        return "json"
