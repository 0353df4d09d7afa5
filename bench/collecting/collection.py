"""What runs of the collector added."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from bench.collecting.options import SampleKind

#: Of a whole run, not of its parts.
_NOT_SHOWN = ("files", "is_terminated")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedSamples:
    """What a run of the collector added of one kind.

    Attributes:
        kind: The kind.
        device: Key of the device.
        files: Files written, in order.
        added: Samples written, by source.
        skipped: Samples left out because the store held them, by source.
        failed: What could not be measured, by source, or by reason where that is known before anything runs.
        reasons: Why it could not, each reason once.
        num_noisy: Samples among those written whose runs disagreed.
        num_measured_again: Samples among those written that took more than one attempt.
        timed_share: Share of the time that went to counted runs; None where it is not known.
        is_terminated: Whether SIGTERM ended the run.
    """

    kind: SampleKind
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

    def to_json(self) -> dict[str, object]:
        """As a JSON object, without the files."""
        numbers = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in _NOT_SHOWN}
        return {**numbers, "kind": self.kind.value, "reasons": list(self.reasons), "num_samples": self.num_samples}

    @property
    def num_samples(self) -> int:
        """Samples written."""
        return sum(self.added.values())


def joined(stretches: Sequence[CollectedSamples]) -> CollectedSamples:
    """Stretches of one run as one, at least one; shares of the time are averaged, for stretches are equally long."""
    shares = [one.timed_share for one in stretches if one.timed_share is not None]
    return replace(
        stretches[-1],
        files=tuple(file for one in stretches for file in one.files),
        added=_summed(one.added for one in stretches),
        skipped=_summed(one.skipped for one in stretches),
        failed=_summed(one.failed for one in stretches),
        reasons=tuple(dict.fromkeys(reason for one in stretches for reason in one.reasons)),
        num_noisy=sum(one.num_noisy for one in stretches),
        num_measured_again=sum(one.num_measured_again for one in stretches),
        timed_share=sum(shares) / len(shares) if shares else None,
    )


def _summed(counts: Iterable[Mapping[str, int]]) -> Mapping[str, int]:
    return sum(map(Counter, counts), Counter())
