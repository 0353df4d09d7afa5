"""The Gymnasium environment: one table after the other is given a rank.

Shape suffixes: N items, R ranks, H width of a code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
from gymnasium import spaces

from autoshard.core.errors import InvalidOptionError
from autoshard.planners.placement import PlacementProblem
from env.observation import (
    ACTION_MASK,
    ITEM_CODE,
    NUM_COST_COLUMNS,
    RANK_CODES,
    RANK_COSTS,
    REMAINING,
    Observation,
    observation_space,
)
from env.reward import placement_reward
from env.task import PlacementTask, RewardMs, check_alike


class TablePlacementEnv(gymnasium.Env):
    """Places the items (tables, or groups of them that share a rank) of one task on ranks, one per step.

    ## Description
    An episode is a placement problem drawn at random from those given. Its items come in falling price, and the
    agent names a rank for each. The aim is that all ranks cost the same, within their memory.

    ## Action Space
    `Discrete(R)`: the rank that takes the upcoming item.

    ## Observation Space
    A `Dict`; codes are the cost model's, and have no unit.

    | key | shape | meaning | unit |
    | --- | --- | --- | --- |
    | `item_code` | (H,) | code of the upcoming item; zeros at the end | root mean square of all items' codes |
    | `remaining` | (1,) | share of the items not placed yet | 1 |
    | `rank_codes` | (R, H) | sums of the codes on each rank | root mean square of an even share's code |
    | `rank_costs` | (R, 2) | price of each rank, as it is and with the upcoming item | price of an even share |
    | `action_mask` | (R,) | 1 for ranks that may hold the item and have room for it | |

    An even share is the sum of all codes divided by R. So observations look alike whatever the number of tables and
    ranks and however slow the device, and a policy can move between them. If no allowed rank has room, the mask
    offers the allowed ones, so that the episode can go on to its penalty.

    ## Rewards
    0 until the last step. Then the degree of balance, min / max of the ranks' kernel times, in [0, 1], if the
    placement keeps to memory limits and constraints. Else the negative penalty of `env.reward.placement_reward`,
    below every reward of a placement that keeps to them. Kernel times are predicted by the problem's cost model, or
    given by `reward_ms`.

    ## Starting State
    No item placed.

    ## Episode End
    Terminates when every item has a rank, after N steps. Never truncates. `info` then holds `ranks`, the rank of
    each item of the problem, `cost_ms`, each rank's kernel time, and `is_feasible`.

    ## Arguments
    - `problems`: placement problems, all with the same cost model and number of ranks.
    - `reward_ms`: measures a placement: a callable of the problem and the items' ranks that returns milliseconds
      per rank. The cost model's predictions if None. It is called for placements within the limits only.

    `reset(options={"task": i})` starts with the i-th problem.

    Source:
        AutoShard Sec. 4.3. Differs: the state holds the item's code, which the policy would make of its features;
        the action features hold the price with the upcoming item too; and all are scaled, so that they transfer.
    """

    def __init__(self, problems: Sequence[PlacementProblem], reward_ms: RewardMs | None = None) -> None:
        self.tasks = tuple(PlacementTask.of(problem) for problem in problems)
        check_alike(self.tasks)
        self.reward_ms = reward_ms
        self.observation_space = observation_space(self.tasks[0].num_ranks, self.tasks[0].code_width)
        self.action_space = spaces.Discrete(self.tasks[0].num_ranks)
        self.task_index = 0
        self._actions: list[int] = []

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Starts an episode; see the class.

        Raises:
            InvalidOptionError: If `options` names a task that is not there.
        """
        super().reset(seed=seed)
        index = (options or {}).get("task")
        if index is None:
            index = self.np_random.integers(len(self.tasks))
        elif not (isinstance(index, int | np.integer) and 0 <= index < len(self.tasks)):
            raise InvalidOptionError(f"must be in [0, {len(self.tasks)}), got {index!r}", field="options.task")
        self.task_index = int(index)
        self._actions = []
        return self._observe(), {"task": self.task_index}

    def step(self, action: np.int64) -> tuple[Observation, SupportsFloat, bool, bool, dict[str, Any]]:
        """Places the upcoming item; see the class."""
        task = self.tasks[self.task_index]
        if len(self._actions) == task.num_items:
            raise gymnasium.error.ResetNeeded("every item has a rank; call reset() for the next episode")
        if not self.action_space.contains(action):
            raise InvalidOptionError(f"must be in [0, {task.num_ranks}), got {action!r}", field="action")
        self._actions.append(int(action))
        if len(self._actions) < task.num_items:
            return self._observe(), 0.0, False, False, {}
        reward, info = self._final()
        return self._observe(), reward, True, False, info

    def _final(self) -> tuple[float, dict[str, Any]]:
        task = self.tasks[self.task_index]
        problem = task.problem
        ranks_N = task.to_ranks(np.array(self._actions))
        is_feasible = problem.is_feasible(ranks_N)
        measure = self.reward_ms if self.reward_ms is not None and is_feasible else PlacementProblem.rank_ms
        cost_ms_R = measure(problem, ranks_N)
        num_forbidden = np.count_nonzero(~problem.allowed_NR[np.arange(task.num_items), ranks_N])
        reward_E = placement_reward(
            cost_ms_R[None], problem.rank_bytes(ranks_N)[None], problem.capacity_R[None], np.array([num_forbidden])
        )
        return float(reward_E[0]), {"ranks": ranks_N, "cost_ms": cost_ms_R, "is_feasible": is_feasible}

    def _observe(self) -> Observation:
        task = self.tasks[self.task_index]
        problem = task.problem
        num_placed = len(self._actions)
        placed_N = task.order_N[:num_placed]
        codes_RH = np.zeros((task.num_ranks, task.code_width), dtype=np.float32)
        np.add.at(codes_RH, self._actions, problem.codes_NH[placed_N])
        cost_ms_R = problem.model.price(codes_RH)
        costs_RC = np.stack([cost_ms_R] * NUM_COST_COLUMNS, axis=1)
        item_H = np.zeros(task.code_width, dtype=np.float32)
        mask_R = np.ones(task.num_ranks, dtype=np.bool_)
        if num_placed < task.num_items:
            item = task.order_N[num_placed]
            item_H = problem.codes_NH[item]
            costs_RC[:, 1] = problem.model.price(codes_RH + item_H)
            held_R = np.zeros(task.num_ranks, dtype=np.int64)
            np.add.at(held_R, self._actions, problem.bytes_N[placed_N])
            allowed_R = problem.allowed_NR[item]
            mask_R = allowed_R & (held_R + problem.bytes_N[item] <= problem.capacity_R)
            mask_R = mask_R if mask_R.any() else allowed_R
        return {
            ITEM_CODE: (item_H / task.item_scale).astype(np.float32),
            REMAINING: np.array([1 - num_placed / task.num_items], dtype=np.float32),
            RANK_CODES: (codes_RH / task.rank_scale).astype(np.float32),
            RANK_COSTS: (costs_RC / task.even_ms).astype(np.float32),
            ACTION_MASK: mask_R.astype(np.int8),
        }
