"""A whole training: labels of searches, learning from them, own placements, V-trace; resumable after each part.

A folder holds what was made so far:

    FOLDER/labels/<seed>.safetensors   a task's label; an empty file where a task has no layout
    FOLDER/labels/<seed>-<round>...    its label after a round of self-improvement
    FOLDER/weights.safetensors         weights, the best weights, what the optimizer remembers, and how far it came
"""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load, save

import autoshard
from autoshard.core.errors import AutoshardError, ExecutionError, FormatError
from autoshard.formats.files import atomic_write, read_bytes
from autoshard.runtime.processes.threads import intra_op_threads
from env.game import GameTask
from policies.network import PolicyNetwork, first_weights
from policies.planning.decoding import decoded
from policies.planning.planner import best_of, improved
from policies.planning.playing import Played, play
from policies.planning.trained import ranges_of
from policies.training.drawn_tasks import TaskKind, TaskSplit, game_task, task_seeds
from policies.training.labels import Label, searched
from policies.training.learner import Learner
from policies.training.run_options import PolicyRunOptions

Weights = dict[str, NDArray[np.float32]]
ResultT = TypeVar("ResultT")

#: Tasks to choose the best weights by.
NUM_VALIDATION = 16
#: Tasks of an update; updates between two evaluations.
_BATCH, _EVALUATE_EVERY = 8, 100
#: Learning rates: of imitation, falling to a tenth, and of V-trace.
_LEARNING_RATE, _VTRACE_RATE = 3e-3, 3e-4
#: Of weights that were trained before: at the other rate, the loss on validation tasks grew after 100 updates or fewer.
_TUNING_RATE = 3e-4
#: Episodes of a task in a round of self-improvement, and bursts from the best; and of an update by V-trace.
_NUM_SAMPLES, _NUM_BURSTS, _NUM_EPISODES = 8, 8, 8
#: Share of the updates that follow a round of self-improvement.
_IMPROVED_SHARE = 0.2
#: Share of the seconds in which tasks are searched, where seconds are limited.
_SEARCHED_SHARE = 0.5
#: Tasks that V-trace plays.
_NUM_PLAYED = 24
_MAX_BYTES = 1 << 28


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a training has come.

    Attributes:
        stage: What it does: `labels`, `imitation`, `improvement`, `vtrace`.
        done: Share of the stage that is done.
        loss: Mean loss on the validation tasks; None where nothing was evaluated.
    """

    stage: str
    done: float
    loss: float | None = None


class PolicyTraining:
    """Trains a policy.

    Args:
        options: For how long.
        kind: What tasks are drawn from.
        folder: For labels and weights; goes on from what is there.
        begin: Weights to begin with, the best ones until others have less loss; random ones if left out.
        device: Where it learns.
        report: Receives progress.
    """

    def __init__(
        self,
        options: PolicyRunOptions,
        kind: TaskKind,
        folder: Path,
        *,
        begin: Weights | None = None,
        device: torch.device | str = "cpu",
        report: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        self.options, self._kind, self._folder, self._report = options, kind, folder, report
        learning, num_tasks = options.learning, options.tasks.num_tasks
        self._seeds = task_seeds(TaskSplit.TRAIN, num_tasks, learning.seed)
        self._is_tuned, self._rate = begin is not None, _LEARNING_RATE if begin is None else _TUNING_RATE
        self._learner = Learner(begin or first_weights(learning.seed), self._rate, device)
        self._best: Weights = self._learner.weights()
        self._best_loss = float("inf")
        self._num_done, self._planned = 0, 0
        self._rng = np.random.default_rng(learning.seed)
        self._began_s = time.monotonic()
        self._tasks_F: list[NDArray[np.float32]] = []
        seconds = options.seconds or float("inf")
        self._searched_s, self._ends_s = self._began_s + _SEARCHED_SHARE * seconds, self._began_s + seconds
        self._restore()

    @property
    def best(self) -> Weights:
        """The weights with the least loss on the validation tasks so far."""
        return self._best

    @property
    def latest(self) -> Weights:
        """The weights after the last update, whatever their loss."""
        return self._learner.weights()

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Ranges of the tasks that have labels, for its card."""
        return ranges_of(self._tasks_F)

    def record(self) -> dict[str, Any]:
        """Options and counts of the training, for its card."""
        options = self.options
        return {
            **asdict(options.tasks),
            **{name: value for name, value in asdict(options.learning).items() if name != "accelerator"},
            "num_labels": len(self._tasks_F),
            "num_updates": self._num_done,
            "elapsed_s": round(time.monotonic() - self._began_s, 3),
            "version": autoshard.__version__,
        }

    @property
    def _is_over(self) -> bool:
        return time.monotonic() >= self._ends_s

    def run(self) -> Weights:
        """Trains until everything asked for is done, or the time is over; returns the best weights.

        Raises:
            ExecutionError: If an actor dies.
            FormatError: If the folder cannot be read or written.
        """
        learning = self.options.learning
        with intra_op_threads(1), self._actors() as run_all:
            labels = self._labels(run_all)
            self._imitate(labels, learning.updates, "imitation")
            for number in range(learning.improvements):
                if not self._is_over:
                    labels = self._improved(labels, number, run_all)
                    self._imitate(labels, round(_IMPROVED_SHARE * learning.updates), "improvement")
            if learning.vtrace_updates and not self._is_over:
                self._reinforce(labels, run_all)
        return self._best

    def _labels(self, run_all: RunAll) -> dict[int, Label]:
        """Labels of all tasks, those for validation included; tasks without a layout have none."""
        seeds = [*task_seeds(TaskSplit.VALIDATION, NUM_VALIDATION), *self._seeds]
        missing = [seed for seed in seeds if not self._label_file(seed).exists()]
        seconds = self.options.tasks.search_seconds
        jobs = (partial(make_label, self._kind, seed, seconds, self._label_file(seed)) for seed in missing)
        for count, _ in enumerate(run_all(self._until(self._searched_s, jobs))):
            self._report(Progress(stage="labels", done=1 - (len(missing) - count - 1) / len(seeds)))
        labels = self._read(seeds)
        if not any(seed in labels for seed in self._seeds):
            raise ExecutionError("for none of the tasks to learn from was a layout found in the time given")
        return labels

    def _read(self, seeds: Iterable[int], number: int | None = None) -> dict[int, Label]:
        files = {seed: self._label_file(seed, number) for seed in seeds}
        labels = {seed: Label.read(path) for seed, path in files.items() if path.exists() and path.stat().st_size}
        if not labels:
            raise ExecutionError("no task with a layout was drawn in the time given")
        self._tasks_F = [label.task_F for label in labels.values()]
        return labels

    @staticmethod
    def _until(until_s: float, jobs: Iterable[Callable[[], ResultT]]) -> Iterator[Callable[[], ResultT]]:
        for job in jobs:
            if time.monotonic() >= until_s:
                return
            yield job

    def _label_file(self, seed: int, number: int | None = None) -> Path:
        return self._folder / "labels" / (f"{seed}.safetensors" if number is None else f"{seed}-{number}.safetensors")

    def _imitate(self, labels: dict[int, Label], num_updates: int, stage: str) -> None:
        """Learns from labels; updates that an earlier run made are not made again."""
        validation = [labels[seed] for seed in task_seeds(TaskSplit.VALIDATION, NUM_VALIDATION) if seed in labels]
        train = [label for seed, label in labels.items() if seed in self._seeds]
        if self._is_tuned and not self._num_done:
            self._evaluate(validation or train, stage, 0.0)
        first, self._planned = self._planned, self._planned + num_updates
        for number in range(max(self._num_done - first, 0), num_updates):
            if self._is_over:
                break
            rate = self._rate * (0.1 + 0.9 * (1 - number / num_updates))
            self._learner.set_rate(rate)
            chosen = self._rng.choice(len(train), size=min(_BATCH, len(train)), replace=False)
            self._learner.imitate([train[index] for index in chosen.tolist()])
            self._num_done += 1
            if self._num_done % _EVALUATE_EVERY == 0 or number == num_updates - 1:
                self._evaluate(validation or train, stage, (number + 1) / num_updates)

    def _evaluate(self, validation: Sequence[Label], stage: str, done: float) -> None:
        loss = self._learner.loss(validation)
        if loss < self._best_loss:
            self._best_loss, self._best = loss, self._learner.weights()
        self._save()
        self._report(Progress(stage=stage, done=done, loss=loss))

    def _improved(self, labels: dict[int, Label], number: int, run_all: RunAll) -> dict[int, Label]:
        """Labels of own placements, where their steps are shorter than those of the labels so far."""
        found = {seed: self._label_file(seed, number) for seed in labels if seed in self._seeds}
        missing = [seed for seed, path in found.items() if not path.exists()]
        jobs = (partial(improve_label, self._kind, seed, labels[seed], self._best, found[seed]) for seed in missing)
        for count, _ in enumerate(run_all(self._until(self._ends_s, jobs))):
            self._report(Progress(stage="improvement", done=1 - (len(missing) - count - 1) / max(len(found), 1)))
        return {**labels, **self._read(found, number)}

    def _reinforce(self, labels: dict[int, Label], run_all: RunAll) -> None:
        """Learns by V-trace; the last weights are the best ones if their placements are."""
        seeds = [seed for seed in labels if seed in self._seeds][:_NUM_PLAYED]
        tested = [seed for seed in task_seeds(TaskSplit.VALIDATION, NUM_VALIDATION) if seed in labels] or seeds
        num_updates = self.options.learning.vtrace_updates
        before = self._rewards(tested, self._best, run_all)
        self._learner.replace_weights(self._best, _VTRACE_RATE)
        for number in range(num_updates):
            if self._is_over:
                break
            seed = seeds[int(self._rng.integers(len(seeds)))]
            chance = int(self._rng.integers(1 << 40))
            job = partial(episodes_of, self._kind, seed, self._learner.weights(), chance)
            for played in run_all([job]):
                self._learner.reinforce(played)
            if (number + 1) % _EVALUATE_EVERY == 0 or number == num_updates - 1:
                reward = self._rewards(tested, self._learner.weights(), run_all)
                self._report(Progress(stage="vtrace", done=(number + 1) / num_updates, loss=-reward))
                if reward > before:
                    before, self._best = reward, self._learner.weights()
                self._save()

    def _rewards(self, seeds: Sequence[int], weights: Weights, run_all: RunAll) -> float:
        """Mean reward of the likeliest placements of some tasks."""
        return float(np.mean(list(run_all(partial(reward_of, self._kind, seed, weights) for seed in seeds))))

    def _save(self) -> None:
        arrays = {f"weights.{name}": value for name, value in self._learner.weights().items()}
        arrays |= {f"best.{name}": value for name, value in self._best.items()}
        arrays |= {f"optimizer.{name}": value for name, value in self._learner.optimizer_arrays().items()}
        arrays["done"] = np.array([self._num_done, self._best_loss])
        atomic_write(self._folder / "weights.safetensors", save(arrays))

    def _restore(self) -> None:
        path = self._folder / "weights.safetensors"
        if not path.exists():
            return
        arrays = load(read_bytes(path, max_bytes=_MAX_BYTES))
        if "done" not in arrays:
            raise FormatError("must hold a training's weights", source=str(path))
        of_kind = {
            kind: {name.removeprefix(kind): value for name, value in arrays.items() if name.startswith(kind)}
            for kind in ("weights.", "best.", "optimizer.")
        }
        self._learner.replace_weights(of_kind["weights."], self._rate)
        self._learner.restore_optimizer(of_kind["optimizer."])
        self._best = of_kind["best."]
        self._num_done, self._best_loss = int(arrays["done"][0]), float(arrays["done"][1])

    def _actors(self) -> Actors:
        return Actors(self.options.learning.actors)


