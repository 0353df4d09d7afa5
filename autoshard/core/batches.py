"""Batches of ids drawn from access profiles, for benchmarks and synthetic training.

Shape suffixes: B bags, L lookups.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autoshard.core.access import AccessProfile, IntArray

_GOLDEN = (math.sqrt(5) - 1) / 2
#: Products of ranks and steps stay within 63 bits, with room for the step to grow a little.
_MAX_PRODUCT = 2**62


@dataclass(frozen=True, slots=True)
class Bags:
    """Ids of one feature: `ids_L` in bag order, and the number of ids of each bag."""

    ids_L: IntArray
    lengths_B: IntArray


def coprime_step(num_rows: int) -> int:
    """A step that visits all of `num_rows` rows in turn, near the golden section of their number.

    Products with row ids stay within 63 bits.
    """
    step = max(1, min(round(num_rows * _GOLDEN), _MAX_PRODUCT // num_rows))
    while math.gcd(step, num_rows) != 1:
        step += 1
    return step


def scatter_ranks(ranks_L: IntArray, num_rows: int) -> IntArray:
    """Row ids of access ranks under a fixed bijection that strews hot rows over the table, as hashing does."""
    return (ranks_L * coprime_step(num_rows)) % num_rows


def draw_lengths(pooling_factor: float, num_bags: int, rng: np.random.Generator) -> IntArray:
    """Bag lengths with the given mean: its floor, and one more for a random share of the bags; shape (B,).

    The sum is exact to one id, so that thin shards (far below one lookup per bag) differ little between draws.
    """
    base = math.floor(pooling_factor)
    lengths = np.full(num_bags, base, dtype=np.int64)
    extra = round((pooling_factor - base) * num_bags)
    lengths[rng.permutation(num_bags)[:extra]] += 1
    return lengths


def draw_bags(
    access: AccessProfile,
    pooling_factor: float,
    num_bags: int,
    rng: np.random.Generator,
    ids_of_ranks: Callable[[IntArray], IntArray] | None = None,
) -> Bags:
    """Draws one batch of a shard.

    Args:
        access: Profile of the rows; ids are in [0, access.num_rows).
        pooling_factor: Mean lookups per bag.
        num_bags: Number of bags.
        rng: Source of randomness; the same state gives the same batch.
        ids_of_ranks: Row ids of access ranks; None for `scatter_ranks`.
    """
    lengths = draw_lengths(pooling_factor, num_bags, rng)
    ranks = access.sample_ranks(int(lengths.sum()), rng)
    ids_L = scatter_ranks(ranks, access.num_rows) if ids_of_ranks is None else ids_of_ranks(ranks)
    return Bags(ids_L=ids_L, lengths_B=lengths)
