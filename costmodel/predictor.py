"""The trained network in numpy, so that planners and services need no torch.

Shape suffixes: N shards, S sets of shards, F features, H width of a code, O outputs (forward, backward).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.core.costs import CodeArray
from costmodel.features import FeatureArray, FeatureScaling
from costmodel.weights import CODE_WIDTH, HEADS, Weights, check_weights, layer_name, layer_widths

#: What the encoder learned, then a 1: the sum of codes tells how many shards there are (above all: none).
FULL_CODE_WIDTH = CODE_WIDTH + 1
# OpenBLAS takes a second thread for products of more than 2**18 multiplications; 128 sets x 32 x 64 is just that many.
# On a busy machine every such product waits for that thread: pricing 768 sets took 20.9 ms in one go, 0.9 ms in parts
# (mean of 300; 2 cores of a Xeon with AMX at a load of 6, November 2026).
_SETS_AT_ONCE = 128

_Layer = tuple[NDArray[np.float32], NDArray[np.float32]]


class CostPredictor:
    """Encodes features of shards, and predicts forward and backward latencies from sums of codes.

    Args:
        weights: Tensors named and shaped as `costmodel.weights.weight_shapes` says.
        encoder_hidden: Widths of the encoder's hidden layers.
        scaling: What brought the features to a common scale.
        scale_ms: Milliseconds per unit of the network's outputs.
        source: Where the weights come from, for error messages.

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
        source: str = "weights",
    ) -> None:
        check_weights(weights, encoder_hidden, source)
        self._scaling = scaling
        self._scale_ms = scale_ms
        self._layers = {
            part: [_layer(weights, part, index) for index in range(len(widths) - 1)]
            for part, widths in layer_widths(encoder_hidden).items()
        }

    def encode(self, features_NF: FeatureArray) -> CodeArray:
        """Codes of shards; shape (N, FULL_CODE_WIDTH)."""
        codes_NH = np.ones((len(features_NF), FULL_CODE_WIDTH), dtype=np.float32)
        codes_NH[:, :CODE_WIDTH] = _mlp(self._scaling.apply(features_NF), self._layers["encoder"])
        return codes_NH

    def predict(self, codes_SH: CodeArray) -> NDArray[np.float64]:
        """Forward and backward latency in milliseconds, never negative, 0 for empty sets; shape (S, O)."""
        parts_SO = np.empty((len(codes_SH), len(HEADS)))
        for start in range(0, len(codes_SH), _SETS_AT_ONCE):
            chunk = slice(start, start + _SETS_AT_ONCE)
            learned_SH = codes_SH[chunk, :CODE_WIDTH]
            for output, head in enumerate(HEADS):
                parts_SO[chunk, output] = _mlp(learned_SH, self._layers[head])[:, 0]
        is_empty_S = codes_SH[:, CODE_WIDTH] < 0.5
        parts_SO[is_empty_S] = 0.0
        return np.maximum(parts_SO * self._scale_ms, 0.0)


def _layer(weights: Weights, part: str, index: int) -> _Layer:
    weight = np.ascontiguousarray(weights[layer_name(part, index, "weight")].T, dtype=np.float32)
    return weight, weights[layer_name(part, index, "bias")].astype(np.float32)


def _mlp(values: NDArray[np.float32], layers: Sequence[_Layer]) -> NDArray[np.float32]:
    for index, (weight, bias) in enumerate(layers):
        values = values @ weight
        values += bias
        if index < len(layers) - 1:
            np.maximum(values, np.float32(0), out=values)
    return values
