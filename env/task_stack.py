"""The parts of several tasks as single arrays, so that episodes of different tasks can be played together.

Shape suffixes: P tasks, F parts of all tasks and one more, E episodes, R ranks, K shared tiers, W ways to hold a
part (on one rank, then the tiers), A choices, H width of a code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from env.task import PlacementTask, check_alike


class TaskStack:
    """Arrays over the parts of all tasks, task after task. The last row, `end`, is what comes after any last part.

    Args:
        tasks: Tasks that can share a batch.

    Raises:
        InvalidOptionError: If they cannot.

    Attributes:
        end: Index of the last row: no item, no bytes, nothing forbidden.
        first_P: The part that comes up first in each task.
        offset_P: Index of each task's part 0.
        num_parts_P: Number of each task's parts.
        codes_WFH: Codes of the parts as they are on one rank, and what each shared tier would give to every rank.
    """

    def __init__(self, tasks: Sequence[PlacementTask]) -> None:
        check_alike(tasks)
        self.tasks = tuple(tasks)
        first = tasks[0]
        self.num_ranks, self.num_tiers, self.may_split = first.num_ranks, first.num_tiers, first.may_split
        self.num_parts_P = np.array([task.parts.num_parts for task in tasks])
        ends_P = self.num_parts_P.cumsum()
        self.offset_P, self.end = ends_P - self.num_parts_P, int(ends_P[-1])
        self._index_parts()
        self._stack_parts()
        self.capacity_PR = np.stack([task.problem.capacity_R for task in tasks])
        self.kinds_AZ = first.kinds_AZ

    def _index_parts(self) -> None:
        first, after, halves = [], [], []
        for task, offset in zip(self.tasks, self.offset_P.tolist(), strict=True):
            parts = task.parts
            first.append(offset + parts.root_N[task.order_N[0]])
            after.append(np.where(parts.after_M == parts.num_parts, self.end, offset + parts.after_M))
            halves.append(np.where(parts.halves_M2 < 0, self.end, offset + parts.halves_M2))
        self.first_P = np.array(first)
        self.after_F = np.concatenate([*after, [self.end]])
        self.halves_F2 = np.concatenate([*halves, [[self.end, self.end]]])

    def _stack_parts(self) -> None:
        bytes_FW = self._joined(lambda task: task.parts.problem.bytes_WN.T)
        self.bytes_F, self.tier_bytes_FK = bytes_FW[:, 0].copy(), bytes_FW[:, 1:].copy()
        self.remaining_F = self._joined(lambda task: task.parts.remaining_M)
        self.rest_bytes_F = self._joined(lambda task: task.parts.rest_bytes_M)
        self.largest_F = self._joined(lambda task: task.parts.largest_M)
        self.may_FA = self._joined(lambda task: task.parts.problem.allowed_NA)
        self.may_FA[self.end] = True
        if self.may_split:
            self.may_FA = np.concatenate([self.may_FA, self.halves_F2[:, :1] != self.end], axis=1)
        self.is_bound_F = ~np.asarray(self.may_FA[:, : self.num_ranks].all(axis=1))
        codes_FWH = self._joined(lambda task: task.parts.problem.codes_WNH.swapaxes(0, 1))
        self.codes_WFH = np.ascontiguousarray(codes_FWH.swapaxes(0, 1))

    def _joined(self, of_task: Callable[[PlacementTask], NDArray[Any]]) -> NDArray[Any]:
        """Rows of all tasks' parts, with a row of zeros for the end."""
        rows = [of_task(task) for task in self.tasks]
        return np.concatenate([*rows, np.zeros_like(rows[0][:1])])
