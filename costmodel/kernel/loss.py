"""What training makes small: errors of predictions, and what sets take too little for the shards that they hold.

Shape suffixes: U distinct shards, N shards of all sets, M shards that are kept, B sets, H width of a code, O outputs
(forward, backward), E errors (forward, backward, sum).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from costmodel.kernel.network import CostNetwork
from costmodel.kernel.weights import LOG_SPREAD_RANGE, TRAIT_WIDTH

#: Weight of the forward part's own relative error.
_FORWARD_WEIGHT = 0.1
#: Share of the sets of which only the costliest shard is kept: where plans have one table that decides alone.
_ALONE_SHARE = 0.3
#: Weights of what is missing relative to the whole set, and relative to what was left out. With 1 and 0.1 some tables
#: still came cheaper with company, by 0.1%; with 5 and 0.3 held-out errors grew by 0.02 points.
_WHOLE_WEIGHT, _LEFT_OUT_WEIGHT = 5.0, 0.1
#: What was left out counts as at least this share of the set.
_LEAST_LEFT_OUT = 1e-3


def prediction_loss(predicted_BO: Tensor, log_spread_B: Tensor, measured_BO: Tensor) -> Tensor:
    """Mean absolute error over the measured kernel time, so that all sets count alike, and the spread's likelihood.

    The sum is a part of its own, so that forward and backward do not err in the same direction for free; the forward
    part also counts relative to itself, since it is small. Spreads are those of Laplace's distribution, and do not
    pull at the predictions.
    """
    kernel_B1 = measured_BO.sum(dim=1, keepdim=True)
    summed_B1 = predicted_BO.sum(dim=1, keepdim=True)
    error_BE = torch.cat([predicted_BO - measured_BO, summed_B1 - kernel_B1], dim=1) / kernel_B1
    forward_B = predicted_BO[:, 0] / measured_BO[:, 0].clamp(min=1e-6) - 1
    off_B = (kernel_B1 / summed_B1.detach()).log().abs()[:, 0]
    log_spread_B = log_spread_B.clamp(*LOG_SPREAD_RANGE)
    doubt_B = off_B * torch.exp(-log_spread_B) + log_spread_B
    return error_BE.abs().mean() + _FORWARD_WEIGHT * forward_B.abs().clamp(max=1.0).mean() + doubt_B.mean()


def missing_growth(
    network: CostNetwork,
    codes_UH: Tensor,
    shard_N: Tensor,
    start_B: Tensor,
    predicted_BO: Tensor,
    least_share: float,
    is_drawn_N: Tensor,
) -> Tensor:
    """Loss of sets that take less than a part of them and `least_share` of the own times of the shards left out.

    What a kernel does for one table does not become less by another one. Without this in the loss, a network that is
    1% off on average sells some tables for less than nothing, and a search finds them: of the costliest table of 800
    it made 1.4% less by the right company.

    Args:
        network: Prices parts of sets.
        codes_UH: Its codes of the distinct shards.
        shard_N: Which shards the sets hold, set after set.
        start_B: Where each set starts in `shard_N`.
        predicted_BO: Its prices of the sets.
        least_share: Share of its own time that a shard must add.
        is_drawn_N: Shards that the part keeps, as `drawn_shards` has them; it keeps each set's costliest one, too.
    """
    owner_N = _owners(start_B, len(shard_N))
    own_N = codes_UH.detach()[:, TRAIT_WIDTH:].sum(dim=1)[shard_N]
    costliest_B = own_N.new_zeros(len(start_B)).scatter_reduce(0, owner_N, own_N, "amax")
    is_kept_N = is_drawn_N | (own_N >= costliest_B[owner_N])
    part_BO, _ = network.predict_ms(codes_UH, shard_N, start_B, is_kept_N)
    left_out_N = codes_UH[:, TRAIT_WIDTH:].sum(dim=1)[shard_N] * ~is_kept_N
    left_out_B = left_out_N.new_zeros(len(start_B)).index_add(0, owner_N, left_out_N)
    whole_B = predicted_BO.sum(dim=1)
    missing_B = torch.relu(part_BO.sum(dim=1) + least_share * left_out_B - whole_B)
    of_whole_B = whole_B.detach()
    of_left_out_B = left_out_B.detach() + _LEAST_LEFT_OUT * of_whole_B
    return _WHOLE_WEIGHT * (missing_B / of_whole_B).mean() + _LEFT_OUT_WEIGHT * (missing_B / of_left_out_B).mean()


def drawn_shards(starts_B: NDArray[np.int64], num_shards: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """A random part of each set's shards, of any size; of some sets none. Shape (N,)."""
    counts_B = np.diff(starts_B, append=num_shards)
    share_B = rng.random(len(starts_B)) ** 2
    share_B[rng.random(len(starts_B)) < _ALONE_SHARE] = 0.0
    is_drawn_N: NDArray[np.bool_] = rng.random(num_shards) < np.repeat(share_B, counts_B)
    return is_drawn_N


def _owners(start_B: Tensor, num_shards: int) -> Tensor:
    """The set of each shard, shape (N,)."""
    counts_B = torch.diff(start_B, append=start_B.new_full((1,), num_shards))
    # With the size given, no device has to be asked for it.
    return torch.repeat_interleave(torch.arange(len(start_B), device=start_B.device), counts_B, output_size=num_shards)
