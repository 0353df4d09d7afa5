"""Whole steps of many placements of one problem at once.

Shape suffixes: U shards, N items, K tiers, R ranks, A = R + K choices, B placements, H width of a code, P parts of a
step, C columns of what is moved.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.core import CostModels, PlacedShard
from autoshard.core.costs import CodeArray, MsArray
from autoshard.core.shard import fused_kernel
from autoshard.planners.space.placement import PlacementProblem, RankArray, on_rank
from autoshard.planners.space.step_sums import KERNEL_PARTS, PARTS, SYNC, MovedArray, StepSums, SumPrices

__all__ = ["PARTS", "StepCost", "StepSums"]


class StepCost:
    """Prices the steps of placements of one problem, as `evaluate` prices their plans; see `SumPrices`.

    An item on a rank adds a row to that rank's sums, an item that all ranks share adds a row to all of them.

    Args:
        problem: The problem.
        costs: Models of all parts; `costs.kernel` is the problem's model.

    Attributes:
        moved_NC: What an item adds to the sums of the rank that has it alone.
        moved_KNC: What it adds to the sums of every rank, by tier.

    Raises:
        InvalidPlanError: If the dense layers make no model.
    """

    def __init__(self, problem: PlacementProblem, costs: CostModels) -> None:
        self.problem = problem
        held = [tuple(on_rank(shard) for shard in problem.shards), *(tier.placed for tier in problem.tiers)]
        kernels = {fused_kernel(one.shard.table, one.update) for placed in held for one in placed}
        self.prices = SumPrices(problem.tables, problem.topology, costs, kernels)
        moved = [self._moved(placed) for placed in held]
        self.moved_NC, self.moved_KNC = moved[0], np.array(moved[1:]).reshape(-1, *moved[0].shape)

    def prices_alike(self, other: StepCost) -> bool:
        """Whether both make the same step of the same sums, so that their placements can be priced together."""
        return self.problem.model is other.problem.model and self.prices.prices_alike(other.prices)

    def sums(self, ranks_N: RankArray) -> StepSums:
        """What each rank holds in one placement; B is 1."""
        problem = self.problem
        moved_RC = np.zeros((problem.num_ranks, self.moved_NC.shape[1]))
        alone_N = ranks_N < problem.num_ranks
        np.add.at(moved_RC, ranks_N[alone_N], self.moved_NC[alone_N])
        for index, moved_NC in enumerate(self.moved_KNC):
            moved_RC += moved_NC[ranks_N == problem.num_ranks + index].sum(axis=0)
        return StepSums(codes_BRH=problem.rank_codes(ranks_N)[None], moved_BRC=moved_RC[None])

    def step_ms(self, sums: StepSums) -> MsArray:
        """Step times, shape (B,): equal to what `evaluate` says of the plans, but for rounding."""
        return self.prices.step_ms(sums)

    def parts_ms(self, sums: StepSums) -> MsArray:
        """Times of `PARTS` on every rank, shape (P, B, R)."""
        return self.prices.parts_ms(sums)

    def choices_ms(
        self,
        sums: StepSums,
        codes_BH: CodeArray,
        moved_BC: MovedArray,
        codes_KBH: CodeArray,
        moved_KBC: MovedArray,
    ) -> MsArray:
        """Step times after one more item per placement, for every choice; shape (B, A).

        Args:
            sums: What ranks hold so far.
            codes_BH: Codes of the items on a rank alone.
            moved_BC: What they move then.
            codes_KBH: Codes that they add to every rank in a shared tier.
            moved_KBC: What they move then.
        """
        num_placements, num_ranks, width = sums.codes_BRH.shape
        one_AR = np.concatenate([np.eye(num_ranks), np.zeros((len(codes_KBH), num_ranks))])
        moved_BARC = sums.moved_BRC[:, None] + one_AR[None, :, :, None] * moved_BC[:, None, None]
        moved_BARC[:, num_ranks:] += moved_KBC.swapaxes(0, 1)[:, :, None]
        num_choices = len(one_AR)
        moved = moved_BARC.reshape(-1, *moved_BARC.shape[2:])
        parts_PBAR = self.prices.moving_ms(moved).reshape(len(PARTS), num_placements, num_choices, num_ranks)
        now = self.prices.kernels_ms(sums.codes_BRH)
        alone = self.prices.kernels_ms(sums.codes_BRH + codes_BH[:, None])
        shared_BKRH = sums.codes_BRH[:, None] + codes_KBH.swapaxes(0, 1)[:, :, None]
        shared = self.prices.kernels_ms(shared_BKRH.reshape(-1, num_ranks, width))
        is_new_AR = one_AR[:num_ranks].astype(np.bool_)
        for part, now_BR, alone_BR, shared_BR in zip(KERNEL_PARTS, now, alone, shared, strict=True):
            of_part_BAR = parts_PBAR[PARTS.index(part)]
            of_part_BAR[:, :num_ranks] += np.where(is_new_AR, alone_BR[:, None], now_BR[:, None])
            of_part_BAR[:, num_ranks:] += shared_BR.reshape(num_placements, -1, num_ranks)
        slowest_PBA = parts_PBAR.max(axis=3)
        step_ms = self.prices.compose(slowest_PBA.reshape(len(PARTS), -1), moved[:, 0, SYNC])
        return step_ms.reshape(num_placements, num_choices)

    def _moved(self, placed: Sequence[PlacedShard]) -> MovedArray:
        """What items move if all are held alike, shape (N, C)."""
        moved_UC = np.stack([self.prices.moved(one) for one in placed])
        return np.stack([moved_UC[list(group)].sum(axis=0) for group in self.problem.members])
