"""Masks that cannot lead into a dead end: which choices leave room for all that comes after them.

Shape suffixes: P tasks, F parts of all tasks, E episodes, D some of them, U those short of room, M parts of a task, R
ranks, K shared tiers, A choices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from env.task_stack import TaskStack

BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]

#: Most numbers of an array over episodes, parts and ranks.
_MOST_AT_ONCE = 1 << 23


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rest:
    """The known completions of U episodes, but for the part that is up.

    Attributes:
        room_UR: Bytes that each rank has left.
        plan_UM: Choices of all parts.
        bytes_UM: Bytes of the parts.
        fits_UMR: Whether a part that is planned on one rank could go to another.
    """

    room_UR: IntArray
    plan_UM: IntArray
    bytes_UM: IntArray
    fits_UMR: BoolArray


class Lookahead:
    """Keeps account of memory in E episodes, and of how each could end well.

    Two proofs that an episode can go on are known. The first is a sum: as long as the bytes to come are no more than
    what all ranks have left beyond the largest item to come, there is always a rank with room for the next one, and
    that stays so whichever rank with room is chosen. Items that may not go to every rank count as placed already,
    where the second proof has them. The second is a witness: a placement of all items to come that fits. A choice
    other than its own is allowed if what is left of it still fits, with at most one other item moved elsewhere, which
    then makes the next witness.

    So at least one choice is allowed at every step, and an episode that keeps to the mask ends within the limits. One
    that does not is lost: its mask offers what has room for the upcoming item alone, or what constraints allow.

    Args:
        stack: Tasks, with their first witnesses.
        num_episodes: E.
    """

    def __init__(self, stack: TaskStack, num_episodes: int) -> None:
        self._stack = stack
        num_parts = int(stack.num_parts_P.max())
        self._first_witness(num_parts)
        self._has_bound = bool(stack.is_bound_F.any())
        self._is_plain = not (self._has_bound or stack.num_tiers or stack.may_split)
        self.free_ER = np.zeros((num_episodes, stack.num_ranks), dtype=np.int64)
        self._reserved_ER = np.zeros_like(self.free_ER)
        self._plan_EM = np.zeros((num_episodes, num_parts), dtype=np.int64)
        self._is_pending_EM = np.zeros((num_episodes, num_parts), dtype=np.bool_)
        self._is_safe_E = np.ones(num_episodes, dtype=np.bool_)
        self._is_lost_E = np.zeros(num_episodes, dtype=np.bool_)
        self._task_E = np.zeros(num_episodes, dtype=np.int64)
        self._mask_EA = self._safe_EA = np.ones((num_episodes, stack.may_FA.shape[1]), dtype=np.bool_)

    def _first_witness(self, num_parts: int) -> None:
        stack = self._stack
        num_tasks = len(stack.tasks)
        self._plan_PM = np.zeros((num_tasks, num_parts), dtype=np.int64)
        self._is_pending_PM = np.zeros((num_tasks, num_parts), dtype=np.bool_)
        self._reserved_PR = np.zeros((num_tasks, stack.num_ranks), dtype=np.int64)
        for index, task in enumerate(stack.tasks):
            root_N = task.parts.root_N
            self._plan_PM[index, root_N] = task.feasible_N
            self._is_pending_PM[index, root_N] = True
            bound_N = stack.is_bound_F[stack.offset_P[index] + root_N]
            parts = stack.offset_P[index] + root_N[bound_N]
            self._reserved_PR[index] = self._taken(parts, task.feasible_N[bound_N]).sum(axis=0)
        bytes_P = np.where(stack.is_bound_F, 0, stack.bytes_F)[stack.first_P]
        largest_P1 = np.maximum(bytes_P, stack.largest_F[stack.first_P])[:, None]
        free_PR = stack.capacity_PR - self._reserved_PR
        self._is_safe_P = _beyond(free_PR, largest_P1) >= bytes_P + stack.rest_bytes_F[stack.first_P]

    def begin(self, episodes_D: IntArray, tasks_D: IntArray) -> None:
        """Starts episodes anew on these tasks."""
        self._task_E[episodes_D] = tasks_D
        self.free_ER[episodes_D] = self._stack.capacity_PR[tasks_D]
        self._reserved_ER[episodes_D] = self._reserved_PR[tasks_D]
        self._plan_EM[episodes_D] = self._plan_PM[tasks_D]
        self._is_pending_EM[episodes_D] = self._is_pending_PM[tasks_D]
        self._is_safe_E[episodes_D] = self._is_safe_P[tasks_D]
        self._is_lost_E[episodes_D] = False

    def branch(self, sources_E: IntArray) -> None:
        """Makes each episode e stand where episode `sources_E[e]` does, which plays the same task."""
        for rows_E in (self.free_ER, self._reserved_ER, self._plan_EM, self._is_pending_EM, self._is_safe_E):
            rows_E[:] = rows_E[sources_E]
        self._is_lost_E = self._is_lost_E[sources_E]
        self._mask_EA, self._safe_EA = self._mask_EA[sources_E], self._safe_EA[sources_E]

    def mask(self, part_E: IntArray) -> BoolArray:
        """What may be done with the parts that are up, shape (E, A); everything where an episode has ended."""
        if self._is_plain and self._is_safe_E.all():
            self._mask_EA = self._safe_EA = self.free_ER >= self._stack.bytes_F.take(part_E)[:, None]
            return self._mask_EA
        may_EA = self._stack.may_FA[part_E]
        self._safe_EA = self._stays_safe(part_E) & may_EA
        mask_EA = self._safe_EA.copy()
        is_live_E = part_E != self._stack.end
        tight_U = np.flatnonzero(is_live_E & ~self._is_safe_E & ~self._is_lost_E)
        at_once = max(1, _MOST_AT_ONCE // (self._plan_EM.shape[1] * self._stack.num_ranks))
        for start in range(0, len(tight_U), at_once):
            chunk = tight_U[start : start + at_once]
            mask_EA[chunk] |= self._keeps_witness(chunk, part_E[chunk]) & may_EA[chunk]
        lost_U = np.flatnonzero(is_live_E & self._is_lost_E)
        mask_EA[lost_U] = self._has_room(lost_U, part_E[lost_U]) & may_EA[lost_U]
        stuck_U = lost_U[~mask_EA[lost_U].any(axis=1)]
        mask_EA[stuck_U] = may_EA[stuck_U]
        mask_EA[~is_live_E] = True
        self._mask_EA = mask_EA
        return mask_EA

    def take(self, episodes_D: IntArray, part_D: IntArray, choice_D: IntArray) -> None:
        """Carries out choices for the parts that were up when `mask` was called."""
        is_safe_D = self._safe_EA[episodes_D, choice_D]
        if self._is_plain and self._is_safe_E.all() and is_safe_D.all():
            self.free_ER[episodes_D, choice_D] -= self._stack.bytes_F[part_D]
            return
        is_kept_D = self._mask_EA[episodes_D, choice_D]
        for index in np.flatnonzero(is_kept_D & ~is_safe_D & (choice_D < self._stack.num_ranks)):
            self._exchange(int(episodes_D[index]), int(part_D[index]), int(choice_D[index]))
        is_split_D = choice_D >= self._stack.num_ranks + self._stack.num_tiers
        self._follow(episodes_D, part_D, is_split_D)
        held_D = ~is_split_D
        self.free_ER[episodes_D[held_D]] -= self._taken(part_D[held_D], choice_D[held_D])
        self._is_lost_E[episodes_D] |= ~is_kept_D
        self._is_safe_E[episodes_D] = (self._is_safe_E[episodes_D] | is_safe_D) & ~self._is_lost_E[episodes_D]

    def _follow(self, episodes_D: IntArray, part_D: IntArray, is_split_D: BoolArray) -> None:
        """Takes parts out of the witnesses, and puts their halves in where they were split."""
        offset_D = self._stack.offset_P[self._task_E[episodes_D]]
        plan_D = self._plan_EM[episodes_D, part_D - offset_D]
        self._is_pending_EM[episodes_D, part_D - offset_D] = False
        is_bound_D1 = self._stack.is_bound_F[part_D, None]
        self._reserved_ER[episodes_D] -= np.where(is_bound_D1, self._taken(part_D, plan_D), 0)
        split = np.flatnonzero(is_split_D)
        for half_D in self._stack.halves_F2[part_D[split]].T:
            episodes, place = episodes_D[split], half_D - offset_D[split]
            self._plan_EM[episodes, place] = plan_D[split]
            self._is_pending_EM[episodes, place] = True
            self._reserved_ER[episodes] += np.where(is_bound_D1[split], self._taken(half_D, plan_D[split]), 0)

    def _taken(self, part_U: IntArray, choice_U: IntArray) -> IntArray:
        """Bytes that each rank gives to a part that is held so, shape (U, R)."""
        stack = self._stack
        taken_UR = np.zeros((len(part_U), stack.num_ranks), dtype=np.int64)
        alone = np.flatnonzero(choice_U < stack.num_ranks)
        taken_UR[alone, choice_U[alone]] = stack.bytes_F[part_U[alone]]
        shared = np.flatnonzero(choice_U >= stack.num_ranks)
        taken_UR[shared] = stack.tier_bytes_FK[part_U[shared], choice_U[shared] - stack.num_ranks][:, None]
        return taken_UR

    def _planned(self, episodes_U: IntArray, part_U: IntArray) -> IntArray:
        """What the witnesses do with the parts that are up; anything where an episode has ended."""
        place_U = part_U - self._stack.offset_P[self._task_E[episodes_U]]
        return self._plan_EM[episodes_U, np.minimum(place_U, self._plan_EM.shape[1] - 1)]

    def _stays_safe(self, part_E: IntArray) -> BoolArray:
        """Whether the first proof holds after each choice, constraints of the part that is up aside; (E, A)."""
        stack = self._stack
        bytes_E1, largest_E1 = stack.bytes_F[part_E, None], stack.largest_F[part_E, None]
        rest_E = stack.rest_bytes_F[part_E]
        free_ER = self.free_ER - self._reserved_ER
        planned_E = np.zeros_like(part_E)
        if self._has_bound:
            planned_E = self._planned(np.arange(len(part_E)), part_E)
            free_ER += np.where(stack.is_bound_F[part_E, None], self._taken(part_E, planned_E), 0)
        beyond_ER = np.maximum(free_ER - largest_E1, 0)
        after_ER = np.maximum(free_ER - bytes_E1 - largest_E1, 0)
        others_ER = beyond_ER.sum(axis=1, keepdims=True) - beyond_ER
        columns = [(free_ER >= bytes_E1) & (others_ER + after_ER >= rest_E[:, None])]
        for tier in range(stack.num_tiers):
            left_ER = free_ER - stack.tier_bytes_FK[part_E, tier, None]
            columns.append(((left_ER >= 0).all(axis=1) & (_beyond(left_ER, largest_E1) >= rest_E))[:, None])
        if stack.may_split:
            columns.append(self._split_stays_safe(part_E, planned_E, free_ER)[:, None])
        return np.concatenate(columns, axis=1)

    def _split_stays_safe(self, part_E: IntArray, planned_E: IntArray, free_ER: IntArray) -> BoolArray:
        stack = self._stack
        first_E, second_E = stack.halves_F2[part_E].T
        is_bound_E = stack.is_bound_F[part_E]
        halves_E2 = np.where(is_bound_E[:, None], 0, stack.bytes_F[stack.halves_F2[part_E]])
        largest_E = np.maximum(stack.largest_F[part_E], halves_E2.max(axis=1))
        left_ER = free_ER
        if self._has_bound:
            taken_ER = self._taken(first_E, planned_E) + self._taken(second_E, planned_E)
            left_ER = free_ER - np.where(is_bound_E[:, None], taken_ER, 0)
        needed_E = stack.rest_bytes_F[part_E] + halves_E2.sum(axis=1)
        return (left_ER >= 0).all(axis=1) & (_beyond(left_ER, largest_E[:, None]) >= needed_E)

    def _rest(self, episodes_U: IntArray, part_U: IntArray) -> _Rest:
        stack = self._stack
        num_episodes, num_ranks = len(episodes_U), stack.num_ranks
        task_U = self._task_E[episodes_U]
        place_M = np.arange(self._plan_EM.shape[1])
        index_UM = np.where(
            place_M < stack.num_parts_P[task_U, None], stack.offset_P[task_U, None] + place_M, stack.end
        )
        is_next_UM = self._is_pending_EM[episodes_U] & (index_UM != part_U[:, None])
        plan_UM, bytes_UM = self._plan_EM[episodes_U], stack.bytes_F[index_UM]
        is_alone_UM = is_next_UM & (plan_UM < num_ranks)
        flat_UM = np.arange(num_episodes)[:, None] * num_ranks + np.where(is_alone_UM, plan_UM, 0)
        planned = np.zeros(num_episodes * num_ranks, dtype=np.int64)
        np.add.at(planned, flat_UM[is_alone_UM], bytes_UM[is_alone_UM])
        room_UR = self.free_ER[episodes_U] - planned.reshape(num_episodes, num_ranks)
        for tier in range(stack.num_tiers):
            is_shared_UM = is_next_UM & (plan_UM == num_ranks + tier)
            room_UR -= (stack.tier_bytes_FK[index_UM, tier] * is_shared_UM).sum(axis=1, keepdims=True)
        may_UMR = stack.may_FA[index_UM, :num_ranks] & is_alone_UM[..., None]
        fits_UMR = may_UMR & (room_UR[:, None] >= bytes_UM[..., None])
        fits_UMR &= np.arange(num_ranks) != plan_UM[..., None]
        return _Rest(room_UR=room_UR, plan_UM=plan_UM, bytes_UM=bytes_UM, fits_UMR=fits_UMR)

    def _keeps_witness(self, episodes_U: IntArray, part_U: IntArray) -> BoolArray:
        """Whether the rest of the witness fits beside each choice, with at most one item moved; shape (U, A)."""
        stack = self._stack
        rest = self._rest(episodes_U, part_U)
        bytes_U1 = stack.bytes_F[part_U, None]
        episode, part = np.nonzero(rest.fits_UMR.any(axis=2))
        movable_UR = np.zeros_like(rest.room_UR)
        np.maximum.at(movable_UR, (episode, rest.plan_UM[episode, part]), rest.bytes_UM[episode, part])
        columns = [rest.room_UR + movable_UR >= bytes_U1]
        for tier in range(stack.num_tiers):
            columns.append(_all_ranks(rest.room_UR >= stack.tier_bytes_FK[part_U, tier, None]))
        if stack.may_split:
            planned_U = self._planned(episodes_U, part_U)
            taken_UR = sum(self._taken(half_U, planned_U) for half_U in stack.halves_F2[part_U].T)
            columns.append(_all_ranks(rest.room_UR >= taken_UR))
        return np.concatenate(columns, axis=1)

    def _exchange(self, episode: int, part: int, rank: int) -> None:
        """Moves the smallest item that makes room on a rank to where most room is; none if there is room."""
        episodes, parts = np.array([episode]), np.array([part])
        rest = self._rest(episodes, parts)
        missing = int(self._stack.bytes_F[part] - rest.room_UR[0, rank])
        if missing <= 0:
            return
        fits_MR, bytes_M = rest.fits_UMR[0], rest.bytes_UM[0]
        makes_room_M = fits_MR.any(axis=1) & (rest.plan_UM[0] == rank) & (bytes_M >= missing)
        moved = int(np.where(makes_room_M, bytes_M, np.iinfo(np.int64).max).argmin())
        target = int(np.where(fits_MR[moved], rest.room_UR[0], -1).argmax())
        self._plan_EM[episode, moved] = target
        if self._stack.is_bound_F[self._stack.offset_P[self._task_E[episode]] + moved]:
            self._reserved_ER[episode, rank] -= bytes_M[moved]
            self._reserved_ER[episode, target] += bytes_M[moved]

    def _has_room(self, episodes_U: IntArray, part_U: IntArray) -> BoolArray:
        """Whether the part that is up fits, whatever comes after it; shape (U, A)."""
        stack = self._stack
        free_UR = self.free_ER[episodes_U]
        columns = [free_UR >= stack.bytes_F[part_U, None]]
        for tier in range(stack.num_tiers):
            columns.append(_all_ranks(free_UR >= stack.tier_bytes_FK[part_U, tier, None]))
        if stack.may_split:
            columns.append(np.zeros((len(part_U), 1), dtype=np.bool_))
        return np.concatenate(columns, axis=1)


def _all_ranks(is_so_UR: BoolArray) -> BoolArray:
    """Whether it is so on every rank, shape (U, 1)."""
    return np.asarray(is_so_UR.all(axis=1, keepdims=True))


def _beyond(free_ER: IntArray, largest_E1: IntArray) -> IntArray:
    """Bytes that all ranks together have left beyond the largest item, shape (E,)."""
    return np.maximum(free_ER - largest_E1, 0).sum(axis=1)
