"""What a planning process is asked, as it passes through a pipe: a head, and then messages of bytes."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import Final

from pydantic import BaseModel


class WorkKind(StrEnum):
    """What is asked for."""

    PLAN = "plan"
    REPLAN = "replan"
    EVALUATE = "evaluate"
    COMPARE = "compare"
    EXPLAIN = "explain"
    IMPROVE = "improve"
    SIMULATE = "simulate"
    DIFF = "diff"
    REPORT = "report"
    RUN = "run"
    SAMPLES = "samples"
    LIST_SAMPLES = "list-samples"
    VALIDATE = "validate"
    CHECK_PLAN = "check-plan"
    CHECK_COMPARISON = "check-comparison"
    CHECK_MODEL = "check-model"
    SHADOW = "shadow"


#: Work whose effect stays although nobody waits for the answer any more.
KEEPING: Final = frozenset({WorkKind.RUN, WorkKind.SAMPLES, WorkKind.SHADOW})
#: Bytes from which a text is packed, and zlib's level, which takes 10 ms a MiB at most.
_LONG_BYTES, _QUICKLY = 1 << 20, 1


class Body:
    """The JSON text of a request's body, which many hands pass on and none may keep: it can be 16 MiB long.

    Args:
        text: The text.
    """

    def __init__(self, text: bytes) -> None:
        self._held, self._is_packed = text, False

    def __len__(self) -> int:
        return len(self.text)

    @property
    def text(self) -> bytes:
        """The text."""
        return zlib.decompress(self._held) if self._is_packed else self._held

    def pack(self) -> bytes:
        """The text, for who sends it on; a long one is held compressed from then on, since a job may need it later."""
        text = self.text
        if len(text) >= _LONG_BYTES and not self._is_packed:
            self._held, self._is_packed = zlib.compress(text, _QUICKLY), True
        return text

    def take(self) -> bytes:
        """The text, which is then no longer held."""
        text, self._held, self._is_packed = self.text, b"", False
        return text


class _Head(BaseModel):
    kind: WorkKind
    request_id: str
    received_s: float | None
    num_stored: int
    actor: str
    team: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One request to a planning process.

    Attributes:
        kind: What is asked for.
        body: The request's body.
        stored: JSON texts of the stored plans that it is about, as the service answered with them; or a file.
        request_id: Id of the request, for the log.
        received_s: When the service had the body, by `time.perf_counter`, from when on its time limit counts: a plan
            that waited for a process is searched for less long. None for when a process has read it.
        actor: Who asks for it.
        team: Whose samples it is about.
    """

    kind: WorkKind
    body: Body
    stored: tuple[bytes, ...] = ()
    request_id: str = ""
    received_s: float | None = None
    actor: str = ""
    team: str = ""

    def send(self, pipe: Connection) -> None:
        """Sends it, and packs its body.

        Raises:
            OSError: If nobody receives it.
        """
        head = _Head(
            kind=self.kind,
            request_id=self.request_id,
            received_s=self.received_s,
            num_stored=len(self.stored),
            actor=self.actor,
            team=self.team,
        )
        pipe.send_bytes(head.model_dump_json().encode())
        pipe.send_bytes(self.body.pack())
        for message in self.stored:
            pipe.send_bytes(message)

    @classmethod
    def receive(cls, pipe: Connection) -> Work:
        """Receives one.

        Raises:
            EOFError: If the service has gone.
            OSError: If the pipe is broken.
        """
        head = _Head.model_validate_json(pipe.recv_bytes())
        body = Body(pipe.recv_bytes())
        stored = tuple(pipe.recv_bytes() for _ in range(head.num_stored))
        return cls(body=body, stored=stored, **head.model_dump(exclude={"num_stored"}))
