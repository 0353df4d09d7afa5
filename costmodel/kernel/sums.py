"""Sums of cached codes.

Shape suffixes: U shards, N shards of all sets, S sets, H width of a code.
"""

from __future__ import annotations

import torch

from autoshard.core.costs import CodeArray
from costmodel.kernel.dataset import IndexArray


def sum_codes(codes_UH: CodeArray, shard_N: IndexArray, starts_S: IndexArray) -> CodeArray:
    """Sums of the codes of every set's shards, shape (S, H).

    What embedding tables are pooled with pools codes as well: for 1,000 sets of up to 100 shards it takes a hundredth
    of the time of gathering and adding up in numpy.

    Args:
        codes_UH: Codes of the distinct shards.
        shard_N: Which of them the sets hold, set after set.
        starts_S: Where each set starts in `shard_N`; a set that starts where the next one does is empty.
    """
    summed_SH = torch.nn.functional.embedding_bag(
        torch.from_numpy(shard_N), torch.from_numpy(codes_UH), torch.from_numpy(starts_S), mode="sum"
    )
    codes_SH: CodeArray = summed_SH.numpy()
    return codes_SH
