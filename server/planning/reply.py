"""What a planning process answers, as it passes through a pipe: two messages of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection

from pydantic import BaseModel

from server.bodies import PlanFacts


class _Head(BaseModel):
    status: int
    facts: PlanFacts | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Answer to a request for a plan.

    Attributes:
        status: HTTP status.
        body: JSON text of the plan, or of a problem.
        facts: What is stored of the plan beside its text; None without a plan.
    """

    status: int
    body: bytes
    facts: PlanFacts | None = None

    def send(self, pipe: Connection) -> None:
        """Sends it.

        Raises:
            OSError: If nobody receives it.
        """
        pipe.send_bytes(_Head(status=self.status, facts=self.facts).model_dump_json().encode())
        pipe.send_bytes(self.body)

    @classmethod
    def receive(cls, pipe: Connection) -> Reply:
        """Receives one.

        Raises:
            EOFError: If the process ended before it answered.
            OSError: If the pipe is broken.
        """
        head = _Head.model_validate_json(pipe.recv_bytes())
        return cls(status=head.status, body=pipe.recv_bytes(), facts=head.facts)
