"""Removes what is kept no longer: in short steps, by as many processes at the same time as there are."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from sqlalchemy import Connection

from server.settings import ServerSettings
from server.storage.storage import Storage

#: Seconds after which the second of two files that belong together is not going to be written.
_HALF_S = 24 * 3600.0


class Sweep:
    """Plans that were deleted a day ago, and what is older than the settings say.

    Args:
        storage: Holds plans and jobs.
        settings: Say how long what is kept, and where jobs and refused samples have files.
    """

    def __init__(self, storage: Storage, settings: ServerSettings) -> None:
        self._storage, self._settings = storage, settings

    def steps(self) -> Iterator[tuple[str, int]]:
        """Removes some at each step; yields what, and how many.

        Raises:
            StorageError: If the database does not answer.
        """
        plans_s, jobs_s, storage = self._settings.plans_kept_s, self._settings.jobs_kept_s, self._storage
        yield from self._rows("deleted plans", storage.plans.forget_deleted)
        if plans_s is not None:
            yield from self._rows("plans", partial(storage.plans.forget_old, kept_us=plans_s * 1_000_000))
        if jobs_s is not None:
            yield from self._rows("jobs", partial(storage.jobs.forget_old, kept_us=jobs_s * 1_000_000))
            yield from self._job_folders(jobs_s)
        for folder in self._settings.quarantine_folders():
            yield from _quarantined(folder, jobs_s)
        while storage.database.shrink():
            yield "", 0  # the caller may want to stop

    def _rows(self, name: str, forget: Callable[[Connection], int]) -> Iterator[tuple[str, int]]:
        number = 1
        while number:
            with self._storage.database.writing(uses_reserve=True) as connection:
                number = forget(connection)
            yield name, number

    def _job_folders(self, kept_s: float) -> Iterator[tuple[str, int]]:
        """Removes folders of jobs that are stored no longer."""
        for folder in sorted(self._settings.jobs_folder.glob("*")):
            if _age_s(folder) >= kept_s and not self._storage.jobs.is_stored(folder.name):
                shutil.rmtree(folder, ignore_errors=True)
                yield "job folders", 1


def _quarantined(folder: Path, kept_s: float | None) -> Iterator[tuple[str, int]]:
    """Removes refused files that are too old, and those without what is said of them."""
    for file in sorted(folder.glob("*.parquet")):
        said, age_s = file.with_suffix(".json"), _age_s(file)
        if (kept_s is not None and age_s >= kept_s) or (age_s >= _HALF_S and not said.exists()):
            file.unlink(missing_ok=True)
            said.unlink(missing_ok=True)
            yield "quarantined files", 1


def _age_s(file: Path) -> float:
    """Seconds since a file or a folder was changed; 0 if it has gone meanwhile."""
    try:
        return time.time() - file.stat().st_mtime
    except FileNotFoundError:
        return 0.0
