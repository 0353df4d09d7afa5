"""The network of the learned cost model: encode each table, add up, price the sum.

Shape suffixes: U distinct shards, N shards of all sets, S sets, F features, H width of a code, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from costmodel.weights import ENCODER_HIDDEN, HEADS, layer_widths


class CostNetwork(nn.Module):
    """Encoder per shard, sum over shards, and a head for each of forward and backward.

    Outputs are in units of the card's `scale_ms`.

    Source:
        AutoShard Sec. 4.2 and C.1: 21-128-32, sum, 32-64-1. Differs: forward and backward have a head each, since a
        plan overlaps them with different things; and the encoder may have more layers.

    Args:
        encoder_hidden: Widths of the encoder's hidden layers.
    """

    def __init__(self, encoder_hidden: Sequence[int] = ENCODER_HIDDEN) -> None:
        super().__init__()
        for part, widths in layer_widths(encoder_hidden).items():
            self.add_module(part, _mlp(widths))

    def forward(self, features_UF: Tensor, shard_N: Tensor, start_S: Tensor) -> Tensor:
        """Forward and backward kernel times of sets of shards; shape (S, O).

        Args:
            features_UF: Scaled features of the distinct shards; each is encoded once, in however many sets it is.
            shard_N: Which shards the sets hold, set after set.
            start_S: Where each set starts in `shard_N`.
        """
        codes_UH = self.get_submodule("encoder")(features_UF)
        codes_SH = nn.functional.embedding_bag(shard_N, codes_UH, start_S, mode="sum")
        return torch.cat([self.get_submodule(head)(codes_SH) for head in HEADS], dim=1)


def _mlp(widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
