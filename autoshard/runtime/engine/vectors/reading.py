"""How a process puts together the embeddings that it reads.

Shape suffixes: F features, P processes, B samples of a local batch, C columns of all pooled features, D embedding dim,
L lookups, R rows that came.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch

from autoshard.core import Pooling
from autoshard.runtime.engine.holdings import Holding, KernelKey, Ownership
from autoshard.runtime.engine.ids.addresses import Destination
from autoshard.runtime.engine.ids.requests import DistributedBatch, InputExchange, RowLookups
from autoshard.runtime.engine.pieces import merged
from autoshard.runtime.engine.staging import staged

CutIndex: TypeAlias = Mapping[tuple[int, tuple[int, int]], int]
Destinations: TypeAlias = Sequence[Sequence[Destination]]
Run: TypeAlias = tuple[int, int, int]
"""Adjacent columns: (block, first column, column after the last)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SumGroup:
    """Columns of sums that the same processes send parts of, side by side in what each of them sends.

    Attributes:
        starts: For each process, or `P` for this one's replicas and `P + 1` for sums of all processes that were added
            up on the way, the first column in its block.
        width: Columns.
    """

    starts: dict[int, int]
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFeature:
    """A feature whose rows, or some of them, come from a kernel.

    Attributes:
        feature: The feature.
        holding: Of the rows.
        is_whole: Whether all lookups of the feature are among them.
        cut: Number of the feature among those that are cut; None if it is not.
        buckets: Destinations that have rows of the holding.
    """

    feature: int
    holding: int
    is_whole: bool
    cut: int | None = None
    buckets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowKernel:
    """What a process reads of the kernels with one key: rows of one width.

    Attributes:
        key: The key.
        dim: D.
        holdings: For each process, and last for this one's replicas, those of its holdings that it is asked for: place
            among them, number, features.
        pooled: Features that are pooled here.
        sequences: Features of sequence tables.
        deduplicated: Whether several lookups may share a row that came.
    """

    key: KernelKey
    dim: int
    holdings: tuple[tuple[tuple[int, int, tuple[int, ...]], ...], ...]
    pooled: tuple[RowFeature, ...]
    sequences: tuple[RowFeature, ...]
    deduplicated: bool

    @property
    def features(self) -> tuple[RowFeature, ...]:
        """All of them, pooled ones first."""
        return self.pooled + self.sequences


@dataclass(frozen=True, slots=True, eq=False)
class RowIndex:
    """Which row answers which lookup of one batch, for one `RowKernel`.

    Attributes:
        arrival_L: Row of every lookup, feature by feature in the order of `RowKernel.features`, bag by bag.
        num_pooled: Lookups of pooled features.
        bags_L: Bag of each of these.
        offsets: First lookup of every bag, and the end.
        positions: For each sequence feature, the places of its lookups in its sequence; None for all of them.
        num_sequence: Lookups of each sequence feature.
        num_rows: R.
        weights_L: Weight of each lookup, 1 of sequences; None where lookups are not weighted.
    """

    arrival_L: torch.Tensor
    num_pooled: int
    bags_L: torch.Tensor
    offsets: torch.Tensor
    positions: tuple[torch.Tensor | None, ...]
    num_sequence: tuple[int, ...]
    num_rows: int
    weights_L: torch.Tensor | None


