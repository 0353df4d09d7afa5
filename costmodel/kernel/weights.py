"""Names and shapes of the learned cost model's weights, which training writes and prediction reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.core.errors import ModelError
from costmodel.kernel.features import NUM_INPUTS, NUM_WORK
from costmodel.registry.card_fields import MAX_WEIGHT, check_tensor

#: Tensors by name.
Weights = Mapping[str, NDArray[Any]]

#: A layer's weights, from inputs to outputs, and its bias.
Layer = tuple[NDArray[np.float32], NDArray[np.float32]]

#: Forward and backward.
NUM_OUTPUTS = 2
#: Numbers of a shard's code that say what it is like.
TRAIT_WIDTH = 32
#: Numbers that the encoder makes of a shard: its traits, and its own forward and backward time.
CODE_WIDTH = TRAIT_WIDTH + NUM_OUTPUTS
#: What is known of a set: its mean traits, how many shards it has, and the sums of their own times.
SET_WIDTH = TRAIT_WIDTH + 1 + NUM_OUTPUTS
ENCODER_HIDDEN = (64, 64)
SET_HIDDEN = 64
#: Sets cost between exp(-this) and exp(this) times the sum of their shards' own times.
MAX_LOG_FUSION = 0.7
#: Logarithms of prices per unit of work stay between these.
LOG_PRICE_RANGE = (-14.0, 6.0)
#: Logarithms of spreads stay between these: half a percent, and a factor of e.
LOG_SPREAD_RANGE = (-5.3, 1.0)

#: Names of single tensors: logarithm of the time that a set takes however few shards it has, relative to scale_ms.
OVERHEAD = "log_overhead"
MAX_LOG_OVERHEAD = 40.0


def layer_widths(encoder_hidden: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Widths of the layers of each part of the network, from its inputs to its outputs."""
    last = encoder_hidden[-1]
    return {
        "encoder.trunk": (NUM_INPUTS, *encoder_hidden),
        "encoder.log_prices": (last, NUM_OUTPUTS * NUM_WORK),
        "encoder.traits": (last, TRAIT_WIDTH),
        "fusion": (SET_WIDTH, SET_HIDDEN, NUM_OUTPUTS),
        "doubt": (SET_WIDTH, SET_HIDDEN // 2, 1),
    }


def weight_shapes(encoder_hidden: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights, as torch names those of CostNetwork."""
    shapes: dict[str, tuple[int, ...]] = {OVERHEAD: (NUM_OUTPUTS,)}
    for part, widths in layer_widths(encoder_hidden).items():
        for layer, (inputs, outputs) in enumerate(pairwise(widths)):
            shapes[layer_name(part, layer, "weight")] = (outputs, inputs)
            shapes[layer_name(part, layer, "bias")] = (outputs,)
    return shapes


def layer_name(part: str, layer: int, tensor: str) -> str:
    """Name of a layer's tensor; torch counts the activations between layers too."""
    return f"{part}.{2 * layer}.{tensor}"


def layers_of(weights: Weights, encoder_hidden: Sequence[int]) -> dict[str, list[Layer]]:
    """The layers of each part of the network.

    Raises:
        ModelError: If a tensor is missing, of another shape or dtype, or has odd numbers; the text names it.
    """
    widths_of = layer_widths(encoder_hidden)
    for name, shape in weight_shapes(encoder_hidden).items():
        tensor = weights.get(name)
        if tensor is None or tensor.shape != shape:
            got = "nothing" if tensor is None else f"shape {tensor.shape}"
            raise ModelError(f"needs a tensor of shape {shape}, got {got}", field=name)
        check_tensor(tensor, name, limit=MAX_LOG_OVERHEAD if name == OVERHEAD else MAX_WEIGHT)
    return {
        part: [_layer(weights, part, index) for index in range(len(widths) - 1)] for part, widths in widths_of.items()
    }


def _layer(weights: Weights, part: str, index: int) -> Layer:
    weight = np.ascontiguousarray(weights[layer_name(part, index, "weight")].T, dtype=np.float32)
    return weight, weights[layer_name(part, index, "bias")].astype(np.float32)
