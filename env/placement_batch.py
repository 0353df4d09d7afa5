"""The environment's twin for training: many episodes side by side, on arrays.

Shape suffixes: P tasks, F parts of all tasks and one more, E episodes, D some of them, N items, M parts of a task, R
ranks, K shared tiers, A choices, H width of a code, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from autoshard.core.costs import MsArray
from autoshard.planners.placement import PlacementProblem, RankArray
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
)
from env.reward import kernel_score, placement_reward
from env.set_price import set_price
from env.step_batch import StepBatch
from env.task import PlacementTask, RewardMs, check_reward
from env.task_stack import TaskStack

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FinishedEpisodes:
    """Placements of episodes that have just ended.

    Attributes:
        episodes_D: Which episodes.
        problems: For each, the problem of what was placed: its task's, but for splits.
        ranks: For each, the placement of that problem's items.
        cost_ms_DR: Kernel time per rank.
        objective_ms_D: Kernel time of the slowest rank, or time of the step if that is the objective.
        is_feasible_D: Whether memory limits and constraints hold.
        rewards_D: As PlacementEnv gives them.
    """

    episodes_D: IntArray
    problems: tuple[PlacementProblem, ...]
    ranks: tuple[RankArray, ...]
    cost_ms_DR: MsArray
    objective_ms_D: MsArray
    is_feasible_D: BoolArray
    rewards_D: NDArray[np.float64]


class PlacementBatch:
    """Plays E episodes of PlacementEnv at once, each of one of P tasks.

    Sums of codes, bytes and prices are kept up step by step, and all prices of a step are asked for at once. Tasks
    may differ in their number of items, so episodes may end at different steps; an episode that has ended waits,
    unchanged, until it is begun anew.

    Args:
        tasks: Tasks with the same cost model, number of ranks, shared tiers and objective.
        num_episodes: E.
        reward_ms: As for PlacementEnv.

    Raises:
        InvalidOptionError: If the tasks differ in any of these, or measured times make no reward.
    """

    def __init__(self, tasks: Sequence[PlacementTask], num_episodes: int, reward_ms: RewardMs | None = None) -> None:
        self._stack = TaskStack(tasks)
        check_reward(tasks, reward_ms)
        self.tasks = self._stack.tasks
        self.num_episodes = num_episodes
        self.reward_ms = reward_ms
        self._price = set_price(tasks[0].problem.model)
        self._lookahead = Lookahead(self._stack, num_episodes)
        self._steps = StepBatch(self._stack, num_episodes) if tasks[0].step_cost is not None else None
        self._even_ms_P = np.array([task.even_ms for task in tasks])
        # Products are faster than quotients.
        self._per_even_ms_P1 = (1 / self._even_ms_P[:, None]).astype(np.float32)
        self._per_item_scale_P1 = np.array([[1 / task.item_scale] for task in tasks], dtype=np.float32)
        self._per_rank_scale_P11 = np.array([[[1 / task.rank_scale]] for task in tasks], dtype=np.float32)
        self._per_byte_PR = 1 / np.maximum(self._stack.capacity_PR, 1)
        self._kinds_EAZ = np.tile(self._stack.kinds_AZ, (num_episodes, 1, 1))
        self._start_state()

    def _start_state(self) -> None:
        stack, shape = self._stack, (self.num_episodes, self._stack.num_ranks)
        self._all_E = np.arange(self.num_episodes)
        self.task_E = np.zeros(self.num_episodes, dtype=np.int64)
        self._part_E = np.full(self.num_episodes, stack.end)
        self._codes_ERH = np.zeros((*shape, self.tasks[0].code_width), dtype=np.float32)
        self._codes_with_ERH = torch.empty(self._codes_ERH.shape)
        self._cost_ms_ER = np.zeros(shape, dtype=np.float32)
        self._with_item_ms_ER = np.zeros(shape, dtype=np.float32)
        self._with_tier_ms_EKR = np.zeros((self.num_episodes, stack.num_tiers, stack.num_ranks), dtype=np.float32)
        self._num_forbidden_E = np.zeros(self.num_episodes, dtype=np.int64)
        self._choice_EM = np.zeros((self.num_episodes, int(stack.num_parts_P.max())), dtype=np.int64)

    @property
    def is_done(self) -> BoolArray:
        """Which episodes have ended, or never begun."""
        return self._part_E == self._stack.end

    @property
    def may_split(self) -> bool:
        """Whether items may be split, so that what comes up depends on what is done."""
        return self._stack.may_split

    def begin(self, episodes_D: IntArray, tasks_D: IntArray) -> None:
        """Starts episodes anew, episode `episodes_D[d]` on task `tasks_D[d]`."""
        self.task_E[episodes_D] = tasks_D
        self._part_E[episodes_D] = self._stack.first_P[tasks_D]
        for array in (self._codes_ERH, self._cost_ms_ER, self._num_forbidden_E):
            array[episodes_D] = 0
        self._choice_EM[episodes_D] = -1
        self._lookahead.begin(episodes_D, tasks_D)
        if self._steps is not None:
            self._steps.begin(episodes_D, tasks_D)

    def items(self) -> tuple[FloatArray, FloatArray]:
        """What all steps will show as `item_code` and `remaining`, whatever is done; for tasks without splits.

        Shapes (N, P, H) and (N, P, 1), with N items of the largest task; smaller ones see zeros after their last.
        """
        assert not self.may_split, "what comes up depends on what is done"
        stack = self._stack
        part_P, parts = stack.first_P, []
        for _ in range(int(stack.num_parts_P.max())):
            parts.append(part_P)
            part_P = stack.after_F[part_P]
        part_NP = np.array(parts)
        items_NPH = stack.codes_FH[part_NP] * self._per_item_scale_P1
        return items_NPH, stack.remaining_F[part_NP][..., None].astype(np.float32)

    def observe(self) -> Observation:
        """What every episode's agent sees; as PlacementEnv, with E in front."""
        stack, task_E, part_E = self._stack, self.task_E, self._part_E
        item_EH = stack.codes_FH.take(part_E, axis=0)
        tiers_EKH = stack.tier_codes_KFH[:, part_E].swapaxes(0, 1)
        per_scale_E11 = self._per_rank_scale_P11[task_E]
        # torch takes half of numpy's time for products along short rows.
        codes_EAH = (torch.from_numpy(self._codes_ERH) * torch.from_numpy(per_scale_E11)).numpy()
        if stack.num_tiers or stack.may_split:
            half_E1H = stack.codes_FH[stack.halves_F2[part_E, :1]][:, : int(stack.may_split)]
            codes_EAH = np.concatenate([codes_EAH, tiers_EKH * per_scale_E11, half_E1H * per_scale_E11], axis=1)
        return {
            ITEM_CODE: item_EH * self._per_item_scale_P1[task_E],
            REMAINING: stack.remaining_F[part_E, None].astype(np.float32),
            CHOICE_CODES: codes_EAH,
            CHOICE_COSTS: self._choice_costs(item_EH, tiers_EKH),
            CHOICE_KINDS: self._kinds_EAZ.copy(),
            ACTION_MASK: self._lookahead.mask(part_E).astype(np.int8),
        }

    def _choice_costs(self, item_EH: FloatArray, tiers_EKH: FloatArray) -> FloatArray:
        stack, part_E, num_ranks = self._stack, self._part_E, self._stack.num_ranks
        per_even_ms_E1 = self._per_even_ms_P1[self.task_E]
        torch.add(torch.from_numpy(self._codes_ERH), torch.from_numpy(item_EH)[:, None], out=self._codes_with_ERH)
        self._with_item_ms_ER = self._price(self._codes_with_ERH.numpy())
        costs_EAC = np.empty((self.num_episodes, len(stack.kinds_AZ), NUM_COST_COLUMNS), dtype=np.float32)
        slowest_ms_E1, others_ms_ER = _slowest(self._cost_ms_ER)
        columns = (self._cost_ms_ER, self._with_item_ms_ER, np.maximum(others_ms_ER, self._with_item_ms_ER))
        for column, costs_ms_ER in enumerate(columns):
            np.multiply(costs_ms_ER, per_even_ms_E1, out=costs_EAC[:, :num_ranks, column])
        costs_EAC[:, num_ranks:, : CostColumn.ROOM] = (slowest_ms_E1 * per_even_ms_E1)[..., None]
        if stack.num_tiers:
            self._with_tier_ms_EKR = self._price(self._codes_ERH[:, None] + tiers_EKH[:, :, None])
            with_tier_EK1 = (self._with_tier_ms_EKR.max(axis=2) * per_even_ms_E1)[..., None]
            costs_EAC[:, num_ranks : num_ranks + stack.num_tiers, CostColumn.WITH_ITEM : CostColumn.ROOM] = (
                with_tier_EK1
            )
        if self._steps is not None:
            costs_EAC[..., CostColumn.OBJECTIVE] = self._steps.after_choices(
                self._codes_ERH, item_EH, tiers_EKH, part_E
            )
        costs_EAC[..., CostColumn.ROOM] = self._room(part_E)
        return costs_EAC

    def _room(self, part_E: IntArray) -> NDArray[np.float64]:
        """Shares of memory that choices leave, shape (E, A); at least -1."""
        stack, free_ER, per_byte_ER = self._stack, self._lookahead.free_ER, self._per_byte_PR[self.task_E]
        columns = [(free_ER - stack.bytes_F[part_E, None]) * per_byte_ER]
        for tier in range(stack.num_tiers):
            left_ER = free_ER - stack.tier_bytes_FK[part_E, tier, None]
            columns.append((left_ER * per_byte_ER).min(axis=1, keepdims=True))
        if stack.may_split:
            columns.append((free_ER * per_byte_ER).min(axis=1, keepdims=True))
        return np.maximum(np.concatenate(columns, axis=1) if len(columns) > 1 else columns[0], -1)

    def step(self, actions_E: IntArray) -> FinishedEpisodes:
        """Places or splits the upcoming item of every episode that has not ended.

        `observe` must have been called since the last step, since it prices what a step may lead to.
        """
        stack = self._stack
        live_D = np.flatnonzero(self._part_E != stack.end)
        part_D, action_D = self._part_E[live_D], actions_E[live_D]
        self._num_forbidden_E[live_D] += ~stack.may_FA[part_D, action_D]
        next_D = stack.after_F[part_D]
        held = slice(None)
        if stack.may_split:
            is_split_D = action_D == len(stack.kinds_AZ) - 1
            half_D = stack.halves_F2[part_D, 0]
            # What may not be split goes to rank 0, where it counts as forbidden.
            action_D = np.where(is_split_D & (half_D == stack.end), 0, action_D)
            is_split_D &= half_D != stack.end
            next_D = np.where(is_split_D, half_D, next_D)
            held = ~is_split_D
        self._lookahead.take(live_D, part_D, action_D)
        self._hold(live_D[held], part_D[held], action_D[held])
        self._part_E[live_D] = next_D
        return self._finish(live_D[next_D == stack.end])

    def _hold(self, episodes_D: IntArray, part_D: IntArray, choice_D: IntArray) -> None:
        stack, num_ranks = self._stack, self._stack.num_ranks
        self._choice_EM[episodes_D, part_D - stack.offset_P[self.task_E[episodes_D]]] = choice_D
        if self._steps is not None:
            self._steps.hold(episodes_D, part_D, choice_D)
        if stack.num_tiers:
            is_shared_D = choice_D >= num_ranks
            shared_D, tier_D = episodes_D[is_shared_D], choice_D[is_shared_D] - num_ranks
            self._codes_ERH[shared_D] += stack.tier_codes_KFH[tier_D, part_D[is_shared_D]][:, None]
            self._cost_ms_ER[shared_D] = self._with_tier_ms_EKR[shared_D, tier_D]
            episodes_D, part_D, choice_D = episodes_D[~is_shared_D], part_D[~is_shared_D], choice_D[~is_shared_D]
        self._codes_ERH[episodes_D, choice_D] += stack.codes_FH[part_D]
        self._cost_ms_ER[episodes_D, choice_D] = self._with_item_ms_ER[episodes_D, choice_D]

    def _finish(self, episodes_D: IntArray) -> FinishedEpisodes:
        tasks_D = self.task_E[episodes_D]
        if not len(episodes_D):
            return _none_finished(self._stack.num_ranks)
        cost_ms_DR = self._cost_ms_ER[episodes_D].astype(np.float64)
        capacity_DR = self._stack.capacity_PR[tasks_D]
        held_DR = capacity_DR - self._lookahead.free_ER[episodes_D]
        num_forbidden_D = self._num_forbidden_E[episodes_D]
        is_feasible_D = (held_DR <= capacity_DR).all(axis=1) & (num_forbidden_D == 0)
        placed = []
        for index, episode in enumerate(episodes_D):
            task = self.tasks[tasks_D[index]]
            placed.append(task.parts.placed(task.problem, self._choice_EM[episode, : task.parts.num_parts].copy()))
            if self.reward_ms is not None and is_feasible_D[index]:
                cost_ms_DR[index] = self.reward_ms(*placed[-1])
        objective_ms_D = cost_ms_DR.max(axis=1)
        score_D = kernel_score(self.tasks[0].objective, cost_ms_DR, self._even_ms_P[tasks_D])
        if self._steps is not None:
            objective_ms_D, score_D = self._steps.now(episodes_D, self._codes_ERH)
        return FinishedEpisodes(
            episodes_D=episodes_D,
            problems=tuple(problem for problem, _ in placed),
            ranks=tuple(ranks_N for _, ranks_N in placed),
            cost_ms_DR=cost_ms_DR,
            objective_ms_D=objective_ms_D,
            is_feasible_D=is_feasible_D,
            rewards_D=placement_reward(score_D, held_DR, capacity_DR, num_forbidden_D),
        )


def _none_finished(num_ranks: int) -> FinishedEpisodes:
    none_D = np.zeros(0)
    return FinishedEpisodes(
        episodes_D=none_D.astype(np.int64),
        problems=(),
        ranks=(),
        cost_ms_DR=np.zeros((0, num_ranks)),
        objective_ms_D=none_D,
        is_feasible_D=none_D.astype(np.bool_),
        rewards_D=none_D,
    )


def _slowest(cost_ER: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The slowest rank's cost (E, 1), and for each rank that of the slowest of all others (E, R), 0 without others."""
    # Ranks first: numpy is slow at reducing short rows.
    cost_RE = cost_ER.T.copy()
    slowest_E = cost_RE.max(axis=0)
    is_slowest_RE = cost_RE == slowest_E
    second_E = np.where(is_slowest_RE, 0, cost_RE).max(axis=0)
    is_alone_RE = is_slowest_RE & (is_slowest_RE.sum(axis=0) == 1)
    return slowest_E[:, None], np.where(is_alone_RE, second_E, slowest_E).T
