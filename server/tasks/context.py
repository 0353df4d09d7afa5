"""What all kinds of work have around them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from server.settings import ServerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskContext:
    """Limits and models of a planning process, and the end of its time.

    Attributes:
        settings: Limits and models.
        allow_s: Takes the time limit of planners, in seconds, from which the time follows at which the process is
            ended, counted from now.
        actor: Who asks.
        is_stopped: Whether planners are to end soon, with what they have found.
        started_s: When the time limit of a plan began, by `time.perf_counter`; None for when its task has been read.
    """

    settings: ServerSettings
    allow_s: Callable[[float], None]
    actor: str = ""
    is_stopped: Callable[[], bool] = lambda: False
    started_s: float | None = None

    @property
    def registry(self) -> Path | None:
        """Folder of trained models."""
        return self.settings.registry
