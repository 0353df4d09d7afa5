"""The batch of episodes as stable-baselines3 sees vectorised environments."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn
from typing_extensions import override

from autoshard.core.errors import InvalidOptionError
from env.finished_episodes import FinishedEpisodes
from env.observation import observation_space
from env.placement_batch import PlacementBatch
from env.task import PlacementTask, RewardMs


class PlacementVecEnv(VecEnv):
    """Plays `num_groups * num_rollouts` episodes at once; those of a group are of the same task.

    Several rollouts of one task can be compared with each other, which is worth more to a learner than as many of
    different tasks. Groups draw their tasks without repetition until all tasks have been drawn. With splits, the
    episodes of a group end at different steps; each then goes on to the group's next task.

    Args:
        tasks: As for PlacementBatch.
        num_groups: Tasks at a time.
        num_rollouts: Episodes per task.
        reward_ms: As for PlacementEnv.
    """

    def __init__(
        self,
        tasks: Sequence[PlacementTask],
        num_groups: int,
        num_rollouts: int,
        reward_ms: RewardMs | None = None,
    ) -> None:
        if num_groups < 1 or num_rollouts < 1:
            raise InvalidOptionError(f"must be at least 1, got {num_groups} x {num_rollouts}", field="num_envs")
        self.batch = PlacementBatch(tasks, num_groups * num_rollouts, reward_ms)
        self._num_rollouts = num_rollouts
        self._rng = np.random.default_rng()
        self._upcoming: list[int] = []
        self._ahead: list[list[int]] = [[] for _ in range(num_groups)]
        self._num_taken = [[0] * num_rollouts for _ in range(num_groups)]
        self._actions = np.zeros(0, dtype=np.int64)
        self._started_s = time.monotonic()
        first = self.batch.tasks[0]
        super().__init__(
            self.batch.num_episodes,
            observation_space(first.num_actions, first.code_width),
            spaces.Discrete(first.num_actions),
        )

    def reset(self) -> VecEnvObs:
        """Starts all episodes; the seed given by `seed` decides which tasks are drawn."""
        if self._seeds[0] is not None:
            self._rng = np.random.default_rng(self._seeds[0])
            self._upcoming = []
        self._ahead = [[] for _ in self._ahead]
        self._num_taken = [[0] * self._num_rollouts for _ in self._ahead]
        self._reset_seeds()
        self._reset_options()
        self._begin(np.arange(self.num_envs))
        return self.batch.observe()

    def step_async(self, actions: np.ndarray) -> None:
        """Takes the actions that `step_wait` carries out."""
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        """Steps all episodes; those that end start anew at once, as stable-baselines3 expects."""
        finished = self.batch.step(np.asarray(self._actions, dtype=np.int64))
        rewards_E = np.zeros(self.num_envs, dtype=np.float32)
        dones_E = np.zeros(self.num_envs, dtype=np.bool_)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        if len(finished.episodes_D):
            rewards_E[finished.episodes_D] = finished.rewards_D
            dones_E[finished.episodes_D] = True
            self._describe(finished, infos)
            self._begin(finished.episodes_D)
        return self.batch.observe(), rewards_E, dones_E, infos

    def draw_state(self) -> dict[str, Any]:
        """JSON object from which `restore_draws` goes on; episodes that are not at their start begin anew then."""
        return {
            "rng": self._rng.bit_generator.state,
            "upcoming": list(self._upcoming),
            "tasks": self.batch.task_E.tolist(),
            "ahead": [list(tasks) for tasks in self._ahead],
            "taken": [number for taken in self._num_taken for number in taken],
        }

    def restore_draws(self, state: Mapping[str, Any]) -> VecEnvObs:
        """Begins the episodes of a `draw_state`, and will draw the tasks that would have followed."""
        self._reset_seeds()
        self._rng.bit_generator.state = state["rng"]
        self._upcoming = list(state["upcoming"])
        self._ahead = [list(tasks) for tasks in state["ahead"]]
        taken, width = list(state["taken"]), self._num_rollouts
        self._num_taken = [taken[start : start + width] for start in range(0, len(taken), width)]
        self.batch.begin(np.arange(self.num_envs), np.array(state["tasks"], dtype=np.int64))
        return self.batch.observe()

    def replace_tasks(self, tasks: Sequence[PlacementTask]) -> VecEnvObs:
        """Begins the current episodes anew on other versions of the tasks, such as newly priced ones."""
        assert len(tasks) == len(self.batch.tasks), "draws go on, so there must be as many tasks"
        task_E = self.batch.task_E
        self.batch = PlacementBatch(tasks, self.num_envs, self.batch.reward_ms)
        self.batch.begin(np.arange(self.num_envs), task_E)
        return self.batch.observe()

    def _describe(self, finished: FinishedEpisodes, infos: list[dict[str, Any]]) -> None:
        last = self.batch.observe()
        elapsed_s = time.monotonic() - self._started_s
        episodes = finished.episodes_D.tolist()
        # Lists of rows take a third of the time of as many look-ups.
        last_rows = zip(*(values[finished.episodes_D] for values in last.values()), strict=True)
        ends = zip(
            episodes,
            finished.ranks,
            finished.cost_ms_DR,
            finished.is_feasible_D.tolist(),
            finished.rewards_D.tolist(),
            last_rows,
            strict=True,
        )
        for episode, ranks, cost_ms_R, is_feasible, reward, rows in ends:
            infos[episode] = {
                "ranks": ranks,
                "cost_ms": cost_ms_R,
                "is_feasible": is_feasible,
                "terminal_observation": dict(zip(last, rows, strict=True)),
                "TimeLimit.truncated": False,
                "episode": {"r": reward, "l": len(ranks), "t": elapsed_s},
            }

    def _begin(self, episodes_D: np.ndarray) -> None:
        self.batch.begin(episodes_D, np.array([self._next_task(episode) for episode in episodes_D.tolist()]))

    def _next_task(self, episode: int) -> int:
        """The task that follows in an episode's group; those that all of the group have begun are forgotten."""
        if self._num_rollouts == 1:
            return self._draw()
        group, place = divmod(episode, self._num_rollouts)
        ahead, taken = self._ahead[group], self._num_taken[group]
        if taken[place] == len(ahead):
            ahead.append(self._draw())
        task = ahead[taken[place]]
        taken[place] += 1
        # Only the episode that is furthest behind can have kept a task from being forgotten.
        if taken[place] == 1 and min(taken) > 0:
            ahead.pop(0)
            self._num_taken[group] = [number - 1 for number in taken]
        return task

    def _draw(self) -> int:
        if not self._upcoming:
            self._upcoming = self._rng.permutation(len(self.batch.tasks)).tolist()
        return self._upcoming.pop()

    def close(self) -> None:
        """Nothing to close."""

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Per episode: `task_index`, `render_mode`, or anything that is the same for all."""
        chosen = list(self._get_indices(indices))
        if attr_name == "task_index":
            return self.batch.task_E[chosen].tolist()
        if attr_name == "render_mode":
            return [None] * len(chosen)
        return [getattr(self, attr_name)] * len(chosen)

    @override
    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Episodes of a batch have no attributes of their own."""
        raise AttributeError(f"{attr_name} cannot be set: the episodes are rows of one batch")

    @override
    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        """Episodes of a batch have no methods of their own."""
        raise AttributeError(f"{method_name} cannot be called: the episodes are rows of one batch")

    @override
    def env_is_wrapped(self, wrapper_class: type[gymnasium.Wrapper], indices: VecEnvIndices = None) -> list[bool]:
        """Never wrapped one by one."""
        return [False for _ in self._get_indices(indices)]
