"""How the ids of a batch reach the processes that hold their rows.

Shape suffixes: F features, P processes, B samples of a local batch, L lookups, N jagged rows (a feature's bags for one
destination), Z numbers of a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist

from autoshard.core.errors import InputError
from autoshard.evaluation.traffic import ID_BYTES, LENGTH_BYTES, Stream
from autoshard.runtime.batch import BatchOfIds
from autoshard.runtime.engine.addresses import AddressMap, Bucketized, CutFeature, RowOrder
from autoshard.runtime.engine.holdings import Asked, Ownership


@dataclass(frozen=True, slots=True, eq=False)
class Jagged:
    """Ids of several slots, slot by slot.

    Attributes:
        lengths_NB: Bag lengths of slots whose sums are asked for.
        counts_N: Ids of each slot, on the host.
        ids_L: The ids: places of rows.
    """

    lengths_NB: torch.Tensor
    counts_N: tuple[int, ...]
    ids_L: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What one process asks another for.

    Attributes:
        sums: Of slots whose sums it wants.
        counts: Rows of each holding whose rows it wants.
        ids_L: Their places, holding by holding.
    """

    sums: Jagged
    counts: tuple[int, ...]
    ids_L: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RowLookups:
    """Lookups whose rows a process asked for, in the order in which the rows come.

    Attributes:
        lookups_L: Lookup of the batch that each is.
        arrival_L: Row that answers it, counted over all holdings in their order.
        counts: For each process and holding, the lookups of every feature of its table.
        num_rows: For each process and holding, the rows that come.
    """

    lookups_L: torch.Tensor
    arrival_L: torch.Tensor
    counts: tuple[tuple[tuple[int, ...], ...], ...]
    num_rows: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Distributed:
    """A batch whose ids are where they are looked up.

    Attributes:
        batch_size: B.
        lengths_FB: Bag lengths of this process's batch.
        counts_F: Its ids of each feature.
        served: What each process asks this one for.
        local: What this process reads from its own replicas.
        rows: Lookups whose rows come from other processes, or from this one's kernels, process by process; and last
            those that are read from replicas here. None if there are none.
        bucketized: Lookups of features that are cut, by destination; None if there are none.
    """

    batch_size: int
    lengths_FB: torch.Tensor
    counts_F: tuple[int, ...]
    served: tuple[Request, ...]
    local: Request
    rows: RowLookups | None
    bucketized: Bucketized | None


