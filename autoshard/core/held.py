"""The shards of a plan as the ranks of a replica group run them, as arrays.

Large models have many tables that are alike, and thousands of shards share a handful of ranks: what depends on neither
names nor ranks is worked out once for each kind of shard, and looked up for the others.

Shape suffixes: N shards, K kinds of shards, L layouts, M shards as ranks hold them, U distinct small tables, R ranks of
the group, X any columns.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from autoshard.core.access import IntArray
from autoshard.core.declared import values
from autoshard.core.shard import LocalShard, PlacedShard, Replicas, local_shards
from autoshard.core.tables import PRICED, TableSet

_Number = TypeVar("_Number", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacedArrays:
    """Shards and who holds them, each distinct thing once.

    Attributes:
        shards_N: The shards as they are run, in the order of the plan.
        kind_N: Their kinds: shards that are alike but for names and ranks have one.
        first_K: The first shard of each kind.
        layout_N: Their layouts: shards whose rows are held and read by the same ranks have one.
        first_L: The first shard of each layout.
        ranks_L: The ranks that hold it, replica after replica.
        shard_M: The shard of each small table; replicas that serve other shares of the samples are apart.
        local_M: Which small table it is.
        ranks_M: The ranks that hold it, each once.
        locals_U: The small tables, named as the first that is like them.
        kind_U: The kind of the shards that they are of.
    """

    shards_N: tuple[PlacedShard, ...]
    kind_N: IntArray
    first_K: tuple[PlacedShard, ...]
    layout_N: IntArray
    first_L: tuple[PlacedShard, ...]
    ranks_L: tuple[IntArray, ...]
    shard_M: IntArray
    local_M: IntArray
    ranks_M: tuple[IntArray, ...]
    locals_U: tuple[LocalShard, ...]
    kind_U: tuple[int, ...]

    @classmethod
    def of(
        cls, placed: Sequence[PlacedShard], tables: TableSet, group_size: int, group_batch_size: int
    ) -> PlacedArrays:
        """Reads the shards of a plan.

        Args:
            placed: The shards.
            tables: The plan's tables.
            group_size: Ranks of a replica group.
            group_batch_size: Samples per step of a replica group.
        """
        shards = tuple([one.as_run(group_size) for one in placed])
        layout_N, first_L = _layouts(shards)
        kind_N, first_K = _kinds(shards, tables, layout_N)
        shares_L = [_by_share(one, group_size) for one in first_L]
        served: dict[tuple[int, float], int] = {}
        held_M = [
            (index, served.setdefault((kind, share), len(served)), ranks)
            for index, (kind, layout) in enumerate(zip(kind_N, layout_N, strict=True))
            for share, ranks in shares_L[layout]
        ]
        locals_U = local_shards(
            [first_K[kind] for kind, _ in served],
            group_batch_size=group_batch_size,
            bags_share_N=[share for _, share in served],
        )
        return cls(
            shards_N=shards,
            kind_N=np.array(kind_N, dtype=np.int64),
            first_K=first_K,
            layout_N=np.array(layout_N, dtype=np.int64),
            first_L=first_L,
            ranks_L=tuple(_flat(one.replicas) for one in first_L),
            shard_M=np.array([index for index, _, _ in held_M], dtype=np.int64),
            local_M=np.array([number for _, number, _ in held_M], dtype=np.int64),
            ranks_M=tuple([ranks for _, _, ranks in held_M]),
            locals_U=tuple(locals_U),
            kind_U=tuple(kind for kind, _ in served),
        )

    def counts(self, num_ranks: int) -> IntArray:
        """How many small tables each rank holds, shape (R,)."""
        return sums_by_rank(np.ones(len(self.ranks_M), dtype=np.int64), self.ranks_M, num_ranks)

    def table_of(self, held: int) -> str:
        """Name of the table that a small one, by its place on axis M, was cut from."""
        return self.shards_N[int(self.shard_M[held])].shard.table.name


def sums_by_rank(values_MX: NDArray[_Number], ranks_M: Sequence[IntArray], num_ranks: int) -> NDArray[_Number]:
    """Sums over what each rank holds, added up in the order of M where that counts; shape (R, X).

    Args:
        values_MX: What each of the ranks adds; X may be no axis at all.
        ranks_M: The ranks, each once.
        num_ranks: R.
    """
    if values_MX.ndim > 1 and not (is_used_X := values_MX.any(axis=0)).all():
        # Of codes, most columns are of kernels that no shard runs in.
        sums_RX: NDArray[Any] = np.zeros((num_ranks, *values_MX.shape[1:]), dtype=values_MX.dtype)
        sums_RX[:, is_used_X] = sums_by_rank(values_MX[:, is_used_X], ranks_M, num_ranks)
        return sums_RX
    if values_MX.dtype.kind in "iO":
        values_MX, ranks_M = _by_ranks(values_MX, ranks_M)
    sums_RX = np.zeros((num_ranks, *values_MX.shape[1:]), dtype=values_MX.dtype)
    counts_M = np.array([len(ranks) for ranks in ranks_M], dtype=np.int64)
    # Most are on one rank; between two that are not, they are added together.
    shared = np.flatnonzero(counts_M != 1).tolist()
    for before, index in pairwise([-1, *shared, len(ranks_M)]):
        if before + 1 < index:
            between = slice(before + 1, index)
            np.add.at(sums_RX, np.concatenate(ranks_M[between]), values_MX[between])
        if index < len(ranks_M):
            of_all = counts_M[index] == num_ranks
            sums_RX[slice(None) if of_all else ranks_M[index]] += values_MX[index]
    return sums_RX


def _by_ranks(values_MX: NDArray[_Number], ranks_M: Sequence[IntArray]) -> tuple[NDArray[_Number], Sequence[IntArray]]:
    """What those of the same ranks add together: of whole numbers, whose sums are the same in any order."""
    known = {id(ranks): ranks for ranks in ranks_M}
    numbers = {key: number for number, key in enumerate(known)}
    sums_GX: NDArray[Any] = np.zeros((len(known), *values_MX.shape[1:]), dtype=values_MX.dtype)
    np.add.at(sums_GX, [numbers[id(ranks)] for ranks in ranks_M], values_MX)
    return sums_GX, list(known.values())


def _layouts(shards: Sequence[PlacedShard]) -> tuple[list[int], tuple[PlacedShard, ...]]:
    """The layout of each shard, and the first shard of each."""
    by_object: dict[tuple[int, int], int] = {}
    numbers: dict[tuple[Replicas, tuple[int, ...] | None], int] = {}
    first: list[PlacedShard] = []
    layout_N = []
    for one in shards:
        # Most are the same objects: replicas of thousands of ranks take as long to compare as to read.
        known = (id(one.replicas), id(one.fetch))
        if known not in by_object:
            number = by_object[known] = numbers.setdefault((one.replicas, one.fetch), len(numbers))
            if number == len(first):
                first.append(one)
        layout_N.append(by_object[known])
    return layout_N, tuple(first)


def _kinds(
    shards: Sequence[PlacedShard], tables: TableSet, layout_N: Sequence[int]
) -> tuple[list[int], tuple[PlacedShard, ...]]:
    """The kind of each shard, and the first shard of each."""
    # Shards of plans that are made up may be of other tables.
    alike: dict[int, Hashable] = {id(table): tables.first_alike[table.name] for table in tables.tables}
    numbers: dict[Hashable, int] = {}
    first: list[PlacedShard] = []
    kind_N = []
    for one, layout in zip(shards, layout_N, strict=True):
        shard, rows, replicas = one.shard, one.shard.rows, one.replicas
        table = alike.get(id(shard.table))
        if table is None:
            table = alike[id(shard.table)] = values(shard.table, PRICED)
        cut = (table, rows.start, rows.stop, rows.by, shard.embedding_dim)
        held = (len(replicas), len(replicas[0]), one.split, one.memory, None if one.fetch is None else layout)
        travel = (one.exchange, one.collective, one.deduplicate, one.grad_sync)
        number = numbers.setdefault((*cut, *held, *travel), len(numbers))
        if number == len(first):
            first.append(one)
        kind_N.append(number)
    return kind_N, tuple(first)


def _by_share(placed: PlacedShard, group_size: int) -> list[tuple[float, IntArray]]:
    """Ranks of a shard whose replicas serve the same share of samples."""
    if placed.fetch is None:
        return [(1 / len(placed.replicas), _flat(placed.replicas))]
    by_share: dict[float, list[int]] = {}
    for index, replica in enumerate(placed.replicas):
        by_share.setdefault(placed.fetch.count(index) / group_size, []).extend(replica)
    return [(share, np.array(ranks, dtype=np.int64)) for share, ranks in by_share.items()]


def _flat(replicas: Replicas) -> IntArray:
    return np.fromiter(chain.from_iterable(replicas), dtype=np.int64)
