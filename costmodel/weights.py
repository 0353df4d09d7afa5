"""Names and shapes of the learned cost model's weights, which training writes and prediction reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.core.errors import ModelError
from costmodel.features import NUM_FEATURES

#: Tensors by name.
Weights = Mapping[str, NDArray[Any]]

#: Numbers that the encoder learns for a table; the policy reads these.
CODE_WIDTH = 32
ENCODER_HIDDEN = 128
HEAD_HIDDEN = 64
#: In the order of the outputs.
HEADS = ("forward_head", "backward_head")


def weight_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the weights, as torch names those of CostNetwork."""
    blocks = {"encoder": (NUM_FEATURES, ENCODER_HIDDEN, CODE_WIDTH)}
    blocks |= dict.fromkeys(HEADS, (CODE_WIDTH, HEAD_HIDDEN, 1))
    shapes: dict[str, tuple[int, ...]] = {}
    for block, (inputs, hidden, outputs) in blocks.items():
        shapes |= {f"{block}.0.weight": (hidden, inputs), f"{block}.0.bias": (hidden,)}
        shapes |= {f"{block}.2.weight": (outputs, hidden), f"{block}.2.bias": (outputs,)}
    return shapes


def check_weights(weights: Weights, source: str) -> None:
    """Raises ModelError if a tensor is missing, of another shape, or not finite; the text names it."""
    for name, shape in weight_shapes().items():
        tensor = weights.get(name)
        if tensor is None or tensor.shape != shape:
            got = "nothing" if tensor is None else f"shape {tensor.shape}"
            raise ModelError(f"needs a tensor of shape {shape}, got {got}", field=name, source=source)
        if not np.isfinite(tensor).all():
            raise ModelError("holds numbers that are not finite", field=name, source=source)
