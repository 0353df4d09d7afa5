"""What the launching process and its workers tell each other through files of one folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autoshard.core.errors import AutoshardError, ExecutionError

#: Written by the launching process: the requests.
JOB_FILE = "job.json"
#: Written by the worker of rank 0: their results.
RESULTS_FILE = "results.json"
#: Written by a worker that fails.
ERROR_FILE = "error.{rank}.json"
#: Written by every worker when it starts.
PID_FILE = "pid.{rank}"
#: Written by the launching process when a job is to save and end.
STOP_FILE = "stop"


def worker_pids(folder: Path) -> dict[int, int]:
    """Ids of the worker processes of this machine, by rank."""
    files = folder.glob(PID_FILE.format(rank="*"))
    return {int(file.suffix[1:]): int(file.read_text(encoding="utf-8")) for file in files}


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRecord:
    """Why a worker failed.

    Attributes:
        time_s: When, in seconds since the epoch; the others fail because the first did.
        kind: `AutoshardError.kind`, or the name of another error's type.
        message: One line.
        field: Offending field, if there is one.
        source: File or option that held it, if known.
    """

    time_s: float
    kind: str
    message: str
    field: str | None = None
    source: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The record as a JSON object."""
        return asdict(self)

    def to_error(self, rank: int) -> AutoshardError:
        """The error to raise in the launching process: the same one if it is an error of this package."""
        for kind in _kinds(AutoshardError):
            if kind.kind == self.kind:
                return kind(self.message, field=self.field, source=self.source)
        return ExecutionError(f"process {rank}: {self.message}")


def _kinds(base: type[AutoshardError]) -> Iterator[type[AutoshardError]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _kinds(kind)
