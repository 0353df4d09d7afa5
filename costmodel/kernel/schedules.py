"""Which samples each update of a training sees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np

from autoshard.core.accepted import AT_LEAST_1
from costmodel.kernel.dataset import IndexArray


class Schedule(Protocol):
    """A finite number of batches of samples, which are numbered in the order in which they were measured."""

    @property
    def num_updates(self) -> int:
        """Number of batches."""
        ...

    def to_json(self) -> dict[str, object]:
        """For the model's card."""
        ...

    def batches(self, num_samples: int, batch_size: int, rng: np.random.Generator) -> Iterator[IndexArray]:
        """Indices of the samples of each batch."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Shuffled:
    """All samples in a new random order, again and again, for a fixed number of updates.

    Few samples are seen more often than many: training takes as long, and gains from it.
    """

    num_updates: int = 5000

    def __post_init__(self) -> None:
        AT_LEAST_1.check_fields(self, "num_updates")

    def to_json(self) -> dict[str, object]:
        """For the model's card."""
        return {"kind": "shuffled", **asdict(self)}

    def batches(self, num_samples: int, batch_size: int, rng: np.random.Generator) -> Iterator[IndexArray]:
        """Indices of the samples of each batch."""
        batch_size = min(batch_size, num_samples)
        order, start = rng.permutation(num_samples), 0
        for _ in range(self.num_updates):
            # What is left at the end of an order is too little for a batch; the next order has it again.
            if start + batch_size > num_samples:
                order, start = rng.permutation(num_samples), 0
            yield order[start : start + batch_size]
            start += batch_size
