"""What a run of the command `collect` added."""

from __future__ import annotations

from dataclasses import dataclass, fields

from bench.collecting.collector import Collection
from bench.collecting.options import SampleKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome(Collection):
    """What was added of one kind.

    Attributes:
        kind: The kind.
        device: Key of the device.
    """

    kind: SampleKind
    device: str

    @classmethod
    def of_kernels(cls, done: Collection, device: str) -> Outcome:
        """What a run of the collector of kernels added."""
        return cls(
            kind=SampleKind.KERNELS, device=device, **{item.name: getattr(done, item.name) for item in fields(done)}
        )
