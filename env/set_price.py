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

    The learned model's arithmetic is done on as many threads as torch may use, in memory that is kept: 2,048 sets take
    0.12 ms on one thread, and 0.9 ms with `LearnedCostModel.price`, whose parts suit a few dozen sets (one core of a
    Xeon with AMX, November 2026). All other models price as they always do.
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
        (first, first_bias), (self._last, self._last_bias) = head.fusion
        self._overhead_O, self._scale_ms = head.overhead_O, np.float32(head.scale_ms)
        # The last number that is known of a set is a 1, whose weight is the bias.
        self._first = torch.from_numpy(np.vstack([first, first_bias]))
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
        num_sets, count_S = len(codes_SH), codes_SH[:, COUNT]
        own_SO = np.maximum(codes_SH[:, TRAIT_WIDTH:CODE_WIDTH], 0) + self._overhead_O
        times_SO = self._fusion(codes_SH, np.maximum(count_S, 1), own_SO, num_sets)
        np.tanh(times_SO, out=times_SO)
        times_SO *= np.float32(MAX_LOG_FUSION)
        np.exp(times_SO, out=times_SO)
        times_SO *= own_SO
        kernel_ms_S = (times_SO[:, 0] + times_SO[:, 1]) * self._scale_ms
        kernel_ms_S[count_S < 0.5] = 0
        return kernel_ms_S

    def _fusion(
        self, codes_SH: CodeArray, count_S: NDArray[np.float32], own_SO: NDArray[np.float32], num_sets: int
    ) -> NDArray[np.float32]:
        known_SZ, hidden = self._known_SZ[:num_sets], self._hidden[:num_sets]
        with torch.inference_mode():
            traits_SH, count_S1 = torch.from_numpy(codes_SH)[:, :TRAIT_WIDTH], torch.from_numpy(count_S)[:, None]
            torch.div(traits_SH, count_S1, out=known_SZ[:, :TRAIT_WIDTH])
            logs_SZ = known_SZ.numpy()[:, TRAIT_WIDTH:]
            logs_SZ[:, 0] = np.log(count_S)
            logs_SZ[:, 1:-1] = np.log(own_SO)
            torch.mm(known_SZ, self._first, out=hidden).relu_()
        fusion_SO: NDArray[np.float32] = hidden.numpy() @ self._last
        fusion_SO += self._last_bias
        return fusion_SO
