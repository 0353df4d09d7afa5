"""What the ranks of many episodes hold, and what it would cost with one part more: asked for at every step.

Shape suffixes: W ways to hold a part (on one rank, then each shared tier), F parts of all tasks and one more, E
episodes, D some of them, R ranks, S sets (R * E), H width of a code, X width of the fusion network's hidden layer, O
outputs (forward, backward), C what sets are known by besides traits (own times, number of shards), Y = H + X, K the
logarithms of C and a 1 after them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from autoshard.core import CostModel
from autoshard.core.costs import CodeArray
from costmodel import LearnedCostModel
from costmodel.kernel.predictor import COUNT, corrected
from costmodel.kernel.weights import NUM_OUTPUTS, SET_HIDDEN, TRAIT_WIDTH

FloatArray = NDArray[np.floating]
IntArray = NDArray[np.int64]

#: What is made of so many stays within a core's cache: steps of 256 episodes on 8 ranks take 0.36 and 0.38 ms with half
#: as many and with these on a Xeon at a load of 4, and 0.326 and 0.314 ms on a quiet EPYC (November 2026).
_SETS_AT_ONCE = 2048
#: Columns of a code: own times, then the number of shards.
_KNOWN = slice(TRAIT_WIDTH, COUNT + 1)


class HeldSets:
    """Sums of codes by episode and rank, and their prices by any cost model.

    `bring_up` names a part for each episode; it is what `hold`, `share` and `price_with` are about until the next call.

    Args:
        model: Prices sums of codes.
        codes_WFH: Codes of all parts, however they are held.
        num_episodes: E.
        num_ranks: R.

    Attributes:
        codes_ERH: What each rank holds; read-only to others.
        item_EH: Codes of the parts that are up, as they are on one rank; read-only to others.
    """

    def __init__(self, model: CostModel, codes_WFH: CodeArray, num_episodes: int, num_ranks: int) -> None:
        self._model, self._codes_WFH, self._shape_RE = model, codes_WFH, (num_ranks, num_episodes)
        self.codes_ERH = np.zeros((num_episodes, num_ranks, codes_WFH.shape[-1]), dtype=np.float32)
        self.bring_up(np.full(num_episodes, codes_WFH.shape[1] - 1))

    @staticmethod
    def of(model: CostModel, codes_WFH: CodeArray, num_episodes: int, num_ranks: int) -> HeldSets:
        """What suits a model: the learned one's arithmetic is done here, all others price as they always do."""
        if isinstance(model, LearnedCostModel):
            return _LearnedSets(model, codes_WFH, num_episodes, num_ranks)
        return HeldSets(model, codes_WFH, num_episodes, num_ranks)

    def begin(self, episodes_D: IntArray) -> None:
        """Empties the ranks of some episodes."""
        self.codes_ERH[episodes_D] = 0

    def branch(self, sources_E: IntArray) -> None:
        """Makes each episode e stand where episode `sources_E[e]` does."""
        self.codes_ERH[:] = self.codes_ERH[sources_E]
        self.bring_up(self._part_E[sources_E])

    def bring_up(self, part_E: IntArray) -> None:
        """Has a part come up in every episode; the last of all parts, which is nothing, where none does."""
        self._part_E = part_E.copy()
        self.item_EH = self._codes_WFH[0].take(part_E, axis=0)

    def hold(self, episodes_D: IntArray, ranks_D: IntArray) -> None:
        """Puts the part that is up on one rank of each of these episodes, named in order."""
        num_ranks, num_episodes = self._shape_RE
        place_D = episodes_D * num_ranks + ranks_D
        _add_rows(self.codes_ERH.reshape(num_episodes * num_ranks, -1), place_D, _of(self.item_EH, episodes_D))

    def share(self, episodes_D: IntArray, tier_D: IntArray) -> None:
        """Has all ranks of each of these episodes, named in order, hold the part that is up by a shared tier."""
        self.codes_ERH[episodes_D] += self._codes_WFH[1 + tier_D, self._part_E[episodes_D]][:, None]

    def price_with(self, way: int = 0) -> FloatArray:
        """Kernel time in milliseconds of every rank if it held the part that is up, too; shape (R, E).

        Args:
            way: 0 for parts as they are on one rank, 1 + k for what shared tier k gives to each rank.
        """
        added_EH = self._codes_WFH[way].take(self._part_E, axis=0) if way else self.item_EH
        codes_ERH = self.codes_ERH + added_EH[:, None]
        return self._model.predict_ms(codes_ERH.reshape(-1, codes_ERH.shape[-1])).reshape(self._shape_RE[::-1]).T


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Block:
    """Views of some ranks' sums, and of where their prices are made, which take longer to make than to fill."""

    hidden_REX: torch.Tensor
    with_REX: torch.Tensor
    with_SX: torch.Tensor
    with_XS: torch.Tensor
    logs_SK: torch.Tensor
    fusion_OS: torch.Tensor


