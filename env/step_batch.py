"""Steps of many episodes at once.

Shape suffixes: P tasks, F parts of all tasks and one more, E episodes, D some of them, G those of tasks that are priced
alike, R ranks, W ways to hold a part, A choices, H width of a code, C columns of what is moved.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autoshard.core.costs import CodeArray, MsArray
from autoshard.planners.space.step_cost import StepCost, StepSums
from env.reward import time_score
from env.task import PlacementTask
from env.task_stack import TaskStack

IntArray = NDArray[np.int64]

#: Most numbers of an array over episodes, choices, ranks and columns.
_MOST_AT_ONCE = 1 << 22


class StepBatch:
    """Keeps up what the ranks of E episodes move, and prices their steps.

    Tasks whose steps are priced alike are priced together.

    Args:
        stack: Tasks with step costs.
        num_episodes: E.
    """

    def __init__(self, stack: TaskStack, num_episodes: int) -> None:
        self._stack = stack
        self._costs: list[StepCost] = []
        group_of = []
        for task in stack.tasks:
            cost = _cost(task)
            group = next((index for index, known in enumerate(self._costs) if known.prices_alike(cost)), None)
            if group is None:
                group = len(self._costs)
                self._costs.append(cost)
            group_of.append(group)
        self._group_P = np.array(group_of)
        self._even_ms_P = np.array([task.even_objective_ms for task in stack.tasks])
        num_columns = max(len(cost.columns) for cost in self._costs)
        padded = [
            np.pad(_cost(task).moved_WNC, ((0, 0), (0, 0), (0, num_columns - len(_cost(task).columns))))
            for task in stack.tasks
        ]
        self._moved_WFC = np.concatenate([*padded, np.zeros((1 + stack.num_tiers, 1, num_columns))], axis=1)
        self._task_E = np.zeros(num_episodes, dtype=np.int64)
        self._moved_ERC = np.zeros((num_episodes, stack.num_ranks, num_columns))

    def begin(self, episodes_D: IntArray, tasks_D: IntArray) -> None:
        """Starts episodes anew on these tasks."""
        self._task_E[episodes_D] = tasks_D
        self._moved_ERC[episodes_D] = 0

    def branch(self, sources_E: IntArray) -> None:
        """Makes each episode e move what episode `sources_E[e]` does, which plays the same task."""
        self._moved_ERC = self._moved_ERC[sources_E]

    def hold(self, episodes_D: IntArray, part_D: IntArray, choice_D: IntArray) -> None:
        """Adds what parts move once they are held so."""
        num_ranks = self._stack.num_ranks
        is_alone_D = choice_D < num_ranks
        self._moved_ERC[episodes_D[is_alone_D], choice_D[is_alone_D]] += self._moved_WFC[0, part_D[is_alone_D]]
        shared_D = ~is_alone_D
        moved_DC = self._moved_WFC[1 + choice_D[shared_D] - num_ranks, part_D[shared_D]]
        self._moved_ERC[episodes_D[shared_D]] += moved_DC[:, None]

    def now(self, episodes_D: IntArray, codes_ERH: CodeArray) -> tuple[MsArray, MsArray]:
        """Steps of some episodes as they are, in milliseconds, and their scores; (D,)."""
        step_ms_D = np.empty(len(episodes_D))
        for place_G, cost, num_columns in self._groups(episodes_D):
            episodes_G = episodes_D[place_G]
            step_ms_D[place_G] = cost.step_ms(self._sums(episodes_G, codes_ERH, num_columns))
        return step_ms_D, time_score(self._even_ms_P[self._task_E[episodes_D]], step_ms_D)

    def after_choices(self, codes_ERH: CodeArray, codes_WEH: CodeArray, part_E: IntArray) -> NDArray[np.float64]:
        """Steps after each choice, over that of an even share; shape (E, A)."""
        stack = self._stack
        steps_ms_EA = np.empty((len(part_E), len(stack.kinds_AZ)))
        num_choices = stack.num_ranks + stack.num_tiers
        for place_G, cost, num_columns in self._groups(np.arange(len(part_E))):
            sums = self._sums(place_G, codes_ERH, num_columns)
            moved_WGC = self._moved_WFC[:, part_E[place_G], :num_columns]
            steps_ms_EA[place_G, :num_choices] = cost.choices_ms(sums, codes_WEH[:, place_G], moved_WGC)
            if stack.may_split:
                steps_ms_EA[place_G, -1] = cost.step_ms(sums)
        return steps_ms_EA / self._even_ms_P[self._task_E, None]

    def _groups(self, episodes_D: IntArray) -> list[tuple[IntArray, StepCost, int]]:
        """Places of episodes that are priced together, with their price and its number of columns."""
        group_D = self._group_P[self._task_E[episodes_D]]
        groups = []
        for group in np.unique(group_D).tolist():
            cost, place_G = self._costs[group], np.flatnonzero(group_D == group)
            num_columns = len(cost.columns)
            per_episode = len(self._stack.kinds_AZ) * self._stack.num_ranks * num_columns
            at_once = max(1, _MOST_AT_ONCE // per_episode)
            groups += [
                (place_G[start : start + at_once], cost, num_columns) for start in range(0, len(place_G), at_once)
            ]
        return groups

    def _sums(self, episodes_G: IntArray, codes_ERH: CodeArray, num_columns: int) -> StepSums:
        return StepSums(codes_BRH=codes_ERH[episodes_G], moved_BRC=self._moved_ERC[episodes_G][..., :num_columns])


def _cost(task: PlacementTask) -> StepCost:
    assert task.step_cost is not None
    return task.step_cost
