"""Tables cut as plans cut them: each cut tiles its table, each piece is the shard that a rank would run.

A cut is a function of a table, its batch and a source of randomness; it returns all pieces of the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from autoshard.core import (
    EmbeddingTable,
    Exchange,
    GradSync,
    LocalShard,
    PlacedShard,
    RowRange,
    RowsBy,
    Shard,
    Split,
    Tier,
    local_shard,
)
from autoshard.core.errors import InvalidOptionError
from bench.sampling.strategies import SetSource, ShardSet, generator_of

#: Thinnest pieces that are measured, in lookups per bag.
LEAST_LOOKUPS_PER_BAG = 0.001
#: Columns come in multiples of this, as FBGEMM's kernels want them.
COLUMN_STEP = 4

_MAX_RANKS_LOG2 = 7
_TRIES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One placed shard of a cut, and the batch of the replica group that it is in."""

    placed: PlacedShard
    group_batch_size: int

    def local(self) -> LocalShard:
        """What each rank runs that holds the piece, as `ShardingPlan.local_shards` has it."""
        num_replicas = len(self.placed.replicas)
        # A piece that is on one rank alone is one of a plan of several ranks.
        placed = self.placed.as_run(max(2, num_replicas))
        share = 1 / num_replicas
        return local_shard(placed, group_batch_size=self.group_batch_size, bags_share=share)


Cut = Callable[[EmbeddingTable, int, np.random.Generator], tuple[Piece, ...]]


def by_row_ids(table: EmbeddingTable, batch_size: int, rng: np.random.Generator) -> tuple[Piece, ...]:
    """Ranges of row ids, of log-uniform sizes, each on one rank."""
    edges = _log_edges(table.num_embeddings, int(rng.integers(1, 5)), rng)
    return tuple(_alone(shard, batch_size) for shard in _row_shards(table, edges, RowsBy.INDEX))


def by_access_rank(table: EmbeddingTable, batch_size: int, rng: np.random.Generator) -> tuple[Piece, ...]:
    """Hot, warm and cold rows: the hottest on all ranks, those of a node or one; the coldest split over ranks."""
    edges = _log_edges(table.num_embeddings, int(rng.integers(1, 4)), rng)
    hot, *others = _row_shards(table, edges, RowsBy.ACCESS_RANK)
    num_ranks = _num_ranks(rng)
    # OPER and FlexShard send the rows asked for instead of partial sums.
    exchange = Exchange.ROWS if rng.random() < 0.25 else None
    copies = int(rng.integers(3))
    pieces = [
        _alone(hot, batch_size) if copies == 0 else (_everywhere, _per_node)[copies - 1](hot, batch_size, num_ranks)
    ]
    pieces += [
        _split(shard, batch_size, num_ranks) if rng.random() < 0.5 else _alone(shard, batch_size) for shard in others
    ]
    if exchange is None:
        return tuple(pieces)
    return tuple(replace(piece, placed=replace(piece.placed, exchange=exchange)) for piece in pieces)


def by_lookups(table: EmbeddingTable, batch_size: int, rng: np.random.Generator) -> tuple[Piece, ...]:
    """A thin tier of rows that get a log-uniform number of lookups per bag, and the rows before and after it."""
    per_bag = table.pooling_factor / len(table.features)
    if per_bag <= LEAST_LOOKUPS_PER_BAG:
        return (_alone(Shard.whole(table), batch_size),)
    share = math.exp(rng.uniform(math.log(LEAST_LOOKUPS_PER_BAG), math.log(per_bag))) / per_bag
    # Wide tables give just the share; where the first rows alone get more than it, the tier is one row.
    low = rng.uniform(0.0, 1.0 - share)
    ends = np.interp([low, low + share], table.access.cumulative_K, table.access.ranks_K)
    start = min(math.floor(ends[0]), table.num_embeddings - 1)
    stop = min(max(start + 1, math.ceil(ends[1])), table.num_embeddings)
    edges = sorted({0, start, stop, table.num_embeddings})
    return tuple(_alone(shard, batch_size) for shard in _row_shards(table, edges, RowsBy.ACCESS_RANK))


def by_columns(table: EmbeddingTable, batch_size: int, rng: np.random.Generator) -> tuple[Piece, ...]:
    """Ranges of columns, in multiples of four, each on one rank."""
    return tuple(_alone(shard, batch_size) for shard in _column_shards(table, rng))


