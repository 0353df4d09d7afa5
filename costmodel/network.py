"""The network of the learned cost model: encode each table, add up, price the sum.

Shape suffixes: N tables, S sets of tables, F features, H width of a code, O outputs.
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
        AutoShard Sec. 4.2 and C.1. Differs: forward and backward have a head each, since a plan overlaps them
        with different things.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder = _mlp(NUM_FEATURES, ENCODER_HIDDEN, CODE_WIDTH)
        self.forward_head = _mlp(CODE_WIDTH, HEAD_HIDDEN, 1)
        self.backward_head = _mlp(CODE_WIDTH, HEAD_HIDDEN, 1)

    def forward(self, features_NF: Tensor, owner_N: Tensor, num_sets: int) -> Tensor:
        """Forward and backward kernel times of sets of tables; shape (S, 2).

        Args:
            features_NF: Scaled features of the tables of all sets.
            owner_N: Index of the set of each table.
            num_sets: S.
        """
        codes_NH = self.encoder(features_NF)
        codes_SH = codes_NH.new_zeros((num_sets, CODE_WIDTH)).index_add(0, owner_N, codes_NH)
        return torch.cat([self.forward_head(codes_SH), self.backward_head(codes_SH)], dim=1)


def _mlp(num_inputs: int, num_hidden: int, num_outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(num_inputs, num_hidden), nn.ReLU(), nn.Linear(num_hidden, num_outputs))
