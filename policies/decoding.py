"""Placements made by a trained network.

Shape suffixes: N items, P tasks, E episodes, R ranks, H width of a code, S width of a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from autoshard.core.costs import MsArray
from autoshard.planners.placement import RankArray
from env import ACTION_MASK, RANK_CODES, RANK_COSTS, FinishedEpisodes, PlacementBatch, PlacementTask
from policies.actor_critic import choose
from policies.network import PlacementNetwork
from policies.threads import one_thread


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placements:
    """Placements of E episodes.

    Attributes:
        ranks: For each, the rank of each item of its problem.
        cost_ms_ER: Predicted kernel time per rank.
        is_feasible_E: Whether memory limits and constraints hold.
        rewards_E: As TablePlacementEnv gives them.
    """

    ranks: tuple[RankArray, ...]
    cost_ms_ER: MsArray
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
    """Places the items of all tasks at once, in as many steps as the largest has items.

    Args:
        network: Trained on codes of the tasks' cost model.
        tasks: Tasks with the same cost model and number of ranks.
        num_samples: Episodes per task, with ranks drawn by their probabilities; None for a single one per task, with
            the likeliest rank at every step.
        generator: Source of the draws.

    Returns:
        Placements of the first task first. Where all allowed ranks were full, memory limits may be exceeded.
    """
    owner_E = np.arange(len(tasks)).repeat(num_samples or 1)
    batch = PlacementBatch(tasks, len(owner_E))
    batch.begin(np.arange(len(owner_E)), owner_E)
    items_NPH, remaining_NP1 = batch.items()
    # States depend on no action, so those of all steps are made at once.
    states_NPS, _ = network.states(
        torch.from_numpy(items_NPH), torch.from_numpy(remaining_NP1), network.initial_state(len(tasks))
    )
    states_NES = states_NPS if num_samples is None else states_NPS[:, torch.from_numpy(owner_E)]
    finished = []
    for states_ES in states_NES:
        observation = {key: torch.as_tensor(value) for key, value in batch.observe().items()}
        logits_ER = network.logits(
            states_ES, observation[RANK_CODES], observation[RANK_COSTS], observation[ACTION_MASK].bool()
        )
        actions_E = choose(logits_ER, deterministic=num_samples is None, generator=generator)
        finished.append(batch.step(actions_E.numpy()))
    return _gather(finished)


def _gather(finished: Sequence[FinishedEpisodes]) -> Placements:
    """Puts episodes that ended at different steps back into their order."""
    order_E = np.argsort(np.concatenate([part.episodes_D for part in finished]))
    ranks = [ranks for part in finished for ranks in part.ranks]
    return Placements(
        ranks=tuple(ranks[index] for index in order_E),
        cost_ms_ER=np.concatenate([part.cost_ms_DR for part in finished])[order_E],
        is_feasible_E=np.concatenate([part.is_feasible_D for part in finished])[order_E],
        rewards_E=np.concatenate([part.rewards_D for part in finished])[order_E],
    )