class ColumnMoves:
    """Puts runs of columns of matrices side by side, as other matrices, in one gather.

    Matrices have as many rows, and lie one behind the other in memory, those that come and those that are made. What
    is gathered are units of columns that all runs are made of. Where the units are is kept for the last number of rows.

    Args:
        widths: Columns of the matrices that come.
        made: For each matrix that is made its runs: (matrix, first column, column after the last).
        device: Where they are.
    """

    def __init__(self, widths: Sequence[int], made: Sequence[Sequence[Run]], device: torch.device) -> None:
        runs = [run for of in made for run in of]
        self._unit = math.gcd(*widths, *(column for _, *ends in runs for column in ends)) or 1
        self._made_widths = [sum(stop - start for _, start, stop in of) for of in made]
        self.is_identity = runs == [(matrix, 0, width) for matrix, width in enumerate(widths)] and len(runs) == len(
            made
        )
        before = [0, *accumulate(widths)]
        #: For each unit of the matrices that are made: columns of matrices before its own, its column, its matrix's.
        self._units = [
            torch.tensor(
                [
                    (before[matrix], column, widths[matrix])
                    for matrix, start, stop in of
                    for column in range(start, stop, self._unit)
                ],
                dtype=torch.int64,
                device=device,
            ).view(-1, 3)
            // self._unit
            for of in made
        ]
        self._known: tuple[int, torch.Tensor] | None = None

    def __call__(self, matrices: torch.Tensor, num_rows: int) -> torch.Tensor:
        """The matrices that are made, one behind the other, of one dimension.

        Args:
            matrices: Those that come, of one dimension.
            num_rows: Rows of each.
        """
        if self.is_identity or not matrices.numel():
            return matrices
        if self._known is None or self._known[0] != num_rows:
            self._known = (num_rows, self._places(num_rows))
        return matrices.view(-1, self._unit).index_select(0, self._known[1]).view(-1)

    def split(self, made: torch.Tensor, num_rows: int) -> list[torch.Tensor]:
        """The matrices that were made, each of (rows, columns)."""
        pieces = torch.split(made, [num_rows * width for width in self._made_widths])
        return [piece.view(num_rows, width) for piece, width in zip(pieces, self._made_widths, strict=True)]

    def _places(self, num_rows: int) -> torch.Tensor:
        places = []
        for units in self._units:
            before, column, width = units.unbind(1)
            rows = torch.arange(num_rows, device=units.device)[:, None]
            places.append((before * num_rows + column + rows * width).view(-1))
        return torch.cat(places).to(torch.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a process puts together what it reads: fixed for a plan.

    Attributes:
        groups: Sums, in the order of the blocks that they make.
        rows: Kernels whose rows are pooled or put in order here; each makes one more block of its pooled features.
        gathered: Columns of blocks that make those of all pooled features.
        added: Columns of blocks that are added to them: (first column, run).
        scattered: For each block the columns of all features that it gets gradients from.
        dim_F: Columns of each feature.
        sequences: Sequence features.
    """

    groups: tuple[SumGroup, ...]
    rows: tuple[RowKernel, ...]
    gathered: tuple[Run, ...]
    added: tuple[tuple[int, Run], ...]
    scattered: tuple[tuple[tuple[int, int], ...], ...]
    dim_F: tuple[int, ...]
    sequences: tuple[int, ...]

    @classmethod
    def of(cls, ownership: Ownership, reader: int, requests: InputExchange) -> Reading:
        """Reads a plan.

        Args:
            ownership: Who holds what.
            reader: The process.
            requests: How it asks for rows.
        """
        cut_index = requests.cut_index
        destinations = requests.addresses.destinations if requests.addresses else ()
        groups, columns = _sum_groups(ownership, reader)
        rows = _row_kernels(ownership, reader, cut_index, destinations)
        for block, kernel in enumerate(rows, start=len(groups)):
            for number, one in enumerate(kernel.pooled):
                columns.append((one.holding, one.feature, block, number * kernel.dim))
        return _put_together(ownership, groups, rows, columns)


def _sum_groups(ownership: Ownership, reader: int) -> tuple[list[SumGroup], list[tuple[int, int, int, int]]]:
    """Groups of sums, and the block and first column of every holding's feature."""
    P, holdings = ownership.num_processes, ownership.holdings
    apart = (ownership.sent_apart(ownership.asked(reader, owner)) for owner in range(P))
    blocks = [*apart, ownership.local(reader).sums, ownership.reduced]
    starts: dict[tuple[object, ...], dict[int, int]] = {}
    members: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for block, slots in enumerate(blocks):
        column = 0
        for slot in slots:
            holding = holdings[slot.holding]
            key: tuple[object, ...] = (holding.kernel_key, () if holding.is_reduced else holding.owners(reader))
            first = starts.setdefault(key, {})
            if block not in first:
                first[block] = column
            if len(first) == 1:
                members.setdefault(key, []).append((slot.holding, slot.feature))
            column += holding.embedding_dim
    groups, columns = [], []
    for number, (key, first) in enumerate(starts.items()):
        width = 0
        for index, feature in members[key]:
            columns.append((index, feature, number, width))
            width += holdings[index].embedding_dim
        groups.append(SumGroup(starts=first, width=width))
    return groups, columns


def _row_kernels(ownership: Ownership, reader: int, cut_index: CutIndex, destinations: Destinations) -> list[RowKernel]:
    P, holdings = ownership.num_processes, ownership.holdings
    asked = [*(ownership.asked(reader, owner).rows for owner in range(P)), ownership.local(reader).rows]
    kernels = []
    for key in ownership.kernels:
        mine = list(dict.fromkeys(one for of in asked for one in of if holdings[one].kernel_key == key))
        if not mine:
            continue
        features = [
            _row_feature(holdings[index], index, feature, cut_index, destinations)
            for index in mine
            for feature in ownership.features_of[holdings[index].table]
        ]
        is_sequence = [holdings[one.holding].of.pooling is Pooling.SEQUENCE for one in features]
        kernels.append(
            RowKernel(
                key=key,
                dim=holdings[mine[0]].embedding_dim,
                holdings=tuple(
                    tuple(
                        (place, one, ownership.features_of[holdings[one].table])
                        for place, one in enumerate(of)
                        if one in mine
                    )
                    for of in asked
                ),
                pooled=tuple(one for one, apart in zip(features, is_sequence, strict=True) if not apart),
                sequences=tuple(one for one, apart in zip(features, is_sequence, strict=True) if apart),
                deduplicated=any(holdings[index].deduplicate for index in mine),
            )
        )
    return kernels


def _row_feature(
    holding: Holding, index: int, feature: int, cut_index: CutIndex, destinations: Destinations
) -> RowFeature:
    cut = cut_index.get((feature, holding.columns))
    buckets = () if cut is None else tuple(n for n, (_, one) in enumerate(destinations[cut]) if one == index)
    return RowFeature(feature=feature, holding=index, is_whole=holding.is_whole, cut=cut, buckets=buckets)


def _put_together(
    ownership: Ownership,
    groups: Sequence[SumGroup],
    rows: Sequence[RowKernel],
    columns: Sequence[tuple[int, int, int, int]],
) -> Reading:
    tables = ownership.tables.tables
    is_pooled_F = [table.pooling is not Pooling.SEQUENCE for table in tables for _ in table.features]
    dim_F = [table.embedding_dim for table in tables for _ in table.features]
    start_F = [0, *accumulate(dim if pooled else 0 for dim, pooled in zip(dim_F, is_pooled_F, strict=True))]
    terms: dict[int, list[tuple[int, int, int, int]]] = {}
    for index, feature, block, column in columns:
        first, last = ownership.holdings[index].columns
        terms.setdefault(feature, []).append((first, last, block, column))
    gathered: list[Run] = []
    added: list[tuple[tuple[int, int], int, int]] = []
    scattered: list[list[tuple[int, int, int]]] = [[] for _ in range(len(groups) + len(rows))]
    for feature in sorted(terms):
        bounds = sorted({bound for first, last, _, _ in terms[feature] for bound in (first, last)})
        for low, high in pairwise(bounds):
            covering = [
                (block, column + low - first)
                for first, last, block, column in terms[feature]
                if first <= low and high <= last
            ]
            at = start_F[feature] + low
            for number, (block, column) in enumerate(covering):
                stop = column + high - low
                if number:
                    added.append(((block, at - column), column, stop))
                else:
                    gathered.append((block, column, stop))
                scattered[block].append((column, at, at + high - low))
    return Reading(
        groups=tuple(groups),
        rows=tuple(rows),
        gathered=tuple(merged(gathered)),
        added=tuple((start + shift, (block, start, stop)) for (block, shift), start, stop in merged(added)),
        scattered=tuple(
            tuple((start, stop) for _, start, stop in merged((None, start, stop) for _, start, stop in sorted(of)))
            for of in scattered
        ),
        dim_F=tuple(dim_F),
        sequences=tuple(feature for feature, pooled in enumerate(is_pooled_F) if not pooled),
    )


def row_index(kernel: RowKernel, batch: DistributedBatch) -> RowIndex:
    """Matches the rows of a kernel to the lookups of a batch."""
    rows = batch.rows
    assert rows is not None, "there are rows"
    start_F = [0, *accumulate(batch.counts_F)]
    base, size = {}, 0
    for one in kernel.features:
        base[one.holding, one.feature] = size - start_F[one.feature]
        size += batch.counts_F[one.feature]
    entries = _entries(kernel, rows)
    device = rows.lookups_L.device
    shifts = [base[one.holding, feature] for one in entries for feature in one.features]
    shift_E, count_E = staged([shifts, [count for one in entries for count in one.counts]], device)
    parts = merged((one.shift, one.lookups.start, one.lookups.stop) for one in entries)
    lookups_L = torch.cat([rows.lookups_L[start:stop] for _, start, stop in parts])
    place_L = lookups_L + torch.repeat_interleave(shift_E, count_E, output_size=len(lookups_L))
    table = torch.full((size,), -1, dtype=torch.int64, device=device)
    table[place_L] = torch.cat([rows.arrival_L[start:stop] + shift for shift, start, stop in parts])
    known = dict.fromkeys(base, 0)
    for entry in entries:
        for feature, count in zip(entry.features, entry.counts, strict=True):
            known[entry.holding, feature] += count
    positions: list[torch.Tensor | None] = []
    for one in kernel.sequences:
        if one.is_whole:
            positions.append(None)
            continue
        first = base[one.holding, one.feature] + start_F[one.feature]
        of_feature = table[first : first + batch.counts_F[one.feature]]
        positions.append(_known_places(of_feature, known[one.holding, one.feature]))
    is_whole = all(one.is_whole for one in kernel.features)
    places_L = None if is_whole else _known_places(table, sum(known.values()))
    arrival_L = table if places_L is None else table.index_select(0, places_L)
    weights_L: torch.Tensor | None = None
    if batch.weights_L is not None:
        of_F = torch.split(batch.weights_L, list(batch.counts_F))
        pooled = [of_F[one.feature] for one in kernel.pooled]
        weights_L = torch.cat(pooled + [torch.ones_like(of_F[one.feature]) for one in kernel.sequences])
        if places_L is not None:
            weights_L = weights_L.index_select(0, places_L)
    lengths = [_bag_lengths(one, batch) for one in kernel.pooled]
    lengths_X = torch.cat(lengths) if lengths else batch.lengths_FB.new_empty(0)
    num_pooled = sum(known[one.holding, one.feature] for one in kernel.pooled)
    bags = torch.arange(len(lengths_X), device=device)
    return RowIndex(
        arrival_L=arrival_L,
        num_pooled=num_pooled,
        bags_L=torch.repeat_interleave(bags, lengths_X, output_size=num_pooled),
        offsets=torch.ops.fbgemm.asynchronous_complete_cumsum(lengths_X.long()),
        positions=tuple(positions),
        num_sequence=tuple(known[one.holding, one.feature] for one in kernel.sequences),
        num_rows=sum(one.num_rows for one in entries),
        weights_L=weights_L,
    )


def _known_places(numbers_X: torch.Tensor, count: int) -> torch.Tensor:
    """Places of the numbers of at least 0; the host knows how many they are, and waits for none."""
    return torch.nonzero_static(numbers_X >= 0, size=count).squeeze(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """Rows of one holding from one process, among all that a process reads."""

    holding: int
    features: tuple[int, ...]
    counts: tuple[int, ...]
    lookups: slice
    num_rows: int
    shift: int
    """From the number of a row among all that come to that among the kernel's."""


def _entries(kernel: RowKernel, rows: RowLookups) -> list[_Entry]:
    entries, lookups, first_row, own_row = [], 0, 0, 0
    for owner, (counts, num_rows) in enumerate(zip(rows.counts, rows.num_rows, strict=True)):
        mine = {number: (holding, features) for number, holding, features in kernel.holdings[owner]}
        for number, (of_features, count) in enumerate(zip(counts, num_rows, strict=True)):
            stop = lookups + sum(of_features)
            if number in mine:
                holding, features = mine[number]
                entries.append(
                    _Entry(
                        holding=holding,
                        features=features,
                        counts=of_features,
                        lookups=slice(lookups, stop),
                        num_rows=count,
                        shift=own_row - first_row,
                    )
                )
                own_row += count
            lookups, first_row = stop, first_row + count
    return entries


def _bag_lengths(one: RowFeature, batch: DistributedBatch) -> torch.Tensor:
    if one.is_whole or one.cut is None:
        return batch.lengths_FB[one.feature]
    assert batch.bucketized is not None, "the feature is cut"
    lengths_DB = batch.bucketized.lengths_DFB[:, one.cut]
    return torch.stack([lengths_DB[bucket] for bucket in one.buckets]).sum(0, dtype=torch.int32)
