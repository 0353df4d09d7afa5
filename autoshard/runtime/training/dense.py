"""The dense part of a DLRM: two perceptrons with the features' interaction between them.

Shape suffixes: B samples of a local batch, N dense features, F features, D embedding dim, C columns of all features.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from autoshard.core import DenseLayers
from autoshard.core.errors import InvalidPlanError
from autoshard.runtime.results import DEFAULT_DENSE_FEATURES

_DEFAULT_HIDDEN = 64


def default_layers(feature_dims: Sequence[int], num_dense: int = DEFAULT_DENSE_FEATURES) -> DenseLayers:
    """Small layers for plans that describe none."""
    return DenseLayers(
        num_dense_features=num_dense,
        bottom_mlp=(_DEFAULT_HIDDEN, max(feature_dims)),
        top_mlp=(_DEFAULT_HIDDEN, 1),
    )


class DenseModel(nn.Module):
    """Bottom perceptron over dense features, interaction with the pooled embeddings, top perceptron to one logit.

    The interaction is what the layers ask for only where that is possible: dot products need features of one
    dim, equal to the bottom perceptron's last width. Everything else is executed as concatenation.

    Args:
        layers: Widths of the perceptrons.
        feature_dims: Embedding dim of each feature.
        seed: Seed of the initial weights.
        smooth: SiLU in place of ReLU. For comparing two trainings: where a ReLU's input is near its kink, rounding
            decides whether a gradient passes, and AdaGrad makes a visible difference of it.

    Raises:
        InvalidPlanError: If the widths make no model.

    Source:
        Naumov et al., "Deep learning recommendation model" (2019), for the shape of the model.
    """

    def __init__(self, layers: DenseLayers, feature_dims: Sequence[int], seed: int, *, smooth: bool = False) -> None:
        super().__init__()
        _check(layers)
        bottom_width, num_features = layers.bottom_mlp[-1], len(feature_dims)
        self.interaction = "dot" if layers.interaction == "dot" and set(feature_dims) == {bottom_width} else "concat"
        if self.interaction == "dot":
            top_inputs = bottom_width + num_features * (num_features + 1) // 2
        else:
            top_inputs = bottom_width + sum(feature_dims)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.bottom = _perceptron((layers.num_dense_features, *layers.bottom_mlp), smooth)
            # The logit is linear.
            self.top = _perceptron((top_inputs, *layers.top_mlp), smooth)[:-1]
        pairs = torch.tril_indices(num_features + 1, num_features + 1, offset=-1)
        self.register_buffer("_pairs", pairs[0] * (num_features + 1) + pairs[1], persistent=False)

    def forward(self, bottom_BD: torch.Tensor, pooled_BC: torch.Tensor) -> torch.Tensor:
        """Logits, shape (B,), from what `bottom` made of the dense features, and the pooled embeddings."""
        if self.interaction == "concat":
            interacted = torch.cat([bottom_BD, pooled_BC], dim=1)
        else:
            B, D = bottom_BD.shape
            vectors_BFD = torch.cat([bottom_BD, pooled_BC], dim=1).view(B, -1, D)
            products = torch.bmm(vectors_BFD, vectors_BFD.transpose(1, 2)).view(B, -1)
            pairs: torch.Tensor = self._pairs  # type: ignore[assignment]
            interacted = torch.cat([bottom_BD, products.index_select(1, pairs)], dim=1)
        logits: torch.Tensor = self.top(interacted)
        return logits.squeeze(1)


def _check(layers: DenseLayers) -> None:
    if layers.num_dense_features < 1:
        raise InvalidPlanError(
            f"must be at least 1, got {layers.num_dense_features}", field="tables.dense.num_dense_features"
        )
    for label, widths in (("bottom_mlp", layers.bottom_mlp), ("top_mlp", layers.top_mlp)):
        if not widths or min(widths) < 1:
            raise InvalidPlanError(f"needs widths of at least 1, got {list(widths)}", field=f"tables.dense.{label}")
    if layers.top_mlp[-1] != 1:
        raise InvalidPlanError(
            f"must end in width 1, the click's logit, got {layers.top_mlp[-1]}", field="tables.dense.top_mlp"
        )


def _perceptron(widths: Sequence[int], smooth: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.SiLU() if smooth else nn.ReLU()]
    return nn.Sequential(*layers)