def by_grid(table: EmbeddingTable, batch_size: int, rng: np.random.Generator) -> tuple[Piece, ...]:
    """Ranges of columns, the rows of each split over the ranks of a node."""
    num_ranks = int(rng.choice((2, 4, 8)))
    return tuple(_split(shard, batch_size, num_ranks, Tier.TABLE_ROW_WISE) for shard in _column_shards(table, rng))


def by_ranks(table: EmbeddingTable, batch_size: int, rng: np.random.Generator) -> tuple[Piece, ...]:
    """The rows dealt evenly to 2 to 128 ranks."""
    return (_split(Shard.whole(table), batch_size, _num_ranks(rng)),)


def by_local_batch(table: EmbeddingTable, batch_size: int, rng: np.random.Generator) -> tuple[Piece, ...]:
    """The table on every rank, which looks its own share of the batch up: data parallel."""
    return (_everywhere(Shard.whole(table), batch_size, _num_ranks(rng)),)


def by_node_batch(table: EmbeddingTable, batch_size: int, rng: np.random.Generator) -> tuple[Piece, ...]:
    """One copy of the table per node, split over its ranks, which see the node's share of the batch."""
    return (_per_node(Shard.whole(table), batch_size, _num_ranks(rng)),)


def by_group_batch(table: EmbeddingTable, batch_size: int, rng: np.random.Generator) -> tuple[Piece, ...]:
    """The table on one rank of every replica group, which sees the group's share of the batch."""
    return (_alone(Shard.whole(table), max(1, batch_size // _num_ranks(rng))),)


#: By what they show of a table.
CUTS: dict[str, Cut] = {
    "row ids": by_row_ids,
    "access ranks": by_access_rank,
    "lookups": by_lookups,
    "columns": by_columns,
    "grid": by_grid,
    "ranks": by_ranks,
    "local batch": by_local_batch,
    "node batch": by_node_batch,
    "group batch": by_group_batch,
}
#: Thin tiers come twice as often: their lookups per bag are spread over five decades.
_CUT_WEIGHTS = np.array([2.0 if name in ("lookups", "access ranks") else 1.0 for name in CUTS])


def draw_piece(source: SetSource, table: EmbeddingTable, rng: np.random.Generator) -> LocalShard | None:
    """A piece of a table by one of the cuts, or None if none was found that can be measured.

    Pieces that expect less than one lookup per step, or fewer than 0.001 per bag, are passed over.
    """
    names = list(CUTS)
    for _ in range(_TRIES):
        cut = CUTS[names[int(rng.choice(len(names), p=_CUT_WEIGHTS / _CUT_WEIGHTS.sum()))]]
        pieces = cut(table, source.tables.batch_size, rng)
        shard = pieces[int(rng.integers(len(pieces)))].local()
        enough = shard.num_lookups >= 1 and shard.pooling_factor >= LEAST_LOOKUPS_PER_BAG
        if enough and source.holds(shard):
            return shard
    return None


class Slices:
    """Pieces of tables, alone and several tables' together, now and then beside whole tables."""

    def __init__(self, source: SetSource, seed: int) -> None:
        self._source = source
        self._seed = seed
        self._tables = source.tables.tables
        if all(draw_piece(source, table, generator_of(seed, "slices", 0)) is None for table in self._tables):
            raise InvalidOptionError("no slice of a table of the pool can be measured", field="tables")

    def draw(self, number: int) -> ShardSet:
        """One to `max_tables` pieces; a fifth of the sets is a single one."""
        rng = generator_of(self._seed, "slices", number)
        size = 1 if rng.random() < 0.2 else int(rng.integers(1, self._source.max_tables + 1))
        while True:
            chosen = rng.choice(len(self._tables), size, replace=size > len(self._tables))
            drawn = (draw_piece(self._source, self._tables[index], rng) for index in chosen)
            shards = self._source.within_limits([shard for shard in drawn if shard is not None])
            if shards:
                return shards


class Copies:
    """Ranks of plans that hold many tables on every rank: up to four times `max_tables` copies, beside whole tables.

    Copies see their rank's share of the batch alone, so that many of them take as long as a few whole tables, and run
    in one kernel for each width.
    """

    def __init__(self, source: SetSource, seed: int) -> None:
        self._source, self._seed = source, seed
        self._pool = [table for table, _ in source.whole_tables()]
        if not any(
            source.holds(by_local_batch(table, 2, generator_of(seed, "copies", 0))[0].local()) for table in self._pool
        ):
            raise InvalidOptionError("no table of the pool can be measured as a copy", field="tables")

    def draw(self, number: int) -> ShardSet:
        """Up to `max_tables` whole tables, and copies of others on 2 to 32 ranks."""
        rng, batch_size = generator_of(self._seed, "copies", number), self._source.tables.batch_size
        while True:
            num_ranks, most = int(2 ** rng.integers(1, 6)), self._source.max_tables
            num_copies = round(math.exp(rng.uniform(0.0, math.log(min(len(self._pool), num_ranks * most, 4 * most)))))
            order = [self._pool[index] for index in rng.permutation(len(self._pool))]
            copies = [_everywhere(Shard.whole(table), batch_size, num_ranks).local() for table in order[:num_copies]]
            whole = [
                _alone(Shard.whole(table), batch_size).local() for table in order[num_copies:][: rng.integers(most)]
            ]
            kept = [shard for shard in copies if self._source.holds(shard)]
            shards = (*kept, *self._source.within_limits([shard for shard in whole if self._source.holds(shard)]))
            limit = self._source.memory_bytes
            if kept and (limit is None or sum(shard.memory_bytes for shard in shards) <= limit):
                return shards


def _alone(shard: Shard, batch_size: int) -> Piece:
    return Piece(placed=PlacedShard.table_wise(shard, 0), group_batch_size=batch_size)


def _split(shard: Shard, batch_size: int, num_ranks: int, tier: Tier = Tier.ROW_WISE) -> Piece:
    """Rows over ranks; a rank cannot hold less than one row."""
    num_ranks = min(num_ranks, shard.num_embeddings)
    if num_ranks < 2:
        return _alone(shard, batch_size)
    return _held(shard, batch_size, tier, (tuple(range(num_ranks)),))


def _everywhere(shard: Shard, batch_size: int, num_ranks: int) -> Piece:
    return _held(shard, batch_size, Tier.DATA_PARALLEL, tuple((rank,) for rank in range(num_ranks)))


def _per_node(shard: Shard, batch_size: int, num_ranks: int) -> Piece:
    """One copy on each of at least two nodes of up to eight ranks."""
    size = min(8, max(1, num_ranks // 2), shard.num_embeddings)
    nodes = tuple(tuple(range(node * size, (node + 1) * size)) for node in range(max(2, num_ranks // size)))
    return _held(shard, batch_size, Tier.FLEX, nodes)


def _held(shard: Shard, batch_size: int, tier: Tier, replicas: tuple[tuple[int, ...], ...]) -> Piece:
    alone = PlacedShard.table_wise(shard, 0)
    # Blocks of rows in falling access frequency would overload the first rank.
    split = Split.CYCLIC if shard.rows.by is RowsBy.ACCESS_RANK else Split.BLOCK
    # Kernels of replicas are measured by themselves, without the sum of their gradients, but update all rows of it.
    grad_sync = GradSync.SPARSE if len(replicas) > 1 else GradSync.NONE
    placed = replace(alone, tier=tier, replicas=replicas, split=split, grad_sync=grad_sync)
    return Piece(placed=placed, group_batch_size=batch_size)


def _row_shards(table: EmbeddingTable, edges: Sequence[int], by: RowsBy) -> tuple[Shard, ...]:
    return tuple(
        Shard(table=table, rows=RowRange(start=start, stop=stop, by=by), columns=(0, table.embedding_dim))
        for start, stop in pairwise(edges)
    )


def _column_shards(table: EmbeddingTable, rng: np.random.Generator) -> tuple[Shard, ...]:
    steps = table.embedding_dim // COLUMN_STEP
    num_edges = min(int(rng.integers(1, 4)), max(0, steps - 1))
    inner = rng.permutation(np.arange(1, steps))[:num_edges] * COLUMN_STEP
    edges = [0, *sorted(inner.tolist()), table.embedding_dim]
    whole = Shard.whole(table)
    return tuple(replace(whole, columns=(start, stop)) for start, stop in pairwise(edges))


def _log_edges(num_rows: int, num_inner: int, rng: np.random.Generator) -> list[int]:
    """0, some log-uniform rows, and the number of rows."""
    inner = np.exp(rng.uniform(0.0, math.log(max(2, num_rows)), num_inner)).astype(int)
    return sorted({0, num_rows, *(min(int(edge), num_rows) for edge in inner)})


def _num_ranks(rng: np.random.Generator) -> int:
    return int(2 ** rng.integers(1, _MAX_RANKS_LOG2 + 1))
