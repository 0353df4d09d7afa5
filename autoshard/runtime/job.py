"""What the launching process and its workers tell each other through files of one folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autoshard.core.errors import AutoshardError, ExecutionError
from autoshard.runtime.results import RunRequest

JOB_FILE = "job.json"
RESULTS_FILE = "results.json"
ERROR_FILE = "error.{rank}.json"
PID_FILE = "pid.{rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Requests for one set of processes, executed one after the other.

    Attributes:
        launcher_pid: Process without which the workers have no reason to go on.
        requests: What to execute.
    """

    launcher_pid: int
    requests: tuple[RunRequest, ...]

    def to_json(self) -> dict[str, Any]:
        """The job as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Job:
        """Reads what `to_json` wrote."""
        requests = tuple(RunRequest(**request) for request in document["requests"])
        return cls(launcher_pid=document["launcher_pid"], requests=requests)


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
