"""The network of the learned cost model: encode each table, add up, price the sum.

Shape suffixes: U distinct shards, N shards of all sets, S sets, F features, H width of a code, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from costmodel.features import NUM_FEATURES
from costmodel.weights import CODE_WIDTH, ENCODER_HIDDEN, HEAD_HIDDEN


class CostNetwork(nn.Module):
    """Encoder 21-128-32 per table, sum over tables, and a head 32-64-1 for each of forward and backward.

    Outputs are in units of the card's `scale_ms`.

    Source:
        AutoShard Sec. 4.2 and C.1. Differs: forward and backward have a head each, since a plan overlaps them with
        different things.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder = _mlp(NUM_FEATURES, ENCODER_HIDDEN, CODE_WIDTH)
        self.forward_head = _mlp(CODE_WIDTH, HEAD_HIDDEN, 1)
        self.backward_head = _mlp(CODE_WIDTH, HEAD_HIDDEN, 1)

    def forward(self, features_UF: Tensor, shard_N: Tensor, start_S: Tensor) -> Tensor:
        """Forward and backward kernel times of sets of shards; shape (S, O).

        Args:
            features_UF: Scaled features of the distinct shards; each is encoded once, in however many sets it is.
            shard_N: Which shards the sets hold, set after set.
            start_S: Where each set starts in `shard_N`.
        """
        codes_SH = nn.functional.embedding_bag(shard_N, self.encoder(features_UF), start_S, mode="sum")
        return torch.cat([self.forward_head(codes_SH), self.backward_head(codes_SH)], dim=1)


def _mlp(num_inputs: int, num_hidden: int, num_outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_inputs, num_hidden), nn.ReLU(), nn.Linear(num_hidden, num_outputs))
