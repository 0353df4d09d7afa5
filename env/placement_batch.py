"""The rules of placement: many episodes side by side, on arrays.

Shape suffixes: P tasks, F parts of all tasks and one more, E episodes, D some of them, N items, M parts of a task, R
ranks, K shared tiers, W ways to hold a part (on one rank, then the tiers), A choices, H width of a code, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from env.finished_episodes import FinishedEpisodes
from env.held_sets import HeldSets
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
from env.step_batch import StepBatch
from env.task import PlacementTask, RewardMs, check_reward
from env.task_stack import TaskStack

BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]


class PlacementBatch:
    """Plays E episodes at once, each of one of P tasks; PlacementEnv describes their rules.

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
        self._held = HeldSets.of(tasks[0].problem.model, self._stack.codes_WFH, num_episodes, self._stack.num_ranks)
        self._lookahead = Lookahead(self._stack, num_episodes)
        self._steps = StepBatch(self._stack, num_episodes) if tasks[0].step_cost is not None else None
        self._even_ms_P = np.array([task.even_ms for task in tasks])
        # Products are faster than quotients.
        self._per_even_ms_P = (1 / self._even_ms_P).astype(np.float32)
        self._per_item_scale_P1 = np.array([[1 / task.item_scale] for task in tasks], dtype=np.float32)
        self._per_rank_scale_P1 = np.array([[1 / task.rank_scale] for task in tasks], dtype=np.float32)
        self._per_byte_PR = 1 / np.maximum(self._stack.capacity_PR, 1)
        self._remaining_F1 = self._stack.remaining_F[:, None].astype(np.float32)
        self._kinds_EAZ = np.tile(self._stack.kinds_AZ, (num_episodes, 1, 1))
        self._may_be_forbidden = not self._stack.may_FA.all()
        self._none_finished = FinishedEpisodes.none(self._stack.num_ranks)
        self._start_state()

    def _start_state(self) -> None:
        stack, num_episodes = self._stack, self.num_episodes
        self.task_E = np.zeros(num_episodes, dtype=np.int64)
        self._part_E = np.full(num_episodes, stack.end)
        # Of the tasks that the episodes play.
        self._per_even_ms_E = np.ones(num_episodes, dtype=np.float32)
        self._per_item_scale_E1 = np.ones((num_episodes, 1), dtype=np.float32)
        self._per_rank_scale_E1 = torch.ones((num_episodes, 1))
        self._per_byte_ER = np.ones((num_episodes, stack.num_ranks))
        # Ranks first: numpy is slow at short rows.
        self._cost_ms_RE = np.zeros((stack.num_ranks, num_episodes), dtype=np.float32)
        self._with_item_ms_RE = np.zeros_like(self._cost_ms_RE)
        self._with_tier_ms_KRE = np.zeros((stack.num_tiers, *self._cost_ms_RE.shape), dtype=np.float32)
        self._num_forbidden_E = np.zeros(num_episodes, dtype=np.int64)
        self._choice_EM = np.zeros((num_episodes, int(stack.num_parts_P.max())), dtype=np.int64)

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
        self._per_even_ms_E[episodes_D] = self._per_even_ms_P[tasks_D]
        self._per_item_scale_E1[episodes_D] = self._per_item_scale_P1[tasks_D]
        self._per_rank_scale_E1.numpy()[episodes_D] = self._per_rank_scale_P1[tasks_D]
        self._per_byte_ER[episodes_D] = self._per_byte_PR[tasks_D]
        self._cost_ms_RE[:, episodes_D] = 0
        self._num_forbidden_E[episodes_D] = 0
        self._choice_EM[episodes_D] = -1
        self._held.begin(episodes_D)
        self._lookahead.begin(episodes_D, tasks_D)
        if self._steps is not None:
            self._steps.begin(episodes_D, tasks_D)

    def branch(self, sources_E: IntArray) -> None:
        """Makes each episode e go on from where episode `sources_E[e]` is, which plays the same task.

        To be called between `observe` and `step`.
        """
        assert (self.task_E[sources_E] == self.task_E).all(), "episodes go on within their tasks"
        self._part_E, self._num_forbidden_E = self._part_E[sources_E], self._num_forbidden_E[sources_E]
        self._choice_EM = self._choice_EM[sources_E]
        self._cost_ms_RE = self._cost_ms_RE[:, sources_E]
        self._with_item_ms_RE = self._with_item_ms_RE[:, sources_E]
        self._with_tier_ms_KRE = self._with_tier_ms_KRE[..., sources_E]
        self._held.branch(sources_E)
        self._lookahead.branch(sources_E)
        if self._steps is not None:
            self._steps.branch(sources_E)

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
        return stack.codes_WFH[0, part_NP] * self._per_item_scale_P1, self._remaining_F1[part_NP]

    def observe(self) -> Observation:
        """What every episode's agent sees; as PlacementEnv, with E in front."""
        part_E = self._part_E
        self._held.bring_up(part_E)
        return {
            ITEM_CODE: self._held.item_EH * self._per_item_scale_E1,
            REMAINING: self._remaining_F1.take(part_E, axis=0),
            CHOICE_CODES: self._choice_codes(),
            CHOICE_COSTS: self._choice_costs(),
            CHOICE_KINDS: self._kinds_EAZ.copy(),
            ACTION_MASK: self._lookahead.mask(part_E).astype(np.int8),
        }

    def _choice_codes(self) -> FloatArray:
        stack, part_E, codes_EAH = self._stack, self._part_E, self._held.codes_ERH
        if stack.num_tiers or stack.may_split:
            tiers_EKH = stack.codes_WFH[1:, part_E].swapaxes(0, 1)
            half_E1H = stack.codes_WFH[0, stack.halves_F2[part_E, :1]][:, : int(stack.may_split)]
            codes_EAH = np.concatenate([codes_EAH, tiers_EKH, half_E1H], axis=1)
        # torch takes half of numpy's time for products along short rows.
        codes = torch.from_numpy(codes_EAH.reshape(self.num_episodes, -1))
        scaled_EAH: FloatArray = torch.mul(codes, self._per_rank_scale_E1).numpy().reshape(codes_EAH.shape)
        return scaled_EAH

    def _choice_costs(self) -> FloatArray:
        stack, num_ranks, per_even_ms_E = self._stack, self._stack.num_ranks, self._per_even_ms_E
        self._with_item_ms_RE = self._held.price_with()
        costs_RCE = np.empty((num_ranks, NUM_COST_COLUMNS, self.num_episodes), dtype=np.float32)
        np.multiply(self._cost_ms_RE, per_even_ms_E, out=costs_RCE[:, CostColumn.AS_IS])
        np.multiply(self._with_item_ms_RE, per_even_ms_E, out=costs_RCE[:, CostColumn.WITH_ITEM])
        others_RE = _slowest_others(costs_RCE[:, CostColumn.AS_IS])
        np.maximum(others_RE, costs_RCE[:, CostColumn.WITH_ITEM], out=costs_RCE[:, CostColumn.OBJECTIVE])
        room_EA = self._room()
        costs_RCE[:, CostColumn.ROOM] = room_EA[:, :num_ranks].T
        costs_EAC = costs_RCE.reshape(-1, self.num_episodes).T.copy().reshape(self.num_episodes, num_ranks, -1)
        if stack.num_tiers or stack.may_split:
            costs_EAC = np.concatenate([costs_EAC, self._shared_costs(room_EA[:, num_ranks:])], axis=1)
        if self._steps is not None:
            codes_WEH = stack.codes_WFH[:, self._part_E]
            costs_EAC[..., CostColumn.OBJECTIVE] = self._steps.after_choices(
                self._held.codes_ERH, codes_WEH, self._part_E
            )
        return costs_EAC

    def _shared_costs(self, room_EA: NDArray[np.float64]) -> FloatArray:
        """Costs of tiers and splits: those of the slowest rank."""
        costs_EAC = np.empty((*room_EA.shape, NUM_COST_COLUMNS), dtype=np.float32)
        costs_EAC[...] = (self._cost_ms_RE.max(axis=0) * self._per_even_ms_E)[:, None, None]
        for tier in range(self._stack.num_tiers):
            self._with_tier_ms_KRE[tier] = self._held.price_with(1 + tier)
            slowest_E1 = (self._with_tier_ms_KRE[tier].max(axis=0) * self._per_even_ms_E)[:, None]
            costs_EAC[:, tier, CostColumn.WITH_ITEM : CostColumn.ROOM] = slowest_E1
        costs_EAC[..., CostColumn.ROOM] = room_EA
        return costs_EAC

    def _room(self) -> NDArray[np.float64]:
        """Shares of memory that choices leave, shape (E, A); at least -1."""
        stack, part_E, free_ER, per_byte_ER = self._stack, self._part_E, self._lookahead.free_ER, self._per_byte_ER
        columns = [(free_ER - stack.bytes_F.take(part_E)[:, None]) * per_byte_ER]
        for tier in range(stack.num_tiers):
            left_ER = free_ER - stack.tier_bytes_FK[part_E, tier, None]
            columns.append((left_ER * per_byte_ER).min(axis=1, keepdims=True))
        if stack.may_split:
            columns.append((free_ER * per_byte_ER).min(axis=1, keepdims=True))
        room_EA = np.concatenate(columns, axis=1) if len(columns) > 1 else columns[0]
        return np.maximum(room_EA, -1, out=room_EA)

    def step(self, actions_E: IntArray) -> FinishedEpisodes:
        """Places or splits the upcoming item of every episode that has not ended.

        `observe` must have been called since the last step, since it prices what a step may lead to.
        """
        stack = self._stack
        live_D = np.flatnonzero(self._part_E != stack.end)
        part_D, action_D = self._part_E[live_D], actions_E[live_D]
        if self._may_be_forbidden:
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
            self._held.share(shared_D, tier_D)
            self._cost_ms_RE[:, shared_D] = self._with_tier_ms_KRE[tier_D, :, shared_D].T
            episodes_D, choice_D = episodes_D[~is_shared_D], choice_D[~is_shared_D]
        self._held.hold(episodes_D, choice_D)
        self._cost_ms_RE[choice_D, episodes_D] = self._with_item_ms_RE[choice_D, episodes_D]

    def _finish(self, episodes_D: IntArray) -> FinishedEpisodes:
        if not len(episodes_D):
            return self._none_finished
        tasks_D = self.task_E[episodes_D]
        cost_ms_DR = self._cost_ms_RE.T[episodes_D].astype(np.float64)
        capacity_DR = self._stack.capacity_PR[tasks_D]
        held_DR = capacity_DR - self._lookahead.free_ER[episodes_D]
        num_forbidden_D = self._num_forbidden_E[episodes_D]
        is_feasible_D = (held_DR <= capacity_DR).all(axis=1) & (num_forbidden_D == 0)
        placed, num_parts_P = [], self._stack.num_parts_P.tolist()
        for index, (task_index, choice_M) in enumerate(zip(tasks_D.tolist(), self._choice_EM[episodes_D], strict=True)):
            task = self.tasks[task_index]
            placed.append(task.parts.placed(task.problem, choice_M[: num_parts_P[task_index]]))
            if self.reward_ms is not None and is_feasible_D[index]:
                cost_ms_DR[index] = self.reward_ms(*placed[-1])
        objective_ms_D = cost_ms_DR.max(axis=1)
        score_D = kernel_score(self.tasks[0].objective, cost_ms_DR, self._even_ms_P[tasks_D])
        if self._steps is not None:
            objective_ms_D, score_D = self._steps.now(episodes_D, self._held.codes_ERH)
        return FinishedEpisodes(
            episodes_D=episodes_D,
            problems=tuple(problem for problem, _ in placed),
            ranks=tuple(ranks_N for _, ranks_N in placed),
            cost_ms_DR=cost_ms_DR,
            objective_ms_D=objective_ms_D,
            is_feasible_D=is_feasible_D,
            rewards_D=placement_reward(score_D, held_DR, capacity_DR, num_forbidden_D),
        )


def _slowest_others(cost_RE: FloatArray) -> FloatArray:
    """For each rank the cost of the slowest of all others, shape (R, E); 0 without others."""
    num_ranks, width = len(cost_RE), 1
    if num_ranks == 1:
        return np.zeros_like(cost_RE)
    # Maxima over the next ranks, around the circle: over twice as many with every pass, until only the own is left out.
    slowest = np.concatenate([cost_RE[1:], cost_RE])
    while width < num_ranks - 1:
        step = min(width, num_ranks - 1 - width)
        slowest = np.maximum(slowest[:-step], slowest[step:])
        width += step
    return slowest[:num_ranks]
