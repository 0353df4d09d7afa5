"""The trained network in numpy, so that planners and services need no torch.

Shape suffixes: N shards, S sets of shards, F features, H width of a code, O outputs (forward, backward).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autoshard.core.costs import CodeArray
from costmodel.features import FeatureArray, FeatureScaling
from costmodel.weights import CODE_WIDTH, HEADS, Weights, check_weights

#: What the encoder learned, then a 1: the sum of codes tells how many shards there are (above all: none).
FULL_CODE_WIDTH = CODE_WIDTH + 1
_SETS_AT_ONCE = 1 << 16

_Layer = tuple[NDArray[np.float32], NDArray[np.float32]]


class CostPredictor:
    """Encodes features of shards, and predicts forward and backward latencies from sums of codes.

    Args:
        weights: Tensors named and shaped as `costmodel.weights.weight_shapes` says.
        scaling: What brought the features to a common scale.
        scale_ms: Milliseconds per unit of the network's outputs.
        source: Where the weights come from, for error messages.

    Raises:
        ModelError: If a tensor is missing, of another shape, or not finite.
    """

    def __init__(self, weights: Weights, scaling: FeatureScaling, scale_ms: float, source: str = "weights") -> None:
        check_weights(weights, source)
        self._scaling = scaling
        self._scale_ms = scale_ms

        def layer(block: str, index: int) -> _Layer:
            weight = np.ascontiguousarray(weights[f"{block}.{index}.weight"].T, dtype=np.float32)
            return weight, weights[f"{block}.{index}.bias"].astype(np.float32)

        self._encoder = (layer("encoder", 0), layer("encoder", 2))
        self._heads = tuple((layer(head, 0), layer(head, 2)) for head in HEADS)

    def encode(self, features_NF: FeatureArray) -> CodeArray:
        """Codes of shards; shape (N, FULL_CODE_WIDTH)."""
        codes_NH = np.ones((len(features_NF), FULL_CODE_WIDTH), dtype=np.float32)
        codes_NH[:, :CODE_WIDTH] = _mlp(self._scaling.apply(features_NF), *self._encoder)
        return codes_NH

    def predict(self, codes_SH: CodeArray) -> NDArray[np.float64]:
        """Forward and backward latency in milliseconds, never negative, 0 for empty sets; shape (S, O)."""
        parts_SO = np.empty((len(codes_SH), len(HEADS)))
        for start in range(0, len(codes_SH), _SETS_AT_ONCE):
            chunk = slice(start, start + _SETS_AT_ONCE)
            learned_SH = codes_SH[chunk, :CODE_WIDTH]
            for output, head in enumerate(self._heads):
                parts_SO[chunk, output] = _mlp(learned_SH, *head)[:, 0]
        is_empty_S = codes_SH[:, CODE_WIDTH] < 0.5
        parts_SO[is_empty_S] = 0.0
        return np.maximum(parts_SO * self._scale_ms, 0.0)


def _mlp(inputs: NDArray[np.float32], hidden: _Layer, output: _Layer) -> NDArray[np.float32]:
    activations: NDArray[np.float32] = inputs @ hidden[0]
    activations += hidden[1]
    np.maximum(activations, np.float32(0), out=activations)
    outputs: NDArray[np.float32] = activations @ output[0]
    outputs += output[1]
    return outputs
