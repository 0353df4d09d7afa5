"""Placements made by a trained network.

Shape suffixes: N items, P tasks, B beginnings, E episodes, R ranks, A choices, C what is seen of them, H width of a
code, S width of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autoshard.core.costs import MsArray
from autoshard.core.errors import InvalidOptionError
from autoshard.planners.placement import PlacementProblem, RankArray
from env import (
    CHOICE_COSTS,
    CHOICE_KINDS,
    ITEM_CODE,
    REMAINING,
    FinishedEpisodes,
    PlacementBatch,
    PlacementTask,
)
from policies.actor_critic import choose
from policies.network import PlacementNetwork, choices_seen
from policies.threads import one_thread
from policies.trajectories import Tensors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placements:
    """Placements of E episodes.

    Attributes:
        problems: For each, the problem of what was placed: its task's, but for splits.
        ranks: For each, the placement of that problem's items.
        cost_ms_ER: Predicted kernel time per rank.
        objective_ms_E: Kernel time of the slowest rank, or time of the step if that is the tasks' objective.
        is_feasible_E: Whether memory limits and constraints hold.
        rewards_E: As PlacementEnv gives them.
    """

    problems: tuple[PlacementProblem, ...]
    ranks: tuple[RankArray, ...]
    cost_ms_ER: MsArray
    objective_ms_E: MsArray
    is_feasible_E: NDArray[np.bool_]
    rewards_E: NDArray[np.float64]


@one_thread()
@torch.inference_mode()
def decode(
    network: PlacementNetwork,
    tasks: Sequence[PlacementTask],
    *,
    num_samples: int | None = None,
    generator: torch.Generator | None = None,
) -> Placements:
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
    if batch.may_split:
        states, place_E = _states_as_played(network, batch), torch.arange(len(owner_E))
    else:
        states, place_E = _states_of_tasks(network, batch), torch.from_numpy(owner_E)
    finished = []
    while not batch.is_done.all():
        observation = {key: torch.as_tensor(value) for key, value in batch.observe().items()}
        logits_EA = network.logits(states(observation)[place_E], *choices_seen(observation))
        actions_E = choose(logits_EA, deterministic=num_samples is None, generator=generator)
        finished.append(batch.step(actions_E.numpy()))
    return _gather(finished)


@one_thread()
@torch.inference_mode()
def decode_beam(network: PlacementNetwork, tasks: Sequence[PlacementTask], *, width: int) -> Placements:
    """Places the items of all tasks, with several of the likeliest beginnings kept at every step.

    Of choices that look alike, such as ranks that hold nothing yet, one is followed, so that beginnings differ by more
    than the numbers of ranks.

    Args:
        network: Trained on codes of the tasks' cost model.
        tasks: As for PlacementBatch.
        width: Beginnings that are kept per task.

    Returns:
        The placement of each task with the best objective, among the ones that it ended with.

    Raises:
        InvalidOptionError: If the width is below 1, or the tasks have splits: then beginnings would not end together.
    """
    if width < 1:
        raise InvalidOptionError(f"must be at least 1, got {width}", field="width")
    owner_E = np.arange(len(tasks)).repeat(width)
    batch = PlacementBatch(tasks, len(owner_E))
    batch.begin(np.arange(len(owner_E)), owner_E)
    if batch.may_split:
        raise InvalidOptionError("must be 0 for a beam search, whose beginnings end together", field="max_splits")
    states, place_E = _states_of_tasks(network, batch), torch.from_numpy(owner_E)
    # All beginnings of a task are the same at first: only one of them counts.
    score_PB = torch.full((len(tasks), width), -torch.inf)
    score_PB[:, 0] = 0.0
    finished = []
    while not batch.is_done.all():
        observation = {key: torch.as_tensor(value) for key, value in batch.observe().items()}
        logits_EA = network.logits(states(observation)[place_E], *choices_seen(observation))
        likely_EA = _first_of_alike(torch.log_softmax(logits_EA, dim=1), observation)
        is_done_P = torch.from_numpy(batch.is_done).view(len(tasks), width).all(dim=1)
        score_PB, source_PB, action_PB = _best_next(score_PB, likely_EA.view(len(tasks), width, -1), is_done_P)
        sources_E = (source_PB + width * torch.arange(len(tasks))[:, None]).flatten()
        batch.branch(sources_E.numpy())
        finished.append(batch.step(action_PB.flatten().numpy()))
    return _best_of(_gather(finished), width)


def _first_of_alike(likely_EA: Tensor, observation: Tensors) -> Tensor:
    """Minus infinity for choices that cost the same as an earlier one of their kind, and leave as much room."""
    seen_EAC = torch.cat([observation[CHOICE_COSTS], observation[CHOICE_KINDS].float()], dim=2)
    alike_EAA = (seen_EAC[:, :, None] == seen_EAC[:, None]).all(dim=3)
    return likely_EA.masked_fill(torch.tril(alike_EAA, diagonal=-1).any(dim=2), -torch.inf)


def _best_next(score_PB: Tensor, likely_PBA: Tensor, is_done_P: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, sources and actions of the best beginnings that are a step longer, (P, B); none move where it is over."""
    num_tasks, width, num_choices = likely_PBA.shape
    best_PB, place_PB = (score_PB[..., None] + likely_PBA).view(num_tasks, -1).topk(width, dim=1)
    stay_PB = torch.arange(width).expand(num_tasks, width)
    done_P1 = is_done_P[:, None]
    return (
        torch.where(done_P1, score_PB, best_PB),
        torch.where(done_P1, stay_PB, place_PB // num_choices),
        torch.where(done_P1, 0, place_PB % num_choices),
    )


def _best_of(placements: Placements, width: int) -> Placements:
    """Of every `width` placements the feasible one with the best objective; the first if none is feasible."""
    rated_PB = np.where(placements.is_feasible_E, placements.objective_ms_E, np.inf).reshape(-1, width)
    best_P = rated_PB.argmin(axis=1) + width * np.arange(len(rated_PB))
    return Placements(
        problems=tuple(placements.problems[index] for index in best_P),
        ranks=tuple(placements.ranks[index] for index in best_P),
        cost_ms_ER=placements.cost_ms_ER[best_P],
        objective_ms_E=placements.objective_ms_E[best_P],
        is_feasible_E=placements.is_feasible_E[best_P],
        rewards_E=placements.rewards_E[best_P],
    )


def _states_of_tasks(network: PlacementNetwork, batch: PlacementBatch) -> Callable[[Tensors], Tensor]:
    """States of tasks step by step: they depend on no action, so all of them are made at once."""
    items_NPH, remaining_NP1 = batch.items()
    states_NPS, _ = network.states(
        torch.from_numpy(items_NPH), torch.from_numpy(remaining_NP1), network.initial_state(len(batch.tasks))
    )
    steps = iter(states_NPS)
    return lambda _: next(steps)


def _states_as_played(network: PlacementNetwork, batch: PlacementBatch) -> Callable[[Tensors], Tensor]:
    """States of episodes step by step, of what comes up in each."""
    memory = network.initial_state(batch.num_episodes)

    def states(observation: Tensors) -> Tensor:
        nonlocal memory
        states_TES, memory = network.states(observation[ITEM_CODE][None], observation[REMAINING][None], memory)
        return states_TES[0]

    return states


def _gather(finished: Sequence[FinishedEpisodes]) -> Placements:
    """Puts episodes that ended at different steps back into their order."""
    order_E = np.argsort(np.concatenate([part.episodes_D for part in finished]))
    problems = [problem for part in finished for problem in part.problems]
    ranks = [ranks for part in finished for ranks in part.ranks]
    return Placements(
        problems=tuple(problems[index] for index in order_E),
        ranks=tuple(ranks[index] for index in order_E),
        cost_ms_ER=np.concatenate([part.cost_ms_DR for part in finished])[order_E],
        objective_ms_E=np.concatenate([part.objective_ms_D for part in finished])[order_E],
        is_feasible_E=np.concatenate([part.is_feasible_D for part in finished])[order_E],
        rewards_E=np.concatenate([part.rewards_D for part in finished])[order_E],
    )