class RunAll(Protocol):
    """Runs jobs, and yields what they return as they end."""

    def __call__(self, jobs: Iterable[Callable[[], ResultT]]) -> Iterator[ResultT]:
        """See the class."""
        ...


class Actors:
    """Runs jobs in processes, or in this one, while it is entered.

    Args:
        num: Processes; 0 for this one alone.
    """

    def __init__(self, num: int) -> None:
        self._num = num
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> RunAll:
        if not self._num:
            return _run_here
        # Forked processes would inherit threads of torch.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(self._num, mp_context=context, initializer=_alone)
        return self._run

    def _run(self, jobs: Iterable[Callable[[], ResultT]]) -> Iterator[ResultT]:
        assert self._pool is not None
        waiting: set[Future[ResultT]] = set()
        try:
            for job in jobs:
                waiting.add(self._pool.submit(job))
                if len(waiting) > self._num:
                    done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                    yield from (one.result() for one in done)
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                yield from (one.result() for one in done)
        except BrokenProcessPool as error:
            raise ExecutionError(f"an actor died: {error}; the same command goes on where it ended") from error

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def _run_here(jobs: Iterable[Callable[[], ResultT]]) -> Iterator[ResultT]:
    return (job() for job in jobs)


def _alone() -> None:
    torch.set_num_threads(1)
    # Every task has the same few warnings of its prices; the process that learns says them once.
    logging.getLogger(autoshard.__name__).setLevel(logging.ERROR)


