"""Parts of the dense model as a rank runs them: what decides their latency, and how much arithmetic they need.

A perceptron of widths w0, w1, ... needs these floating-point operations for a batch of B samples, a multiplication and
an addition counted apart, biases and activations left out:

- forward: 2 B sum(w[i] w[i+1]);
- backward: as many for the gradients of the weights, and as many for those of the inputs, but for a bottom
  perceptron's first layer, whose inputs are data.

Dot products of V vectors of D numbers with each other need 2 B V² D forward, since all pairs are computed in one
batched product, and twice that backward. Concatenation needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from autoshard.core.accepted import AT_LEAST_1, check_choice
from autoshard.core.errors import InvalidOptionError
from autoshard.core.tables import DenseLayers, DType

#: Formats that dense layers are measured in.
DENSE_DTYPES = (DType.FP32, DType.FP16, DType.BF16)


class DenseKind(StrEnum):
    """A part of the dense model, as `autoshard.runtime.training.dense.DenseModel` runs it."""

    BOTTOM_MLP = "bottom_mlp"
    """A ReLU after every layer; its inputs are data, which need no gradient."""
    TOP_MLP = "top_mlp"
    """The last layer is linear and gives the logit; its inputs get a gradient."""
    DOT = "dot"
    """Dot products of all pairs of feature vectors, behind the bottom perceptron's output."""
    CONCAT = "concat"
    """The bottom perceptron's output and the pooled embeddings, side by side."""

    @property
    def is_mlp(self) -> bool:
        """Whether it is a perceptron."""
        return self in (DenseKind.BOTTOM_MLP, DenseKind.TOP_MLP)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseShape:
    """What decides how long one part of the dense model takes on a rank.

    Attributes:
        kind: Which part.
        dtype: Number format of weights, inputs and outputs. fp32 is what torch computes unless told otherwise, no TF32.
        batch_size: Samples of the rank's local batch.
        widths: Of a perceptron: its inputs, then every layer's outputs. Of an interaction: the bottom perceptron's
            outputs, then the pooled embeddings' columns.

    Raises:
        InvalidOptionError: If no such part can be run.
    """

    kind: DenseKind
    dtype: DType = DType.FP32
    batch_size: int
    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        AT_LEAST_1.check_fields(self, "batch_size")
        check_choice(self.dtype, DENSE_DTYPES, "dtype")
        if len(self.widths) < 2 or min(self.widths) < 1:
            raise InvalidOptionError(f"must be two or more numbers above 0, got {list(self.widths)}", field="widths")
        if not self.kind.is_mlp and len(self.widths) != 2:
            raise InvalidOptionError(f"of an interaction must be two numbers, got {list(self.widths)}", field="widths")
        if self.kind == DenseKind.TOP_MLP and self.widths[-1] != 1:
            raise InvalidOptionError(
                f"of a top perceptron must end in 1, the logit, got {list(self.widths)}", field="widths"
            )
        if self.kind == DenseKind.DOT and self.widths[1] % self.widths[0]:
            raise InvalidOptionError(
                f"of dot products must be a dim and a multiple of it, got {list(self.widths)}", field="widths"
            )

    @classmethod
    def interaction(
        cls,
        batch_size: int,
        num_features: int,
        embedding_dim: int,
        *,
        kind: DenseKind = DenseKind.DOT,
        dtype: DType = DType.FP32,
    ) -> DenseShape:
        """Interaction of embeddings of one dim with a bottom perceptron that is as wide."""
        widths = (embedding_dim, num_features * embedding_dim)
        return cls(kind=kind, batch_size=batch_size, widths=widths, dtype=dtype)

    @property
    def num_vectors(self) -> int:
        """Feature vectors of dot products, the bottom perceptron's included."""
        return self.widths[1] // self.widths[0] + 1

    @property
    def output_width(self) -> int:
        """Columns of the output."""
        if self.kind == DenseKind.DOT:
            return self.widths[0] + self.num_vectors * (self.num_vectors - 1) // 2
        return sum(self.widths) if self.kind == DenseKind.CONCAT else self.widths[-1]

    @property
    def num_outputs(self) -> int:
        """Numbers that it computes of a sample.

        All layers' outputs; of dot products the vectors side by side, the products of all pairs, and the output.
        """
        if self.kind.is_mlp:
            return sum(self.widths[1:])
        between = self.num_vectors * (self.widths[0] + self.num_vectors) if self.kind == DenseKind.DOT else 0
        return between + self.output_width

    @property
    def num_parameters(self) -> int:
        """Weights and biases."""
        return sum((inputs + 1) * outputs for inputs, outputs in pairwise(self.widths)) if self.kind.is_mlp else 0

    @property
    def forward_flops(self) -> int:
        """Floating-point operations of the forward pass; the formula is this module's first text."""
        if self.kind.is_mlp:
            return 2 * self.batch_size * sum(inputs * outputs for inputs, outputs in pairwise(self.widths))
        if self.kind == DenseKind.DOT:
            return 2 * self.batch_size * self.num_vectors**2 * self.widths[0]
        return 0

    @property
    def backward_flops(self) -> int:
        """Floating-point operations of the backward pass; the formula is this module's first text."""
        unneeded = 2 * self.batch_size * self.widths[0] * self.widths[1] if self.kind == DenseKind.BOTTOM_MLP else 0
        return 2 * self.forward_flops - unneeded


def dense_shapes(
    layers: DenseLayers, feature_dims: Sequence[int], batch_size: int, dtype: DType = DType.FP32
) -> tuple[DenseShape, DenseShape, DenseShape]:
    """The parts that a model's dense layers are measured as: bottom perceptron, interaction, top perceptron.

    Args:
        layers: The model's `dense` part.
        feature_dims: Embedding dim of each feature.
        batch_size: Samples of a rank's local batch.
        dtype: Number format.

    Raises:
        InvalidOptionError: If the layers make no model.
    """
    bottom = DenseShape(
        kind=DenseKind.BOTTOM_MLP,
        batch_size=batch_size,
        widths=(layers.num_dense_features, *layers.bottom_mlp),
        dtype=dtype,
    )
    width = bottom.output_width
    # The rule of `DenseModel`: dot products only where all vectors are of one dim.
    is_dot = layers.interaction == "dot" and set(feature_dims) == {width}
    interaction = DenseShape(
        kind=DenseKind.DOT if is_dot else DenseKind.CONCAT,
        batch_size=batch_size,
        widths=(width, sum(feature_dims)),
        dtype=dtype,
    )
    top = DenseShape(
        kind=DenseKind.TOP_MLP,
        batch_size=batch_size,
        widths=(interaction.output_width, *layers.top_mlp),
        dtype=dtype,
    )
    return bottom, interaction, top
