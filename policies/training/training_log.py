"""What a training writes down while it runs: scalars for TensorBoard, and where the time went."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import KVWriter, Logger, TensorBoardOutputFormat
from torch.utils.tensorboard import SummaryWriter

from autoshard.core.errors import FormatError


@dataclass(slots=True, kw_only=True)
class Times:
    """Seconds of a training by what they went into.

    Attributes:
        collect_s: Playing episodes, or waiting for actors that do.
        measure_s: Measuring rewards.
        learn_s: Learning from them.
        evaluate_s: Scores on validation tasks.
    """

    collect_s: float = 0.0
    measure_s: float = 0.0
    learn_s: float = 0.0
    evaluate_s: float = 0.0

    def to_json(self) -> dict[str, float]:
        """As a JSON object, to the millisecond."""
        return {name: round(value, 3) for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, document: dict[str, float]) -> Self:
        """Of a JSON object; what is missing is 0."""
        return cls(**{name: float(document.get(name, 0.0)) for name in cls.__slots__})


class StepRate:
    """Counts steps of the environment per second of updates, from one evaluation to the next."""

    def __init__(self) -> None:
        self._num_steps, self._seconds = 0, 0.0

    def add(self, num_steps: int, seconds: float) -> None:
        """Counts an update."""
        self._num_steps += num_steps
        self._seconds += seconds

    def taken(self) -> float:
        """Mean since it was last taken; 0 without updates."""
        rate = self._num_steps / self._seconds if self._seconds else 0.0
        self._num_steps, self._seconds = 0, 0.0
        return rate


class CollectTimer(BaseCallback):
    """Takes the time that an algorithm spends on collecting."""

    def __init__(self) -> None:
        super().__init__()
        self.collect_s = 0.0
        self._started_s = 0.0

    def _on_rollout_start(self) -> None:
        self._started_s = time.monotonic()

    def _on_rollout_end(self) -> None:
        self.collect_s += time.monotonic() - self._started_s

    def _on_step(self) -> bool:
        return True


class _TensorBoard(TensorBoardOutputFormat):
    """As the base class, but hides what an earlier run wrote at steps that come again."""

    def __init__(self, folder: Path, first_step: int) -> None:
        self.writer = SummaryWriter(log_dir=str(folder), purge_step=first_step)
        self._is_closed = False


def make_logger(folder: Path | None, num_updates: int = 0) -> Logger:
    """A logger of stable-baselines3 whose steps are updates.

    Args:
        folder: For TensorBoard's event files; those that are there are gone on from. None to write nothing.
        num_updates: Updates that were made already. Later ones in the folder are hidden: a run that broke off may have
            come further than its last checkpoint.

    Raises:
        FormatError: If the folder cannot be written.
    """
    writers: list[KVWriter] = []
    if folder is not None:
        try:
            writers.append(_TensorBoard(folder, num_updates + 1))
        except OSError as error:
            raise FormatError(f"cannot be written: {error.strerror or error}", source=str(folder)) from error
    # Without a logger of its own, stable-baselines3 makes a folder for every update.
    return Logger(folder=None, output_formats=writers)
