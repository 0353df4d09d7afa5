"""Tabu search in many small groups of ranks at once, on marginal prices that one call of the model gives.

Shape suffixes: N items, R ranks, H width of a code, G blocks, K ranks of a block, M movable items of a block,
C ranks of a block whose items have changed, L = G x K ranks of all blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.planners.space.placement import PlacementProblem, RankArray

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
        num_blocks, width = blocks_GK.shape
        num_items = items_GM.shape[1]
        # Arrays below have a row per rank of a block, one block's after the other's: numpy reads and writes single
        # places of these several times faster than with three indices.
        self._first_G = np.arange(num_blocks) * width
        self._filler_GM = items_GM == problem.num_items
        codes_NH = np.pad(problem.codes_NH, ((0, 1), (0, 0)))
        # One item more, of zeros: the rank as it is, and what is taken where nothing is.
        self._codes_GMH = np.pad(codes_NH[items_GM], ((0, 0), (0, 1), (0, 0)))
        self._bytes_GM = np.pad(np.pad(problem.bytes_N, (0, 1))[items_GM], ((0, 0), (0, 1)))
        slot_R = np.zeros(problem.num_ranks, dtype=np.int64)
        slot_R[blocks_GK] = np.arange(width)
        slots_GM = np.pad(slot_R[np.append(ranks_N, 0)[items_GM]], ((0, 0), (0, 1)))
        self._at_GM: IndexArray = slots_GM + self._first_G[:, None]
        self._here_LM = np.zeros((num_blocks * width, num_items + 1), dtype=np.bool_)
        of_G, items = np.nonzero(~self._filler_GM)
        self._here_LM[self._at_GM[of_G, items], items] = True
        moving_N = np.zeros(problem.num_items + 1, dtype=np.bool_)
        moving_N[items_GM] = True
        resting_N = np.flatnonzero(~moving_N[:-1])
        resting_RH = np.zeros((problem.num_ranks, problem.codes_NH.shape[1]), dtype=np.float32)
        np.add.at(resting_RH, ranks_N[resting_N], problem.codes_NH[resting_N])
        self._resting_LH = resting_RH[blocks_GK.ravel()]
        self._free_L = (problem.capacity_R - problem.rank_bytes(ranks_N))[blocks_GK.ravel()]
        self._largest_bytes = int(self._bytes_GM.max())
        allowed_NR = np.pad(problem.allowed_NR, ((0, 1), (0, 0)))
        self._barred_LM = ~allowed_NR[np.repeat(items_GM, width, axis=0), blocks_GK.reshape(-1, 1)]
        self.cost_ms_GK: FloatArray = np.zeros((num_blocks, width), dtype=np.float32)
        # Prices of what cannot be: joining the own rank or one that is barred, and leaving for items that fill up.
        self._join_ms_LM = np.zeros(self._barred_LM.shape, dtype=np.float32)
        self._leave_ms_GM = np.where(self._filler_GM, -_NEVER, np.float32(0))
        self._tabu_until_LM = np.zeros(self._here_LM.shape, dtype=np.int32)
        self._reprice(np.arange(num_blocks * width).reshape(num_blocks, width), np.arange(num_blocks))

    @property
    def slots_GM(self) -> IndexArray:  # noqa: N802 - a shape suffix
        """For each movable item, which rank of its block holds it; a copy."""
        slots_GM: IndexArray = self._at_GM[:, :-1] - self._first_G[:, None]
        return slots_GM

    def adds_up(self, tolerance: float) -> bool:
        """Whether items' marginal prices are the same on all ranks of a block that could take them."""
        joins_GKM = self._join_ms_LM.reshape(*self._blocks_GK.shape, -1)
        open_GKM = joins_GKM < _NEVER
        high_GM = np.where(open_GKM, joins_GKM, -np.inf).max(axis=1)
        low_GM = joins_GKM.min(axis=1)
        open_GM = open_GKM.any(axis=1)
        return bool((high_GM[open_GM] - low_GM[open_GM] <= tolerance * self.cost_ms_GK.max()).all())

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
            moves_GX, swaps_GX = self._changes(number, settings)
        move_G, swap_G = moves_GX.argmin(axis=1).tolist(), swaps_GX.argmin(axis=1).tolist()
        until_G = rng.integers(number + settings.tenure, number + 2 * settings.tenure + 1, len(move_G)).tolist()
        done_G, rank_GC = [], []
        for block, (move, swap, until) in enumerate(zip(move_G, swap_G, until_G, strict=True)):
            ranks = self._exchange(block, move, swap, moves_GX, swaps_GX, until)
            if ranks is not None:
                done_G.append(block)
                rank_GC.append(ranks)
        if done_G:
            self._reprice(np.array(rank_GC), np.array(done_G))

    def _exchange(
        self, block: int, move: int, swap: int, moves_GX: FloatArray, swaps_GX: FloatArray, until: int
    ) -> tuple[int, int] | None:
        """Does the better of a block's best move and swap; the rows of the two ranks, or None if neither may be."""
        by_move, by_swap = moves_GX[block, move], swaps_GX[block, swap]
        if min(by_move, by_swap) == _NEVER:
            return None
        num_items = self._items_GM.shape[1]
        if by_move < by_swap:
            slot, give = divmod(move, num_items)
            # What is taken is the item of zeros.
            take, target = num_items, int(self._first_G[block]) + slot
        else:
            give, take = divmod(swap, num_items)
            target = int(self._at_GM[block, take])
        source = int(self._at_GM[block, give])
        for item, left, reached in ((give, source, target), (take, target, source)):
            self._at_GM[block, item] = reached
            self._here_LM[left, item] = False
            self._here_LM[reached, item] = True
            self._tabu_until_LM[left, item] = until
            self._free_L[left] += self._bytes_GM[block, item]
            self._free_L[reached] -= self._bytes_GM[block, item]
        return source, target

    def _changes(self, number: int, settings: StepSettings) -> tuple[FloatArray, FloatArray]:
        """What each move, (G, K * M), and swap, (G, M * M), changes the energy by; infinite for what may not be."""
        at_GM = self._at_GM[:, :-1]
        num_blocks, num_items = at_GM.shape
        width = self.cost_ms_GK.shape[1]
        slowest_G1 = self.cost_ms_GK.max(axis=1, keepdims=True)
        scale_G1 = np.float32(settings.exponent) / np.maximum(slowest_G1, np.float32(1e-30))
        # Energies are sums of exp(p (time / slowest - 1)), near enough to those of (time / slowest) ** p.
        log_energy_GK = scale_G1 * (self.cost_ms_GK - slowest_G1)
        energy_GK = np.exp(log_energy_GK)
        log_joined_GKM = scale_G1[:, :, None] * self._join_ms_LM.reshape(num_blocks, width, num_items)
        log_joined_GKM[self._tabu_until_LM[:, :-1].reshape(log_joined_GKM.shape) > number] = _NEVER
        before_GM = energy_GK.take(at_GM)
        log_without_GM = log_energy_GK.take(at_GM)
        log_without_GM -= scale_G1 * self._leave_ms_GM
        moves_GKM = np.exp(log_joined_GKM + log_energy_GK[:, :, None])
        moves_GKM -= energy_GK[:, :, None]
        moves_GKM += (np.exp(log_without_GM) - before_GM)[:, None]
        # Of the rank of the first item, if it gets the second one instead.
        swaps_GMM = log_joined_GKM.reshape(-1, num_items).take(at_GM, axis=0)
        swaps_GMM += log_without_GM[:, :, None]
        np.exp(swaps_GMM, out=swaps_GMM)
        swaps_GMM -= before_GM[:, :, None]
        if self._largest_bytes > self._free_L.min():
            room_GM = self._free_L.take(at_GM) + self._bytes_GM[:, :-1]
            swaps_GMM[self._bytes_GM[:, None, :-1] > room_GM[:, :, None]] = _NEVER
            moves_GKM[self._bytes_GM[:, None, :-1] > self._free_L.reshape(num_blocks, width, 1)] = _NEVER
        both_GMM = swaps_GMM + swaps_GMM.transpose(0, 2, 1)
        return moves_GKM.reshape(num_blocks, -1), both_GMM.reshape(num_blocks, -1)

    def _reprice(self, rank_GC: IndexArray, of_G: IndexArray) -> None:
        """Prices some ranks of some blocks anew: as they are, with each item they lack, without each they have.

        Args:
            rank_GC: For each of the blocks, the rows of these ranks.
            of_G: The blocks, in their order.
        """
        codes_GMH = self._codes_GMH if len(of_G) == len(self._codes_GMH) else self._codes_GMH[of_G]
        here_GCM = self._here_LM.take(rank_GC, axis=0)
        sum_GCH = here_GCM.astype(np.float32) @ codes_GMH
        sum_GCH += self._resting_LH.take(rank_GC, axis=0)
        sets_GCMH = np.where(here_GCM, np.float32(-1), np.float32(1))[..., None] * codes_GMH[:, None]
        sets_GCMH += sum_GCH[:, :, None]
        price_ms = self._problem.model.predict_ms(sets_GCMH.reshape(-1, sets_GCMH.shape[-1])).astype(np.float32)
        price_ms_GCM = price_ms.reshape(here_GCM.shape)
        cost_ms_GC = price_ms_GCM[:, :, -1]
        self.cost_ms_GK.reshape(-1)[rank_GC] = cost_ms_GC
        marginal_ms_GCM = price_ms_GCM[:, :, :-1] - cost_ms_GC[:, :, None]
        here_GCM = here_GCM[:, :, :-1]
        of, column, item = here_GCM.nonzero()
        self._leave_ms_GM[of_G[of], item] = -marginal_ms_GCM[of, column, item]
        marginal_ms_GCM[here_GCM | self._barred_LM.take(rank_GC, axis=0)] = _NEVER
        self._join_ms_LM[rank_GC] = marginal_ms_GCM
