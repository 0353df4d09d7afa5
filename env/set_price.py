"""Prices of many sets at once: what a batch of episodes asks for at every step.

Shape suffixes: S sets of shards, H width of a code, Z width of what is known of a set, O outputs (forward, backward).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from autoshard.core import CostModel
from autoshard.core.costs import CodeArray
from costmodel import LearnedCostModel
from costmodel.predictor import COUNT
from costmodel.weights import CODE_WIDTH, MAX_LOG_FUSION, SET_WIDTH, TRAIT_WIDTH

#: As many as a batch of 256 episodes on 8 ranks asks for; what is kept of them stays within a core's cache.
_SETS_AT_ONCE = 2048

#: Kernel times in milliseconds of sets given by the sums of their codes, shape (..., H) to (...).
SetPrice = Callable[[CodeArray], NDArray[np.floating]]


def set_price(model: CostModel) -> SetPrice:
    """A model's price, for thousands of sets at a time.

    The learned model's arithmetic is done on as many threads as torch may use, in memory that is kept, for
    `LearnedCostModel.price` works in parts that suit a few dozen sets. All other models price as they always do.
    """
    if isinstance(model, LearnedCostModel):
        return _LearnedPrice(model)

    def price(codes: CodeArray) -> NDArray[np.floating]:
        return model.price(codes.reshape(-1, codes.shape[-1])).reshape(codes.shape[:-1])

    return price


class _LearnedPrice:
    """The same arithmetic as `CostPredictor.predict`."""

    def __init__(self, model: LearnedCostModel) -> None:
        head = model.set_head
        (first, first_bias), (last, last_bias) = head.fusion
        # The last number that is known of a set is a 1, whose weight is the bias.
        self._first = torch.from_numpy(np.vstack([first, first_bias]))
        self._last, self._last_bias_O1 = torch.from_numpy(last.T.copy()), last_bias[:, None]
        self._overhead_O1, self._scale_ms = head.overhead_O[:, None], np.float32(head.scale_ms)
        self._known_SZ = torch.ones((_SETS_AT_ONCE, SET_WIDTH + 1))
        self._hidden = torch.empty((_SETS_AT_ONCE, len(first_bias)))

    def __call__(self, codes: CodeArray) -> NDArray[np.floating]:
        codes_SH = np.ascontiguousarray(codes).reshape(-1, codes.shape[-1])
        kernel_ms_S = np.empty(len(codes_SH), dtype=np.float32)
        for start in range(0, len(codes_SH), _SETS_AT_ONCE):
            chunk = slice(start, start + _SETS_AT_ONCE)
            kernel_ms_S[chunk] = self._price(codes_SH[chunk])
        return kernel_ms_S.reshape(codes.shape[:-1])

    def _price(self, codes_SH: CodeArray) -> NDArray[np.float32]:
        count_S = codes_SH[:, COUNT]
        own_OS = np.maximum(codes_SH[:, TRAIT_WIDTH:CODE_WIDTH].T.copy(), 0)
        own_OS += self._overhead_O1
        times_OS = self._fusion(codes_SH, np.maximum(count_S, 1), own_OS)
        np.tanh(times_OS, out=times_OS)
        times_OS *= np.float32(MAX_LOG_FUSION)
        np.exp(times_OS, out=times_OS)
        times_OS *= own_OS
        times_OS *= self._scale_ms
        return np.where(count_S < 0.5, np.float32(0), times_OS[0] + times_OS[1])

    def _fusion(
        self, codes_SH: CodeArray, count_S: NDArray[np.float32], own_OS: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """What goes into the tangent, shape (O, S): long rows, for numpy is slow at short ones."""
        known_SZ, hidden = self._known_SZ[: len(codes_SH)], self._hidden[: len(codes_SH)]
        with torch.inference_mode():
            traits_SH = torch.from_numpy(codes_SH)[:, :TRAIT_WIDTH]
            torch.div(traits_SH, torch.from_numpy(count_S)[:, None], out=known_SZ[:, :TRAIT_WIDTH])
            logs_ZS = known_SZ.numpy()[:, TRAIT_WIDTH:-1].T
            for row_S, of_S in zip(logs_ZS, (count_S, *own_OS), strict=True):
                row_S[:] = np.log(of_S)
            torch.mm(known_SZ, self._first, out=hidden).relu_()
            fusion_OS: NDArray[np.float32] = torch.mm(self._last, hidden.T).numpy()
        fusion_OS += self._last_bias_O1
        return fusion_OS
