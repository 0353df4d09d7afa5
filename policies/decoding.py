"""Placements made by a trained network.

Shape suffixes: N items, P tasks, E episodes, R ranks, A choices, H width of a code, S width of a state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autoshard.core.costs import MsArray
from autoshard.planners.placement import PlacementProblem, RankArray
from env import ITEM_CODE, REMAINING, FinishedEpisodes, PlacementBatch, PlacementTask
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
