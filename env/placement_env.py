"""The Gymnasium environment: one shard after the other is given its place.

Shape suffixes: M parts of items, R ranks, K shared tiers, A choices, H width of a code, C columns of what is moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from autoshard.core import CostModels
from autoshard.core.costs import CodeArray, MsArray
from autoshard.core.errors import InvalidOptionError
from autoshard.planners.space.placement import PlacementProblem
from autoshard.planners.space.step_cost import StepSums
from env.lookahead import Lookahead
from env.observation import (
    ACTION_MASK,
    CHOICE_CODES,
    CHOICE_COSTS,
    CHOICE_KINDS,
    ITEM_CODE,
    NUM_COST_COLUMNS,
    REMAINING,
    CostColumn,
    Observation,
    observation_space,
)
from env.reward import Objective, kernel_score, placement_reward, time_score
from env.splits import SplitBy
from env.task import PlacementTask, RewardMs, check_reward
from env.task_stack import TaskStack


class PlacementEnv(gymnasium.Env):
    """Gives each item of a task its place, one per step.

    ## Description
    An episode is a placement problem drawn at random from those given. Items are shards: whole tables, groups of
    rows, segments of tables in falling access frequency, or several that must share a rank. They come in falling
    price, and the agent names a place for each: a rank, or a tier that all ranks share, if the problem offers any. It
    may also split an item, if that is asked for: its columns are halved, or its hottest rows are cut off; the two
    parts come next. The aim is the objective,
    within the memory of the ranks.

    ## Action Space
    `Discrete(A)` with A = R + K, or R + K + 1 with splits:

    | action | meaning |
    | --- | --- |
    | r < R | rank r takes the upcoming item |
    | R + k | all ranks hold it, by the problem's shared tier k |
    | R + K | it is split in two (halves of its columns, or hot rows and the rest), which come next |

    ## Observation Space
    A `Dict`; codes are the cost model's, and have no unit.

    | key | shape | meaning | unit |
    | --- | --- | --- | --- |
    | `item_code` | (H,) | code of the upcoming item; zeros at the end | root mean square of all items' codes |
    | `remaining` | (1,) | share of the items not placed yet; each of two parts counts as half | 1 |
    | `choice_codes` | (A, H) | codes by choice, below | root mean square of an even share's code |
    | `choice_costs` | (A, 4) | columns below | |
    | `choice_kinds` | (A, 5) | one-hot: rank, data parallel, flex, row-wise, split | |
    | `action_mask` | (A,) | 1 for what may be done | |

    The code of a rank is the sum of those it holds; of a shared tier, what every rank would get; of a split, that of
    its first part. Costs are:

    | column | rank | shared tier | split | unit |
    | --- | --- | --- | --- | --- |
    | 0 | its kernel time | the slowest rank's | the slowest rank's | price of an even share |
    | 1 | the same with the item | the same with the item | the slowest rank's | price of an even share |
    | 2 | objective after the choice | as for a rank | objective as it is | the objective of an even share |
    | 3 | share of its memory left after the choice | of the fullest rank | of the fullest rank, as it is | 1 |

    The objective after a choice is the slowest rank's kernel time, or the whole step's time if steps are the
    objective. An even share is the sum of all codes divided by R. So observations look alike whatever the number of
    items and ranks and however slow the device, and a policy can move between them.

    The mask looks ahead (`env.lookahead.Lookahead`): an episode that keeps to it always ends within memory limits and
    constraints. After an action against it, it offers what has room for the upcoming item, or else what its
    constraints allow, so that the episode can go on to its penalty.

    ## Rewards
    0 until the last step. Then, if the placement keeps to memory limits and constraints, by objective:

    | objective | reward |
    | --- | --- |
    | `balance` | min / max of the ranks' kernel times, in [0, 1] |
    | `max_kernel` | price of an even share / kernel time of the slowest rank |
    | `step` | time of a step in which all ranks have an even share / time of the step |

    Else the negative penalty of `env.reward.placement_reward`, below every reward of a placement that keeps to them;
    splitting what may not be split counts as a forbidden place on rank 0. Kernel times are predicted by the problem's
    cost model, or given by `reward_ms`.

    ## Starting State
    No item placed.

    ## Episode End
    Terminates when every item has its place: after N steps, and two more for each split. Never truncates. `info` then
    holds `problem`, the problem of what was placed (the task's own, but for splits), `ranks`, the placement of its
    items, `cost_ms`, each rank's kernel time, `objective_ms`, the slowest rank's kernel time or the step's time, and
    `is_feasible`.

    ## Arguments
    - `problems`: placement problems, all with the same cost model, number of ranks and shared tiers.
    - `objective`: what for, `Objective.BALANCE` by default.
    - `costs`: models of all parts of a step, for `Objective.STEP`.
    - `max_splits`: how often an item may be split, one split within the other; 0, the default, for never.
    - `split_by`: what splits cut. `SplitBy.COLUMNS`, the default, halves columns; items that are less than 8 columns
      wide, or whose halves are not multiples of 4, stay whole. `SplitBy.HOT_ROWS` cuts the hottest rows off whole
      tables, those with half of the lookups, and then the next off the rest, up to 90% of the lookups
      (`env.splits.HOT_SHARES`); what is cut off stays as it is.
    - `reward_ms`: measures a placement's kernel times; None takes the predictions.

    `reset(options={"task": i})` plays problem i instead of a random one.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - Gymnasium's own convention

    def __init__(
        self,
        problems: Sequence[PlacementProblem],
        *,
        objective: Objective = Objective.BALANCE,
        costs: CostModels | None = None,
        max_splits: int = 0,
        split_by: SplitBy = SplitBy.COLUMNS,
        reward_ms: RewardMs | None = None,
    ) -> None:
        self.tasks = tuple(
            PlacementTask.of(problem, objective=objective, costs=costs, max_splits=max_splits, split_by=split_by)
            for problem in problems
        )
        self._stack = TaskStack(self.tasks)
        check_reward(self.tasks, reward_ms)
        self.reward_ms = reward_ms
        self._lookahead = Lookahead(self._stack, 1)
        self.observation_space = observation_space(self.tasks[0].num_actions, self.tasks[0].code_width)
        self.action_space = spaces.Discrete(self.tasks[0].num_actions)
        self.task_index = 0
        self._begin()

    def _begin(self) -> None:
        task = self.tasks[self.task_index]
        self._part = int(task.parts.root_N[task.order_N[0]])
        self._choice_M = np.full(task.parts.num_parts, -1, dtype=np.int64)
        self._num_forbidden = 0
        self._lookahead.begin(np.array([0]), np.array([self.task_index]))

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
        self._begin()
        return self._observe(), {"task": self.task_index}

    @property
    def _is_done(self) -> bool:
        return self._part == len(self._choice_M)

    def step(self, action: np.int64) -> tuple[Observation, SupportsFloat, bool, bool, dict[str, Any]]:
        """Places the upcoming item, or splits it; see the class."""
        task = self.tasks[self.task_index]
        if self._is_done:
            raise gymnasium.error.ResetNeeded("every item has its place; call reset() for the next episode")
        if not self.action_space.contains(action):
            raise InvalidOptionError(f"must be in [0, {task.num_actions}), got {action!r}", field="action")
        self._act(task, int(action))
        if not self._is_done:
            return self._observe(), 0.0, False, False, {}
        reward, info = self._final()
        return self._observe(), reward, True, False, info

    def _act(self, task: PlacementTask, action: int) -> None:
        part, problem = self._part, task.parts.problem
        is_split = action == problem.num_choices
        if is_split and task.parts.halves_M2[part, 0] < 0:
            action, is_split = 0, False
            self._num_forbidden += 1
        elif not is_split:
            self._num_forbidden += not problem.allowed_NA[part, action]
        index = np.array([self._stack.offset_P[self.task_index] + part])
        self._lookahead.take(np.array([0]), index, np.array([action]))
        if is_split:
            self._part = int(task.parts.halves_M2[part, 0])
            return
        self._choice_M[part] = action
        self._part = int(task.parts.after_M[part])

    def _final(self) -> tuple[float, dict[str, Any]]:
        task = self.tasks[self.task_index]
        problem, ranks_N = task.parts.placed(task.problem, self._choice_M)
        is_feasible = self._num_forbidden == 0 and problem.is_feasible(ranks_N)
        measure = self.reward_ms if self.reward_ms is not None and is_feasible else PlacementProblem.rank_ms
        cost_ms_R = measure(problem, ranks_N)
        if task.step_cost is not None:
            objective_ms = float(task.step_cost.step_ms(self._sums(self._held()[0]))[0])
            score_E = time_score(np.array([task.even_objective_ms]), np.array([objective_ms]))
        else:
            objective_ms = float(cost_ms_R.max())
            score_E = kernel_score(task.objective, cost_ms_R[None], np.array([task.even_ms]))
        held_R = problem.rank_bytes(ranks_N)
        reward_E = placement_reward(score_E, held_R[None], problem.capacity_R[None], np.array([self._num_forbidden]))
        info = {
            "problem": problem,
            "ranks": ranks_N,
            "cost_ms": cost_ms_R,
            "objective_ms": objective_ms,
            "is_feasible": is_feasible,
        }
        return float(reward_E[0]), info

    def _held(self) -> tuple[CodeArray, NDArray[np.int64]]:
        """Codes and bytes on each rank, shapes (R, H) and (R,), added up from all that was placed."""
        problem = self.tasks[self.task_index].parts.problem
        return problem.rank_codes(self._choice_M), problem.rank_bytes(self._choice_M)

    def _sums(self, codes_RH: CodeArray) -> StepSums:
        """What each rank holds and moves."""
        moved_RC = self.tasks[self.task_index].moved(self._choice_M)
        return StepSums(codes_BRH=codes_RH[None], moved_BRC=moved_RC[None])

    def _observe(self) -> Observation:
        task, problem, part = self.tasks[self.task_index], self.tasks[self.task_index].parts.problem, self._part
        codes_WH = np.zeros((1 + task.num_tiers, task.code_width), dtype=np.float32)
        half_H, remaining, index = codes_WH[0], 0.0, self._stack.end
        if not self._is_done:
            codes_WH, remaining = problem.codes_WNH[:, part], task.parts.remaining_M[part]
            index = int(self._stack.offset_P[self.task_index]) + part
            half = task.parts.halves_M2[part, 0]
            half_H = problem.codes_NH[half] if half >= 0 else half_H
        codes_RH, held_R = self._held()
        codes_AH = [codes_RH, codes_WH[1:], half_H[None]] if task.may_split else [codes_RH, codes_WH[1:]]
        mask_EA = self._lookahead.mask(np.array([index]))
        return {
            ITEM_CODE: (codes_WH[0] / task.item_scale).astype(np.float32),
            REMAINING: np.array([remaining], dtype=np.float32),
            CHOICE_CODES: (np.concatenate(codes_AH) / task.rank_scale).astype(np.float32),
            CHOICE_COSTS: self._choice_costs(codes_RH, held_R, codes_WH),
            CHOICE_KINDS: self._stack.kinds_AZ.copy(),
            ACTION_MASK: mask_EA[0].astype(np.int8),
        }

    def _choice_costs(self, codes_RH: CodeArray, held_R: NDArray[np.int64], codes_WH: CodeArray) -> NDArray[np.float32]:
        task, problem = self.tasks[self.task_index], self.tasks[self.task_index].parts.problem
        num_ranks = task.num_ranks
        price = problem.model.predict_ms
        now_R, with_item_R = price(codes_RH), price(codes_RH + codes_WH[0])
        costs_AC = np.empty((task.num_actions, NUM_COST_COLUMNS))
        costs_AC[:] = now_R.max()
        costs_AC[:num_ranks, CostColumn.AS_IS] = now_R
        costs_AC[:num_ranks, CostColumn.WITH_ITEM] = with_item_R
        for index, tier_H in enumerate(codes_WH[1:], num_ranks):
            costs_AC[index, [CostColumn.WITH_ITEM, CostColumn.OBJECTIVE]] = price(codes_RH + tier_H).max()
        after_RR = np.where(np.eye(num_ranks, dtype=np.bool_), with_item_R, now_R)
        costs_AC[:num_ranks, CostColumn.OBJECTIVE] = after_RR.max(axis=1)
        costs_AC /= task.even_ms
        if task.step_cost is not None:
            costs_AC[:, CostColumn.OBJECTIVE] = self._steps_ms(codes_RH, codes_WH) / task.even_objective_ms
        taken_AR = np.zeros((task.num_actions, num_ranks), dtype=np.int64)
        if not self._is_done:
            bytes_W = problem.bytes_WN[:, self._part]
            np.fill_diagonal(taken_AR, bytes_W[0])
            taken_AR[num_ranks : problem.num_choices] = bytes_W[1:, None]
        share_AR = (problem.capacity_R - held_R - taken_AR) / np.maximum(problem.capacity_R, 1)
        room_A = share_AR.min(axis=1)
        room_A[:num_ranks] = share_AR.diagonal()
        costs_AC[:, CostColumn.ROOM] = np.maximum(room_A, -1)
        return costs_AC.astype(np.float32)

    def _steps_ms(self, codes_RH: CodeArray, codes_WH: CodeArray) -> MsArray:
        """Time of the step after each choice, shape (A,)."""
        task = self.tasks[self.task_index]
        step_cost, sums = task.step_cost, self._sums(codes_RH)
        assert step_cost is not None
        moved_WC = np.zeros_like(step_cost.moved_WNC[:, 0]) if self._is_done else step_cost.moved_WNC[:, self._part]
        steps_ms_A = step_cost.choices_ms(sums, codes_WH[:, None], moved_WC[:, None])[0]
        return np.concatenate([steps_ms_A, step_cost.step_ms(sums)]) if task.may_split else steps_ms_A