class _LearnedSets(HeldSets):
    """Prices as `CostPredictor.predict` has them, at a fraction of its work.

    The fusion network's first layer is linear in the mean of the traits, so its part of each shard is known
    beforehand, and sums of them are kept up instead of sums of traits. Everything before the last layer is left
    multiplied by the number of shards, which spares a quotient per hidden unit: relu(n x) = n relu(x). Ranks come
    first, so that what is added to all of them is added in long rows, on as many threads as torch may use.
    """

    def __init__(self, model: LearnedCostModel, codes_WFH: CodeArray, num_episodes: int, num_ranks: int) -> None:
        head = model.set_head
        # What is needed of a part lies side by side, for it comes from far.
        hidden_WFX = codes_WFH[..., :TRAIT_WIDTH] @ head.of_traits_TX
        self._parts_WFY = np.concatenate([codes_WFH, hidden_WFX], axis=-1)
        self._width = codes_WFH.shape[-1]
        super().__init__(model, self._parts_WFY[..., : self._width], num_episodes, num_ranks)
        self._of_logs_KX = torch.from_numpy(np.vstack([head.of_own_OX, head.of_count_X, head.bias_X]))
        self._last_OX, self._last_bias_O11 = torch.from_numpy(head.last_XO.T.copy()), head.last_bias_O[:, None, None]
        self._least_C11 = np.array([*[0] * NUM_OUTPUTS, 1], dtype=np.float32)[:, None, None]
        self._overhead_C11 = np.append(head.overhead_O, np.float32(0))[:, None, None]
        self._scale_ms = np.float32(head.scale_ms)
        self._hidden_SX = torch.zeros((num_ranks * num_episodes, SET_HIDDEN))
        self._logs_KS = torch.empty((NUM_OUTPUTS + 2, num_ranks * num_episodes))
        self._fusion_OS = torch.empty((NUM_OUTPUTS, num_ranks * num_episodes))
        self._blocks = self._cut()

    def _cut(self) -> list[_Block]:
        num_ranks, num_episodes = self._shape_RE
        ranks_at_once = min(num_ranks, max(1, _SETS_AT_ONCE // num_episodes))
        scratch_REX = torch.empty((ranks_at_once, num_episodes, SET_HIDDEN))
        blocks = []
        for start in range(0, num_ranks, ranks_at_once):
            hidden_REX = self._hidden_SX.view(num_ranks, num_episodes, -1)[start : start + ranks_at_once]
            with_REX = scratch_REX[: len(hidden_REX)]
            sets = slice(start * num_episodes, (start + len(hidden_REX)) * num_episodes)
            blocks.append(
                _Block(
                    hidden_REX=hidden_REX,
                    with_REX=with_REX,
                    with_SX=with_REX.view(-1, SET_HIDDEN),
                    with_XS=with_REX.view(-1, SET_HIDDEN).T,
                    logs_SK=self._logs_KS[:, sets].T,
                    fusion_OS=self._fusion_OS[:, sets],
                )
            )
        return blocks

    def begin(self, episodes_D: IntArray) -> None:
        super().begin(episodes_D)
        self._by_rank()[:, episodes_D] = 0

    def _by_rank(self) -> NDArray[np.float32]:
        """The sums that are kept up, shape (R, E, X)."""
        hidden_REX: NDArray[np.float32] = self._hidden_SX.numpy().reshape(*self._shape_RE, SET_HIDDEN)
        return hidden_REX

    def branch(self, sources_E: IntArray) -> None:
        super().branch(sources_E)
        hidden_REX = self._by_rank()
        hidden_REX[:] = hidden_REX[:, sources_E]

    def bring_up(self, part_E: IntArray) -> None:
        self._part_E = part_E.copy()
        self._item_EY = self._parts_WFY[0].take(part_E, axis=0)
        self.item_EH = self._item_EY[:, : self._width]

    def hold(self, episodes_D: IntArray, ranks_D: IntArray) -> None:
        super().hold(episodes_D, ranks_D)
        place_D = ranks_D * self._shape_RE[1] + episodes_D
        _add_rows(self._hidden_SX.numpy(), place_D, _of(self._item_EY, episodes_D)[:, self._width :])

    def share(self, episodes_D: IntArray, tier_D: IntArray) -> None:
        super().share(episodes_D, tier_D)
        self._by_rank()[:, episodes_D] += self._parts_WFY[1 + tier_D, self._part_E[episodes_D], self._width :]

    def price_with(self, way: int = 0) -> FloatArray:
        added_EY = self._parts_WFY[way].take(self._part_E, axis=0) if way else self._item_EY
        known_CRE = np.add(self.codes_ERH[..., _KNOWN].T, added_EY[:, _KNOWN].T[:, None], order="C")
        is_empty_RE = known_CRE[-1] < 0.5
        np.maximum(known_CRE, self._least_C11, out=known_CRE)
        known_CRE += self._overhead_C11
        own_ORE, count_RE = known_CRE[:-1], known_CRE[-1]
        times_ORE = self._fusion(known_CRE, torch.from_numpy(added_EY[:, self._width :]))
        times_ORE /= count_RE
        times_ORE += self._last_bias_O11
        corrected(own_ORE, times_ORE)
        kernel_ms_RE: FloatArray = times_ORE[0] + times_ORE[1]
        kernel_ms_RE *= self._scale_ms
        kernel_ms_RE[is_empty_RE] = 0
        return kernel_ms_RE

    def _fusion(self, known_CRE: NDArray[np.float32], added_EX: torch.Tensor) -> NDArray[np.float32]:
        """What goes into the tangent but for its bias, times the number of shards; shape (O, R, E)."""
        logs_KRE = self._logs_KS.numpy().reshape(-1, *self._shape_RE)
        np.log(known_CRE, out=logs_KRE[:-1])
        logs_KRE[-1] = 1
        logs_KRE *= known_CRE[-1]
        for block in self._blocks:
            torch.add(block.hidden_REX, added_EX, out=block.with_REX)
            block.with_SX.addmm_(block.logs_SK, self._of_logs_KX).relu_()
            torch.mm(self._last_OX, block.with_XS, out=block.fusion_OS)
        fusion_ORE: NDArray[np.float32] = self._fusion_OS.numpy().reshape(-1, *self._shape_RE)
        return fusion_ORE


def _of(rows_EY: FloatArray, episodes_D: IntArray) -> FloatArray:
    """Rows of some episodes, named in order; as they are if these are all."""
    return rows_EY if len(episodes_D) == len(rows_EY) else rows_EY.take(episodes_D, axis=0)


def _add_rows(sums: NDArray[np.float32], place_D: IntArray, rows: NDArray[np.float32]) -> None:
    """Adds rows to rows, none of which is named twice."""
    # Half the time of `sums[place_D] += rows`.
    summed = sums.take(place_D, axis=0)
    summed += rows
    sums[place_D] = summed
