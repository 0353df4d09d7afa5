"""The network as a policy of stable-baselines3.

Shape suffixes: B episodes, A choices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import Tensor

from env import ITEM_CODE, REMAINING
from policies.network.network import LstmState, PlacementNetwork, choices_seen


class PlacementPolicy(BasePolicy):
    """PlacementNetwork with an Adam optimizer, for the observations of PlacementEnv.

    Args:
        observation_space: Of PlacementEnv.
        action_space: Of PlacementEnv.
        lr_schedule: Learning rate by remaining progress.
        use_sde: Not supported; the argument that stable-baselines3 hands to every policy.
    """

    def __init__(
        self,
        observation_space: spaces.Dict,
        action_space: spaces.Discrete,
        lr_schedule: Schedule,
        use_sde: bool = False,
    ) -> None:
        super().__init__(observation_space, action_space)
        assert not use_sde, "state-dependent exploration is for continuous actions"
        width = observation_space[ITEM_CODE].shape
        assert width is not None
        self.network = PlacementNetwork(width[0])
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=lr_schedule(1))

    def step(self, observation: dict[str, Tensor], before: LstmState) -> tuple[Tensor, Tensor, LstmState]:
        """Scores of the choices (B, A) and values (B,) of one step, and what the LSTM knows after it."""
        states_TBS, after = self.network.states(observation[ITEM_CODE][None], observation[REMAINING][None], before)
        states_BS = states_TBS[0]
        logits_BA = self.network.logits(states_BS, *choices_seen(observation))
        return logits_BA, self.network.values(states_BS), after

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        """Choices for the upcoming items of B episodes, or of one, and what the LSTM knows after them."""
        tensors, is_batch = self.obs_to_tensor(observation)
        assert isinstance(tensors, dict)
        before = self.network.initial_state(len(tensors[REMAINING]))
        if state is not None:
            before = (torch.as_tensor(state[0], device=self.device), torch.as_tensor(state[1], device=self.device))
            if episode_start is not None:
                before = keep(before, torch.as_tensor(~np.atleast_1d(episode_start), device=self.device))
        with torch.no_grad():
            logits_BA, _, after = self.step(tensors, before)
        actions_B = choose(logits_BA, deterministic=deterministic).cpu().numpy()
        return (actions_B if is_batch else actions_B[0]), (after[0].cpu().numpy(), after[1].cpu().numpy())

    def _predict(self, observation: PyTorchObs, deterministic: bool = False) -> Tensor:
        assert isinstance(observation, dict)
        logits_BA, _, _ = self.step(observation, self.network.initial_state(len(observation[REMAINING])))
        return choose(logits_BA, deterministic=deterministic)

    def _get_constructor_parameters(self) -> dict[str, Any]:
        return {
            "observation_space": self.observation_space,
            "action_space": self.action_space,
            "lr_schedule": self._dummy_schedule,
        }


def keep(state: LstmState, is_kept_B: Tensor) -> LstmState:
    """The LSTM's state, with that of some episodes set back to the start."""
    kept_1B1 = is_kept_B[None, :, None]
    return state[0] * kept_1B1, state[1] * kept_1B1


def choose(logits_BA: Tensor, *, deterministic: bool, generator: torch.Generator | None = None) -> Tensor:
    """Choices with the highest score, or drawn by their probabilities; shape (B,).

    All draws come from a generator of the CPU, so that a seed means the same on every device.
    """
    if deterministic:
        return logits_BA.argmax(dim=-1)
    # Exponential races draw from a softmax without ever forming it, in one pass over the scores.
    races_BA = torch.empty(logits_BA.shape, dtype=logits_BA.dtype).exponential_(generator=generator).log_()
    return (logits_BA - races_BA.to(logits_BA.device, non_blocking=True)).argmax(dim=-1)
