"""Packs shards greedily under caps on the sum of dimensions per rank; many lists of shards and all caps at once.

Shape suffixes: T tasks (a list of shards under one cap), P shards of a list, R ranks, H width of a code, C columns of
what is moved, X = H + C + memory levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.core import MemoryLevel
from autoshard.planners.space.kinds import LEVELS, FloatArray
from autoshard.planners.space.planner_space import BoolArray, IndexArray, ItemShard, PlannerSpace
from autoshard.planners.space.step_cost import StepSums

#: Ranks of all tasks that are packed side by side: their sums stay within some megabytes.
_RANKS_AT_ONCE = 1 << 14
#: Ranks of the tasks whose steps are priced in one call.
_RANKS_PRICED = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """Where shards went.

    Attributes:
        ranks_P: The rank of each shard, in the order of the list.
        step_ms: The predicted step.
    """

    ranks_P: IndexArray
    step_ms: float


class CappedGreedy:
    """NeuroShard's inner loop: shards by falling cost, each on the rank with room that costs least so far.

    A rank has room for a shard within its device memory and below the cap on its sum of dimensions, which stands for
    what it exchanges. Each list is packed once for every cap; the plan with the shortest predicted step counts.

    Args:
        space: Prices steps and knows the kinds of the shards.
        capacity_R: Bytes of device memory that shards may take of each rank.
        caps: Caps on the sum of dimensions of a rank, over the mean of all ranks.

    Source:
        NeuroShard (Zha et al., MLSys 2023), online search, inner loop: greedy grid search; `_greedy` and
        `_table_wise_shard` of its published code. Differs: finished plans are compared by the whole predicted step, and
        pinned tables go to their ranks.
    """

    def __init__(self, space: PlannerSpace, capacity_R: FloatArray, caps: FloatArray) -> None:
        self._space, self._capacity_R, self._caps = space, capacity_R, caps

    def pack(self, lists: Sequence[Sequence[ItemShard]]) -> list[Packed | None]:
        """Packs lists of equally many shards; None for a list that fits under no cap.

        Args:
            lists: Shards on single ranks (`Tier.TABLE_WISE`), of kinds that the space has learned.
        """
        at_once = max(1, _RANKS_AT_ONCE // (len(self._caps) * self._space.topology.world_size))
        return [
            packed for start in range(0, len(lists), at_once) for packed in self._packed(lists[start : start + at_once])
        ]

    def _packed(self, lists: Sequence[Sequence[ItemShard]]) -> list[Packed | None]:
        tasks = _Tasks.of(self._space, lists, self._caps)
        filled = _Filled(self._space, tasks, self._capacity_R)
        for number in range(tasks.kind_TP.shape[1]):
            filled.put(number)
            if not filled.is_alive_T.any():
                return [None] * len(lists)
        step_ms_T = filled.step_ms()
        found: list[Packed | None] = []
        for first in range(0, len(step_ms_T), len(self._caps)):
            best = first + int(step_ms_T[first : first + len(self._caps)].argmin())
            if not np.isfinite(step_ms_T[best]):
                found.append(None)
                continue
            ranks_P = np.empty_like(filled.ranks_TP[best])
            ranks_P[tasks.order_TP[best]] = filled.ranks_TP[best]
            found.append(Packed(ranks_P=ranks_P, step_ms=float(step_ms_T[best])))
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Tasks:
    """Lists of shards in the order of packing, each once for every cap.

    Attributes:
        order_TP: Index in its list of the shard that is packed next.
        kind_TP: Its kind.
        dims_TP: Its dimensions.
        allowed_TPR: Ranks that the constraints allow it.
        cap_T: Largest sum of dimensions of a rank.
    """

    order_TP: IndexArray
    kind_TP: IndexArray
    dims_TP: IndexArray
    allowed_TPR: BoolArray
    cap_T: FloatArray

    @classmethod
    def of(cls, space: PlannerSpace, lists: Sequence[Sequence[ItemShard]], caps: FloatArray) -> _Tasks:
        kind_SP = np.array([[shard.kind for shard in shards] for shards in lists], dtype=np.int64)
        dims_SP = np.array([[num_dims(shard) for shard in shards] for shards in lists], dtype=np.int64)
        allowed_SPR = np.array([[shard.allowed_S for shard in shards] for shards in lists])
        alone_ms_V = space.costs.kernel.predict_ms(space.kinds.codes_VH.astype(np.float32))
        order_SP = np.argsort(-alone_ms_V[kind_SP], axis=1, kind="stable")

        def for_each_cap(values_SP: NDArray[np.int64]) -> IndexArray:
            return np.repeat(np.take_along_axis(values_SP, order_SP, axis=1), len(caps), axis=0)

        mean_S = dims_SP.sum(axis=1) / space.topology.world_size
        return cls(
            order_TP=np.repeat(order_SP, len(caps), axis=0),
            kind_TP=for_each_cap(kind_SP),
            dims_TP=for_each_cap(dims_SP),
            allowed_TPR=np.repeat(np.take_along_axis(allowed_SPR, order_SP[:, :, None], axis=1), len(caps), axis=0),
            cap_T=(mean_S[:, None] * caps).ravel(),
        )


class _Filled:
    """Ranks of all tasks that fill up shard by shard."""

    def __init__(self, space: PlannerSpace, tasks: _Tasks, capacity_R: FloatArray) -> None:
        self._space, self._tasks, self._capacity_R = space, tasks, capacity_R
        num_tasks, num_shards = tasks.kind_TP.shape
        shape = (num_tasks, space.topology.world_size)
        self._sums_TRX = np.zeros((*shape, space.kinds.rows_VX.shape[1]))
        self._hbm_TR = space.kinds.split(self._sums_TRX)[2][..., LEVELS.index(MemoryLevel.HBM)]
        self._dims_TR, self._cost_ms_TR = np.zeros(shape), np.zeros(shape)
        self.ranks_TP: IndexArray = np.zeros((num_tasks, num_shards), dtype=np.int64)
        self.is_alive_T: BoolArray = np.ones(num_tasks, dtype=np.bool_)

    def put(self, number: int) -> None:
        """Puts the next shard of every task on a rank; tasks without room for it drop out."""
        tasks, kinds = self._tasks, self._space.kinds
        kind_T, dims_T = tasks.kind_TP[:, number], tasks.dims_TP[:, number]
        bytes_T = kinds.bytes_VM[kind_T, LEVELS.index(MemoryLevel.HBM)]
        fits_TR = tasks.allowed_TPR[:, number] & (self._hbm_TR + bytes_T[:, None] <= self._capacity_R)
        fits_TR &= self._dims_TR + dims_T[:, None] <= tasks.cap_T[:, None]
        self.is_alive_T &= fits_TR.any(axis=1)
        cost_ms_TR = np.where(fits_TR, self._cost_ms_TR, np.inf)
        is_least_TR = cost_ms_TR == cost_ms_TR.min(axis=1, keepdims=True)
        rank_T = np.where(is_least_TR, self._hbm_TR, np.inf).argmin(axis=1)
        every = np.arange(len(rank_T))
        self.ranks_TP[:, number] = rank_T
        self._sums_TRX[every, rank_T] += kinds.rows_VX[kind_T]
        self._dims_TR[every, rank_T] += dims_T
        live = np.flatnonzero(self.is_alive_T)
        codes_H = kinds.split(self._sums_TRX[live, rank_T[live]])[0].astype(np.float32)
        self._cost_ms_TR[live, rank_T[live]] = self._space.costs.kernel.predict_ms(codes_H)

    def step_ms(self) -> FloatArray:
        """Predicted steps, shape (T,); infinite for tasks that dropped out."""
        step_ms_T = np.full(len(self.is_alive_T), np.inf)
        live = np.flatnonzero(self.is_alive_T)
        num_parts = -(-len(live) * len(self._capacity_R) // _RANKS_PRICED)
        for part in np.array_split(live, max(1, num_parts)):
            codes_BRH, moved_BRC, _ = self._space.kinds.split(self._sums_TRX[part])
            sums = StepSums(codes_BRH=codes_BRH.astype(np.float32), moved_BRC=moved_BRC)
            step_ms_T[part] = self._space.prices.step_ms(sums)
        return step_ms_T


def num_dims(shard: ItemShard) -> int:
    """Columns of a shard, those of all its tables together."""
    return sum(part.shard.embedding_dim for part in shard.parts)
