"""Rewards that are measured: finished placements run on this machine, all of an update in the same rounds.

Shape suffixes: E episodes, D episodes that have just ended, R ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from stable_baselines3.common.vec_env import VecEnvWrapper
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from autoshard.core import ShardingPlan
from autoshard.core.costs import MsArray
from autoshard.planners.refine import MeasurePlans
from autoshard.planners.space.placement import PlacementProblem, RankArray
from autoshard.plugins import find_replay
from env import PlacementTask, PlacementVecEnv, kernel_score

#: Told what was measured: a problem, the rank of each of its items, and each rank's milliseconds.
OnMeasured = Callable[[PlacementProblem, RankArray, MsArray], None]


def find_benchmark(device: str) -> MeasurePlans:
    """The installed micro-benchmark, found as `autoshard compare --replay` finds it.

    Args:
        device: Key of the device kind that is trained for; this machine must have one.

    Raises:
        InvalidOptionError: If none is installed.
    """
    replay_plans = find_replay("reward")
    target = "cpu" if device.startswith("cpu") else "cuda"

    def measure(plans: Sequence[ShardingPlan]) -> tuple[MsArray, ...]:
        # Episodes are collected without gradients, of which backward kernels are part.
        with torch.inference_mode(False), torch.enable_grad():
            replay = replay_plans(plans, device=target, advance=lambda _: None)
        return tuple(np.array(plan.kernel_ms_per_rank) for plan in replay.plans)

    return measure


class MeasuredVecEnv(VecEnvWrapper):
    """PlacementVecEnv whose rewards are measured in a share of the rounds of episodes, evenly spread.

    Placements beyond memory limits or constraints are not measured, and keep their reward.

    Args:
        venv: The environments; all their episodes end together, their objective is of kernels, and no item is split.
        measure: Measures plans.
        share: Share of the rounds that are measured.
        on_measured: Told every placement that was measured.

    Attributes:
        num_rounds: Rounds of episodes that have ended.
        num_measured: Placements that were measured.
        measure_s: Seconds that it took.

    Source:
        AutoShard Sec. 4.5: rewards are measured. Differs: all placements of an update run in the same interleaved
        rounds, so that the machine's moods are the same for all that are compared.
    """

    venv: PlacementVecEnv

    def __init__(
        self,
        venv: PlacementVecEnv,
        measure: MeasurePlans,
        share: float = 1.0,
        on_measured: OnMeasured = lambda *_: None,
    ) -> None:
        super().__init__(venv)
        self._measure, self._share, self._on_measured = measure, share, on_measured
        self._tasks: list[PlacementTask] = []
        self.num_rounds = 0
        self.num_measured = 0
        self.measure_s = 0.0

    def reset(self) -> VecEnvObs:
        """Starts all episodes."""
        return self.venv.reset()

    def step_async(self, actions: np.ndarray) -> None:
        """Takes the actions that `step_wait` carries out."""
        # Once they have ended, the environments show the episodes that follow.
        self._tasks = [self.venv.batch.tasks[task] for task in self.venv.batch.task_E]
        self.venv.step_async(actions)

    def step_wait(self) -> VecEnvStepReturn:
        """Steps all episodes, and measures those that ended if it is their turn."""
        observation, rewards_E, dones_E, infos = self.venv.step_wait()
        if dones_E.any():
            before, self.num_rounds = int(self.num_rounds * self._share), self.num_rounds + 1
            if int(self.num_rounds * self._share) > before:
                feasible = [episode for episode in np.flatnonzero(dones_E).tolist() if infos[episode]["is_feasible"]]
                self._reward(feasible, rewards_E, infos)
        return observation, rewards_E, dones_E, infos

    def _reward(self, episodes: Sequence[int], rewards_E: np.ndarray, infos: list[dict]) -> None:
        if not episodes:
            return
        started_s = time.monotonic()
        # Rollouts of a task often end alike, and need not be measured twice.
        key_of = {episode: (id(self._tasks[episode]), infos[episode]["ranks"].tobytes()) for episode in episodes}
        plans = {key: self._tasks[episode].problem.to_plan(infos[episode]["ranks"]) for episode, key in key_of.items()}
        found = dict(zip(plans, self._measure(list(plans.values())), strict=True))
        for episode, key in key_of.items():
            task, cost_ms_R = self._tasks[episode], found[key]
            self._on_measured(task.problem, infos[episode]["ranks"], cost_ms_R)
            score_1 = kernel_score(task.objective, cost_ms_R[None], np.array([task.even_ms]))
            rewards_E[episode] = infos[episode]["episode"]["r"] = float(score_1[0])
            infos[episode]["cost_ms"] = cost_ms_R
        self.num_measured += len(plans)
        self.measure_s += time.monotonic() - started_s
