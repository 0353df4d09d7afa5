"""Threads that do jobs, fire schedules and remove what is kept no longer, in each process of a database.

The queue is the table of jobs. Threads claim jobs for themselves, those of a process one after the other, and say while
a job runs that it is still there; one of which nothing was said for 10 s is claimed by the next free thread, of
whichever process. A job ends in one transaction, once, also where two processes did it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import structlog

from server.jobs.runner import JobRunner
from server.jobs.sweep import Sweep
from server.problems import StorageError
from server.settings import ServerSettings
from server.storage.storage import Storage
from server.tasks.reply import Reply

#: Seconds between two looks for a job that waits, or a schedule that is due.
_LOOK_S = 0.5
#: Hour of the nightly sweep, UTC, and seconds between two of its steps, in which others write.
_SWEEP_HOUR, _STEP_S = 3, 0.01
_log = structlog.get_logger()


class JobEngine:
    """Has jobs done, schedules fired, and old rows and files removed, in this process or another one of the database.

    Args:
        storage: Holds the jobs.
        settings: Limits, models and folders.
        on_swept: Is told what was removed, and how many.
        retry_s: Seconds after which a database that did not answer is asked again.
    """

    def __init__(
        self,
        storage: Storage,
        settings: ServerSettings,
        on_swept: Callable[[str, int], None] = lambda *_: None,
        *,
        retry_s: float = 2.0,
    ) -> None:
        self._storage, self._retry_s = storage, retry_s
        self._sweep, self._on_swept = Sweep(storage, settings), on_swept
        self._runner = JobRunner(storage, settings)
        self._on_made: Callable[[Reply], object] = lambda _: None
        self._stopping = threading.Event()
        self._woken = threading.Event()
        self._claiming, self._num_free = threading.Lock(), settings.num_jobs
        self._threads = [
            *(threading.Thread(target=self._repeat, args=(self._work,), name="job") for _ in range(settings.num_jobs)),
            threading.Thread(target=self._repeat, args=(self._fire,), name="schedules"),
            threading.Thread(target=self._repeat, args=(self._sweep_once,), name="sweep"),
        ]

    def start(self, on_made: Callable[[Reply], object] = lambda _: None) -> None:
        """Begins to do jobs.

        Args:
            on_made: Is told what a job made, in the job's thread, after it is stored.
        """
        self._on_made = on_made
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends what runs here; it is resumed by the next process, or another one."""
        self._stopping.set()
        self._runner.stop()
        self._woken.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def wake(self) -> None:
        """Has a job that was stored begin at once, if a thread is free."""
        self._woken.set()

    def forget(self, job_id: str) -> None:
        """Removes the folder of a job that was deleted, if it ran here."""
        self._runner.forget(job_id)

    def _repeat(self, do: Callable[[], None]) -> None:
        while not self._stopping.is_set():
            try:
                do()
            except StorageError as error:
                _log.warning("no jobs, for now", reason=str(error))
                self._stopping.wait(self._retry_s)
            except Exception:  # noqa: BLE001 - the thread ends else, and all later jobs wait
                _log.exception("fault while jobs are done")
                self._stopping.wait(self._retry_s)

    def _work(self) -> None:
        with self._claiming:
            job = self._storage.jobs.claim(is_last_place=self._num_free == 1)
            self._num_free -= job is not None
        if job is not None:
            try:
                if (made := self._runner.do(job)) is not None:
                    self._on_made(made)
            finally:
                with self._claiming:
                    self._num_free += 1
        elif self._woken.wait(_LOOK_S) and not self._stopping.is_set():
            self._woken.clear()

    def _fire(self) -> None:
        for name in self._storage.fire_schedules():
            _log.info("schedule made a job", schedule=name)
            self.wake()
        self._stopping.wait(_LOOK_S)

    def _sweep_once(self) -> None:
        """Sweeps at the start, and then every night."""
        removed: Counter[str] = Counter()
        try:
            for name, number in self._sweep.steps():
                if number:
                    removed[name] += number
                    self._on_swept(name, number)
                if self._stopping.wait(_STEP_S):
                    return
        finally:
            if removed:
                _log.info("removed what is kept no longer", **removed)
        now = datetime.now(UTC)
        night = now.replace(hour=_SWEEP_HOUR, minute=0, second=0, microsecond=0)
        self._stopping.wait(((night - now) % timedelta(days=1)).total_seconds() or timedelta(days=1).total_seconds())
