"""Tabu search in many small groups of ranks at once, on marginal prices that one call of the model gives.

Shape suffixes: N items, R ranks, H width of a code, G blocks, K ranks of a block, M movable items of a block,
C ranks of a block whose items have changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.planners.placement import PlacementProblem, RankArray

FloatArray = NDArray[np.float32]
IndexArray = NDArray[np.int64]

#: What stands for the energy of an exchange that is not allowed, and for its logarithm.
_NEVER = np.float32(np.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """How one step chooses.

    Attributes:
        exponent: p of the p-norm of the ranks' times that exchanges are to make smaller.
        tenure: Steps for which an item may not go back to the rank that it has left, up to twice as many by chance.
    """

    exponent: float
    tenure: int


class Blocks:
    """Blocks of ranks, no rank in two of them, each with a placement of its movable items that steps change.

    For every rank of a block and every item it keeps the marginal price: what the rank's time grows by if the item
    joins it, or shrinks by if the item leaves it. Two sums of these say nearly what a swap changes (the model need not
    add up: on a learned one, half of the swaps of an 80-table task are off by less than 0.1% of a rank's time), so
    that a step can compare all moves and swaps within a block. What it then does is priced exactly.

    Args:
        problem: The problem.
        ranks_N: A feasible placement.
        blocks_GK: Ranks of each block.
        items_GM: Items that may move, all on ranks of their block; `problem.num_items` fills up short rows.
    """

    def __init__(
        self, problem: PlacementProblem, ranks_N: RankArray, blocks_GK: IndexArray, items_GM: IndexArray
    ) -> None:
        self._problem = problem
        self._blocks_GK, self._items_GM = blocks_GK, items_GM
        self._block_G = np.arange(len(blocks_GK))
        self._of_G1 = self._block_G[:, None]
        num_blocks, width = blocks_GK.shape
        self._filler_GM = items_GM == problem.num_items
        codes_NH = np.pad(problem.codes_NH, ((0, 1), (0, 0)))
        # One row more, of zeros: the rank as it is.
        self._codes_GMH = np.pad(codes_NH[items_GM], ((0, 0), (0, 1), (0, 0)))
        self._bytes_GM = np.pad(np.pad(problem.bytes_N, (0, 1))[items_GM], ((0, 0), (0, 1)))
        slot_R = np.zeros(problem.num_ranks, dtype=np.int64)
        slot_R[blocks_GK] = np.arange(width)
        self._slots_GM: IndexArray = slot_R[np.append(ranks_N, 0)[items_GM]]
        self._here_GKM = np.zeros((num_blocks, width, items_GM.shape[1] + 1), dtype=np.bool_)
        np.put_along_axis(self._here_GKM[:, :, :-1], self._slots_GM[:, None], True, axis=1)
        self._here_GKM[:, :, :-1] &= ~self._filler_GM[:, None]
        moving_N = np.zeros(problem.num_items + 1, dtype=np.bool_)
        moving_N[items_GM] = True
        resting_N = np.flatnonzero(~moving_N[:-1])
        resting_RH = np.zeros((problem.num_ranks, problem.codes_NH.shape[1]), dtype=np.float32)
        np.add.at(resting_RH, ranks_N[resting_N], problem.codes_NH[resting_N])
        self._resting_GKH = resting_RH[blocks_GK]
        self._free_GK = (problem.capacity_R - problem.rank_bytes(ranks_N))[blocks_GK]
        self._largest_bytes = int(self._bytes_GM.max())
        allowed_NR = np.pad(problem.allowed_NR, ((0, 1), (0, 0)))
        self._barred_GKM = ~allowed_NR[items_GM[:, None, :], blocks_GK[:, :, None]]
        self.cost_ms_GK: FloatArray = np.zeros((num_blocks, width), dtype=np.float32)
        self._join_ms_GKM = np.zeros(self._barred_GKM.shape, dtype=np.float32)
        self._leave_ms_GM = np.zeros(items_GM.shape, dtype=np.float32)
        self._tabu_until_GKM = np.zeros(self._barred_GKM.shape, dtype=np.int32)
        for slot in range(width):
            self._reprice(np.full((num_blocks, 1), slot))

    @property
    def slots_GM(self) -> IndexArray:  # noqa: N802 - a shape suffix
        """For each movable item, which rank of its block holds it; a copy."""
        return self._slots_GM.copy()

    def adds_up(self, tolerance: float) -> bool:
        """Whether items' marginal prices are the same on all ranks of a block that could take them."""
        joins_GKM = self._join_ms_GKM
        open_GKM = ~(self._barred_GKM | self._here_GKM[:, :, :-1])
        high_GM = np.where(open_GKM, joins_GKM, -np.inf).max(axis=1)
        low_GM = np.where(open_GKM, joins_GKM, np.inf).min(axis=1)
        return bool((high_GM - low_GM <= tolerance * self.cost_ms_GK.max())[open_GKM.any(axis=1)].all())

    def place(self, ranks_N: RankArray, slots_GM: IndexArray) -> RankArray:
        """The placement with the movable items where `slots_GM` says; the others stay."""
        ranks_N = ranks_N.copy()
        real_GM = ~self._filler_GM
        ranks_N[self._items_GM[real_GM]] = np.take_along_axis(self._blocks_GK, slots_GM, axis=1)[real_GM]
        return ranks_N

    def step(self, number: int, settings: StepSettings, rng: np.random.Generator) -> None:
        """Does in each block the best exchange that is allowed and not tabu, even if it is one for the worse."""
        # Exchanges that make a rank many times slower have infinite energy.
        with np.errstate(over="ignore"):
            give_G, take_G, source_G, target_G, done_G = self._best(number, settings)
        swaps_G = done_G & (take_G < self._items_GM.shape[1])
        until_G = number + settings.tenure + rng.integers(0, settings.tenure + 1, len(done_G))
        for of_G, item_G, left_G, reached_G in (
            (done_G, give_G, source_G, target_G),
            (swaps_G, take_G, target_G, source_G),
        ):
            block, item, left, reached = self._block_G[of_G], item_G[of_G], left_G[of_G], reached_G[of_G]
            self._slots_GM[block, item] = reached
            self._here_GKM[block, left, item] = False
            self._here_GKM[block, reached, item] = True
            self._tabu_until_GKM[block, left, item] = until_G[of_G]
            self._free_GK[block, left] += self._bytes_GM[block, item]
            self._free_GK[block, reached] -= self._bytes_GM[block, item]
        self._reprice(np.stack([source_G, target_G], axis=1))

    def _best(
        self, number: int, settings: StepSettings
    ) -> tuple[IndexArray, IndexArray, IndexArray, IndexArray, NDArray[np.bool_]]:
        """Items given and taken (the number of items for none), their ranks, and whether there is any exchange."""
        of_G, slots_GM = self._block_G, self._slots_GM
        num_items = slots_GM.shape[1]
        slowest_G1 = self.cost_ms_GK.max(axis=1, keepdims=True)
        scale_G1 = np.float32(settings.exponent) / np.maximum(slowest_G1, np.float32(1e-30))
        # Energies are sums of exp(p (time / slowest - 1)), near enough to those of (time / slowest) ** p.
        energy_GK = np.exp(scale_G1 * (self.cost_ms_GK - slowest_G1))
        log_joined_GKM = scale_G1[:, :, None] * self._join_ms_GKM
        log_joined_GKM[self._barred_GKM | self._here_GKM[:, :, :-1] | (self._tabu_until_GKM > number)] = _NEVER
        before_GM = energy_GK[self._of_G1, slots_GM]
        log_without_GM = scale_G1 * (self.cost_ms_GK[self._of_G1, slots_GM] - slowest_G1 - self._leave_ms_GM)
        log_without_GM[self._filler_GM] = _NEVER
        moves_GKM = np.exp(log_joined_GKM + scale_G1[:, :, None] * (self.cost_ms_GK - slowest_G1)[:, :, None])
        moves_GKM -= energy_GK[:, :, None]
        moves_GKM += (np.exp(log_without_GM) - before_GM)[:, None]
        # Of the rank of the first item, if it gets the second one instead.
        swaps_GMM = log_joined_GKM[self._of_G1, slots_GM]
        swaps_GMM += log_without_GM[:, :, None]
        np.exp(swaps_GMM, out=swaps_GMM)
        swaps_GMM -= before_GM[:, :, None]
        if self._largest_bytes > self._free_GK.min():
            room_GM = self._free_GK[self._of_G1, slots_GM] + self._bytes_GM[:, :-1]
            swaps_GMM[self._bytes_GM[:, None, :-1] > room_GM[:, :, None]] = _NEVER
            moves_GKM[self._bytes_GM[:, None, :-1] > self._free_GK[:, :, None]] = _NEVER
        swaps_GX = (swaps_GMM + swaps_GMM.transpose(0, 2, 1)).reshape(len(of_G), -1)
        moves_GX = moves_GKM.reshape(len(of_G), -1)
        swap_G, move_G = swaps_GX.argmin(axis=1), moves_GX.argmin(axis=1)
        by_swap_G, by_move_G = swaps_GX[of_G, swap_G], moves_GX[of_G, move_G]
        moves_G = by_move_G < by_swap_G
        give_G = np.where(moves_G, move_G, swap_G // num_items) % num_items
        take_G = np.where(moves_G, num_items, swap_G % num_items)
        target_G = np.where(moves_G, move_G // num_items, slots_GM[of_G, np.minimum(take_G, num_items - 1)])
        done_G = np.minimum(by_move_G, by_swap_G) < _NEVER
        return give_G, take_G, slots_GM[of_G, give_G], target_G, done_G

    def _reprice(self, slots_GC: IndexArray) -> None:
        """Prices some ranks of each block anew: as they are, with each item they lack, without each they have."""
        here_GCM = self._here_GKM[self._of_G1, slots_GC]
        sum_GCH = here_GCM.astype(np.float32) @ self._codes_GMH + self._resting_GKH[self._of_G1, slots_GC]
        sign_GCM = np.where(here_GCM, np.float32(-1), np.float32(1))
        sets_GCMH = sign_GCM[..., None] * self._codes_GMH[:, None]
        sets_GCMH += sum_GCH[:, :, None]
        price_ms = self._problem.model.price(sets_GCMH.reshape(-1, sets_GCMH.shape[-1])).astype(np.float32)
        price_ms_GCM = price_ms.reshape(sign_GCM.shape)
        cost_ms_GC = price_ms_GCM[:, :, -1]
        self.cost_ms_GK[self._of_G1, slots_GC] = cost_ms_GC
        marginal_ms_GCM = price_ms_GCM[:, :, :-1] - cost_ms_GC[:, :, None]
        self._join_ms_GKM[self._of_G1, slots_GC] = marginal_ms_GCM
        for column in range(slots_GC.shape[1]):
            np.copyto(self._leave_ms_GM, -marginal_ms_GCM[:, column], where=here_GCM[:, column, :-1])
