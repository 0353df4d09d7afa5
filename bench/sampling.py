"""Which sets of shards to measure, so that a cost model sees what planners will ask it.

Shape suffixes: N shards of the pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from autoshard.core import LocalShard, PlacedShard, Shard, TableSet, local_shard
from autoshard.core.errors import InvalidOptionError

#: Share of the sets that are subsets of any size; the rest are what placements of many tables give single ranks.
_SUBSET_SHARE = 0.5
#: Tables and ranks of the placements: AutoShard's main task (Sec. 5.1).
_PLACED_TABLES = 80
_PLACED_RANKS = 8
#: Every so many sets one of the last sets comes again, so that a store tells how well it repeats itself.
_REPEAT_EVERY = 32
_NUM_REMEMBERED = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenSet:
    """A set of shards, and how it was chosen: `random`, `random_placement`, `greedy_placement` or `repeat`."""

    shards: tuple[LocalShard, ...]
    source: str


def table_wise_pool(tables: TableSet) -> tuple[LocalShard, ...]:
    """All tables of a model as a rank runs them that holds them whole."""
    return tuple(
        local_shard(PlacedShard.table_wise(Shard.whole(table), 0), group_batch_size=tables.batch_size)
        for table in tables.tables
    )


def choose_sets(pool: Sequence[LocalShard], *, max_tables: int, seed: int) -> Iterator[ChosenSet]:
    """Endless sets to measure; the same seed gives the same ones.

    Half are subsets of the pool, of every size up to `max_tables` alike. The others are ranks of placements of up
    to 80 tables on up to 8 ranks, at random or by a greedy rule: sets whose costs are close to each other, which
    is where a planner needs the cost model to be right. Now and then an earlier set is repeated.

    Args:
        pool: Shards to choose from.
        max_tables: Largest number of shards in a set.
        seed: Of the choice.

    Raises:
        InvalidOptionError: If `max_tables` is below 1.
    """
    if max_tables < 1:
        raise InvalidOptionError(f"must be at least 1, got {max_tables}", field="max_tables")
    return _chosen_sets(pool, min(max_tables, len(pool)), np.random.default_rng(seed))


def _chosen_sets(pool: Sequence[LocalShard], largest: int, rng: np.random.Generator) -> Iterator[ChosenSet]:
    seen: deque[ChosenSet] = deque(maxlen=_NUM_REMEMBERED)
    for number in count(1):
        if number % _REPEAT_EVERY == 0:
            yield replace(seen[int(rng.integers(len(seen)))], source="repeat")
            continue
        chosen = _subset(pool, largest, rng) if rng.random() < _SUBSET_SHARE else _rank(pool, largest, rng)
        seen.append(chosen)
        yield chosen


def _subset(pool: Sequence[LocalShard], largest: int, rng: np.random.Generator) -> ChosenSet:
    chosen_N = rng.choice(len(pool), int(rng.integers(1, largest + 1)), replace=False)
    return ChosenSet(shards=tuple(pool[index] for index in chosen_N), source="random")


def _rank(pool: Sequence[LocalShard], largest: int, rng: np.random.Generator) -> ChosenSet:
    """One rank of a placement: the others would tell little more than the first."""
    is_greedy = rng.random() < 0.5
    ranks = _placed(pool, largest, rng, is_greedy=is_greedy)
    shards = ranks[int(rng.integers(len(ranks)))]
    return ChosenSet(shards=shards, source="greedy_placement" if is_greedy else "random_placement")


def _placed(
    pool: Sequence[LocalShard], largest: int, rng: np.random.Generator, *, is_greedy: bool
) -> list[tuple[LocalShard, ...]]:
    """The ranks of one placement that hold at least one and at most `largest` shards."""
    num_tables = min(_PLACED_TABLES, len(pool))
    num_ranks = max(2, min(_PLACED_RANKS, num_tables // 2))
    chosen = [pool[index] for index in rng.choice(len(pool), num_tables, replace=False)]
    while True:
        ranks = _greedily(chosen, num_ranks, rng) if is_greedy else _at_random(chosen, num_ranks, rng)
        fitting = [shards for shards in ranks if 1 <= len(shards) <= largest]
        if fitting:
            return fitting
        chosen = chosen[: max(1, len(chosen) // 2)]


def _at_random(shards: Sequence[LocalShard], num_ranks: int, rng: np.random.Generator) -> list[tuple[LocalShard, ...]]:
    rank_N = rng.integers(num_ranks, size=len(shards))
    return [
        tuple(shard for shard, rank in zip(shards, rank_N, strict=True) if rank == wanted)
        for wanted in range(num_ranks)
    ]


def _greedily(shards: Sequence[LocalShard], num_ranks: int, rng: np.random.Generator) -> list[tuple[LocalShard, ...]]:
    """Costliest shard first, each to the rank with the least so far; cost by one of three rules of thumb."""
    rule = int(rng.integers(3))
    cost_N = np.array([(s.memory_bytes, s.num_lookups, s.num_lookups * s.embedding_dim)[rule] for s in shards])
    ranks: list[list[LocalShard]] = [[] for _ in range(num_ranks)]
    held_R = np.zeros(num_ranks)
    for index in np.argsort(-cost_N, kind="stable"):
        rank = int(held_R.argmin())
        ranks[rank].append(shards[index])
        held_R[rank] += cost_N[index]
    return [tuple(held) for held in ranks]
