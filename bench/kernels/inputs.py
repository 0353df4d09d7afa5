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

from autoshard.core import NUM_REUSE_BINS, REUSE_BIN_EDGES, AccessProfile, LocalShard, Update
from autoshard.core.batches import coprime_step, draw_bags, draw_lengths
from autoshard.core.shard import UPDATE_WRITES
from autoshard.formats.stores.samples import MeasuredShard

_CPU = torch.device("cpu")
#: Of the rows that all ranks of a replica hit: by how many the expected ones may be missed, the most lookups that are
#: drawn for them, and how often what lies between too few lookups and enough is halved.
_ROWS_APART, _MOST_LOOKUPS, _HALVINGS = 0.5, 2.0**24, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardBatch:
    """One batch of a shard, on the device that it was drawn for, and what it holds.

    Attributes:
        ids_L: Ids in bag order, int64.
        lengths_B: Bag lengths, int32.
        measured: The shard, and what the batch holds of it.
        updated_U: Rising rows of a replica that any of its ranks hits, which all of them update; none of other shards.
    """

    ids_L: torch.Tensor
    lengths_B: torch.Tensor
    measured: MeasuredShard
    updated_U: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedInput:
    """One batch of several shards, whose ids come shard by shard.

    Attributes:
        ids_L: Ids, int64; or the rows that they are of one table that has those of all shards, one below the other.
        lengths_SB: Bag lengths, int32; shards have as many bags each.
    """

    ids_L: torch.Tensor
    lengths_SB: torch.Tensor


#: Of the batches that are held.
_HELD_BYTES = 512 * 2**20


class BatchCache:
    """Draws each shard's batches once, and keeps as many as fit.

    A batch depends on the shard alone (its name aside), so all runs on all devices of a kind look up the same rows.
    """

    def __init__(self, device: torch.device = _CPU, max_bytes: int = _HELD_BYTES) -> None:
        """Starts empty; batches beyond `max_bytes` push the oldest out."""
        self._device, self._max_bytes = device, max_bytes
        self._held_bytes = 0
        self.batches: dict[tuple[LocalShard, int], ShardBatch] = {}

    def prepare(self, wanted: Iterable[tuple[LocalShard, int]]) -> None:
        """Draws the first batches of shards, each with its number of draws, on all cores; what is held is left.

        A GPU draws them so quickly that it does when they are asked for.
        """
        if self._device.type != "cpu":
            return
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
            self._keep((shard, draw), draw_batch(shard, draw, self._device))
        return self.batches[shard, draw]

    def _keep(self, key: tuple[LocalShard, int], batch: ShardBatch) -> None:
        self.batches[key] = batch
        self._held_bytes += _num_bytes(batch)
        while self._held_bytes > self._max_bytes and len(self.batches) > 1:
            oldest = next(iter(self.batches))
            self._held_bytes -= _num_bytes(self.batches.pop(oldest))


def draw_batch(shard: LocalShard, draw: int = 0, device: torch.device = _CPU) -> ShardBatch:
    """Draws a batch of a shard, with a seed made of what the batch depends on and the number of the draw.

    A GPU draws ids by itself, with the numbers of its own generator: a host takes seconds for what runs in milliseconds
    there (sets of ten tables at a batch of 65,536 have six million ids).
    """
    depends_on = (shard.num_embeddings, shard.num_bags, shard.pooling_factor, *([draw] if draw else []))
    digest = hashlib.sha256(repr(depends_on).encode())
    digest.update(shard.access.ranks_K.tobytes() + shard.access.cumulative_K.tobytes())
    seed = int.from_bytes(digest.digest()[:8], "little")
    rng = np.random.default_rng(seed)
    num_others = _lookups_of_others(shard)
    if device.type == "cpu":
        bags = draw_bags(shard.access, shard.pooling_factor, shard.num_bags, rng)
        ids_L, lengths_B = torch.from_numpy(bags.ids_L), bags.lengths_B
        others_L = torch.from_numpy(draw_bags(shard.access, num_others, 1, rng).ids_L)
    else:
        lengths_B = draw_lengths(shard.pooling_factor, shard.num_bags, rng)
        generator = torch.Generator(device).manual_seed(seed >> 1)
        ids_L = draw_ids(shard.access, int(lengths_B.sum()), generator)
        others_L = draw_ids(shard.access, num_others, generator)
    distinct_U, counts = torch.unique(ids_L, return_counts=True)
    measured = MeasuredShard(
        shard=shard, num_lookups=len(ids_L), num_distinct=len(counts), reuse_bins=reuse_bins_of(counts)
    )
    updated_U = distinct_U[:0]
    if shard.update is Update.ALL_REDUCED:
        updated_U = torch.unique(torch.cat([distinct_U, others_L]))
    return ShardBatch(
        ids_L=ids_L,
        lengths_B=torch.from_numpy(lengths_B.astype(np.int32)).to(device),
        measured=measured,
        updated_U=updated_U,
    )


