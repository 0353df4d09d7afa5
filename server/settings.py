"""What an operator decides about the service."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autoshard.core.accepted import Range


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Limits and models of one service."""

    registry: Path | None = None
    """Registry of trained models; without one, kernels are priced by the analytic model."""
    num_workers: int = 2
    """Plans that are made at the same time, each in a process of its own."""
    max_body_bytes: int = 16 << 20
    """Largest request body. The 856 tables of MetaSyn take about 3 MB."""
    body_timeout_s: float = 30.0
    """Longest time that a client may take to send its body."""
    overtime_s: float = 30.0
    """How long after its time limit a planner that does not keep it is ended."""

    def __post_init__(self) -> None:
        Range(at_least=1, at_most=64).check(self.num_workers, "workers")
