"""The network of the learned cost model: price each shard, add up, correct the sum for what fusing changes.

Shape suffixes: U distinct shards, N shards of all sets, S sets, F features, H width of a code, K kinds of work, O
outputs (forward, backward), Z width of what is known of a set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from costmodel.kernel.features import NUM_INPUTS, NUM_WORK
from costmodel.kernel.weights import (
    ENCODER_HIDDEN,
    LOG_PRICE_RANGE,
    MAX_LOG_FUSION,
    NUM_OUTPUTS,
    OVERHEAD,
    TRAIT_WIDTH,
    layer_widths,
)

#: Work that no sample has gets a price as if the mean sample had this much.
_LEAST_WORK = 1e-2


class ShardEncoder(nn.Module):
    """Code of a shard: traits, and the time that it would add to a set, in units of the card's `scale_ms`.

    That time is the work of its kernels, each kind times a price that depends on what the shard is like.

    Args:
        widths: Widths of the layers of each part, as `layer_widths` has them.
    """

    def __init__(self, widths: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        self.trunk = _mlp(widths["encoder.trunk"])
        self.log_prices = _mlp(widths["encoder.log_prices"])
        self.traits = _mlp(widths["encoder.traits"])
        with torch.no_grad():  # all shards start with nearly the same prices
            self.get_parameter("log_prices.0.weight").mul_(0.1)
            self.get_parameter("log_prices.0.bias").zero_()

    def forward(self, features_UF: Tensor) -> Tensor:
        """Codes, shape (U, H): TRAIT_WIDTH traits, then forward and backward time."""
        hidden = nn.functional.relu(self.trunk(features_UF[:, :NUM_INPUTS]))
        prices_UOK = self.log_prices(hidden).clamp(*LOG_PRICE_RANGE).exp().view(-1, NUM_OUTPUTS, NUM_WORK)
        times_UO = torch.einsum("uok,uk->uo", prices_UOK, features_UF[:, NUM_INPUTS:])
        return torch.cat([self.traits(hidden), times_UO], dim=1)


class CostNetwork(nn.Module):
    """Encoder per shard, sum over shards, correction of the sum; and how far off it may be.

    Source:
        AutoShard Sec. 4.2 and C.1 (21-128-32, sum, 32-64-1) has codes without units and a head that makes a time of
        their sum. Differs: the sum is of times already, which the head only corrects, so that a table costs in
        proportion to its work whether training saw one like it or not; forward and backward are apart; and a second
        head says how uncertain a prediction is.

    Args:
        encoder_hidden: Widths of the encoder's hidden layers.
    """

    def __init__(self, encoder_hidden: Sequence[int] = ENCODER_HIDDEN) -> None:
        super().__init__()
        widths = layer_widths(encoder_hidden)
        self.encoder = ShardEncoder(widths)
        self.fusion = _mlp(widths["fusion"])
        self.doubt = _mlp(widths["doubt"])
        self.register_parameter(OVERHEAD, nn.Parameter(torch.full((NUM_OUTPUTS,), -4.0)))
        with torch.no_grad():  # fusing changes nothing at first
            self.get_parameter("fusion.2.weight").zero_()
            self.get_parameter("fusion.2.bias").zero_()

    @torch.no_grad()
    def start_from(self, work_K: NDArray[np.float64], latency_O: NDArray[np.float64]) -> None:
        """Gives all shards the same prices, and all sets an overhead, before training.

        All kinds of work take equal shares of the mean latency, and the overhead a hundredth of it.

        Args:
            work_K: Work of the mean sample, by kind.
            latency_O: Its latency, in units of the card's `scale_ms`.
        """
        prices_OK = latency_O[:, None] / (NUM_WORK * np.maximum(work_K, _LEAST_WORK))
        self.encoder.get_parameter("log_prices.0.bias").copy_(torch.from_numpy(np.log(prices_OK)).flatten())
        self.get_parameter(OVERHEAD).copy_(torch.from_numpy(np.log(latency_O / 100)))

    def forward(self, features_UF: Tensor, shard_N: Tensor, start_S: Tensor) -> tuple[Tensor, Tensor]:
        """Forward and backward kernel times of sets of shards, shape (S, O), and log spreads of their sum, (S,).

        Args:
            features_UF: Scaled features of the distinct shards; each is encoded once, in however many sets it is.
            shard_N: Which shards the sets hold, set after set; no set is empty.
            start_S: Where each set starts in `shard_N`.
        """
        return self.predict_ms(self.encoder(features_UF), shard_N, start_S)

    def predict_ms(
        self, codes_UH: Tensor, shard_N: Tensor, start_S: Tensor, is_kept_N: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `forward`, from the codes of the distinct shards.

        Args:
            codes_UH: Codes of the distinct shards.
            shard_N: Which shards the sets hold, set after set.
            start_S: Where each set starts in `shard_N`.
            is_kept_N: Whether each shard counts, at least one of each set; all count when left out.
        """
        kept_N = None if is_kept_N is None else is_kept_N.to(codes_UH.dtype)
        codes_SH = nn.functional.embedding_bag(shard_N, codes_UH, start_S, mode="sum", per_sample_weights=kept_N)
        counts_S = _counts(start_S, len(shard_N), kept_N).to(codes_SH.dtype)
        own_SO = codes_SH[:, TRAIT_WIDTH:] + self.get_parameter(OVERHEAD).exp()
        known_SZ = torch.cat(
            [codes_SH[:, :TRAIT_WIDTH] / counts_S[:, None], counts_S.log()[:, None], own_SO.log()], dim=1
        )
        times_SO = own_SO * (MAX_LOG_FUSION * torch.tanh(self.fusion(known_SZ))).exp()
        return times_SO, self.doubt(known_SZ.detach())[:, 0]


def _counts(start_S: Tensor, num_shards: int, kept_N: Tensor | None) -> Tensor:
    """Number of shards of each set that count."""
    ends_S = torch.cat([start_S, start_S.new_full((1,), num_shards)])
    if kept_N is None:
        return torch.diff(ends_S)
    before_N = torch.cat([kept_N.new_zeros(1), kept_N.cumsum(dim=0)])
    return torch.diff(before_N[ends_S])


def _mlp(widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
