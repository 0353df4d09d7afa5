"""Placements made by a trained network.

Shape suffixes: N items, P tasks, B beginnings, E episodes, R ranks, A choices, C what is seen of them, H width of a
code, S width of a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autoshard.core.accepted import AT_LEAST_1
from autoshard.runtime.processes.threads import intra_op_threads
from env import (
    ACTION_MASK,
    CHOICE_COSTS,
    CHOICE_KINDS,
    ITEM_CODE,
    REMAINING,
    FinishedEpisodes,
    PlacementBatch,
    PlacementTask,
)
from policies.algorithms.trajectories import Tensors
from policies.network.actor_critic import choose
from policies.network.network import PlacementNetwork, choices_seen


@intra_op_threads(1)
@torch.inference_mode()
def decode(
    network: PlacementNetwork,
    tasks: Sequence[PlacementTask],
    *,
    num_samples: int | None = None,
    generator: torch.Generator | None = None,
) -> FinishedEpisodes:
    """Places the items of all tasks at once.

    Args:
        network: Trained on codes of the tasks' cost model.
        tasks: As for PlacementBatch.
        num_samples: Episodes per task, with choices drawn by their probabilities; None for a single one per task,
            with the likeliest choice at every step.
        generator: Source of the draws.

    Returns:
        Placements of the first task first. Masks look ahead, so all of them keep to limits and constraints.
    """
    owner_E = np.arange(len(tasks)).repeat(num_samples or 1)
    batch = PlacementBatch(tasks, len(owner_E))
    batch.begin(np.arange(len(owner_E)), owner_E)
    seen: _States = _StatesAsPlayed(network, batch) if batch.may_split else _StatesOfTasks(network, batch, owner_E)
    finished = []
    while not batch.is_done.all():
        observation = {key: torch.as_tensor(value) for key, value in batch.observe().items()}
        logits_EA = network.logits(seen.next(observation), *choices_seen(observation))
        actions_E = choose(logits_EA, deterministic=num_samples is None, generator=generator)
        finished.append(batch.step(actions_E.numpy()))
    placements = FinishedEpisodes.joined(finished)
    return placements.take(np.argsort(placements.episodes_D))


@intra_op_threads(1)
@torch.inference_mode()
def decode_beam(network: PlacementNetwork, tasks: Sequence[PlacementTask], *, width: int) -> FinishedEpisodes:
    """Places the items of all tasks, with several of the likeliest beginnings kept at every step.

    Of choices that look alike, such as ranks that hold nothing yet, one is followed, so that beginnings differ by more
    than the numbers of ranks. Where items may be split, a beginning that ends early stays in its place as long as no
    longer ones are likelier.

    Args:
        network: Trained on codes of the tasks' cost model.
        tasks: As for PlacementBatch.
        width: Beginnings that are kept per task.

    Returns:
        The placement of each task with the best objective, among the ones that it ended with.

    Raises:
        InvalidOptionError: If the width is below 1.
    """
    AT_LEAST_1.check(width, "width")
    owner_E = np.arange(len(tasks)).repeat(width)
    batch = PlacementBatch(tasks, len(owner_E))
    batch.begin(np.arange(len(owner_E)), owner_E)
    seen: _States = _StatesAsPlayed(network, batch) if batch.may_split else _StatesOfTasks(network, batch, owner_E)
    # All beginnings of a task are the same at first: only one of them counts.
    score_PB = torch.full((len(tasks), width), -torch.inf)
    score_PB[:, 0] = 0.0
    finished: list[FinishedEpisodes] = []
    # Which of the finished ones each beginning is, once it has ended.
    end_E, num_ended = np.full(len(owner_E), -1), 0
    while not batch.is_done.all():
        observation = {key: torch.as_tensor(value) for key, value in batch.observe().items()}
        logits_EA = network.logits(seen.next(observation), *choices_seen(observation))
        likely_EA = _first_of_alike(torch.log_softmax(logits_EA, dim=1), observation)
        is_done_E = torch.from_numpy(batch.is_done)
        likely_EA[is_done_E] = -torch.inf
        likely_EA[is_done_E, 0] = 0.0
        score_PB, source_PB, action_PB = _best_next(score_PB, likely_EA.view(len(tasks), width, -1))
        sources_E = (source_PB + width * torch.arange(len(tasks))[:, None]).flatten()
        batch.branch(sources_E.numpy())
        seen.branch(sources_E)
        end_E = end_E[sources_E.numpy()]
        finished.append(batch.step(action_PB.flatten().numpy()))
        ended_D = finished[-1].episodes_D
        end_E[ended_D] = num_ended + np.arange(len(ended_D))
        num_ended += len(ended_D)
    return _best_of(FinishedEpisodes.joined(finished).take(end_E), width)


def _first_of_alike(likely_EA: Tensor, observation: Tensors) -> Tensor:
    """Minus infinity for choices that cost the same as an earlier allowed one of their kind, and leave as much room."""
    seen_EAC = torch.cat([observation[CHOICE_COSTS], observation[CHOICE_KINDS].float()], dim=2)
    alike_EAA = (seen_EAC[:, :, None] == seen_EAC[:, None]).all(dim=3) & (observation[ACTION_MASK] > 0)[:, None]
    return likely_EA.masked_fill(torch.tril(alike_EAA, diagonal=-1).any(dim=2), -torch.inf)


def _best_next(score_PB: Tensor, likely_PBA: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, sources and actions of the best beginnings that are a step longer, (P, B)."""
    num_tasks, width, num_choices = likely_PBA.shape
    best_PB, place_PB = (score_PB[..., None] + likely_PBA).view(num_tasks, -1).topk(width, dim=1)
    return best_PB, place_PB // num_choices, place_PB % num_choices


