"""V-trace actor-critic as an algorithm of stable-baselines3.

Shape suffixes: T steps, E episodes, B = T * E, A choices, S width of a state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.type_aliases import GymEnv
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs
from torch import Tensor

from autoshard.runtime.processes.learners import Learners
from costmodel.kernel.updates.batches import uploaded
from env import ITEM_CODE, REMAINING
from policies.algorithms.returns import vtrace_returns
from policies.algorithms.training_options import VTraceSettings
from policies.algorithms.trajectories import Tensors, Trajectories, TrajectoryRecorder
from policies.network.actor_critic import PlacementPolicy, choose, keep
from policies.network.network import LstmState, choices_seen


class VTrace(OnPolicyAlgorithm):
    """IMPALA's learner: collects trajectories, and learns from them once, corrected by V-trace.

    The loss is summed over the steps of a trajectory and averaged over trajectories.

    Args:
        policy: PlacementPolicy, or a class derived from it.
        env: Environments with the spaces of PlacementEnv; AutoShard's preset has 8. PlacementVecEnv is fastest.
        settings: How to learn.
        seed: Source of randomness of the network's first weights and of actions.
        device: Where the network lives.
        stats_window_size: Episodes over which rewards are averaged in logs.
        tensorboard_log: Folder for TensorBoard; none if None.
        verbose: 1 prints logs.
        learners: Processes that train together, each on trajectories of its own; alone when left out.

    Source:
        AutoShard Sec. 4.4 (Eq. 2 and 3) and C.2. Differs: the policy term is a gain, so its sign in the loss is
        negative; losses are averaged over trajectories, so that the gradient limit means the same for any number.
    """

    policy: PlacementPolicy  # type: ignore[assignment]  # the base class knows policies without memory only

    def __init__(
        self,
        policy: type[PlacementPolicy],
        env: GymEnv,
        settings: VTraceSettings | None = None,
        *,
        seed: int | None = None,
        device: torch.device | str = "cpu",
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        verbose: int = 0,
        policy_kwargs: dict[str, Any] | None = None,
        learners: Learners | None = None,
        _init_setup_model: bool = True,
    ) -> None:
        self.settings = settings or VTraceSettings()
        self.learners = learners or Learners()
        super().__init__(
            policy,  # type: ignore[arg-type]
            env,
            learning_rate=self.settings.learning_rate,
            n_steps=self.settings.num_steps,
            gamma=self.settings.discount,
            gae_lambda=1.0,
            ent_coef=self.settings.entropy_weight,
            vf_coef=self.settings.baseline_weight,
            max_grad_norm=self.settings.max_grad_norm,
            use_sde=False,
            sde_sample_freq=-1,
            seed=seed,
            device=device,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            verbose=verbose,
            policy_kwargs=policy_kwargs,
            supported_action_spaces=(spaces.Discrete,),
            _init_setup_model=_init_setup_model,
        )

    def _setup_model(self) -> None:
        self._setup_lr_schedule()
        self.set_random_seed(self.seed)
        policy = self.policy_class(self.observation_space, self.action_space, self.lr_schedule)
        assert isinstance(policy, PlacementPolicy)
        self.policy = policy.to(self.device)
        self._lstm_state = self.policy.network.initial_state(self.n_envs)
        self.trajectories: Trajectories | None = None
        # The recorder of this class keeps more than stable-baselines3's buffers do; `learn` just hands it through.
        self.rollout_buffer = None  # type: ignore[assignment]

    def begin_episodes(self, observation: VecEnvObs) -> None:
        """Tells that all environments have begun new episodes, with this observation."""
        self._last_obs = observation  # type: ignore[assignment]
        self._last_episode_starts = np.ones(self.n_envs, dtype=np.bool_)

    @torch.no_grad()
    def collect_rollouts(
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBuffer, n_rollout_steps: int
    ) -> bool:
        """Plays `n_rollout_steps` steps in every environment; see the base class."""
        assert self._last_obs is not None
        assert self._last_episode_starts is not None
        self.policy.set_training_mode(False)
        callback.on_rollout_start()
        recorder = TrajectoryRecorder(before=self._lstm_state)
        tasks_E = np.array(env.get_attr("task_index"))
        has_ended_E, num_steps = np.zeros(env.num_envs, dtype=np.bool_), 0
        while num_steps < n_rollout_steps or (self.settings.whole_episodes and not has_ended_E.all()):
            observation = self._to_tensors(self._last_obs)
            starts_E = self._last_episode_starts
            before = keep(self._lstm_state, uploaded(~starts_E, self.device))
            logits_EA, _, self._lstm_state = self.policy.step(observation, before)
            actions_E = choose(logits_EA, deterministic=False)
            log_probs_E = log_prob(logits_EA, actions_E)
            self._last_obs, rewards_E, dones_E, infos = env.step(actions_E.cpu().numpy())  # type: ignore[assignment]
            self._last_episode_starts = dones_E
            recorder.add(
                observation,
                actions=actions_E,
                log_probs=log_probs_E,
                rewards=uploaded(rewards_E, self.device),
                starts=torch.as_tensor(starts_E, dtype=torch.bool),
                dones=uploaded(dones_E, self.device),
                tasks=torch.as_tensor(tasks_E),
            )
            num_steps += 1
            has_ended_E |= dones_E
            self.num_timesteps += env.num_envs
            self._update_info_buffer(infos, dones_E)
            if dones_E.any():
                tasks_E = np.array(env.get_attr("task_index"))
            callback.update_locals(locals())
            if not callback.on_step():
                return False
        self.trajectories = recorder.finish(self._to_tensors(self._last_obs))
        if self.settings.whole_episodes:
            self.begin_episodes(env.reset())
        callback.on_rollout_end()
        return True

    def train(self) -> None:
        """Makes one update from the trajectories collected last."""
        assert self.trajectories is not None
        self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        with self.learners.autocast():
            loss, told = self._loss(self.trajectories)
        self.policy.optimizer.zero_grad()
        loss.backward()
        parameters = [item for group in self.policy.optimizer.param_groups for item in group["params"]]
        self.learners.average_gradients(parameters)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.settings.max_grad_norm)
        self.policy.optimizer.step()
        self._n_updates += 1
        told["gradient_norm"] = norm
        # Read at once, after all work of the update is queued: the only wait for the device.
        for name, value in zip(told, torch.stack(list(told.values())).cpu().tolist(), strict=True):
            self.logger.record(f"train/{name}", value)
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")

    def _loss(self, data: Trajectories) -> tuple[Tensor, Tensors]:
        """The loss, and numbers of it for logs, by name."""
        observations = self.learner_observations(data)
        states_TES, after = self.states(observations, data)
        values_TE = self.policy.network.values(states_TES)
        seen = [values.flatten(0, 1) for values in (states_TES, *choices_seen(observations))]
        logits_BA = self.policy.network.logits(*seen)
        log_probs_TE = log_prob(logits_BA, data.actions_TE.flatten()).view_as(values_TE)
        log_ratios_TE = (log_probs_TE - data.log_probs_TE).detach()
        discounts_TE = self.settings.discount * (~data.dones_TE).float()
        bootstrap_E = self._bootstrap(data, after)
        returns = vtrace_returns(log_ratios_TE, discounts_TE, data.rewards_TE, values_TE.detach(), bootstrap_E)
        advantages_TE = returns.advantages_TB
        if self.settings.compare_within_task:
            compare = _whole_advantages if self.settings.whole_episodes else _lagged_advantages
            advantages_TE = compare(log_ratios_TE, discounts_TE, data)
        counts_TE = _first_episodes(data) if self.settings.whole_episodes else torch.ones_like(values_TE)
        entropy_B = entropy(logits_BA)
        num_trajectories = values_TE.shape[1]
        policy_loss = -(counts_TE * log_probs_TE * advantages_TE).sum() / num_trajectories
        value_loss = 0.5 * (counts_TE * (returns.targets_TB - values_TE).square()).sum() / num_trajectories
        entropy_loss = -(counts_TE.flatten() * entropy_B).sum() / num_trajectories
        loss = policy_loss + self.settings.baseline_weight * value_loss + self.settings.entropy_weight * entropy_loss
        told = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy_B.mean()}
        return loss, {name: value.detach().float() for name, value in told.items()}

    def learner_observations(self, data: Trajectories) -> Tensors:
        """What the learner reads; a place for joint training to make codes through which gradients flow."""
        return data.observations

    def states(self, observations: Tensors, data: Trajectories) -> tuple[Tensor, LstmState]:
        """The network's states of all steps, shape (T, E, S), and the LSTM's after the last one."""
        parts, state = [], data.before
        for slab in data.slabs:
            state = keep(state, uploaded(~data.starts_TE[slab.start].numpy(), state[0].device))
            states_TES, state = self.policy.network.states(
                observations[ITEM_CODE][slab], observations[REMAINING][slab], state
            )
            parts.append(states_TES)
        return torch.cat(parts), state

    @torch.no_grad()
    def _bootstrap(self, data: Trajectories, after: LstmState) -> Tensor:
        """Values of what is seen last; the discount makes those of ended episodes count for nothing."""
        last = data.last_observation
        states_TES, _ = self.policy.network.states(last[ITEM_CODE][None], last[REMAINING][None], after)
        return self.policy.network.values(states_TES[0])

    def _to_tensors(self, observation: Any) -> Tensors:
        return {key: uploaded(value, self.device) for key, value in observation.items()}


def compared_within_task(advantages_TE: Tensor, tasks_TE: Tensor) -> Tensor:
    """Advantages over the mean of the same task and step, in units of the task's standard deviation.

    States depend on no action, so the episodes of a task see the same ones, and their mean is the best baseline. A
    task whose episodes all did equally well comes out as 0.

    Args:
        advantages_TE: On any device.
        tasks_TE: On the CPU.
    """
    groups = _Groups.of(tasks_TE, advantages_TE.device)
    centred_B = _centred(advantages_TE, groups).flatten()
    deviation_B = _group_means(centred_B.square(), groups.group_TE.flatten(), groups.number).sqrt()
    # Rounding alone makes equal rewards differ by about 1e-7.
    compared_B = torch.where(deviation_B > 1e-5, centred_B / deviation_B.clamp(min=1e-5), 0.0)
    return compared_B.view_as(advantages_TE)


def _lagged_advantages(log_ratios_TE: Tensor, discounts_TE: Tensor, data: Trajectories) -> Tensor:
    """Advantages over the mean of the same task, corrected for the lag.

    The mean comes off before ratios weigh anything: what a value head is off by would else weigh in with every ratio
    but 1, and be taken for an advantage, however small the real ones are. Without lag it is the same as comparing the
    advantages over values.
    """
    none_TE = torch.zeros_like(data.rewards_TE)
    centred_TE = _centred(data.rewards_TE, _Groups.of(data.tasks_TE, data.rewards_TE.device))
    returns = vtrace_returns(log_ratios_TE, discounts_TE, centred_TE, none_TE, none_TE[0])
    return compared_within_task(returns.advantages_TB, data.tasks_TE)


def _first_episodes(data: Trajectories) -> Tensor:
    """1 for steps of the first episode in each environment, 0 for those of the next; shape (T, E)."""
    dones_TE = data.dones_TE.int()
    return (dones_TE.cumsum(dim=0) - dones_TE == 0).float()


def _whole_advantages(log_ratios_TE: Tensor, discounts_TE: Tensor, data: Trajectories) -> Tensor:
    """Advantages of the first episode in each environment over the mean of its task, in the task's deviations.

    Episodes of a task see other states as soon as they differ in a split, so what they are compared by is the
    outcome of the whole.
    """
    ends_TE = _first_episodes(data) * data.dones_TE
    rewards_E, tasks_E = (ends_TE * data.rewards_TE).sum(dim=0), data.tasks_TE[0]
    compared_E = compared_within_task(rewards_E[None], tasks_E[None])[0]
    none_TE = torch.zeros_like(ends_TE)
    return vtrace_returns(log_ratios_TE, discounts_TE, ends_TE * compared_E, none_TE, none_TE[0]).advantages_TB


@dataclass(frozen=True, slots=True, kw_only=True)
class _Groups:
    """Steps by their tasks, which are numbered from 0; counted on the CPU, so that no device is waited for."""

    group_TE: Tensor
    number: int

    @classmethod
    def of(cls, tasks_TE: Tensor, device: torch.device) -> _Groups:
        """Groups of tasks, whose numbers go to a device."""
        tasks, group_TE = np.unique(tasks_TE.numpy(), return_inverse=True)
        return cls(group_TE=uploaded(group_TE.reshape(tasks_TE.shape), device), number=len(tasks))


def _centred(values_TE: Tensor, groups: _Groups) -> Tensor:
    """Values less the mean of their group at the same step."""
    num_steps = len(values_TE)
    step_T1 = torch.arange(num_steps, device=values_TE.device)[:, None]
    cell_B = (groups.group_TE + groups.number * step_T1).flatten()
    return values_TE - _group_means(values_TE.flatten(), cell_B, groups.number * num_steps).view_as(values_TE)


def _group_means(values_B: Tensor, group_B: Tensor, num_groups: int) -> Tensor:
    """For each value the mean of its group."""
    sums_G = values_B.new_zeros(num_groups).index_add(0, group_B, values_B)
    # Not by bincount, which asks the device for the largest group.
    counts_G = group_B.new_zeros(num_groups).index_add(0, group_B, torch.ones_like(group_B))
    return (sums_G / counts_G.clamp(min=1))[group_B]


def log_prob(logits_BA: Tensor, actions_B: Tensor) -> Tensor:
    """Log-probabilities of actions, shape (B,)."""
    return logits_BA.log_softmax(dim=-1).gather(-1, actions_B[..., None])[..., 0]


def entropy(logits_BA: Tensor) -> Tensor:
    """Entropies of the policy, shape (B,)."""
    log_probs_BA = logits_BA.log_softmax(dim=-1)
    # Masked choices have log-probability minus infinity and contribute nothing.
    return -(log_probs_BA.exp() * log_probs_BA.clamp(min=torch.finfo(log_probs_BA.dtype).min)).sum(dim=-1)
