"""What the time of a part of dense layers is made of: arithmetic at rates that depend on widths, bytes, layers.

Shape suffixes: N parts, F terms of the roofline, Q numbers that its residual sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from autoshard.core.dense import DenseKind, DenseShape
from autoshard.evaluation.dense_time import touched_bytes
from costmodel.step.regression import FloatArray

#: Terms of the fitted roofline, all at least 0: operations, operations in narrow layers and in small batches (which
#: reach a lower rate), bytes of weights and of activations, layers, and the start.
TERM_NAMES: Final = ("gflops", "narrow_gflops", "small_gflops", "weight_mb", "activation_mb", "layers", "start")
#: Logarithms that the residual sees, with their squares.
RESIDUAL_NAMES: Final = ("operations", "bytes", "batch", "mean_width", "layers")
_NARROW_WIDTH = 64.0
_SMALL_BATCH = 64.0


def term_features(shapes: Sequence[DenseShape], *, backward: bool) -> FloatArray:
    """Terms of the roofline, shape (N, F)."""
    return np.array([_terms(shape, backward=backward) for shape in shapes]).reshape(len(shapes), len(TERM_NAMES))


def residual_features(shapes: Sequence[DenseShape]) -> FloatArray:
    """Logarithms of sizes, shape (N, Q)."""
    return np.array([_logs(shape) for shape in shapes]).reshape(len(shapes), len(RESIDUAL_NAMES))


def _terms(shape: DenseShape, *, backward: bool) -> list[float]:
    flops = shape.backward_flops if backward else shape.forward_flops
    activations = touched_bytes(shape) - shape.dtype.num_bytes * shape.num_parameters
    narrow = flops * _narrowness(shape)
    return [
        flops / 1e9,
        narrow / 1e9,
        flops * _SMALL_BATCH / shape.batch_size / 1e9,
        shape.dtype.num_bytes * shape.num_parameters / 1e6,
        activations / 1e6,
        float(_num_layers(shape)),
        1.0,
    ]


def _narrowness(shape: DenseShape) -> float:
    """Mean over operations of `_NARROW_WIDTH` over the narrower side of the layer that they are in."""
    if not shape.kind.is_mlp:
        return _NARROW_WIDTH / min(shape.num_vectors, shape.widths[0]) if shape.kind is DenseKind.DOT else 0.0
    sizes = [(inputs * outputs, min(inputs, outputs)) for inputs, outputs in pairwise(shape.widths)]
    return sum(size * _NARROW_WIDTH / narrow for size, narrow in sizes) / sum(size for size, _ in sizes)


def _num_layers(shape: DenseShape) -> int:
    return len(shape.widths) - 1 if shape.kind.is_mlp else 1


def _logs(shape: DenseShape) -> list[float]:
    values = (
        max(1.0, float(shape.forward_flops)),
        touched_bytes(shape),
        float(shape.batch_size),
        float(np.mean(shape.widths)),
        float(_num_layers(shape)),
    )
    return [float(np.log(value)) for value in values]
