"""What a run of the command `collect` added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.collecting.collector import Collection
from bench.collecting.options import What


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was added of one kind.

    Attributes:
        what: The kind.
        device: Key of the device.
        files: Files written.
        added: Samples written, by source.
        skipped: Left out because the store held them, by source.
        failed: What could not be measured, by source or by reason.
        reasons: Why it could not.
        num_noisy: Samples whose runs disagreed.
        num_measured_again: Samples that took more than one attempt.
        timed_share: Share of the time that went to counted runs; None where it is not known.
        is_terminated: Whether SIGTERM ended it.
    """

    what: What
    device: str
    files: tuple[Path, ...] = ()
    added: Mapping[str, int] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[str, int] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    num_noisy: int = 0
    num_measured_again: int = 0
    timed_share: float | None = None
    is_terminated: bool = False

    @property
    def num_samples(self) -> int:
        """Samples written."""
        return sum(self.added.values())

    @classmethod
    def of_kernels(cls, done: Collection, device: str) -> Outcome:
        """What a run of the collector of kernels added."""
        return cls(
            what=What.KERNELS,
            device=device,
            files=done.files,
            added=done.added,
            skipped=done.skipped,
            failed=done.failed,
            reasons=done.reasons,
            num_noisy=done.num_noisy,
            num_measured_again=done.num_measured_again,
            timed_share=done.timed_share,
            is_terminated=done.is_terminated,
        )
