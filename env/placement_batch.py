"""The environment's twin for training: many episodes side by side, on arrays.

Shape suffixes: P tasks, E episodes, N items, R ranks, H width of a code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.core.costs import CodeArray, CostModel, MsArray
from autoshard.planners.placement import RankArray
from env.observation import (
    ACTION_MASK,
    ITEM_CODE,
    NUM_COST_COLUMNS,
    RANK_CODES,
    RANK_COSTS,
    REMAINING,
    Observation,
)
from env.reward import placement_reward
from env.task import PlacementTask, RewardMs, check_alike

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FinishedEpisodes:
    """Placements of episodes that have just ended.

    Attributes:
        episodes_D: Which episodes.
        ranks: For each, the rank of each item of its problem.
        cost_ms_DR: Kernel time per rank.
        is_feasible_D: Whether memory limits and constraints hold.
        rewards_D: As TablePlacementEnv gives them.
    """

    episodes_D: IntArray
    ranks: tuple[RankArray, ...]
    cost_ms_DR: MsArray
    is_feasible_D: BoolArray
    rewards_D: NDArray[np.float64]


class PlacementBatch:
    """Plays E episodes of TablePlacementEnv at once, each of one of P tasks.

    Sums of codes, bytes and prices are kept up step by step, and all prices of a step are asked for at once. Tasks
    may differ in their number of items, so episodes may end at different steps; an episode that has ended waits,
    unchanged, until it is begun anew.

    Args:
        tasks: Tasks with the same cost model and number of ranks.
        num_episodes: E.
        reward_ms: As for TablePlacementEnv.

    Raises:
        InvalidOptionError: If the tasks differ in cost model or number of ranks.
    """

    def __init__(self, tasks: Sequence[PlacementTask], num_episodes: int, reward_ms: RewardMs | None = None) -> None:
        check_alike(tasks)
        self.tasks = tuple(tasks)
        self.num_episodes = num_episodes
        self.reward_ms = reward_ms
        self._model: CostModel = tasks[0].problem.model
        self._stack_tasks()
        self._start_state()

    def _stack_tasks(self) -> None:
        # Items are padded with one more than the longest task has, which is what a finished episode sees.
        num_tasks, num_ranks, width = len(self.tasks), self.tasks[0].num_ranks, self.tasks[0].code_width
        self.num_items_P = np.array([task.num_items for task in self.tasks])
        padded = int(self.num_items_P.max()) + 1
        self._codes_PNH = np.zeros((num_tasks, padded, width), dtype=np.float32)
        self._bytes_PN = np.zeros((num_tasks, padded), dtype=np.int64)
        self._allowed_PNR = np.ones((num_tasks, padded, num_ranks), dtype=np.bool_)
        for index, task in enumerate(self.tasks):
            self._codes_PNH[index, : task.num_items] = task.ordered_codes
            self._bytes_PN[index, : task.num_items] = task.problem.bytes_N[task.order_N]
            self._allowed_PNR[index, : task.num_items] = task.problem.allowed_NR[task.order_N]
        self._capacity_PR = np.stack([task.problem.capacity_R for task in self.tasks])
        self._even_ms_P = np.array([task.even_ms for task in self.tasks])
        self._item_scale_P = np.array([task.item_scale for task in self.tasks], dtype=np.float32)
        self._rank_scale_P = np.array([task.rank_scale for task in self.tasks], dtype=np.float32)

    def _start_state(self) -> None:
        shape = (self.num_episodes, self.tasks[0].num_ranks)
        self._all_E = np.arange(self.num_episodes)
        self.task_E = np.zeros(self.num_episodes, dtype=np.int64)
        self._step_E = np.zeros(self.num_episodes, dtype=np.int64)
        self._codes_ERH = np.zeros((*shape, self.tasks[0].code_width), dtype=np.float32)
        self._held_ER = np.zeros(shape, dtype=np.int64)
        self._cost_ms_ER = np.zeros(shape)
        self._cost_with_item_ms_ER = np.zeros(shape)
        self._num_forbidden_E = np.zeros(self.num_episodes, dtype=np.int64)
        self._actions_EN = np.zeros((self.num_episodes, self._codes_PNH.shape[1]), dtype=np.int64)

    @property
    def is_done(self) -> BoolArray:
        """Which episodes have ended."""
        return self._step_E == self.num_items_P[self.task_E]

    def begin(self, episodes_D: IntArray, tasks_D: IntArray) -> None:
        """Starts episodes anew, episode `episodes_D[d]` on task `tasks_D[d]`."""
        self.task_E[episodes_D] = tasks_D
        for array in (self._step_E, self._codes_ERH, self._held_ER, self._cost_ms_ER, self._num_forbidden_E):
            array[episodes_D] = 0

    def items(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """What all steps will show as `item_code` and `remaining`, whatever is done.

        Shapes (N, P, H) and (N, P, 1), with N items of the largest task; smaller ones see zeros after their last.
        """
        items_PNH = self._codes_PNH[:, :-1] / self._item_scale_P[:, None, None]
        steps_N1 = np.arange(items_PNH.shape[1])[:, None]
        remaining_NP = np.maximum(1 - steps_N1 / self.num_items_P, 0)
        return np.ascontiguousarray(items_PNH.swapaxes(0, 1)), remaining_NP[..., None].astype(np.float32)

    def observe(self) -> Observation:
        """What every episode's agent sees; as TablePlacementEnv, with E in front."""
        task_E, step_E = self.task_E, self._step_E
        item_EH = self._codes_PNH[task_E, step_E]
        even_ms_E11 = self._even_ms_P[task_E, None, None]
        costs_ERC = np.empty((*self._cost_ms_ER.shape, NUM_COST_COLUMNS))
        self._cost_with_item_ms_ER = self._price(self._codes_ERH + item_EH[:, None])
        costs_ERC[..., 0] = self._cost_ms_ER
        costs_ERC[..., 1] = np.where(self.is_done[:, None], self._cost_ms_ER, self._cost_with_item_ms_ER)
        remaining_E = 1 - step_E / self.num_items_P[task_E]
        return {
            ITEM_CODE: item_EH / self._item_scale_P[task_E, None],
            REMAINING: remaining_E[:, None].astype(np.float32),
            RANK_CODES: self._codes_ERH / self._rank_scale_P[task_E, None, None],
            RANK_COSTS: (costs_ERC / even_ms_E11).astype(np.float32),
            ACTION_MASK: self._mask().astype(np.int8),
        }

    def step(self, actions_E: IntArray) -> FinishedEpisodes:
        """Places the upcoming item of every episode that has not ended, on rank `actions_E[e]`.

        `observe` must have been called since the last step, since it prices what a step may lead to.
        """
        was_done_E = self.is_done
        live_D = self._all_E[~was_done_E]
        task_D, step_D, action_D = self.task_E[live_D], self._step_E[live_D], actions_E[live_D]
        self._codes_ERH[live_D, action_D] += self._codes_PNH[task_D, step_D]
        self._held_ER[live_D, action_D] += self._bytes_PN[task_D, step_D]
        self._cost_ms_ER[live_D, action_D] = self._cost_with_item_ms_ER[live_D, action_D]
        self._num_forbidden_E[live_D] += ~self._allowed_PNR[task_D, step_D, action_D]
        self._actions_EN[live_D, step_D] = action_D
        self._step_E[live_D] += 1
        return self._finish(self._all_E[self.is_done & ~was_done_E])

    def _finish(self, episodes_D: IntArray) -> FinishedEpisodes:
        cost_ms_DR = self._cost_ms_ER[episodes_D]
        held_DR = self._held_ER[episodes_D]
        capacity_DR = self._capacity_PR[self.task_E[episodes_D]]
        num_forbidden_D = self._num_forbidden_E[episodes_D]
        is_feasible_D = (held_DR <= capacity_DR).all(axis=1) & (num_forbidden_D == 0)
        ranks = []
        for index, episode in enumerate(episodes_D):
            task = self.tasks[self.task_E[episode]]
            ranks.append(task.to_ranks(self._actions_EN[episode, : task.num_items]))
            if self.reward_ms is not None and is_feasible_D[index]:
                cost_ms_DR[index] = self.reward_ms(task.problem, ranks[-1])
        rewards_D = (
            placement_reward(cost_ms_DR, held_DR, capacity_DR, num_forbidden_D) if len(episodes_D) else np.zeros(0)
        )
        return FinishedEpisodes(
            episodes_D=episodes_D,
            ranks=tuple(ranks),
            cost_ms_DR=cost_ms_DR,
            is_feasible_D=is_feasible_D,
            rewards_D=rewards_D,
        )

    def _price(self, codes_ERH: CodeArray) -> MsArray:
        return self._model.price(codes_ERH.reshape(-1, codes_ERH.shape[-1])).reshape(codes_ERH.shape[:-1])

    def _mask(self) -> BoolArray:
        task_E, step_E = self.task_E, self._step_E
        allowed_ER = self._allowed_PNR[task_E, step_E]
        needed_E1 = self._bytes_PN[task_E, step_E, None]
        fits_ER = allowed_ER & (self._held_ER + needed_E1 <= self._capacity_PR[task_E])
        mask_ER = np.where(fits_ER.any(axis=1, keepdims=True), fits_ER, allowed_ER)
        return mask_ER | self.is_done[:, None]
