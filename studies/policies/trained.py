"""Policies that an evaluation trains: whole ones, and ones that lack a part of their network.

All that the evaluation asks of the training and of the network is here.

Shape suffixes: H width of a code, S width of a state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import torch

from autoshard.planners.space.placement import PlacementProblem
from autoshard.runtime.processes.threads import intra_op_threads
from env import PlacementTask
from policies.choices import Algorithm, RewardSource
from policies.network.network import PlacementNetwork
from policies.rollout.measured import find_benchmark
from policies.training.scores import PlacementScore, score_policy
from policies.training.trainer import Budget, PolicyTrainer, TrainingOptions


class NetworkPart(StrEnum):
    """Parts of the network that a policy can be trained without."""

    RANK_COSTS = "prices of the ranks"
    """None of the numbers of a rank that are no codes: kernel times, the objective, memory, and its kind."""
    RANK_CODES = "codes of the ranks"
    STATES = "LSTM and item"
    """The policy head sees the ranks alone."""


class Learner(StrEnum):
    """Ways to train whose curves are compared."""

    VTRACE = "V-trace"
    ACTORS = "V-trace, actors that lag"
    """Two processes play while the learner learns."""
    PPO = "PPO"
    MEASURED = "V-trace, measured rewards"


_LEARNERS: Final[Mapping[Learner, TrainingOptions]] = {
    Learner.VTRACE: TrainingOptions(),
    Learner.ACTORS: TrainingOptions(num_actors=2),
    Learner.PPO: TrainingOptions(algorithm=Algorithm.PPO),
    Learner.MEASURED: TrainingOptions(reward=RewardSource.MEASURED),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """Scores on unseen tasks during a training.

    Attributes:
        num_updates: Updates so far.
        training_s: Seconds that they took; scoring does not count.
        spent_s: Of these, seconds of collecting, of measuring and of learning.
        score: Of one greedy decode per task.
    """

    num_updates: int
    training_s: float
    spent_s: Mapping[str, float]
    score: PlacementScore

    def to_json(self) -> dict[str, Any]:
        """As a JSON object, with the numbers of its parts side by side."""
        return {
            "num_updates": self.num_updates,
            "training_s": self.training_s,
            **self.spent_s,
            **self.score.to_json(),
        }


def train_network(
    train: Sequence[PlacementProblem],
    validation: Sequence[PlacementProblem],
    *,
    seed: int,
    num_updates: int,
    folder: Path,
    without: NetworkPart | None = None,
    as_task: Callable[[PlacementProblem], PlacementTask] = PlacementTask.of,
) -> PlacementNetwork:
    """Trains a network, and takes the weights that did best on the validation problems.

    Args:
        train: Problems to learn from.
        validation: Problems to choose by.
        seed: Of weights and of what is tried.
        num_updates: Updates.
        folder: Where checkpoints are kept; goes on from the one that is there.
        without: A part of the network that stays at zero.
        as_task: Makes tasks of problems.
    """
    trainer = PolicyTrainer(train, validation, seed=seed, as_task=as_task)
    if without is not None:
        hold_at_zero(trainer.network, without)
    trainer.run(Budget(num_updates=num_updates), folder=folder)
    return trainer.best_network


def training_curve(
    train: Sequence[PlacementProblem],
    validation: Sequence[PlacementProblem],
    unseen: Sequence[PlacementProblem],
    *,
    learner: Learner,
    device: str,
    seed: int,
    num_updates: int,
    every: int,
) -> tuple[CurvePoint, ...]:
    """Trains from random weights, and scores the network on unseen problems, at first and after every few updates.

    Args:
        train: Problems to learn from.
        validation: Problems that the trainer asks for; nothing is chosen by them.
        unseen: Problems to score on.
        learner: Way to train.
        device: Key of the device kind, for rewards that are measured.
        seed: Of weights and of what is tried.
        num_updates: Updates.
        every: Updates between two points.

    Raises:
        InvalidOptionError: If rewards are to be measured and nothing that measures is installed.
        ExecutionError: If actors fail.
    """
    options = _LEARNERS[learner]
    measure = find_benchmark(device) if options.share_measured else None
    trainer = PolicyTrainer(train, validation, options=options, seed=seed, measure=measure)
    tasks = [PlacementTask.of(problem) for problem in unseen]
    training_s, points = 0.0, []
    try:
        with intra_op_threads(1):
            for number in range(num_updates + 1):
                started_s = time.perf_counter()
                if number:
                    trainer.update()
                    training_s += time.perf_counter() - started_s
                if number % every == 0 or number == num_updates:
                    points.append(_point(trainer, training_s, tasks))
    finally:
        trainer.close()
    return tuple(points)


def _point(trainer: PolicyTrainer, training_s: float, tasks: Sequence[PlacementTask]) -> CurvePoint:
    times = trainer.times
    return CurvePoint(
        num_updates=trainer.num_updates,
        training_s=training_s,
        spent_s={name: getattr(times, name) for name in ("collect_s", "measure_s", "learn_s")},
        score=score_policy(trainer.network, tasks),
    )


@torch.no_grad()
def hold_at_zero(network: PlacementNetwork, part: NetworkPart) -> None:
    """Removes a part of a network: its weights are zero, and training leaves them so."""
    width, code_width = network.state_width, network.code_width
    weights = [(network.policy_first.weight, columns) for columns in _columns(part, width, code_width)]
    for parameter, columns in weights:
        kept = torch.ones_like(parameter)
        kept[:, columns] = 0.0
        parameter *= kept
        # Adam moves no weight whose gradients were all zero.
        parameter.register_hook(lambda gradient, kept=kept: gradient * kept)


def _columns(part: NetworkPart, width: int, code_width: int) -> tuple[slice, ...]:
    """The policy head's inputs that are made of a part: of state, action, and their product, each S wide."""
    state, action, product = 0, width, 2 * width
    if part is NetworkPart.STATES:
        return slice(state, state + width), slice(product, product + width)
    inner = slice(0, code_width) if part is NetworkPart.RANK_CODES else slice(code_width, width)
    return tuple(slice(start + inner.start, start + inner.stop) for start in (action, product))