def _lookups_of_others(shard: LocalShard) -> int:
    """Lookups of the other ranks of a replica, by which as many rows are hit as its `written_rows` say."""
    if shard.update is not Update.ALL_REDUCED or shard.written_rows is None:
        return 0
    own = shard.access.expected_distinct(shard.num_lookups)
    # Each rank writes the sums of what it hits; of what any rank hits, sums over the ranks, and the update.
    hit = min((shard.written_rows - own) / (1 + UPDATE_WRITES), shard.num_embeddings) - _ROWS_APART
    least = most = max(1.0, shard.num_lookups)
    while shard.access.expected_distinct(most) < hit and most < _MOST_LOOKUPS:
        most *= 2
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        least, most = (middle, most) if shard.access.expected_distinct(middle) < hit else (least, middle)
    return max(0, round(most - shard.num_lookups))


def draw_ids(access: AccessProfile, number: int, generator: torch.Generator) -> torch.Tensor:
    """So many independent lookups, as `AccessProfile.sample_ranks` draws them, on the generator's device."""
    device = generator.device
    ranks_K, cumulative_K = (torch.tensor(knots, device=device) for knots in (access.ranks_K, access.cumulative_K))
    draws_L = torch.rand(number, generator=generator, dtype=torch.float64, device=device)
    next_L = torch.searchsorted(cumulative_K, draws_L, right=True).clamp_(max=len(ranks_K) - 1)
    slopes_I = ranks_K.diff() / cumulative_K.diff()
    first_L = next_L - 1
    ranks_L = (ranks_K[first_L] + (draws_L - cumulative_K[first_L]) * slopes_I[first_L]).long()
    return ranks_L.clamp_(max=access.num_rows - 1) * coprime_step(access.num_rows) % access.num_rows


def reuse_bins_of(counts: torch.Tensor) -> tuple[float, ...]:
    """Shares of AutoShard's 17 reuse bins (0, 1], (1, 2], (2, 4] ... of rows hit `counts` times each; all 0 of none.

    Source:
        AutoShard B.2.
    """
    if not len(counts):
        return (0.0,) * NUM_REUSE_BINS
    edges = torch.tensor(REUSE_BIN_EDGES, dtype=torch.float64, device=counts.device)
    bins = torch.bincount(torch.bucketize(counts.double(), edges), minlength=NUM_REUSE_BINS)
    shares: list[float] = (bins.double() / len(counts)).float().tolist()
    return tuple(shares)


def fuse(batches: Sequence[ShardBatch], *, as_one_table: bool = False) -> FusedInput:
    """Joins the batches of a set of shards, in order; their ids as rows of one table, if it is to be so."""
    ids = [batch.ids_L for batch in batches]
    rows_L = in_one_table(batches, ids) if as_one_table else torch.cat(ids)
    return FusedInput(ids_L=rows_L, lengths_SB=torch.stack([batch.lengths_B for batch in batches]))


def in_one_table(batches: Sequence[ShardBatch], ids: Sequence[torch.Tensor]) -> torch.Tensor:
    """Ids of each shard as rows of one table that has those of all shards, one below the other."""
    first_rows = accumulate((batch.measured.shard.num_embeddings for batch in batches), initial=0)
    return torch.cat([ids_L + first for ids_L, first in zip(ids, first_rows, strict=False)])


def _num_bytes(batch: ShardBatch) -> int:
    return batch.ids_L.nbytes + batch.lengths_B.nbytes + batch.updated_U.nbytes
