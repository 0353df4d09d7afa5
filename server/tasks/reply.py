"""What a planning process answers, as it passes through a pipe: two messages of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

from pydantic import BaseModel

from autoshard.api import PlanFigures
from autoshard.core.errors import AutoshardError
from server.problems import problem_of

#: Status of a task that was checked, and is for a job to do.
ACCEPTED: Final = 202


class PlanFacts(PlanFigures):
    """What is stored of a plan, beside the plan: its figures, its id, and the names by which it is searched."""

    id: str
    search_text: str


class _Head(BaseModel):
    status: int
    facts: PlanFacts | None
    planner: str
    floor_gap: float | None
    waited_s: float
    worked_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answer of a planning process.

    Attributes:
        status: HTTP status.
        body: JSON text of what was asked for or of a problem; for a report, its HTML.
        facts: What is stored of a plan beside its text; None where nothing is to be stored.
        planner: Name of the planner that was asked; empty without one.
        floor_gap: Kernel time of the plan's slowest rank over that of its costliest shard, minus 1; None without a
            plan, or where nothing takes time.
        waited_s: How long the request had waited for a process.
        worked_s: How long the process worked on it.
    """

    status: int
    body: bytes
    facts: PlanFacts | None = None
    planner: str = ""
    floor_gap: float | None = None
    waited_s: float = 0.0
    worked_s: float = 0.0

    @classmethod
    def of_error(cls, error: AutoshardError) -> Reply:
        """The answer where the work could not be done."""
        problem = problem_of(error)
        return cls(status=problem.status, body=problem.model_dump_json(exclude_none=True).encode())

    def send(self, pipe: Connection) -> None:
        """Sends it.

        Raises:
            OSError: If nobody receives it.
        """
        head = _Head(**{name: getattr(self, name) for name in _Head.model_fields})
        pipe.send_bytes(head.model_dump_json().encode())
        pipe.send_bytes(self.body)

    @classmethod
    def receive(cls, pipe: Connection) -> Reply:
        """Receives one.

        Raises:
            EOFError: If the process ended before it answered.
            OSError: If the pipe is broken.
        """
        head = _Head.model_validate_json(pipe.recv_bytes())
        return cls(body=pipe.recv_bytes(), **dict(head))