def _best_of(placements: FinishedEpisodes, width: int) -> FinishedEpisodes:
    """Of every `width` placements the feasible one with the best objective; the first if none is feasible."""
    rated_PB = np.where(placements.is_feasible_D, placements.objective_ms_D, np.inf).reshape(-1, width)
    return placements.take(rated_PB.argmin(axis=1) + width * np.arange(len(rated_PB)))


class _States(Protocol):
    """States of episodes step by step, shape (E, S)."""

    def next(self, observation: Tensors) -> Tensor:
        """Of the step that is seen."""
        ...

    def branch(self, sources_E: Tensor) -> None:
        """Makes each episode e go on from where episode `sources_E[e]` is."""
        ...


class _StatesOfTasks:
    """Of tasks without splits: they depend on no action, so all of them are made at once."""

    def __init__(self, network: PlacementNetwork, batch: PlacementBatch, owner_E: NDArray[np.int64]) -> None:
        items_NPH, remaining_NP1 = batch.items()
        states_NPS, _ = network.states(
            torch.from_numpy(items_NPH), torch.from_numpy(remaining_NP1), network.initial_state(len(batch.tasks))
        )
        self._steps, self._owner_E = iter(states_NPS), torch.from_numpy(owner_E)

    def next(self, _observation: Tensors) -> Tensor:
        return next(self._steps)[self._owner_E]

    def branch(self, sources_E: Tensor) -> None:
        """Episodes go on within their tasks, which see the same."""


class _StatesAsPlayed:
    """Of what comes up in each episode."""

    def __init__(self, network: PlacementNetwork, batch: PlacementBatch) -> None:
        self._network, self._memory = network, network.initial_state(batch.num_episodes)

    def next(self, observation: Tensors) -> Tensor:
        states_TES, self._memory = self._network.states(
            observation[ITEM_CODE][None], observation[REMAINING][None], self._memory
        )
        return states_TES[0]

    def branch(self, sources_E: Tensor) -> None:
        hidden, cell = self._memory
        self._memory = hidden[:, sources_E], cell[:, sources_E]
