"""Policies that an evaluation trains: whole ones, and ones that lack a part of their network.

All that the evaluation asks of the training and of the network is here.

Shape suffixes: H width of a code, S width of a state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch

from autoshard.planners.placement import PlacementProblem
from env import PlacementTask
from policies.network import PlacementNetwork
from policies.scores import PlacementScore, score_policy
from policies.threads import one_thread
from policies.training import Budget, PolicyTrainer


class NetworkPart(StrEnum):
    """Parts of the network that a policy can be trained without."""

    RANK_COSTS = "prices of the ranks"
    """Neither what a rank costs, nor what it would cost with the item."""
    RANK_CODES = "codes of the ranks"
    STATES = "LSTM and item"
    """The policy head sees the ranks alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """Scores on unseen tasks during a training.

    Attributes:
        num_updates: Updates so far.
        training_s: Seconds that they took; scoring does not count.
        score: Of one greedy decode per task.
    """

    num_updates: int
    training_s: float
    score: PlacementScore


def train_network(
    train: Sequence[PlacementProblem],
    validation: Sequence[PlacementProblem],
    *,
    seed: int,
    num_updates: int,
    folder: Path,
    without: NetworkPart | None = None,
    advance: Callable[[float], None] = lambda _: None,
) -> PlacementNetwork:
    """Trains a network, and takes the weights that did best on the validation problems.

    Args:
        train: Problems to learn from.
        validation: Problems to choose by.
        seed: Of weights and of what is tried.
        num_updates: Updates.
        folder: Where checkpoints are kept; goes on from the one that is there.
        without: A part of the network that stays at zero.
        advance: Told the share of the updates that has just been done.
    """
    trainer = PolicyTrainer(train, validation, seed=seed)
    if without is not None:
        hold_at_zero(trainer.network, without)
    trainer.run(Budget(num_updates=num_updates), folder=folder, advance=advance)
    return trainer.best_network


def training_curve(
    train: Sequence[PlacementProblem],
    validation: Sequence[PlacementProblem],
    unseen: Sequence[PlacementProblem],
    *,
    seed: int,
    num_updates: int,
    every: int,
    advance: Callable[[float], None] = lambda _: None,
) -> tuple[CurvePoint, ...]:
    """Trains from random weights, and scores the network on unseen problems, at first and after every few updates."""
    trainer = PolicyTrainer(train, validation, seed=seed)
    tasks = [PlacementTask.of(problem) for problem in unseen]
    points = [CurvePoint(num_updates=0, training_s=0.0, score=score_policy(trainer.network, tasks))]
    training_s = 0.0
    with one_thread():
        for number in range(1, num_updates + 1):
            started_s = time.perf_counter()
            trainer.update()
            training_s += time.perf_counter() - started_s
            if number % every == 0 or number == num_updates:
                score = score_policy(trainer.network, tasks)
                points.append(CurvePoint(num_updates=number, training_s=training_s, score=score))
            advance(1 / num_updates)
    return tuple(points)


@torch.no_grad()
def hold_at_zero(network: PlacementNetwork, part: NetworkPart) -> None:
    """Makes a network do without a part, for good: what weighs it is zero, and learns nothing."""
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
