"""How far a training of the cost model is, and how fast: for logs and for TensorBoard."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from autoshard.core.errors import FormatError


@dataclass(frozen=True, slots=True, kw_only=True)
class CostProgress:
    """A training of the cost model after some updates.

    Attributes:
        num_updates: Updates so far.
        loss: Loss of the last one, of this process's samples.
        learning_rate: Learning rate of the next one.
        samples_per_s: Samples that all processes learned from, per second since the start.
    """

    num_updates: int
    loss: float
    learning_rate: float
    samples_per_s: float


OnCostProgress = Callable[[CostProgress], None]


class Throughput:
    """Counts samples per second since it was made."""

    def __init__(self) -> None:
        self._started_s, self._num_samples = time.monotonic(), 0

    def add(self, num_samples: int) -> None:
        """Counts samples that were learned from."""
        self._num_samples += num_samples

    @property
    def samples_per_s(self) -> float:
        """Mean so far."""
        return self._num_samples / max(time.monotonic() - self._started_s, 1e-9)


@contextmanager
def tensorboard_log(folder: Path | None) -> Iterator[OnCostProgress]:
    """Writes the numbers of a training to TensorBoard's event files, under `cost/`, by updates.

    Args:
        folder: Folder of the files; None writes nothing.

    Raises:
        FormatError: If the folder cannot be written.
    """
    if folder is None:
        yield lambda _: None
        return
    from torch.utils.tensorboard import SummaryWriter

    try:
        writer = SummaryWriter(log_dir=str(folder))
    except OSError as error:
        raise FormatError(f"cannot be written: {error.strerror or error}", source=str(folder)) from error

    def write(progress: CostProgress) -> None:
        for name, value in asdict(progress).items():
            if name != "num_updates":
                writer.add_scalar(f"cost/{name}", value, progress.num_updates)

    with writer:
        yield write