@lru_cache(maxsize=_NUM_PLAYED + NUM_VALIDATION)
def _task_of(kind: TaskKind, seed: int) -> GameTask:
    """A task that is played again and again."""
    return game_task(kind.request(seed))


def make_label(kind: TaskKind, seed: int, seconds: float, path: Path) -> None:
    """Searches a task and writes its label; an empty file where it has no layout."""
    try:
        task = game_task(kind.request(seed))
        label = Label.of(task, searched(task, seconds, seed))
    except AutoshardError:
        atomic_write(path, b"")
        return
    label.save(path)


def improve_label(kind: TaskKind, seed: int, label: Label, weights: Weights, path: Path) -> None:
    """Writes the label of a policy's own best placement after some bursts, or the one there is if that is better."""
    task = game_task(kind.request(seed))
    best = best_of(PolicyNetwork(weights), task, _NUM_SAMPLES, seed)
    layout = improved(task, best, _NUM_BURSTS, seed)
    better = layout.step_ms() < label.step_ms[0] and not (task.room_beside(layout) < 0).any()
    (Label.of(task, layout) if better else label).save(path)


def episodes_of(kind: TaskKind, seed: int, weights: Weights, chance: int) -> Played:
    """Recorded episodes of a task, without their layouts, which are large."""
    rng = np.random.default_rng(chance)
    return replace(play(PolicyNetwork(weights), _task_of(kind, seed), _NUM_EPISODES, rng=rng), layouts=())


def reward_of(kind: TaskKind, seed: int, weights: Weights) -> float:
    """Reward of a policy's likeliest placement of a task."""
    task = _task_of(kind, seed)
    return task.witness_ms / decoded(PolicyNetwork(weights), task).layout(0).step_ms()
