"""V-trace whose episodes others play, with weights of the past."""

from __future__ import annotations

from dataclasses import dataclass

from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv
from typing_extensions import override

from autoshard.runtime.processes.learners import Learners
from policies.algorithms.training_options import VTraceSettings
from policies.algorithms.vtrace import VTrace
from policies.network.actor_critic import PlacementPolicy
from policies.network.weights import to_arrays
from policies.rollout.actors import ActorPool


@dataclass(slots=True, kw_only=True)
class LagCount:
    """How many updates older than the learner's the weights were that played.

    Attributes:
        num_orders: Orders that were learned from.
        total: Sum of their lags.
        most: Largest lag.
    """

    num_orders: int = 0
    total: int = 0
    most: int = 0

    def add(self, lag: int) -> None:
        """Counts one more order."""
        self.num_orders += 1
        self.total += lag
        self.most = max(self.most, lag)

    @property
    def mean(self) -> float:
        """Mean lag; 0 before the first order."""
        return self.total / self.num_orders if self.num_orders else 0.0


class LaggedVTrace(VTrace):
    """V-trace that learns from what actors play.

    Args:
        env: Environments as the actors have; not played here.
        settings: How to learn.
        pool: The actors.
        seed: Source of randomness of the network's first weights.
        learners: Processes that train together, and this one's device; the actors play on CPUs.

    Attributes:
        lag: Of all that was learned from.

    Source:
        AutoShard Sec. 4.4 and IMPALA (Espeholt et al. 2018) Sec. 3: actors and one learner, corrected by V-trace.
    """

    def __init__(
        self,
        env: VecEnv,
        settings: VTraceSettings,
        pool: ActorPool,
        *,
        seed: int | None = None,
        learners: Learners | None = None,
    ) -> None:
        learners = learners or Learners()
        super().__init__(PlacementPolicy, env, settings, seed=seed, device=learners.device, learners=learners)
        self.pool = pool
        self.lag = LagCount()

    @override
    def collect_rollouts(
        self, env: VecEnv, callback: BaseCallback, rollout_buffer: RolloutBuffer, n_rollout_steps: int
    ) -> bool:
        """Takes the next trajectories from the actors; see the base class."""
        callback.on_rollout_start()
        played, lag = self.pool.take(to_arrays(self.policy.network))
        self.trajectories = played.trajectories(self.policy)
        self.lag.add(lag)
        self.logger.record("actors/lag", lag)
        self.logger.record("actors/mean_lag", self.lag.mean)
        self.logger.record("actors/max_lag", self.lag.most)
        self.num_timesteps += n_rollout_steps * env.num_envs
        assert self.ep_info_buffer is not None
        self.ep_info_buffer.extend(dict(episode) for episode in played.episodes)
        callback.on_rollout_end()
        return True
