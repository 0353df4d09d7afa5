"""Batches of ids for shards, drawn once per shard and reused.

Shape suffixes: S shards, B bags, L lookups.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from autoshard.core import NUM_REUSE_BINS, REUSE_BIN_EDGES, LocalShard
from autoshard.core.batches import Bags, draw_bags
from autoshard.formats.stores.samples import MeasuredShard


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardBatch:
    """One batch of a shard and what it holds."""

    bags: Bags
    measured: MeasuredShard


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedInput:
    """One batch of several shards, whose ids come shard by shard.

    Attributes:
        ids_L: Ids, int64.
        rows_L: The rows that they are of one table that has those of all shards, shard by shard.
        lengths_SB: Bag lengths, int32; shards have as many bags each.
    """

    ids_L: torch.Tensor
    rows_L: torch.Tensor
    lengths_SB: torch.Tensor


#: Of the batches that are held on a CPU.
HELD_BYTES = 512 * 2**20


class BatchCache:
    """Draws each shard's batches once, and keeps as many as fit.

    A batch depends on the shard alone (its name aside), so all runs on all machines look up the same rows.
    """

    def __init__(self, max_bytes: int = HELD_BYTES) -> None:
        """Starts empty; batches beyond `max_bytes` push the oldest out."""
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self.batches: dict[tuple[LocalShard, int], ShardBatch] = {}

    def prepare(self, wanted: Iterable[tuple[LocalShard, int]]) -> None:
        """Draws the first batches of shards, each with its number of draws, on all cores; what is held is left."""
        missing = dict.fromkeys(
            (shard, draw) for shard, num_draws in wanted for draw in range(num_draws) if (shard, draw) not in self
        )
        if len(missing) > 1:
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
                for key, batch in zip(missing, threads.map(draw_batch, *zip(*missing, strict=True)), strict=True):
                    self._keep(key, batch)

    def __contains__(self, key: object) -> bool:
        """Whether a shard's draw is held."""
        return key in self.batches

    def __call__(self, shard: LocalShard, num_draws: int = 1) -> list[ShardBatch]:
        """The shard's first `num_draws` batches."""
        return [self._draw(shard, draw) for draw in range(num_draws)]

    def _draw(self, shard: LocalShard, draw: int) -> ShardBatch:
        if (shard, draw) not in self:
            self._keep((shard, draw), draw_batch(shard, draw))
        return self.batches[shard, draw]

    def _keep(self, key: tuple[LocalShard, int], batch: ShardBatch) -> None:
        self.batches[key] = batch
        self._held_bytes += _num_bytes(batch)
        while self._held_bytes > self._max_bytes and len(self.batches) > 1:
            oldest = next(iter(self.batches))
            self._held_bytes -= _num_bytes(self.batches.pop(oldest))


def draw_batch(shard: LocalShard, draw: int = 0) -> ShardBatch:
    """Draws a batch of a shard, with a seed made of what the batch depends on and the number of the draw."""
    depends_on = (shard.num_embeddings, shard.num_bags, shard.pooling_factor, *([draw] if draw else []))
    seed = hashlib.sha256(repr(depends_on).encode())
    seed.update(shard.access.ranks_K.tobytes() + shard.access.cumulative_K.tobytes())
    rng = np.random.default_rng(int.from_bytes(seed.digest()[:8], "little"))
    bags = draw_bags(shard.access, shard.pooling_factor, shard.num_bags, rng)
    _, counts = np.unique(bags.ids_L, return_counts=True)
    measured = MeasuredShard(
        shard=shard, num_lookups=len(bags.ids_L), num_distinct=len(counts), reuse_bins=reuse_bins_of(counts)
    )
    return ShardBatch(bags=bags, measured=measured)


def reuse_bins_of(counts: NDArray[np.int64]) -> tuple[float, ...]:
    """Shares of AutoShard's 17 reuse bins (0, 1], (1, 2], (2, 4] ... of rows hit `counts` times each; all 0 of none.

    Source:
        AutoShard B.2.
    """
    if not len(counts):
        return (0.0,) * NUM_REUSE_BINS
    bins = np.searchsorted(REUSE_BIN_EDGES, counts)
    shares = np.bincount(bins, minlength=NUM_REUSE_BINS) / len(counts)
    return tuple(shares.astype(np.float32).tolist())


def fuse(batches: Sequence[ShardBatch], device: torch.device) -> FusedInput:
    """Joins the batches of a set of shards, in order."""
    first_rows = accumulate((batch.measured.shard.num_embeddings for batch in batches), initial=0)
    rows = [batch.bags.ids_L + first for batch, first in zip(batches, first_rows, strict=False)]
    lengths_SB = np.stack([batch.bags.lengths_B for batch in batches]).astype(np.int32)
    joined = (np.concatenate([batch.bags.ids_L for batch in batches]), np.concatenate(rows), lengths_SB)
    ids_L, rows_L, lengths = (torch.from_numpy(one).to(device) for one in joined)
    return FusedInput(ids_L=ids_L, rows_L=rows_L, lengths_SB=lengths)


def _num_bytes(batch: ShardBatch) -> int:
    return batch.bags.ids_L.nbytes + batch.bags.lengths_B.nbytes
