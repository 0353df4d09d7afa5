"""The trained network in numpy, so that planners and services need no torch.

Shape suffixes: N shards, S sets of shards, F features, H width of a code, K kinds of work, O outputs (forward,
backward), Z width of what is known of a set, T its traits, X width of the fusion network's hidden layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.core.costs import CodeArray, KernelFloor
from costmodel.kernel.features import NUM_INPUTS, NUM_WORK, FeatureArray, FeatureScaling
from costmodel.kernel.weights import (
    CODE_WIDTH,
    LOG_PRICE_RANGE,
    LOG_SPREAD_RANGE,
    MAX_LOG_FUSION,
    NUM_OUTPUTS,
    OVERHEAD,
    SET_WIDTH,
    TRAIT_WIDTH,
    Layer,
    Weights,
    layers_of,
)

#: What the encoder learned, then a 1 (the sum of codes tells how many shards there are, above all: none), then a 1
#: for shards unlike all that were measured.
FULL_CODE_WIDTH = CODE_WIDTH + 2
COUNT, NUM_OUTSIDE = CODE_WIDTH, CODE_WIDTH + 1
# OpenBLAS takes a second thread for products of more than 2**18 multiplications. On a busy machine every such product
# waits for that thread: pricing 768 sets took 20.9 ms in one go, 0.9 ms in parts (mean of 300; 2 cores of a Xeon with
# AMX at a load of 6, November 2026).
_PRODUCTS_AT_ONCE = 1 << 18
#: What is made of so many sets on the way stays within a core's cache.
_SETS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SetHead:
    """What makes a price of a sum of codes, for those who price many sums in their own way.

    What is known of a set goes through two layers, and corrects the sum of its shards' own times: see `corrected`.

    Attributes:
        overhead_O: Time of any set, in units of `scale_ms`.
        of_traits_TX: The first layer's weights of the mean traits.
        of_count_X: Of the logarithm of the number of shards.
        of_own_OX: Of the logarithms of the sums of own times.
        bias_X: The first layer's bias.
        last_XO: The last layer's weights.
        last_bias_O: Its bias.
        scale_ms: Milliseconds per unit.
    """

    overhead_O: NDArray[np.float32]
    of_traits_TX: NDArray[np.float32]
    of_count_X: NDArray[np.float32]
    of_own_OX: NDArray[np.float32]
    bias_X: NDArray[np.float32]
    last_XO: NDArray[np.float32]
    last_bias_O: NDArray[np.float32]
    scale_ms: float


def corrected(own: NDArray[np.float32], fusion: NDArray[np.float32]) -> NDArray[np.float32]:
    """Times of sets: the sums of their shards' own times, corrected by the last layer's outputs.

    Both are of one shape, whatever their axes; the times take the place of the outputs.
    """
    np.tanh(fusion, out=fusion)
    fusion *= np.float32(MAX_LOG_FUSION)
    np.exp(fusion, out=fusion)
    fusion *= own
    return fusion


class CostPredictor:
    """Encodes features of shards, and predicts forward and backward latencies from sums of codes.

    Args:
        weights: Tensors named and shaped as `costmodel.kernel.weights.weight_shapes` says.
        encoder_hidden: Widths of the encoder's hidden layers.
        scaling: What brought the features to a common scale.
        scale_ms: Milliseconds per unit of the network's outputs.

    Raises:
        ModelError: If a tensor is missing, of another shape, or not finite.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        encoder_hidden: Sequence[int],
        scaling: FeatureScaling,
        scale_ms: float,
    ) -> None:
        self._layers = layers_of(weights, encoder_hidden)
        self._scaling = scaling
        self._scale_ms = scale_ms
        self._overhead_O = np.exp(weights[OVERHEAD].astype(np.float32))

    @property
    def set_head(self) -> SetHead:
        """What `predict` works with."""
        (first, first_bias), (last, last_bias) = self._layers["fusion"]
        return SetHead(
            overhead_O=self._overhead_O,
            of_traits_TX=first[:TRAIT_WIDTH],
            of_count_X=first[TRAIT_WIDTH],
            of_own_OX=first[TRAIT_WIDTH + 1 :],
            bias_X=first_bias,
            last_XO=last,
            last_bias_O=last_bias,
            scale_ms=self._scale_ms,
        )

    def encode(self, features_NF: FeatureArray) -> CodeArray:
        """Codes of shards, none of them outside of what was measured; shape (N, FULL_CODE_WIDTH)."""
        scaled_NF = self._scaling.apply(features_NF)
        hidden = np.maximum(_mlp(scaled_NF[:, :NUM_INPUTS], self._layers["encoder.trunk"]), 0)
        log_prices = np.clip(_mlp(hidden, self._layers["encoder.log_prices"]), *LOG_PRICE_RANGE)
        prices_NOK = np.exp(log_prices).reshape(-1, NUM_OUTPUTS, NUM_WORK)
        codes_NH = np.zeros((len(features_NF), FULL_CODE_WIDTH), dtype=np.float32)
        codes_NH[:, :TRAIT_WIDTH] = _mlp(hidden, self._layers["encoder.traits"])
        codes_NH[:, TRAIT_WIDTH:CODE_WIDTH] = np.einsum("nok,nk->no", prices_NOK, scaled_NF[:, NUM_INPUTS:])
        codes_NH[:, COUNT] = 1.0
        return codes_NH

    def predict(self, codes_SH: CodeArray) -> NDArray[np.float64]:
        """Forward and backward latency in milliseconds, never negative, 0 for empty sets; shape (S, O)."""
        parts_SO = np.empty((len(codes_SH), NUM_OUTPUTS))
        for start in range(0, len(codes_SH), _SETS_AT_ONCE):
            chunk = slice(start, start + _SETS_AT_ONCE)
            known_SZ, own_SO = self._known(codes_SH[chunk])
            parts_SO[chunk] = corrected(own_SO, _mlp(known_SZ, self._layers["fusion"]))
        parts_SO[codes_SH[:, COUNT] < 0.5] = 0.0
        return parts_SO * self._scale_ms

    def floor(self, codes_NH: CodeArray) -> KernelFloor:
        """What shards add at least to the latencies of sets, whatever runs beside them.

        The correction of a set is at least exp(-MAX_LOG_FUSION), so that no set takes less than that share of the sum
        of its shards' own times.
        """
        least = float(np.exp(-MAX_LOG_FUSION)) * self._scale_ms
        own_NO = codes_NH[:, TRAIT_WIDTH:CODE_WIDTH].astype(np.float64)
        forward_base, backward_base = (least * self._overhead_O.astype(np.float64)).tolist()
        return KernelFloor(
            forward_ms_N=least * own_NO[:, 0],
            backward_ms_N=least * own_NO[:, 1],
            kernel_N=np.zeros(len(codes_NH), dtype=np.int64),
            forward_base_ms=forward_base,
            backward_base_ms=backward_base,
        )

    def spread(self, codes_SH: CodeArray) -> NDArray[np.float64]:
        """How far the logarithm of the sum may be off, in units that the card calibrates; shape (S,)."""
        known_SZ, _ = self._known(codes_SH)
        log_spread_S = _mlp(known_SZ, self._layers["doubt"])[:, 0]
        return np.exp(np.clip(log_spread_S, *LOG_SPREAD_RANGE)).astype(np.float64)

    def _known(self, codes_SH: CodeArray) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """What is known of sets, shape (S, Z), and the sums of their shards' own times with the overhead, (S, O)."""
        counts_S = np.maximum(codes_SH[:, COUNT], 1.0)
        # Rounding can leave a little less than nothing where shards were taken out again.
        own_SO = np.maximum(codes_SH[:, TRAIT_WIDTH:CODE_WIDTH], 0.0) + self._overhead_O
        known_SZ = np.empty((len(codes_SH), SET_WIDTH), dtype=np.float32)
        np.divide(codes_SH[:, :TRAIT_WIDTH], counts_S[:, None], out=known_SZ[:, :TRAIT_WIDTH])
        np.log(counts_S, out=known_SZ[:, TRAIT_WIDTH])
        np.log(own_SO, out=known_SZ[:, TRAIT_WIDTH + 1 :])
        return known_SZ, own_SO


def _mlp(values: NDArray[np.float32], layers: Sequence[Layer]) -> NDArray[np.float32]:
    for index, (weight, bias) in enumerate(layers):
        values = _product(values, weight)
        values += bias
        if index < len(layers) - 1:
            np.maximum(values, np.float32(0), out=values)
    return values


def _product(values: NDArray[np.float32], weight: NDArray[np.float32]) -> NDArray[np.float32]:
    rows = _PRODUCTS_AT_ONCE // weight.size
    if len(values) <= rows:
        return values @ weight
    product = np.empty((len(values), weight.shape[1]), dtype=np.float32)
    for start in range(0, len(values), rows):
        np.matmul(values[start : start + rows], weight, out=product[start : start + rows])
    return product
