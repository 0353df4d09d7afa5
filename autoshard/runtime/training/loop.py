"""The loop of a training job: batches, steps, checkpoints, and its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from autoshard.core import ShardingPlan
from autoshard.formats import digest, plan_to_json
from autoshard.runtime.timing import Span, StepTimer, Timings
from autoshard.runtime.training.data import Feed
from autoshard.runtime.training.step import StepOutcome, TrainingStep
from autoshard.runtime.training.synthetic import Samples

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

    from autoshard.runtime.checkpoints import Checkpoints
    from autoshard.runtime.embeddings import ShardedEmbeddings

#: Steps after which the answer to what a process asked is read: a GPU has come to it by then.
_ANSWER_STEPS = 2


@dataclass(frozen=True, slots=True, eq=False)
class TrainedStep:
    """A step that was made.

    Attributes:
        number: Steps that the job has made, with this one.
        samples: What it was trained on.
        outcome: What it computed.
        span: Time of the step.
        data_ms: Time that it waited for its batch before.
        timings: Time of its parts.
    """

    number: int
    samples: Samples
    outcome: StepOutcome
    span: Span
    data_ms: float
    timings: Timings


class TrainingLoop:
    """Trains on batches until they end, enough steps were made, or a process asks to stop. All processes run it.

    What is said of a process that asks holds for all: they make the same steps.

    Args:
        training: Makes a step.
        feed: Gives the batches.
        timer: Where the step counts its time.
        last: Number of the job's last step; None to go on until the batches end.
        wants_stop: Asked after each step, on any process; once it says yes, all stop after one of the next steps.
        saved: Saves the job and goes on from where it was saved; None to start at the beginning and save nothing.

    Attributes:
        number: Steps that the job has made.
        is_stopped: Whether it ended because a process asked.
        last_samples: What the last step was trained on; None before the first.
    """

    def __init__(
        self,
        training: TrainingStep,
        feed: Feed,
        timer: StepTimer,
        *,
        last: int | None = None,
        wants_stop: Callable[[], bool] = lambda: False,
        saved: SavedJob | None = None,
    ) -> None:
        self._training, self._feed, self._timer, self._last = training, feed, timer, last
        self._wants_stop, self._saved = wants_stop, saved
        self._asked: deque[tuple[torch.Tensor, Any]] = deque()
        self._loss: torch.Tensor | None = None
        self.number, self.is_stopped = 0, False
        self.last_samples: Samples | None = None
        if saved is not None:
            self.number = saved.resume({"data": feed})

    def __iter__(self) -> Iterator[TrainedStep]:
        """Makes the steps, one after the other.

        A GPU is waited for when its times are read, not after a step.
        """
        while not self.is_stopped:
            begun_s = self._timer.clock.now_s()
            taken = self._feed.take(None if self._last is None else self._last - self.number)
            if taken is None:
                break
            data_ms = (self._timer.clock.now_s() - begun_s) * 1e3
            samples, following = taken
            self.last_samples = samples
            self._timer.take()
            begun = self._timer.mark()
            self._training.asks = self._wants_stop()
            outcome = self._training(samples, following)
            self.number, self._loss = self.number + 1, outcome.loss
            ended = self._timer.mark()
            self._hear(outcome.asked)
            yield TrainedStep(self.number, samples, outcome, Span(begun, ended), data_ms, self._timer.take())
            if self._saved is not None:
                self._saved.after(self.number, outcome.loss)
        if self._saved is not None:
            self._saved.finish(self.number, self._loss)

    def go_on(self, steps: int | None) -> None:
        """Lets it, at its end, make so many more steps when it is asked for steps anew; None for all that there are."""
        self._last = None if steps is None else self.number + steps

    def wait(self) -> None:
        """Waits until a GPU has come to the end of the last step."""
        self._timer.wait()

    def _hear(self, asked: torch.Tensor | None) -> None:
        if asked is None:  # One process without others, which it could answer.
            self.is_stopped = self._training.asks
            return
        event = None
        if asked.device.type == "cuda":
            asked = torch.empty(1, dtype=asked.dtype, pin_memory=True).copy_(asked, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._asked.append((asked, event))
        if len(self._asked) > _ANSWER_STEPS:
            answer, event = self._asked.popleft()
            if event is not None:
                event.synchronize()
            self.is_stopped = bool(answer.item())


class SavedJob:
    """Saves a job every so many steps, and goes on from the last checkpoint.

    Args:
        checkpoints: Where checkpoints are.
        every: Steps from one to the next; where replica groups differ, the next step at which they are averaged.
        state: What is saved, by name, beside what the loop adds.
        plan: The plan that the job was begun with.
        embeddings: Its tables.
        dense: Its dense layers.

    Attributes:
        resumed_from: Step of the checkpoint that the job went on from; None if there was none.
        plan: The plan that is trained.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        every: int,
        state: Mapping[str, Stateful],
        plan: ShardingPlan,
        embeddings: ShardedEmbeddings,
        dense: torch.nn.Module,
    ) -> None:
        self._checkpoints, self._every, self._state, self.plan = checkpoints, every, dict(state), plan
        self._embeddings, self._dense = embeddings, dense
        self._begun_with: str | None = None
        self._row_orders: Mapping[str, torch.Tensor] | None = None
        self._saved_at = 0
        self.resumed_from: int | None = None
        self._is_due = False

    def resume(self, more: Mapping[str, Stateful]) -> int:
        """Loads the last checkpoint, if there is one; returns the steps that the job has made.

        Args:
            more: What is saved besides, by name.
        """
        self._state |= more
        latest = self._checkpoints.latest()
        if latest is None:
            return 0
        latest.load(self._state)
        self.resumed_from = self._saved_at = latest.step
        return latest.step

    def adopt(self, plan: ShardingPlan, row_orders: Mapping[str, torch.Tensor]) -> None:
        """From now on, another plan is trained.

        Args:
            plan: The plan.
            row_orders: Its row ids in falling access frequency, by table.
        """
        if self._begun_with is None:
            self._begun_with = digest(plan_to_json(self.plan))
        self.plan, self._row_orders = plan, row_orders

    def after(self, step: int, loss: torch.Tensor) -> None:
        """Saves after a step if it is time.

        Args:
            step: Steps that the job has made.
            loss: Of the last one.

        Raises:
            DivergedError: If the state is not finite; it is not saved.
        """
        self._is_due |= step % self._every == 0
        groups = self.plan.replica_groups
        if self._is_due and (groups.num_groups == 1 or step % groups.sync_every == 0):
            self._save(step, loss)

    def finish(self, step: int, loss: torch.Tensor | None) -> None:
        """Saves what was not yet saved, and waits until it is there. Replica groups that differ are averaged before.

        Args:
            step: Steps that the job has made.
            loss: Of the last one; None where it was resumed at its end.

        Raises:
            DivergedError: As `after`, also if what was loaded is not finite.
        """
        if step > self._saved_at:
            self._embeddings.average_groups()
            self._save(step, loss)
        elif loss is None:
            self._embeddings.guard.check_finite(step, loss, self._dense)
        self._checkpoints.wait()

    def _save(self, step: int, loss: torch.Tensor | None) -> None:
        self._embeddings.guard.check_finite(step, loss, self._dense)
        self._checkpoints.save(
            step, self._state, plan=self.plan, row_orders=self._row_orders, begun_with=self._begun_with
        )
        self._saved_at, self._is_due = step, False
