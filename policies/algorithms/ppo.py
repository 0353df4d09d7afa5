"""PPO of stable-baselines3 on whole episodes, with the network that V-trace trains.

Shape suffixes: T steps, E episodes, B = T * E, A choices, S width of a state.
"""

from __future__ import annotations

import math
from collections.abc import Generator

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import DictRolloutBuffer, RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.type_aliases import DictRolloutBufferSamples
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs
from torch import Tensor

from env import ITEM_CODE, REMAINING
from policies.algorithms.training_options import PPOSettings
from policies.algorithms.trajectories import Tensors
from policies.algorithms.vtrace import compared_within_task, entropy, log_prob
from policies.network.actor_critic import PlacementPolicy, choose
from policies.network.network import LstmState, choices_seen


class EpisodicPolicy(PlacementPolicy):
    """PlacementPolicy as PPO asks for it.

    While episodes are played it remembers by itself what the LSTM knows; afterwards it scores whole episodes at once.
    """

    _state: LstmState

    def begin_episodes(self, num_episodes: int) -> None:
        """Forgets what it knows of the episodes before."""
        self._state = self.network.initial_state(num_episodes)

    def forward(self, observation: Tensors) -> tuple[Tensor, Tensor, Tensor]:
        """Choices drawn, values of the states, and log-probabilities of the choices; each of shape (E,)."""
        logits_EA, values_E, self._state = self.step(observation, self._state)
        actions_E = choose(logits_EA, deterministic=False)
        return actions_E, values_E, log_prob(logits_EA, actions_E)

    def predict_values(self, observation: Tensors) -> Tensor:
        """Values of states that follow an episode's end, shape (E,); PPO asks for them, and they count for nothing."""
        return self.step(observation, self.network.initial_state(len(observation[REMAINING])))[1]

    def evaluate_actions(self, observations: Tensors, actions_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores whole episodes.

        Args:
            observations: Of all steps, shape (T, E, ...).
            actions_B: Step after step.

        Returns:
            Values, log-probabilities of the actions, and entropies; each of shape (B,).
        """
        network = self.network
        states_TES, _ = network.states(
            observations[ITEM_CODE],
            observations[REMAINING],
            network.initial_state(observations[REMAINING].shape[1]),
        )
        logits_BA = network.logits(
            states_TES.flatten(0, 1), *(seen.flatten(0, 1) for seen in choices_seen(observations))
        )
        return network.values(states_TES).flatten(), log_prob(logits_BA, actions_B), entropy(logits_BA)


class EpisodeBuffer(DictRolloutBuffer):
    """stable-baselines3's buffer, but its minibatches hold whole episodes, for a policy with a memory.

    Attributes:
        tasks_E: Task of each episode.
        compare_within_task: Whether advantages are compared within tasks.
    """

    tasks_E: np.ndarray
    compare_within_task = False

    def compute_returns_and_advantage(self, last_values: Tensor, dones: np.ndarray) -> None:
        """Returns and generalised advantages, the latter compared within tasks if so wanted."""
        super().compute_returns_and_advantage(last_values, dones)
        if self.compare_within_task:
            tasks_TE = torch.from_numpy(np.tile(self.tasks_E, (self.buffer_size, 1)))
            self.advantages = compared_within_task(torch.from_numpy(self.advantages), tasks_TE).numpy()

    def get(self, batch_size: int | None = None) -> Generator[DictRolloutBufferSamples, None, None]:  # type: ignore[override]
        """Minibatches of about `batch_size` steps: observations (T, E, ...), all else (B,)."""
        assert self.full, "a rollout comes first"
        # Of torch's generator, which checkpoints keep.
        shuffled_E = torch.randperm(self.n_envs).numpy()
        size = max(1, batch_size // self.buffer_size) if batch_size is not None else self.n_envs
        for start in range(0, self.n_envs, size):
            chosen = shuffled_E[start : start + size]

            def flat(values_TE: np.ndarray, chosen: np.ndarray = chosen) -> Tensor:
                return self.to_torch(values_TE[:, chosen].reshape(-1))

            yield DictRolloutBufferSamples(
                observations={key: self.to_torch(values[:, chosen]) for key, values in self.observations.items()},
                actions=flat(self.actions),
                old_values=flat(self.values),
                old_log_prob=flat(self.log_probs),
                advantages=flat(self.advantages),
                returns=flat(self.returns),
            )


class PlacementPPO(PPO):
    """PPO with a recurrent policy that masks what may not be chosen.

    What the LSTM knows depends on the items alone and not on what was done with them, so it may be run anew over whole
    episodes as often as PPO goes over them. Collecting, losses and the training loop are stable-baselines3's.

    Args:
        env: Environments whose episodes all take `num_steps`.
        settings: How to learn.
        num_steps: Items of a task.
        seed: Source of randomness of the network's first weights and of actions.
        device: Where the network lives.
    """

    policy: EpisodicPolicy  # type: ignore[assignment]  # the base class knows policies without memory only
    rollout_buffer: EpisodeBuffer

    def __init__(
        self,
        env: VecEnv,
        settings: PPOSettings,
        *,
        num_steps: int,
        seed: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        num_minibatches = math.gcd(env.num_envs, settings.num_minibatches)
        super().__init__(
            EpisodicPolicy,  # type: ignore[arg-type]
            env,
            learning_rate=settings.learning_rate,
            n_steps=num_steps,
            batch_size=num_steps * env.num_envs // num_minibatches,
            n_epochs=settings.num_epochs,
            gamma=1.0,
            gae_lambda=settings.gae_lambda,
            clip_range=settings.clip_range,
            ent_coef=settings.entropy_weight,
            vf_coef=settings.baseline_weight,
            max_grad_norm=settings.max_grad_norm,
            rollout_buffer_class=EpisodeBuffer,
            device=device,
            seed=seed,
        )
        self.rollout_buffer.compare_within_task = settings.compare_within_task

    def begin_episodes(self, observation: VecEnvObs) -> None:
        """Tells that all environments have begun new episodes, with this observation."""
        self._last_obs = observation  # type: ignore[assignment]
        self._last_episode_starts = np.ones(self.n_envs, dtype=np.bool_)

    def collect_rollouts(
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBuffer, n_rollout_steps: int
    ) -> bool:
        """Plays one episode in every environment; see the base class."""
        self.policy.begin_episodes(env.num_envs)
        self.rollout_buffer.tasks_E = np.array(env.get_attr("task_index"))
        return super().collect_rollouts(env, callback, rollout_buffer, n_rollout_steps)