class InputExchange:
    """Sends every process the ids that it looks up: one all-to-all of lengths, and one of ids, for the whole plan.

    A bag's length travels only where its sum is asked for; where rows are, their number does. Whether a batch can be
    looked up travels with the lengths, so that all processes refuse a bad one together.

    Args:
        ownership: Who holds what.
        orders: Row orders of tables that are cut by access rank, by name.
        group: The processes.
        device: Where batches are.
    """

    def __init__(
        self, ownership: Ownership, orders: Mapping[str, RowOrder], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._ownership, self._group, self._device = ownership, group, device
        self._reader = reader = group.rank()
        self._num_processes = ownership.num_processes
        self._asked = [ownership.asked(reader, owner) for owner in range(self._num_processes)]
        self._local = ownership.local(reader)
        self._served = [ownership.asked(other, reader) for other in range(self._num_processes)]
        tables = ownership.tables.tables
        self._rows_F = torch.tensor([table.num_embeddings for table in tables for _ in table.features], device=device)
        self._num_features = len(self._rows_F)
        cut = _cut_features(ownership, reader, orders)
        self.cut_index = {(one.feature, ownership.holdings[one.holdings[0]].columns): n for n, one in enumerate(cut)}
        self._cut_order = _permutation([one.feature for one in cut], self._num_features, device)
        self._cut_features = [one.feature for one in cut]
        self.addresses = AddressMap(cut, ownership.holdings, reader, orders, device) if cut else None
        by_owner = [self._sources(asked, owner) for owner, asked in enumerate(self._asked)]
        by_owner.append(self._sources(self._local, reader))
        num_sources = self._num_features + (self.addresses.num_buckets * len(cut) if self.addresses else 0)
        wire = [source for sums, rows in by_owner for source in (*sums, *(one for of in rows for one in of))]
        self._wire_order = _permutation(wire, num_sources, device)
        rows_only = [source for _, rows in by_owner for of in rows for source in of]
        self._rows_order = torch.tensor(rows_only, dtype=torch.int32, device=device) if rows_only else None
        self._needs_counts = bool(rows_only) or self.addresses is not None
        self._num_slots = [(len(sums), [len(of) for of in rows]) for sums, rows in by_owner]
        #: Bytes that this process has sent to each process.
        self.sent_bytes = {stream: [0.0] * self._num_processes for stream in (Stream.LENGTHS, Stream.IDS)}

    def over(self, group: dist.ProcessGroup) -> InputExchange:
        """The same exchange over another process group of the same processes, with counters of its own."""
        twin = copy(self)
        twin._group = group
        twin.sent_bytes = {stream: [0.0] * self._num_processes for stream in self.sent_bytes}
        return twin

    def _sources(self, asked: Asked, owner: int) -> tuple[list[int], list[list[int]]]:
        """Jagged rows of sums, and those of every holding whose rows are asked for."""
        sums = [self._source(slot.holding, slot.feature, owner) for slot in asked.sums]
        features_of, holdings = self._ownership.features_of, self._ownership.holdings
        rows = [
            [self._source(index, feature, owner) for feature in features_of[holdings[index].table]]
            for index in asked.rows
        ]
        return sums, rows

    def _source(self, holding: int, feature: int, owner: int) -> int:
        number = self.cut_index.get((feature, self._ownership.holdings[holding].columns))
        if number is None or self.addresses is None:
            return feature
        bucket = self.addresses.destinations[number].index((owner, holding))
        return self._num_features + bucket * len(self.cut_index) + number

    def __call__(self, batch: BatchOfIds) -> Distributed:
        """Exchanges one batch; every process calls it with a batch of the same size.

        Raises:
            InputError: If a process's lengths do not add up, or one of its ids is no row: on all processes.
        """
        fault = self._fault(batch)
        if fault is not None:
            batch = BatchOfIds(torch.zeros_like(batch.lengths_FB), batch.ids_L[:0])
        lengths_FB, ids_L = batch.lengths_FB.to(torch.int32).contiguous(), batch.ids_L.long().contiguous()
        counts_F = tuple(lengths_FB.sum(1).tolist()) if self._needs_counts else ()
        bucketized, lengths_NB, source_L = self._sources_of(lengths_FB, ids_L, counts_F)
        wire = _Wire(*_permuted(self._wire_order, lengths_NB, source_L), self._num_slots)
        rows = self._row_lookups(wire, lengths_NB, bucketized, counts_F) if self._rows_order is not None else None
        served = self._exchanged(wire, batch.batch_size, fault)
        return Distributed(
            batch_size=batch.batch_size,
            lengths_FB=lengths_FB,
            counts_F=counts_F,
            served=served,
            local=wire.request(self._num_processes),
            rows=rows,
            bucketized=bucketized,
        )

    def _fault(self, batch: BatchOfIds) -> InputError | None:
        """What is wrong with the batch, if anything is."""
        if bool((batch.lengths_FB < 0).any()):
            return InputError("must be at least 0", field="lengths")
        total = int(batch.lengths_FB.sum())
        if total != len(batch.ids_L):
            return InputError(f"add up to {total}, but there are {len(batch.ids_L)} ids", field="lengths")
        bounds_L = torch.repeat_interleave(self._rows_F, batch.lengths_FB.sum(1), output_size=total)
        is_bad_L = (batch.ids_L < 0) | (batch.ids_L >= bounds_L)
        if not bool(is_bad_L.any()):
            return None
        first = int(is_bad_L.nonzero()[0])
        feature = int(torch.searchsorted(batch.lengths_FB.sum(1).cumsum(0), first, right=True))
        table, name = self._named(feature)
        return InputError(
            f"table {table!r} has rows 0 to {int(self._rows_F[feature]) - 1}, got id {int(batch.ids_L[first])}",
            field=f"feature {name!r}",
        )

    def _named(self, feature: int) -> tuple[str, str]:
        names = [(table.name, one.name) for table in self._ownership.tables.tables for one in table.features]
        return names[feature]

    def _sources_of(
        self, lengths_FB: torch.Tensor, ids_L: torch.Tensor, counts_F: Sequence[int]
    ) -> tuple[Bucketized | None, torch.Tensor, torch.Tensor]:
        """Jagged rows that messages are made of: the batch's features, and those that are cut by destination."""
        if self.addresses is None:
            return None, lengths_FB, ids_L
        cut_FB, cut_L = _permuted(self._cut_order, lengths_FB, ids_L)
        bucketized = self.addresses(cut_FB, cut_L, [counts_F[feature] for feature in self._cut_features])
        by_destination = bucketized.lengths_DFB.view(-1, lengths_FB.shape[1])
        return bucketized, torch.cat([lengths_FB, by_destination]), torch.cat([ids_L, bucketized.offsets_L])

    def _row_lookups(
        self, wire: _Wire, lengths_NB: torch.Tensor, bucketized: Bucketized | None, counts_F: Sequence[int]
    ) -> RowLookups:
        """Which lookup each row answers; asks for each row once where that is wanted."""
        assert self._rows_order is not None, "there are rows"
        lookups_L = torch.arange(sum(counts_F), device=self._device)
        if bucketized is not None:
            cut_L = lookups_L
            if self._cut_order is not None:
                one_FB = torch.tensor([counts_F], dtype=torch.int32, device=self._device).view(-1, 1)
                cut_L = _permuted(self._cut_order, one_FB, lookups_L)[1]
            lookups_L = torch.cat([lookups_L, cut_L[bucketized.lookups_L]])
        _, lookups_L = _permuted(self._rows_order, lengths_NB, lookups_L)
        arrivals, counts, num_rows, start = [], [], [], 0
        for owner, asked in enumerate([*self._asked, self._local]):
            counts.append(wire.row_counts(owner))
            uniques, sizes = [], []
            for holding, of_features, ids_L in zip(asked.rows, counts[-1], wire.row_ids(owner), strict=True):
                if self._ownership.holdings[holding].deduplicate:
                    ids_L, inverse_L = torch.unique(ids_L, return_inverse=True)
                    arrivals.append(inverse_L + start)
                else:
                    arrivals.append(torch.arange(start, start + sum(of_features), device=self._device))
                uniques.append(ids_L)
                sizes.append(len(ids_L))
                start += len(ids_L)
            wire.ask_for(owner, uniques)
            num_rows.append(tuple(sizes))
        arrival_L = torch.cat(arrivals) if arrivals else lookups_L
        return RowLookups(lookups_L, arrival_L, tuple(counts), tuple(num_rows))

    def _exchanged(self, wire: _Wire, B: int, fault: InputError | None) -> tuple[Request, ...]:
        """Sends lengths and then ids; what all processes ask this one for."""
        sent = [wire.message(owner, fault is None) for owner in range(self._num_processes)]
        sizes = [len(asked.sums) * B + len(asked.rows) + 1 for asked in self._served]
        received = torch.empty(sum(sizes), dtype=torch.int32, device=self._device)
        dist.all_to_all_single(received, torch.cat(sent), sizes, [len(one) for one in sent], self._group)
        messages = torch.split(received, sizes)
        sums = [one[: len(of.sums) * B].view(-1, B).sum(1) for one, of in zip(messages, self._served, strict=True)]
        tails = [one[len(of.sums) * B :] for one, of in zip(messages, self._served, strict=True)]
        # The one place where the host waits for the device: it has to know how many ids go where.
        known = torch.cat([wire.sums_N, *(part for pair in zip(sums, tails, strict=True) for part in pair)]).tolist()
        wire.know(known[: len(wire.sums_N)])
        counts, at = [], len(wire.sums_N)
        for asked in self._served:
            end = at + len(asked.sums) + len(asked.rows) + 1
            counts.append(known[at:end])
            at = end
        self._refuse([one[-1] for one in counts], fault)
        ids, id_sizes = wire.ids(), [sum(one[:-1]) for one in counts]
        sent_sizes = [wire.num_ids(owner) for owner in range(self._num_processes)]
        served_L = torch.empty(sum(id_sizes), dtype=torch.int64, device=self._device)
        dist.all_to_all_single(served_L, ids, id_sizes, sent_sizes, self._group)
        for owner, (message, number) in enumerate(zip(sent, sent_sizes, strict=True)):
            self.sent_bytes[Stream.LENGTHS][owner] += (len(message) - 1) * LENGTH_BYTES
            self.sent_bytes[Stream.IDS][owner] += number * ID_BYTES
        return tuple(
            _request(message, served, of, numbers, B)
            for message, served, of, numbers in zip(
                messages, torch.split(served_L, id_sizes), self._served, counts, strict=True
            )
        )

    def _refuse(self, is_good_P: Sequence[int], fault: InputError | None) -> None:
        if fault is not None:
            raise fault
        bad = [process for process, is_good in enumerate(is_good_P) if not is_good]
        if bad:
            raise InputError(f"process {bad[0]} has a batch that cannot be looked up", field="ids")


class _Wire:
    """Jagged rows in the order in which they travel: owner by owner, sums before rows; and last those read here."""

    def __init__(
        self, lengths_NB: torch.Tensor, ids_L: torch.Tensor, num_slots: Sequence[tuple[int, Sequence[int]]]
    ) -> None:
        self._lengths_NB, self._ids_L, self._num_slots = lengths_NB, ids_L, num_slots
        self.sums_N = lengths_NB.sum(1)
        self._counts_N: list[int] | None = None
        self._rows: dict[int, list[torch.Tensor]] = {}
        self._starts: list[int] = []
        self._first: list[int] = []
        first = 0
        for sums, rows in num_slots:
            self._first.append(first)
            first += sums + sum(rows)

    @property
    def counts_N(self) -> list[int]:  # noqa: N802 - a shape suffix
        """Ids of every jagged row, on the host."""
        if self._counts_N is None:
            self._counts_N = self.sums_N.tolist()
        return self._counts_N

    def know(self, counts_N: list[int]) -> None:
        """Takes the numbers of ids that the host has got by another way."""
        self._counts_N = counts_N

    def _span(self, owner: int) -> tuple[int, int, int]:
        """First jagged row of an owner's sums, of its rows, and the one after the last."""
        sums, rows = self._num_slots[owner]
        first = self._first[owner]
        return first, first + sums, first + sums + sum(rows)

    def row_counts(self, owner: int) -> tuple[tuple[int, ...], ...]:
        """Lookups of each feature, holding by holding."""
        at, counts = self._span(owner)[1], []
        for size in self._num_slots[owner][1]:
            counts.append(tuple(self.counts_N[at : at + size]))
            at += size
        return tuple(counts)

    def _start(self, row: int) -> int:
        if len(self._starts) <= len(self._lengths_NB):
            self._starts = [0, *accumulate(self.counts_N)]
        return self._starts[row]

    def row_ids(self, owner: int) -> list[torch.Tensor]:
        """Ids of each holding whose rows are asked for."""
        start, ids = self._start(self._span(owner)[1]), []
        for of_features in self.row_counts(owner):
            ids.append(self._ids_L[start : start + sum(of_features)])
            start += sum(of_features)
        return ids

    def ask_for(self, owner: int, ids: list[torch.Tensor]) -> None:
        """Replaces the ids of rows by others."""
        self._rows[owner] = ids

    def message(self, owner: int, is_good: bool) -> torch.Tensor:
        """Bag lengths, numbers of rows, and whether the batch can be looked up; int32 of shape (Z,)."""
        first, middle, last = self._span(owner)
        lengths = self._lengths_NB[first:middle].reshape(-1)
        sizes = [len(one) for one in self._rows.get(owner, [])] if last > middle else []
        return torch.cat([lengths, lengths.new_tensor([*sizes, int(is_good)])])

    def _sums_range(self, owner: int) -> tuple[int, int]:
        first, middle, _ = self._span(owner)
        start = self._start(first)
        return start, self._start(middle)

    def num_ids(self, owner: int) -> int:
        """Ids that an owner is sent."""
        start, stop = self._sums_range(owner)
        return stop - start + sum(len(one) for one in self._rows.get(owner, []))

    def ids(self) -> torch.Tensor:
        """Ids for all owners, one after the other."""
        owners = range(len(self._num_slots) - 1)
        if not self._rows:
            start, stop = self._start(0), self._sums_range(len(owners) - 1)[1]
            return self._ids_L[start:stop]
        pieces: list[torch.Tensor] = []
        for owner in owners:
            start, stop = self._sums_range(owner)
            pieces += [self._ids_L[start:stop], *self._rows.get(owner, [])]
        return torch.cat(pieces)

    def request(self, owner: int) -> Request:
        """What an owner is asked for, as it gets it."""
        first, middle, _ = self._span(owner)
        start, stop = self._sums_range(owner)
        rows = self._rows.get(owner, [])
        return Request(
            sums=Jagged(self._lengths_NB[first:middle], tuple(self.counts_N[first:middle]), self._ids_L[start:stop]),
            counts=tuple(len(one) for one in rows),
            ids_L=torch.cat(rows) if rows else self._ids_L[:0],
        )


def _request(message: torch.Tensor, ids_L: torch.Tensor, asked: Asked, counts: Sequence[int], B: int) -> Request:
    num_sums = len(asked.sums)
    summed = sum(counts[:num_sums])
    return Request(
        sums=Jagged(message[: num_sums * B].view(num_sums, B), tuple(counts[:num_sums]), ids_L[:summed]),
        counts=tuple(counts[num_sums:-1]),
        ids_L=ids_L[summed:],
    )


def _cut_features(ownership: Ownership, reader: int, orders: Mapping[str, RowOrder]) -> list[CutFeature]:
    """Features that a process reads from several places, once for each range of columns."""
    by_columns: dict[tuple[int, tuple[int, int]], list[int]] = {}
    for index, holding in enumerate(ownership.holdings):
        by_columns.setdefault((holding.table, holding.columns), []).append(index)
    cut = []
    for (table, _), indices in by_columns.items():
        one = ownership.holdings[indices[0]]
        is_plain = len(indices) == 1 and one.is_whole and len(one.owners(reader)) == 1
        if is_plain and one.of.name not in orders and all(held.num_parts == 1 for held in one.ranges):
            continue
        cut += [CutFeature(feature, tuple(indices)) for feature in ownership.features_of[table]]
    return cut


def _permutation(order: Sequence[int], num_rows: int, device: torch.device) -> torch.Tensor | None:
    """The order as FBGEMM takes it; None if it changes nothing."""
    if list(order) == list(range(num_rows)):
        return None
    return torch.tensor(order, dtype=torch.int32, device=device)


def _permuted(
    order: torch.Tensor | None, lengths_NB: torch.Tensor, ids_L: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if order is None:
        return lengths_NB, ids_L
    lengths, ids, _ = torch.ops.fbgemm.permute_2D_sparse_data(order, lengths_NB, ids_L, None, None)
    return lengths, ids
